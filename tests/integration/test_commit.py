"""An output appears whole or not at all."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from worker.commit import Output, check_output, commit_output
from worker.contract.compression import compressed, decompressed
from worker.contract.errors import InputError, InterruptedRunError
from worker.contract.formats import checksum_of
from worker.contract.plan import Compression
from worker.contract.store import LocalStore, Produce, Store, open_store
from worker.contract.store_s3 import PART_BYTES

COMPRESSIONS: list[Compression] = ["none", "gz", "zst"]


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "outputs" / "out")
    return f"s3://{request.getfixturevalue('s3_bucket')}/outputs/out"


class RepeatingStore(LocalStore):
    """Its first upload is in vain, as when S3 answers 409 to the last part."""

    def create_stream(self, uri: str, produce: Produce, owner: str) -> bool:
        produce(cast("BinaryIO", io.BytesIO()))
        return super().create_stream(uri, produce, owner)


def go_on() -> None:
    pass


def commit(
    store: Store, uri: str, blocks: Iterable[bytes], record_count: int, compression: Compression = "none"
) -> Output | None:
    return commit_output(
        store,
        uri,
        lambda: blocks,
        record_count=record_count,
        compression=compression,
        writer_id="w1",
        check=go_on,
    )


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_output_is_counted_and_checksummed_before_it_is_compressed(uri: str, compression: Compression) -> None:
    store = open_store(uri)

    output = commit(store, uri, [b"a\nb\n", b"c\n"], 3, compression)

    assert output == Output(size_bytes=6, checksum=checksum_of(b"a\nb\nc\n"))
    assert decompressed(io.BytesIO(store.read(uri)), compression).read() == b"a\nb\nc\n"
    check_output(store, uri, compression, 3)


def test_the_second_output_is_refused_and_the_first_one_stays(uri: str) -> None:
    store = open_store(uri)
    commit(store, uri, [b"first\n"], 1)

    assert (
        commit_output(store, uri, lambda: [b"other\n"], record_count=1, compression="none", writer_id="w2", check=go_on)
        is None
    )
    assert store.read(uri) == b"first\n"


def test_an_upload_that_starts_again_is_counted_once(tmp_path: Path) -> None:
    uri = str(tmp_path / "out")

    output = commit(RepeatingStore(), uri, [b"a\n", b"b\n"], 2)

    assert output == Output(size_bytes=4, checksum=checksum_of(b"a\nb\n"))
    assert Path(uri).read_bytes() == b"a\nb\n"


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("line_count", [1, 3])
def test_lines_that_do_not_add_up_are_never_published(uri: str, compression: Compression, line_count: int) -> None:
    store = open_store(uri)

    with pytest.raises(ValueError, match=f"{line_count} lines \\(expected 2"):
        commit(store, uri, [b"x\n"] * line_count, 2, compression)

    assert store.head(uri) is None


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_commit_that_is_given_up_leaves_no_object_and_no_open_upload(
    s3_bucket: str, compression: Compression
) -> None:
    import boto3

    uri = f"s3://{s3_bucket}/out"
    block = bytes(range(256)) * 4096 + b"\n"

    def blocks() -> Iterator[bytes]:
        # The first part is on its way by then.
        for _ in range(PART_BYTES // len(block) + 2):
            yield block
        raise InterruptedRunError("stopped")

    with pytest.raises(InterruptedRunError):
        commit_output(
            open_store(uri), uri, blocks, record_count=1, compression=compression, writer_id="w1", check=go_on
        )

    client = boto3.client("s3")
    assert client.list_objects_v2(Bucket=s3_bucket)["KeyCount"] == 0
    assert "Uploads" not in client.list_multipart_uploads(Bucket=s3_bucket)


def test_a_worker_that_must_go_gives_up_before_the_next_piece(tmp_path: Path) -> None:
    uri = str(tmp_path / "outputs" / "out")

    def stop() -> None:
        raise InterruptedRunError("stopped")

    with pytest.raises(InterruptedRunError):
        commit_output(
            open_store(uri), uri, lambda: [b"a\n"], record_count=1, compression="none", writer_id="w1", check=stop
        )

    assert list(Path(uri).parent.iterdir()) == []


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_anothers_output_is_counted_line_by_line(uri: str, compression: Compression) -> None:
    store = open_store(uri)
    stored = io.BytesIO()
    target = compressed(cast("BinaryIO", stored), compression)
    target.write(b"a\n" * 5)
    target.close()
    store.write(uri, stored.getvalue())

    check_output(store, uri, compression, 5)
    with pytest.raises(InputError, match="5 lines"):
        check_output(store, uri, compression, 6)
