"""The same promises on a local folder and on S3 over HTTP."""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from submitter.inputs import open_inputs
from worker.contract import store_s3
from worker.contract.errors import ConfigError, InputError
from worker.contract.layout import join
from worker.contract.store import NotFoundError, Store, open_store

Place = tuple[Store, str]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        root = str(tmp_path / "root")
    else:
        root = f"s3://{request.getfixturevalue('s3_bucket')}/some/root"
    return open_store(root), root


def test_what_is_created_reads_back(place: Place) -> None:
    store, root = place
    uri = join(root, "a b+#?%@:é\t", "x.json")

    assert store.create(uri, b"content", owner="w1")
    assert store.read(uri) == b"content"
    found = store.head(uri)
    assert found is not None
    assert found.size_bytes == 7


def test_second_creator_loses_and_the_first_content_stays(place: Place) -> None:
    store, root = place
    uri = join(root, "x.json")
    store.create(uri, b"first", owner="w1")

    assert not store.create(uri, b"second", owner="w2")
    assert store.read(uri) == b"first"


def test_of_many_concurrent_creators_exactly_one_wins(place: Place) -> None:
    store, root = place
    uri = join(root, "x.json")
    barrier = threading.Barrier(8)
    wins: list[str] = []

    def create(owner: str) -> None:
        barrier.wait()
        if store.create(uri, owner.encode(), owner):
            wins.append(owner)

    threads = [threading.Thread(target=create, args=(f"w{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(wins) == 1
    assert store.read(uri) == wins[0].encode()


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_a_stream_is_created_once_and_whole(place: Place, size: int) -> None:
    store, root = place
    uri = join(root, "out.jsonl")

    assert store.create_stream(uri, lambda stream: _write(stream, b"x" * size), owner="w1")
    assert not store.create_stream(uri, lambda stream: _write(stream, b"y" * (size + 1)), owner="w2")
    assert store.read(uri) == b"x" * size
    assert [entry.uri for entry in store.list(root)] == [uri]


def test_a_large_stream_goes_up_in_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_s3, "PART_BYTES", 5 << 20)
    store, root = place
    content = os.urandom(12 << 20)

    assert store.create_stream(join(root, "big"), lambda stream: _write(stream, content), owner="w1")
    assert store.read(join(root, "big")) == content


def test_an_error_while_producing_leaves_nothing(place: Place) -> None:
    store, root = place

    def produce(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise ValueError("produce")

    with pytest.raises(ValueError, match="produce"):
        store.create_stream(join(root, "x"), produce, owner="w1")
    assert store.head(join(root, "x")) is None
    assert list(store.list(root)) == []
    if root.startswith("/"):
        assert list(Path(root).rglob("*")) == []
    else:
        import boto3

        assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=root.split("/")[2])


def test_write_replaces(place: Place) -> None:
    store, root = place
    store.write(join(root, "x"), b"one")
    store.write(join(root, "x"), b"two")

    assert store.read(join(root, "x")) == b"two"


def test_ranges_and_streams_from_the_middle(place: Place) -> None:
    store, root = place
    uri = join(root, "x")
    store.write(uri, b"0123456789")

    assert store.read_range(uri, 3, 6) == b"345"
    assert store.read_range(uri, 8, 100) == b"89"
    with store.open_read(uri, start=4) as stream:
        assert stream.read() == b"456789"
    with io.BufferedReader(store.open_read(uri)) as stream:  # type: ignore[type-var]
        assert stream.peek(2)[:2] == b"01"


def test_reading_with_the_etag_of_an_older_version_fails(place: Place) -> None:
    store, root = place
    uri = join(root, "x")
    store.write(uri, b"one")
    found = store.head(uri)
    assert found is not None
    store.write(uri, b"other")

    with pytest.raises(InputError, match="has changed"):
        store.read_range(uri, 0, 1, etag=found.etag)
    with pytest.raises(InputError, match="has changed"), store.open_read(uri, etag=found.etag) as stream:
        stream.read()


@pytest.mark.parametrize(
    "read",
    [
        lambda store, uri: store.read(uri),
        lambda store, uri: store.read_range(uri, 0, 1),
        lambda store, uri: store.open_read(uri).read(),
    ],
)
def test_reading_what_is_not_there_names_it(place: Place, read: Callable[[Store, str], bytes]) -> None:
    store, root = place

    with pytest.raises(NotFoundError, match=r"root/nothing: there is no such"):
        read(store, join(root, "nothing"))
    assert store.head(join(root, "nothing")) is None


def test_list_is_in_order_and_pages(place: Place) -> None:
    store, root = place
    names = [f"k{number:04}" for number in range(1_100 if root.startswith("s3") else 20)]
    for name in names:
        store.write(join(root, "sub", name), b"")

    assert [entry.uri for entry in store.list(join(root, "sub") + "/")] == [join(root, "sub", name) for name in names]
    assert list(store.list(join(root, "other") + "/")) == []


def test_when_an_object_was_written_is_known(place: Place) -> None:
    store, root = place
    begun_s = time.time()
    store.write(join(root, "x"), b"one")
    ended_s = time.time()

    found = store.head(join(root, "x"))

    assert found
    assert list(store.list(root + "/")) == [found]
    # S3 says whole seconds.
    assert begun_s - 1 <= found.modified_s <= ended_s + 1


def test_delete_is_idempotent(place: Place) -> None:
    store, root = place
    store.write(join(root, "x"), b"one")
    store.delete(join(root, "x"))
    store.delete(join(root, "x"))

    assert store.head(join(root, "x")) is None


def test_a_missing_bucket_is_a_configuration_error(aws_environment: dict[str, str]) -> None:
    store = open_store("s3://no-such-bucket-here/x")

    with pytest.raises(ConfigError, match="NoSuchBucket"):
        store.create("s3://no-such-bucket-here/x", b"", owner="w1")
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        store.create_stream("s3://no-such-bucket-here/x", lambda stream: _write(stream, b"x"), owner="w1")


def _write(stream: BinaryIO, content: bytes) -> None:
    stream.write(content)


def test_a_link_that_leads_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "nothing")

    with pytest.raises(InputError, match=r"a\.jsonl: the link leads nowhere"):
        list(open_store(str(tmp_path)).list(str(tmp_path)))


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")

    with pytest.raises(InputError, match=r"a\.jsonl: it is no file"):
        list(open_store(str(tmp_path)).list(str(tmp_path)))


def test_a_bucket_that_no_name_can_be_is_a_configuration_error(aws_environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no such name can be"):
        open_store("s3://Bad_Bucket!/x").read("s3://Bad_Bucket!/x")


@pytest.fixture
def unlistable() -> Iterator[Path]:
    """A folder with a file, and a folder below that this process may not list."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "a.jsonl").write_text("{}", encoding="ascii")
        (folder / "sub").mkdir()
        (folder / "sub" / "b.jsonl").write_text("{}", encoding="ascii")
        (folder / "sub").chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if is_root:
                os.seteuid(0)
            (folder / "sub").chmod(0o755)


def test_a_folder_that_cannot_be_listed_does_not_pass_for_an_empty_one(unlistable: Path) -> None:
    with pytest.raises(ConfigError, match="sub: Permission denied"):
        list(open_store(str(unlistable)).list(str(unlistable)))


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*/*.jsonl"])
def test_nor_does_one_in_the_way_of_a_pattern(unlistable: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match="sub"), open_inputs([f"{unlistable}/{pattern}"], "/nowhere/run"):
        pass


def test_one_that_no_pattern_reaches_does_not_matter(unlistable: Path) -> None:
    with open_inputs([f"{unlistable}/*.jsonl"], "/nowhere/run") as (inputs, _):
        assert [Path(one.name).name for one in inputs] == ["a.jsonl"]
