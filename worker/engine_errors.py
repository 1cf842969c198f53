"""What an exception out of vLLM says of a record."""

from __future__ import annotations

import sys
import traceback

from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import ChatTemplateResolutionError

from worker.contract.record_errors import RecordError

MAX_MESSAGE_CHARS = 400
"""Of another library's words in an error. A template's own errors are a sentence; more than that could be a prompt."""


def record_error(error: Exception) -> RecordError:
    """The same as an error line's. Pydantic's own text is not used: it repeats the user's values."""
    if isinstance(error, RecordError):
        return error
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # The steps behind the field's name are pydantic's own, such as which type of a union it has tried.
        param = str(first["loc"][0]) if first["loc"] else None
        return RecordError("request", "invalid_parameter", f"read {param or 'body'}: {cut(first['msg'])}", param)
    if isinstance(error, VLLMValidationError):
        # `str()` of it would append the value.
        return RecordError("request", "invalid_parameter", f"check request: {cut(error.args[0])}", error.parameter)
    if isinstance(error, ChatTemplateResolutionError):
        return RecordError(
            "request",
            "no_chat_template",
            "render messages: the model has no chat template (expected one in its tokenizer, or a prompt instead)",
            "messages",
        )
    _show(error)
    return RecordError("request", "refused", f"prepare request: vLLM refuses it ({type(error).__name__})")


def answer_error(error: Exception) -> RecordError:
    """What went wrong with an answer that the engine has given."""
    if isinstance(error, RecordError):
        return error
    _show(error)
    return RecordError(
        "engine",
        "unreadable_answer",
        f"read answer: {type(error).__name__} (expected one that the parsers of tools and reasoning can read)",
    )


_shown: set[tuple[str, int]] = set()


def _show(error: Exception) -> None:
    """Write on standard error where an unknown exception comes from, once for each place, and without its text: that may
    hold the record's. A version of vLLM that has changed under us would otherwise fail every record with no word.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)
    if place not in _shown:
        _shown.add(place)
        sys.stderr.write(f"record failed by {type(error).__name__}:\n{''.join(traceback.format_list(frames))}")


def cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"
