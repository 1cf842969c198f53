"""Which bytes are an image, and images as `data:` URLs."""

from __future__ import annotations

import binascii

from worker.contract.record_errors import RecordError

KINDS_EXPECTED = "expected PNG, JPEG, GIF, WebP or BMP"

_MAGIC = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF87a", "image/gif"),
          (b"GIF89a", "image/gif"))  # fmt: skip


def image_type(content: bytes) -> str | None:
    """The media type that an image's first bytes say it is of; None if they say nothing of the kind."""
    for magic, media_type in _MAGIC:
        if content.startswith(magic):
            return media_type
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    # Two letters are no proof; the four reserved bytes after the file's size are always zero.
    if content[:2] == b"BM" and len(content) > 26 and content[6:10] == bytes(4):
        return "image/bmp"
    return None


def data_url(content: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{binascii.b2a_base64(content, newline=False).decode('ascii')}"


def check_data_url(url: str, max_bytes: int, param: str) -> None:
    """Hold that a `data:` URL has an image in base64.

    Raises:
        RecordError: it has none, or a larger one; `param` is where it stands.
    """
    head, comma, packed = url[len("data:") :].partition(",")
    if not comma or head.rpartition(";")[2].strip().lower() != "base64":
        raise _invalid(param, "a data URL of another form (expected data:image/…;base64,…)")
    if len(packed) > (max_bytes + 2) // 3 * 4:
        raise RecordError("request", "media_too_large", f"read {param}: it is larger than {max_bytes} bytes", param)
    try:
        content = binascii.a2b_base64(packed, strict_mode=True)
    except ValueError as error:
        raise _invalid(param, "its base64 is damaged") from error
    if image_type(content) is None:
        raise _invalid(param, f"not an image ({KINDS_EXPECTED})")


def _invalid(param: str, what: str) -> RecordError:
    return RecordError("request", "invalid_media", f"read {param}: {what}", param)
