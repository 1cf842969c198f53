"""Images in chats: where they stand, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.contract.content_parts import IMAGE_PARTS, refuse_hidden_media
from worker.contract.record_errors import RecordError

MAX_IMAGES = 64
"""Of one record. Each may be as large as `MAX_IMAGE_BYTES`, and all of them are held until the record is answered."""

_FETCHED = ("http://", "https://", "s3://")


@dataclass(frozen=True, slots=True)
class Image:
    """Where one image of a chat stands, and what is said of it."""

    message_index: int
    part_index: int
    url: str

    @property
    def param(self) -> str:
        return f"messages[{self.message_index}].content[{self.part_index}].image_url"

    @property
    def is_fetched(self) -> bool:
        return _is_fetched(self.url)


def find_images(body: dict[str, Any]) -> list[Image]:
    """The images of a chat's body, in their order; none in a body of another kind.

    Raises:
        RecordError: a part names an image in no known way, or names media besides what its type says; or there are
            more than `MAX_IMAGES`.
    """
    found: list[Image] = []
    messages = body.get("messages")
    for message_index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for part_index, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, dict):
                continue
            at = f"messages[{message_index}].content[{part_index}]"
            kind = part.get("type")
            if isinstance(kind, str) and kind in IMAGE_PARTS:
                found.append(Image(message_index, part_index, _url_of(part, at)))
                if len(found) > MAX_IMAGES:
                    raise RecordError(
                        "request",
                        "too_many_images",
                        f"read {found[-1].param}: too many images (expected at most {MAX_IMAGES} in a record)",
                        found[-1].param,
                    )
            else:
                refuse_hidden_media(part, at)
    return found


def _url_of(part: dict[str, Any], at: str) -> str:
    found = part.get("image_url")
    if isinstance(found, dict):
        found = found.get("url")
    if not isinstance(found, str):
        raise RecordError(
            "request", "invalid_media", f"read {at}.image_url: no URL (expected a string, or an object with a url)", at
        )
    if not (_is_fetched(found) or _is_data(found)):
        raise RecordError(
            "request",
            "media_not_allowed",
            f"read {at}.image_url: of a kind that is not fetched (expected https://, http://, s3:// or data:)",
            at,
        )
    return found


def _is_fetched(url: str) -> bool:
    return url.startswith("s3://") or url[:8].lower().startswith(_FETCHED[:2])


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"
