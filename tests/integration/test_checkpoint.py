"""Checkpoints in this process, on a real store; what storage does wrong is simulated by one that does it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from worker import checkpoint as checkpoint_module
from worker.checkpoint import Checkpoint, CheckpointPlace
from worker.contract.errors import ConfigError, StorageError
from worker.contract.manifest import EarlierAttempt
from worker.contract.store import LocalStore, open_store
from worker.protocol import Result
from worker.segments import Identity
from worker.settings import CheckpointPolicy
from worker.spool import joined

RECORD_COUNT = 100


def result(ordinal: int, text: bytes = b"answer") -> Result:
    return Result(ordinal, "", 3, 1, 2, b"%s %d" % (text, ordinal))


class Place:
    """A partition's folder of segments, and checkpoints of one attempt after the other there."""

    def __init__(self, folder: Path, store: LocalStore | None = None) -> None:
        self.store = store or LocalStore()
        self.folder = folder
        self.segments = folder / "segments"
        self._attempt_count = 0

    def checkpoint(self, policy: CheckpointPolicy | None = None) -> Checkpoint:
        self._attempt_count += 1
        writer_id = f"w{self._attempt_count}"
        place = CheckpointPlace(
            store=self.store,
            folder_uri=str(self.segments),
            segment_uri=lambda number: str(self.segments / f"{writer_id}-{number:06d}.jsonl.zst"),
            identity=Identity(
                run_id="r-1", fingerprint="f", partition_index=0, input_checksum="c", record_count=RECORD_COUNT
            ),
            attempt=EarlierAttempt(
                writer_id=writer_id,
                attempt=self._attempt_count,
                job_id=None,
                compute_environment="spot",
                host="h",
                started_at=f"2025-01-01T00:00:0{self._attempt_count}.000Z",
            ),
        )
        return Checkpoint(place, policy or CheckpointPolicy(), self.folder)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.segments.iterdir()) if self.segments.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def add(checkpoint: Checkpoint, *results: Result) -> None:
    checkpoint.add(results, joined([one.line for one in results]))


def save(checkpoint: Checkpoint) -> None:
    """What comes next in the worker's loop, until the save under way has ended."""
    checkpoint.save_if_due()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(30)
    checkpoint.save_if_due()


def test_the_next_attempt_has_what_was_saved_and_does_the_rest(place: Place) -> None:
    with closing(place.checkpoint()) as first:
        assert first.open() == bytearray(RECORD_COUNT)
        add(first, *map(result, range(10, 30)))
        first.finish("SIGTERM", 30.0)

    with closing(place.checkpoint()) as second:
        done = second.open()
        assert [ordinal for ordinal in range(RECORD_COUNT) if done[ordinal]] == list(range(10, 30))
        add(second, *map(result, [*range(10), *range(30, RECORD_COUNT)]))

        assert b"".join(second.blocks()) == joined([b"answer %d" % ordinal for ordinal in range(RECORD_COUNT)])
        assert (second.tally.ok_count, second.tally.tokens.completion_tokens) == (RECORD_COUNT, 2 * RECORD_COUNT)


def test_the_account_says_who_came_before_and_how_it_ended(place: Place) -> None:
    with closing(place.checkpoint(CheckpointPolicy(record_count=1))) as first:
        first.open()
        add(first, result(0))
        save(first)
        add(first, result(1), result(2))
        first.finish("spot_interruption", 30.0)
    with closing(place.checkpoint(CheckpointPolicy(record_count=1))) as second:
        second.open()
        add(second, result(3))
        save(second)
        # Killed: no last segment.

    with closing(place.checkpoint()) as third:
        third.open()

    (one, two) = third.earlier_attempts
    assert (one.writer_id, one.record_count, one.ended_by, one.compute_environment) == (
        "w1",
        3,
        "spot_interruption",
        "spot",
    )
    assert (two.writer_id, two.record_count, two.ended_by) == ("w2", 1, None)


def test_an_attempt_that_was_stopped_before_any_result_is_known_too(place: Place) -> None:
    with closing(place.checkpoint()) as first:
        first.finish("SIGTERM", 30.0)

    with closing(place.checkpoint()) as second:
        second.open()

    assert [(one.record_count, one.ended_by) for one in second.earlier_attempts] == [(0, "SIGTERM")]


def test_of_two_answers_to_a_record_one_is_kept_and_counted(place: Place) -> None:
    for text in (b"one", b"two"):
        with closing(place.checkpoint()) as attempt:
            # As two workers at once do: neither has seen the other's segments.
            hidden = place.segments.rename(place.folder / text.decode()) if place.segments.exists() else None
            attempt.open()
            if hidden:
                hidden.rename(place.segments)
            add(attempt, *(result(ordinal, text) for ordinal in range(RECORD_COUNT)))
            attempt.finish("SIGTERM", 30.0)

    with closing(place.checkpoint()) as third:
        third.open()

        assert third.tally.ok_count == RECORD_COUNT
        assert b"".join(third.blocks()) == joined([b"one %d" % ordinal for ordinal in range(RECORD_COUNT)])


def test_nothing_is_saved_before_it_is_time_nor_when_there_is_nothing(place: Place) -> None:
    with closing(place.checkpoint(CheckpointPolicy(every_s=3600.0, record_count=10))) as checkpoint:
        checkpoint.open()
        save(checkpoint)
        add(checkpoint, *map(result, range(9)))
        save(checkpoint)
        assert place.names() == []

        add(checkpoint, result(9))
        save(checkpoint)
        assert place.names() == ["w1-000001.jsonl.zst"]

        save(checkpoint)
        assert place.names() == ["w1-000001.jsonl.zst"]


def test_results_too_large_for_one_segment_go_into_several(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "MAX_SEGMENT_BYTES", 100)
    with closing(place.checkpoint()) as checkpoint:
        checkpoint.open()
        add(checkpoint, *map(result, range(RECORD_COUNT)))
        checkpoint.finish("SIGTERM", 30.0)

    assert len(place.names()) >= 10
    with closing(place.checkpoint()) as second:
        assert second.open().count(1) == RECORD_COUNT


class FailingStore(LocalStore):
    """Creates nothing, so many times."""

    def __init__(self, error: Exception, count: int) -> None:
        self.error = error
        self.left = count

    def create(self, uri: str, content: bytes, owner: str) -> bool:
        if self.left > 0:
            self.left -= 1
            raise self.error
        return super().create(uri, content, owner)


def test_what_could_not_be_saved_is_in_the_next_segment(tmp_path: Path) -> None:
    place = Place(tmp_path, FailingStore(StorageError("create segment: S3 answered SlowDown"), 1))
    with closing(place.checkpoint(CheckpointPolicy(record_count=2))) as checkpoint:
        checkpoint.open()
        add(checkpoint, result(0), result(1))
        save(checkpoint)
        add(checkpoint, result(2))
        checkpoint.finish("SIGTERM", 30.0)

    # Under a number of its own: of the first try nobody knows for certain that it left nothing.
    assert place.names() == ["w1-000002.jsonl.zst"]
    with closing(place.checkpoint()) as second:
        assert second.open().count(1) == 3


def test_storage_that_keeps_failing_is_not_asked_again_and_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path, FailingStore(StorageError("create segment: no space left"), 1_000_000))
    with closing(place.checkpoint(CheckpointPolicy(record_count=1))) as checkpoint:
        checkpoint.open()
        for ordinal in range(50):
            add(checkpoint, result(ordinal))
            save(checkpoint)
        checkpoint.finish("StorageError", 30.0)

    said = [record.getMessage() for record in caplog.records]
    assert said.count("checkpoint.failed") == 2
    assert said[-1] == "checkpoint.incomplete"


class BrokenStore(LocalStore):
    """Has a bug."""

    def create(self, uri: str, content: bytes, owner: str) -> bool:  # noqa: ARG002
        raise MemoryError


def test_the_last_segment_never_covers_up_what_went_wrong_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Place(tmp_path, BrokenStore()).checkpoint()) as checkpoint:
        checkpoint.open()
        add(checkpoint, result(0))
        checkpoint.finish("SIGTERM", 30.0)

    assert [record.getMessage() for record in caplog.records] == ["checkpoint.failed", "checkpoint.incomplete"]


def test_a_folder_that_may_not_be_written_ends_the_work_early(tmp_path: Path) -> None:
    place = Place(tmp_path, FailingStore(ConfigError("create segment: S3 answered AccessDenied"), 99))
    with closing(place.checkpoint(CheckpointPolicy(record_count=1))) as checkpoint:
        checkpoint.open()
        add(checkpoint, result(0))
        with pytest.raises(ConfigError, match="AccessDenied"):
            save(checkpoint)


class HangingStore(LocalStore):
    """Has an upload that ends when the test does."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def create(self, uri: str, content: bytes, owner: str) -> bool:
        self.release.wait()
        return super().create(uri, content, owner)


@pytest.fixture
def hanging_store() -> Iterator[HangingStore]:
    store = HangingStore()
    yield store
    store.release.set()


def test_the_last_segment_is_waited_for_only_so_long(
    tmp_path: Path, hanging_store: HangingStore, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path, hanging_store)
    checkpoint = place.checkpoint()
    checkpoint.open()
    add(checkpoint, result(0), result(1))

    checkpoint.finish("SIGTERM", 0.1)

    assert caplog.records[-1].getMessage() == "checkpoint.incomplete"
    assert caplog.records[-1].__dict__["fields"]["unsaved_count"] == 2

    hanging_store.release.set()
    checkpoint.finish("SIGTERM", 30.0)
    checkpoint.close()


def test_after_the_commit_no_segment_is_left(place: Place) -> None:
    with closing(place.checkpoint(CheckpointPolicy(record_count=1))) as checkpoint:
        checkpoint.open()
        add(checkpoint, result(0))
        save(checkpoint)
        add(checkpoint, result(1))
        checkpoint.save_if_due()
        checkpoint.remove_segments(30.0)

    assert list(open_store(str(place.segments)).list(str(place.segments))) == []
