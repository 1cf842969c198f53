"""Parts of a message's content: what may stand in one besides what its type says."""

from __future__ import annotations

from typing import Any

from worker.contract.record_errors import RecordError

IMAGE_PARTS = frozenset({"image_url", "input_image"})
"""Types of content parts that hold an image."""

_SUBJECT_KEYS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "prompt_embeds",
        "uuid",
        "video_embeds",
        "video_url",
    }
)
"""Fields by which vLLM finds what to load in a part, whatever the part's type says, and the one that makes it do so."""


def refuse_hidden_media(part: dict[str, Any], at: str) -> None:
    """Raise RecordError if a part that is not of type `image_url` names media: vLLM would load them, from anywhere."""
    for name in sorted(_SUBJECT_KEYS & part.keys()):
        if part[name] is not None:
            raise RecordError(
                "request",
                "unsupported_content",
                f"read {at}.{name}: not in a part of this type (expected it in one of type 'image_url', or nowhere)",
                f"{at}.{name}",
            )
