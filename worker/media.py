"""Images in chats: which must be fetched, whether the run allows it, and their bytes put in their place.

An engine is given `data:` URLs alone. vLLM would otherwise open what a record names, a socket or a file, with whatever
rights the machine has; so a record's parts are also made anew here, without the fields by which vLLM takes an image
from a part of another type.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker.contract.media_allowed import read_allowed_media
from worker.contract.record_errors import RecordError
from worker.media_fetch import ImageSource
from worker.media_images import Image, find_images
from worker.media_kinds import KINDS_EXPECTED, check_data_url, data_url, image_type
from worker.media_url import parse_http_url

THREAD_COUNT = 8
TIMEOUT_S = 20.0
"""Of one attempt to fetch one image."""
MAX_IMAGE_BYTES = 20 << 20
CACHE_BYTES = 64 << 20


class MediaFetcher:
    """Fetches images on threads of its own. The same URL is fetched once as long as it is remembered."""

    def __init__(
        self,
        allowed: Sequence[str],
        *,
        threads: int = THREAD_COUNT,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_IMAGE_BYTES,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Take the run's entries of `--allow-media`.

        Raises:
            UsageError: one of them is none.
        """
        self._source = ImageSource(read_allowed_media(allowed), timeout_s=timeout_s, max_bytes=max_bytes)
        self._max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="media")
        self._lock = threading.RLock()
        self._fetching: dict[str, _Fetch] = {}
        self._remembered = _Remembered(cache_bytes)
        self._fetch_count = 0

    @property
    def fetch_count(self) -> int:
        """How many fetches have ended, well or not."""
        return self._fetch_count

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    def start(self, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Begin to fetch; the result is the body with each image as a `data:` URL. `body` itself is left as it is.

        The future's exception, if it has one, is a RecordError: of the first image that could not be had. What of the
        others nobody else waits for, and has not begun, is not fetched then. A body without images is done at once.
        """
        order = _Order(body)
        try:
            order.images = find_images(body)
            for image in order.images:
                if not image.is_fetched:
                    check_data_url(image.url, self._max_bytes, image.param)
        except RecordError as problem:
            order.done.set_exception(problem)
            return order.done
        with self._lock:
            for image in order.images:
                if image.is_fetched and image.url not in order.found:
                    remembered = self._remembered.get(image.url)
                    if remembered is None:
                        order.missing.add(image.url)
                    else:
                        order.found[image.url] = remembered
            if not order.missing:
                order.settle()
            for url in dict.fromkeys(image.url for image in order.images):
                # One that has failed already takes the rest of them along.
                if url in order.missing:
                    self._join(url, order)
        return order.done

    def _join(self, url: str, order: _Order) -> None:
        under_way = self._fetching.get(url)
        if under_way is not None:
            under_way.orders.append(order)
            return
        fetch = self._fetching[url] = _Fetch(self._pool.submit(self._fetch, url), [order])
        # Not the fetch itself: a future keeps its callbacks, and images would live on in a circle.
        fetch.future.add_done_callback(partial(self._ended, url, fetch.orders))

    def _ended(self, url: str, orders: list[_Order], future: Future[str]) -> None:
        with self._lock:
            self._fetch_count += 1
            fetch = self._fetching.get(url)
            if fetch is not None and fetch.orders is orders:
                del self._fetching[url]
            is_there = not future.cancelled() and future.exception() is None
            if is_there:
                self._remembered.put(url, future.result())
            while orders:
                order = orders.pop(0)
                if is_there:
                    order.take(url, future.result())
                else:
                    self._withdraw(order, url)
                    order.fail(url, future)

    def _withdraw(self, order: _Order, failed: str) -> None:
        """Take an order from the fetches it still waits for, and those that are nobody's then from the queue."""
        missing, order.missing = order.missing - {failed}, set()
        for url in missing:
            fetch = self._fetching.get(url)
            if fetch is not None and order in fetch.orders:
                fetch.orders.remove(order)
                if not fetch.orders:
                    # One that is under way goes on, and is remembered.
                    fetch.future.cancel()

    def close(self) -> None:
        """End the threads. What has not begun is cancelled, and what has begun is not tried again."""
        self._source.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fetch(self, url: str) -> str:
        content = self._source.read(url)
        media_type = image_type(content)
        if media_type is None:
            raise RecordError(
                "request", "invalid_media", f"fetch image from {_place(url)}: not an image ({KINDS_EXPECTED})"
            )
        return data_url(content, media_type)


@dataclass(eq=False, slots=True)
class _Order:
    """A body on the way to its images."""

    body: dict[str, Any]
    images: Sequence[Image] = ()
    found: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    done: Future[dict[str, Any]] = field(default_factory=Future)

    def take(self, url: str, data: str) -> None:
        self.found[url] = data
        self.missing.discard(url)
        if not self.missing:
            self.settle()

    def settle(self) -> None:
        urls = [(image, self.found.get(image.url, image.url)) for image in self.images]
        self.done.set_result(_with_data_urls(self.body, urls))

    def fail(self, url: str, fetch: Future[str]) -> None:
        image = next(image for image in self.images if image.url == url)
        self.done.set_exception(_problem(image, fetch))


@dataclass(eq=False, slots=True)
class _Fetch:
    """An image on its way, and all who wait for it."""

    future: Future[str]
    orders: list[_Order]


class _Remembered:
    """Images of late, up to a number of bytes; the ones that were asked for longest ago go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._images: OrderedDict[str, str] = OrderedDict()

    def get(self, url: str) -> str | None:
        found = self._images.get(url)
        if found is not None:
            self._images.move_to_end(url)
        return found

    def put(self, url: str, image: str) -> None:
        self._size += len(image) - len(self._images.pop(url, ""))
        self._images[url] = image
        while self._size > self._max_bytes:
            _, oldest = self._images.popitem(last=False)
            self._size -= len(oldest)


def _problem(image: Image, fetch: Future[str]) -> RecordError:
    try:
        problem = fetch.exception()
    except CancelledError:
        return RecordError("request", "media_unavailable", "fetch image: the engine is ending", image.param)
    if isinstance(problem, RecordError):
        # One fetch may be for several records: where the image stands is each one's own.
        return RecordError(problem.stage, problem.code, problem.message, image.param)
    what = f"fetch image from {_place(image.url)}: it failed ({type(problem).__name__})"
    return RecordError("request", "media_unavailable", what, image.param)


def _with_data_urls(body: dict[str, Any], found: Sequence[tuple[Image, str]]) -> dict[str, Any]:
    messages = list(body.get("messages", ()))
    for image, url in found:
        message = messages[image.message_index]
        if message is body["messages"][image.message_index]:
            message = messages[image.message_index] = {**message, "content": list(message["content"])}
        message["content"][image.part_index] = {"type": "image_url", "image_url": {"url": url}}
    return {**body, "messages": messages} if found else body


def _place(url: str) -> str:
    """A URL's host or bucket: what errors may say of it."""
    if url.startswith("s3://"):
        return "/".join(url.split("/", 3)[:3])
    return parse_http_url(url).host
