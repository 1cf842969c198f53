"""Records that wait for their images: what is told of them, and how much of it there is at once."""

from __future__ import annotations

import base64
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.image_server import Handler, ImageServer, png
from worker.contract.record_errors import RecordError
from worker.fetched_records import MAX_ON_THE_WAY, FetchedRecords
from worker.protocol import Item
from worker.records import Record

IMAGE = png(red=7)
DATA_URL = "data:image/png;base64," + base64.b64encode(IMAGE).decode()


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def server(gate: threading.Event) -> Iterator[ImageServer]:
    """Image `/a` is there at once, `/b` and `/0`, `/1`, … once the gate is open."""

    def late(handler: Handler) -> None:
        gate.wait()
        handler.give(IMAGE)

    with ImageServer({"/a": IMAGE, "/b": late, **{f"/{number}": late for number in range(64)}}) as running:
        yield running
        gate.set()


def record(*urls: str) -> Record:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return Record("chat", {"messages": [{"role": "user", "content": parts}]})


def item(ordinal: int) -> Item:
    return Item(ordinal, ordinal, 0, b"{}")


def ordinals(records: FetchedRecords, wait_s: float = 0.0) -> list[int]:
    return [found.ordinal for found, _ in records.finished(wait_s)]


def test_every_fetch_that_ends_is_told_though_no_record_is_finished(server: ImageServer, gate: threading.Event) -> None:
    records = FetchedRecords([server.address])
    assert records.fetch_count == 0

    assert records.start(item(1), record(server.url("/a"), server.url("/b")))
    while records.fetch_count < 1:
        assert ordinals(records, 0.01) == []
    assert records.count == 1
    gate.set()
    while not (found := ordinals(records, 1.0)):
        pass

    assert found == [1]
    assert records.fetch_count == 2


def test_a_record_without_images_is_not_kept() -> None:
    records = FetchedRecords([])

    assert not records.start(item(1), record())
    assert not records.start(item(2), Record("completion", {"prompt": "p"}))
    assert records.count == 0


def test_too_many_images_are_refused_before_one_is_fetched(server: ImageServer) -> None:
    records = FetchedRecords([server.address])

    with pytest.raises(RecordError, match="too many images"):
        records.start(item(1), record(*[server.url("/a")] * 65))
    assert (records.count, server.requests) == (0, {})


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("form", ["given", "fetched"])
def test_no_more_are_fetched_while_the_engine_has_as_much_as_there_is_room_for(server: ImageServer, form: str) -> None:
    records = FetchedRecords([server.address], max_held_bytes=2 * len(DATA_URL))
    url = DATA_URL if form == "given" else server.url("/a")
    # At first nothing is known of the size of what is fetched.
    held: list[Any] = []
    for ordinal in range(2):
        assert records.start(item(ordinal), record(url))
        while len(held) <= ordinal:
            held += records.finished(0.01)

    assert records.start(item(2), record(url))
    assert ordinals(records) == []
    assert records.count == 1
    del held[0]
    while not (found := ordinals(records)):
        pass

    assert found == [2]


def test_what_is_larger_than_all_the_room_goes_when_the_engine_has_nothing_to_do() -> None:
    records = FetchedRecords([], max_held_bytes=1)
    for ordinal in range(3):
        assert records.start(item(ordinal), record(DATA_URL))

    kept = [found for _ in range(3) for found in records.finished(0.01)]

    assert [found.ordinal for found, _ in kept] == [0, 1, 2]


def test_a_record_that_fails_gives_its_room_back() -> None:
    records = FetchedRecords([], max_held_bytes=1)
    for ordinal in range(3):
        assert records.start(item(ordinal), record(DATA_URL[:-3]))

    found = [one for _ in range(3) for one in records.finished(0.0)]

    assert [isinstance(error, RecordError) for _, error in found] == [True] * 3


def test_so_many_images_are_on_their_way_at_once(server: ImageServer, gate: threading.Event) -> None:
    records = FetchedRecords([server.address])
    assert records.start(item(1), record(*(server.url(f"/{number}") for number in range(MAX_ON_THE_WAY))))
    assert records.start(item(2), record(server.url("/a")))
    gate.set()
    while not (found := ordinals(records, 1.0)):
        pass

    assert found == [1]
    assert server.requests["/a"] == 0
    while not (found := ordinals(records, 1.0)):
        pass
    assert found == [2]
