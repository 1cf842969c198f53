"""A worker's log lines in words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from submitter.output import kinds_of_errors, one_line

Fields = Mapping[str, Any]

_WORDS = {
    "worker.started": "worker started on {host}: attempt {attempt} at partition {partition_index}, {record_count:,} records",
    "worker.failed": "worker failed with exit code {exit_code}: {message}{hint}",
    "checkpoint.loaded": "{record_count:,} results taken from earlier attempts",
    "checkpoint.saved": "{record_count:,} results saved",
    "partition.loaded": "partition read: {record_count:,} records, {done_count:,} of them done before",
    "partition.progress": (
        "{done_count:,} of {record_count:,} records done, {error_count:,} of them errors, {output_tokens_per_s:,.0f} output "
        "tokens/s"
    ),
    "partition.committed": (
        "output committed after {total_s:,.0f} s: {ok_count:,} records answered, {error_count:,} errors{error_counts}"
    ),
    "partition.already_committed": "the output is there already: nothing to do",
    "engine.started": "engine {engine_index} started",
    "engine.ready": "engine {engine_index} is ready after {boot_s:,.0f} s",
    "engine.died": (
        "engine {engine_index} died with {in_flight_count:,} records in work: {cause}; {restarts_left} restarts are left"
    ),
    "spot.interruption_noticed": "the Spot host is to be taken back ({action} at {at})",
    "spot.rebalance_recommended": "this Spot host is at a higher risk of being taken back",
    "retry.scheduled": "{operation}: {caused_by}, once more in {wait_s} s",
}
_NOTHING_SAVED = "no more results to save: it is saved how this attempt ends"
_OF_EVERY_LINE = {"ts", "level", "event", "run_id", "run_uri", "partition_index", "attempt", "job_id", "_aws"}
_LONG_FIELDS = {"resolved", "traceback", "earlier_attempts"}
"""What `--json` shows."""
_MARKS = {"warning": "warning: ", "error": "error: "}


def in_words(fields: Fields) -> str:
    """`20:43:12 engine 0 is ready after 34 s`, in the time of this machine."""
    moment = datetime.fromisoformat(fields["ts"]).astimezone().strftime("%H:%M:%S")
    return one_line(f"{moment} {_MARKS.get(str(fields.get('level')), '')}{_words(fields)}")


def _words(fields: Fields) -> str:
    hint = fields.get("hint")
    kinds = fields.get("error_counts")
    shown = {
        **fields,
        "hint": f" ({hint})" if hint else "",
        "error_counts": f" ({kinds_of_errors(kinds)})" if kinds else "",
    }
    try:
        if fields["event"] == "checkpoint.saved" and not fields["record_count"]:
            return _NOTHING_SAVED
        return _WORDS[fields["event"]].format_map(shown)
    except (KeyError, TypeError, ValueError):
        # Not among them, or of another version than this one.
        return _plainly(fields)


def _plainly(fields: Fields) -> str:
    others = [
        f"{name} {value}"
        for name, value in fields.items()
        if name not in _OF_EVERY_LINE and name not in _LONG_FIELDS and value not in (None, "", {}, [])
    ]
    name = str(fields["event"]).replace(".", " ").replace("_", " ")
    return f"{name}: {', '.join(others)}" if others else name
