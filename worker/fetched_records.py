"""Records whose images are on their way: they wait here, and keep no others waiting."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from worker.media import THREAD_COUNT, MediaFetcher
from worker.media_images import Image, find_images
from worker.protocol import Item
from worker.records import Record

MAX_HELD_BYTES = 256 << 20
"""Of images, as text, of all records under way: no more are fetched while those that the engine has come to as much."""
MAX_ON_THE_WAY = 4 * THREAD_COUNT
"""Images of one or more records. How large they are is not known before."""


class _Body(dict[str, Any]):
    """A body that can be watched: its images have room until nobody has it any more."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Waiting:
    item: Item
    record: Record
    images: Sequence[Image]
    fetched_count: int
    given_bytes: int
    """Of the images that it holds itself."""


class FetchedRecords:
    """Fetches for one engine."""

    def __init__(self, allowed: Sequence[str], *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        """Take the run's entries of `--allow-media`."""
        self._allowed = allowed
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._on_the_way = 0
        self._fetcher: MediaFetcher | None = None
        self._waiting: dict[Future[dict[str, Any]], _Waiting] = {}
        self._parked: deque[_Waiting] = deque()

    @property
    def count(self) -> int:
        return len(self._waiting) + len(self._parked)

    @property
    def fetch_count(self) -> int:
        """How many fetches have ended, ever: where it grows, something moves."""
        return 0 if self._fetcher is None else self._fetcher.fetch_count

    def start(self, item: Item, record: Record) -> bool:
        """Fetch the images that a record names, and look at those that it holds. False: it has none.

        Where others have all the room, the record waits for them to be answered.

        Raises:
            RecordError: it names something that may not be fetched, or too much of it.
        """
        images = find_images(record.body) if record.endpoint == "chat" else ()
        if not images:
            return False
        if self._fetcher is None:
            self._fetcher = MediaFetcher(self._allowed)
        fetched_count = len({image.url for image in images if image.is_fetched})
        given_bytes = sum(len(image.url) for image in images if not image.is_fetched)
        self._parked.append(_Waiting(item, record, images, fetched_count, given_bytes))
        self._start_parked(is_idle=False)
        return True

    def finished(self, wait_s: float) -> Iterator[tuple[Item, Record | Exception]]:
        """Those that have all they need, or never will. There is a time to wait if the engine has nothing else to do."""
        self._start_parked(is_idle=wait_s > 0)
        done, _ = wait(self._waiting, wait_s, FIRST_COMPLETED)
        while done:
            future = done.pop()
            found = self._waiting.pop(future)
            self._held_bytes -= found.given_bytes
            self._on_the_way -= found.fetched_count
            error = future.exception()
            if isinstance(error, Exception):
                yield found.item, error
            else:
                yield found.item, replace(found.record, body=self._held(future.result(), found.images))

    def _start_parked(self, *, is_idle: bool) -> None:
        while self._parked:
            found = self._parked[0]
            if self._held_bytes >= self._max_held_bytes and not (is_idle and not self._waiting):
                # Room comes with the answers of others. Where there are none, what it waits for is gone.
                return
            if self._on_the_way and self._on_the_way + found.fetched_count > MAX_ON_THE_WAY:
                return
            assert self._fetcher is not None
            del self._parked[0]
            self._held_bytes += found.given_bytes
            self._on_the_way += found.fetched_count
            self._waiting[self._fetcher.start(found.record.body)] = found

    def _held(self, body: dict[str, Any], images: Sequence[Image]) -> dict[str, Any]:
        held = _Body(body)
        size = 0
        for image in images:
            size += len(body["messages"][image.message_index]["content"][image.part_index]["image_url"]["url"])
        self._held_bytes += size
        weakref.finalize(held, self._give_back, size).atexit = False
        return held

    def _give_back(self, size: int) -> None:
        self._held_bytes -= size
