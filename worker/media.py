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
from dataclasses import dataclass
from functools import partial
from typing import Any

from worker.content_parts import IMAGE_PARTS, refuse_hidden_media
from worker.contract.media_allowed import read_allowed_media
from worker.media_fetch import ImageSource
from worker.media_kinds import KINDS_EXPECTED, check_data_url, data_url, image_type
from worker.media_url import parse_http_url
from worker.record_errors import RecordError

THREAD_COUNT = 8
TIMEOUT_S = 20.0
"""Of one attempt to fetch one image."""
MAX_IMAGE_BYTES = 20 << 20
CACHE_BYTES = 64 << 20

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
        RecordError: a part names an image in no known way, or names media besides what its type says.
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


def media_urls(body: dict[str, Any]) -> list[str]:
    """What must be fetched for this body, each URL once.

    Raises:
        RecordError: as `find_images`.
    """
    return list(dict.fromkeys(image.url for image in find_images(body) if image.is_fetched))


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
        self._fetching: dict[str, Future[str]] = {}
        self._remembered = _Remembered(cache_bytes)

    def start(self, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Begin to fetch; the result is the body with each image as a `data:` URL. `body` itself is left as it is.

        The future's exception, if it has one, is a RecordError. A body without images is done at once.
        """
        done: Future[dict[str, Any]] = Future()
        done.set_running_or_notify_cancel()
        try:
            images = find_images(body)
            for image in images:
                if not image.is_fetched:
                    check_data_url(image.url, self._max_bytes, image.param)
        except RecordError as problem:
            done.set_exception(problem)
            return done
        fetches = {image.url: self._fetch_once(image.url) for image in images if image.is_fetched}
        waiting = set(fetches)

        def fetched(url: str, _: Future[str]) -> None:
            with self._lock:
                waiting.discard(url)
                is_last = not waiting
            if is_last:
                _settle(done, body, images, fetches)

        if not fetches:
            _settle(done, body, images, fetches)
        for url, fetch in fetches.items():
            fetch.add_done_callback(partial(fetched, url))
        return done

    def close(self) -> None:
        """End the threads. What has not begun is cancelled, and what has begun is not tried again."""
        self._source.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fetch_once(self, url: str) -> Future[str]:
        with self._lock:
            remembered = self._remembered.get(url)
            if remembered is not None:
                found: Future[str] = Future()
                found.set_result(remembered)
                return found
            if url not in self._fetching:
                fetch = self._fetching[url] = self._pool.submit(self._fetch, url)
                fetch.add_done_callback(partial(self._remember, url))
                return fetch
            return self._fetching[url]

    def _fetch(self, url: str) -> str:
        content = self._source.read(url)
        media_type = image_type(content)
        if media_type is None:
            raise RecordError(
                "request", "invalid_media", f"fetch image from {_place(url)}: not an image ({KINDS_EXPECTED})"
            )
        return data_url(content, media_type)

    def _remember(self, url: str, fetch: Future[str]) -> None:
        with self._lock:
            self._fetching.pop(url, None)
            if not fetch.cancelled() and fetch.exception() is None:
                self._remembered.put(url, fetch.result())


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


def _settle(
    done: Future[dict[str, Any]], body: dict[str, Any], images: Sequence[Image], fetches: dict[str, Future[str]]
) -> None:
    """Give the body, or what is wrong with the first image that is not there."""
    try:
        found = [(image, _fetched(image, fetches[image.url]) if image.is_fetched else image.url) for image in images]
    except RecordError as problem:
        done.set_exception(problem)
    else:
        done.set_result(_with_data_urls(body, found))


def _fetched(image: Image, fetch: Future[str]) -> str:
    try:
        return fetch.result()
    except RecordError as problem:
        # One fetch may be for several records: where the image stands is each one's own.
        raise RecordError(problem.stage, problem.code, problem.message, image.param) from problem
    except CancelledError as error:
        raise RecordError("request", "media_unavailable", "fetch image: the engine is ending", image.param) from error
    except Exception as error:
        raise RecordError(
            "request",
            "media_unavailable",
            f"fetch image from {_place(image.url)}: it failed ({type(error).__name__})",
            image.param,
        ) from error


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
