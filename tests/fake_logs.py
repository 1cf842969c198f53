"""CloudWatch Logs as far as it reads: streams, pages, and tokens that repeat at the end."""

from __future__ import annotations

from typing import Any

from tests.fake_aws_server import ClientError, now_ms

Json = dict[str, Any]

DEFAULT_GROUP = "/aws/batch/job"
PAGE_SIZE = 10_000


class FakeLogs:
    """`streams` by group and name; an event has `timestamp` (ms), `ingestionTime` and `message`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.streams: dict[tuple[str, str], list[Json]] = {}
        self.page_size = PAGE_SIZE
        """Events in one answer, however many are asked for."""

    def write(self, stream: str, *messages: str, group: str = DEFAULT_GROUP, at_ms: int | None = None) -> None:
        """Add lines to a stream, which is made if there is none."""
        moment = now_ms() if at_ms is None else at_ms
        events = self.streams.setdefault((group, stream), [])
        events += [{"timestamp": moment, "message": message, "ingestionTime": moment} for message in messages]

    def get_log_events(self, request: Json, _size_bytes: int) -> Json:
        """The newest page first, unless `startFromHead`. At either end the token that came is given back."""
        found = self._within(self._stream(_group_of(request), request["logStreamName"]), request)
        size = min(request.get("limit", PAGE_SIZE), self.page_size)
        token = request.get("nextToken")
        if token is None:
            start = 0 if request.get("startFromHead") else max(0, len(found) - size)
            first, last = start, min(len(found), start + size)
        else:
            direction, _, place = token.partition("/")
            if direction == "f":
                first, last = min(int(place), len(found)), min(int(place) + size, len(found))
            elif direction == "b":
                first, last = max(0, int(place) - size), int(place)
            else:
                raise ClientError("The specified nextToken is invalid.", "InvalidParameterException")
        return {
            "events": found[first:last],
            "nextForwardToken": f"f/{last:056d}",
            "nextBackwardToken": f"b/{first:056d}",
        }

    def filter_log_events(self, request: Json, _size_bytes: int) -> Json:
        """Events of several streams by their time. Patterns are not served."""
        if request.get("filterPattern"):
            raise ClientError("filterPattern is not served by this stand-in", "InvalidParameterException")
        group = _group_of(request)
        names = request.get("logStreamNames") or [name for found, name in self.streams if found == group]
        events = [
            {**event, "logStreamName": name, "eventId": f"{name}/{number}"}
            for name in names
            for number, event in enumerate(self._within(self._stream(group, name), request))
        ]
        events.sort(key=lambda event: int(event["timestamp"]))
        start = int(request.get("nextToken", 0))
        end = start + min(request.get("limit", PAGE_SIZE), self.page_size)
        return {"events": events[start:end], **({"nextToken": str(end)} if end < len(events) else {})}

    def _stream(self, group: str, name: str) -> list[Json]:
        if not any(found == group for found, _ in self.streams):
            raise ClientError("The specified log group does not exist.", "ResourceNotFoundException")
        if (group, name) not in self.streams:
            raise ClientError("The specified log stream does not exist.", "ResourceNotFoundException")
        return self.streams[group, name]

    def _within(self, events: list[Json], request: Json) -> list[Json]:
        since, until = request.get("startTime", 0), request.get("endTime", 1 << 62)
        return [event for event in events if since <= event["timestamp"] < until]


def _group_of(request: Json) -> str:
    if ("logGroupName" in request) == ("logGroupIdentifier" in request):
        raise ClientError("give either logGroupName or logGroupIdentifier", "InvalidParameterException")
    reference: str = request.get("logGroupName") or request["logGroupIdentifier"]
    return reference.rpartition(":log-group:")[2]
