"""Records whose images are on their way: they wait here, and keep no others waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace

from worker.media import MediaFetcher, find_images
from worker.protocol import Item
from worker.records import Record


class FetchedRecords:
    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = allowed
        self._fetcher: MediaFetcher | None = None
        self._waiting: dict[Future[dict[str, object]], tuple[Item, Record]] = {}

    @property
    def count(self) -> int:
        return len(self._waiting)

    def start(self, item: Item, record: Record) -> bool:
        """Fetch the images that a record names, and look at those that it holds. False: it has none.

        Raises:
            RecordError: it names something that may not be fetched.
        """
        if record.endpoint != "chat" or not find_images(record.body):
            return False
        if self._fetcher is None:
            self._fetcher = MediaFetcher(self._allowed)
        self._waiting[self._fetcher.start(record.body)] = item, record
        return True

    def finished(self, wait_s: float) -> Iterator[tuple[Item, Record | Exception]]:
        """Those that have all they need, or never will."""
        done, _ = wait(self._waiting, wait_s, FIRST_COMPLETED)
        for future in done:
            item, record = self._waiting.pop(future)
            error = future.exception()
            if isinstance(error, Exception):
                yield item, error
            else:
                yield item, replace(record, body=future.result())
