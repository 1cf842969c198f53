"""One JSON object per log line.

An event is `log_event(logger, logging.INFO, "partition.committed", record_count=5)`. What holds for a whole process,
such as the run and the partition, is bound once with `configure_logs`.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson


def log_event(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log an event named `noun.past_participle`. Fields are data about the work: never prompts, answers or secrets."""
    logger.log(level, event, extra={"fields": fields})


def trace_of(error: BaseException | None) -> str:
    """Where an error comes from, and of what kinds it and its causes are. What they say is left out: of an error that
    nobody thought of it may be a record's text.
    """
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{''.join(frames)}{type(error).__qualname__}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\ncaused by ".join(parts)


class JsonFormatter(logging.Formatter):
    def __init__(self, context: dict[str, Any]) -> None:
        super().__init__()
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {
            "ts": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **self._context,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = trace_of(record.exc_info[1])
        try:
            return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except orjson.JSONEncodeError:
            # A path that is no UTF-8, say: an event that cannot be written is an event that nobody hears of.
            return json.dumps(entry, default=str)


def configure_logs(context: dict[str, Any], stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send this program's events (and warnings of libraries) to a stream, standard output if none is given."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonFormatter(context))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("worker", "submitter"):
        logging.getLogger(name).setLevel(level)
