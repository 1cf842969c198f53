"""What goes wrong when an image is fetched: for good, or for now."""

from __future__ import annotations

from worker.contract.record_errors import RecordError


class TransientError(Exception):
    """It may be there a little later. The message goes into the record's error."""


def unavailable(place: str, what: str) -> RecordError:
    """`place` is a host or a bucket: what errors may say of a URL."""
    return RecordError("request", "media_unavailable", f"fetch image from {place}: {what}")


def too_large(place: str, max_bytes: int) -> RecordError:
    return RecordError("request", "media_too_large", f"fetch image from {place}: it is larger than {max_bytes} bytes")
