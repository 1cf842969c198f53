"""A download says each minute how far it has come, and fails if hardly anything comes."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from worker.contract.errors import ArrayError, ExitCode
from worker.fetch_progress import PROGRESS_S, Progress
from worker.fetch_source import STALL_BYTES, STALL_S, Source

SIZE_BYTES = 3 * STALL_BYTES
SOURCE = Source(content="model", place="org/model", revision="1" * 40)


class Download:
    def __init__(self, draft: Path) -> None:
        self.draft = draft
        self.errors: list[ArrayError] = []
        self.progress = Progress(SOURCE, draft, SIZE_BYTES, STALL_S, self.errors.append)

    def come(self, size_bytes: int, name: str = "weights") -> None:
        with (self.draft / name).open("ab") as stream:
            stream.write(os.urandom(size_bytes))
            stream.flush()
            os.fsync(stream.fileno())


@pytest.fixture
def download(tmp_path: Path) -> Download:
    return Download(tmp_path)


def said(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [getattr(record, "fields", {}) for record in caplog.records if record.message == "model.progress"]


def test_each_minute_it_says_how_many_of_the_bytes_have_come(
    download: Download, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="worker")
    download.progress.look(PROGRESS_S - 1)
    assert said(caplog) == []
    download.come(2 * STALL_BYTES)
    download.progress.look(1)
    download.progress.look(PROGRESS_S - 1)

    (fields,) = said(caplog)
    assert (fields["received_bytes"], fields["size_bytes"]) == (2 * STALL_BYTES, SIZE_BYTES)
    assert fields["place"] == "org/model"


def test_a_download_that_drips_fails_as_one_that_may_be_tried_again(download: Download) -> None:
    looks = int(STALL_S / 30)
    for _ in range(looks - 1):
        download.come(1000)
        download.progress.look(30)
    assert download.errors == []
    download.progress.look(30)

    (error,) = download.errors
    assert error.exit_code == ExitCode.INTERRUPTED
    assert f"it hardly comes (expected {STALL_BYTES:,} bytes or more in 300 s)" in error.message


def test_a_slow_download_goes_on(download: Download) -> None:
    for _ in range(4):
        download.come(STALL_BYTES)
        download.progress.look(STALL_S - 1)

    assert download.errors == []


def test_a_file_that_is_made_in_its_whole_length_is_seen_to_fill(download: Download) -> None:
    (download.draft / "weights").touch()
    os.truncate(download.draft / "weights", SIZE_BYTES)
    download.progress.look(1)
    for part in range(3):
        with (download.draft / "weights").open("r+b") as stream:
            stream.seek(part * STALL_BYTES)
            stream.write(os.urandom(STALL_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        download.progress.look(STALL_S - 1)

    assert download.errors == []


def test_what_comes_again_after_damage_counts(download: Download) -> None:
    download.come(2 * STALL_BYTES)
    download.progress.look(1)
    (download.draft / "weights").unlink()
    download.progress.look(STALL_S - 1)
    download.come(STALL_BYTES)
    download.progress.look(STALL_S - 1)

    assert download.errors == []


def test_the_time_of_short_tries_adds_up(tmp_path: Path) -> None:
    errors: list[ArrayError] = []
    progress = Progress(SOURCE, tmp_path, SIZE_BYTES, 1e-9, errors.append)
    with progress.downloading():
        pass

    assert errors
