"""Models come to a host once, whole or not at all, and are what the plan has pinned."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest

from tests.fake_hub import FakeHub, Repository, blob_id, running_hub
from tests.fakes import engine_command
from tests.worker_runs import Ended, StartedWorker, lines, manifest_of, read_output, records, write_run
from worker.contract.errors import EngineBootError, InputError, StorageError
from worker.contract.layout import RunLayout
from worker.contract.model_place import digest_of, list_objects
from worker.contract.plan import Plan
from worker.contract.store import open_store
from worker.contract.store_s3 import S3Store
from worker.fetch_s3 import RANGE_BYTES, check_object, fetch_objects
from worker.fetch_source import FetchFailed, FetchRequest, Source, decode_line
from worker.interrupt import Interrupt
from worker.model_cache import ModelCache

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/model"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version":"1.0"}',
    "model-00001-of-00002.safetensors": os.urandom(300_000),
    "model-00002-of-00002.safetensors": os.urandom(200_000),
    "1_Pooling/config.json": b'{"pooling":1}',
}
BESIDE = {"README.md": b"# It", "pytorch_model.bin": b"the same again", "original/consolidated.00.pth": b"and again"}
LARGE = "model-00001-of-00002.safetensors"


def write_model(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def all_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="worker")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with running_hub() as found:
        found.repositories[MODEL] = Repository(write_model(tmp_path / "repository", FILES | BESIDE), COMMIT)
        yield found


@dataclass(slots=True)
class Lying(Repository):
    """Lists a file that it has not."""

    name: str = ""

    def listing(self) -> list[dict[str, Any]]:
        return [*Repository.listing(self), {"type": "file", "path": self.name, "size": 2, "oid": blob_id(b"{}")}]


class Host:
    """A machine with a cache, and a run whose model lies elsewhere."""

    def __init__(self, folder: Path, variables: Mapping[str, str], **plan: Any) -> None:
        self.work = folder / "work"
        self.run_uri = str(folder / "run")
        self.variables = dict(variables)
        self.plan: Plan = write_run(self.run_uri, [lines(records(3))] * 8, **plan)

    def start(self, index: int = 0, *more: str) -> StartedWorker:
        return StartedWorker(
            self.run_uri, "--index", str(index), "--work-dir", str(self.work), *more,
            engine=engine_command("model-path"), variables=self.variables,
        )  # fmt: skip

    def end(self, index: int = 0, *more: str) -> Ended:
        with self.start(index, *more) as worker:
            return worker.end()

    def fetch(self) -> Path:
        """What a worker does before it starts engines, without the rest of it."""
        cache = ModelCache(self.work, Interrupt())
        try:
            with patched(self.variables):
                return Path(cache.model(self.plan.model, self.plan.model_revision, None))
        finally:
            cache.close()

    def folders(self) -> list[Path]:
        """What is in the cache, drafts of killed workers included."""
        return sorted(path for path in (self.work / "models").iterdir() if path.is_dir())

    def contents(self) -> dict[str, bytes]:
        (folder,) = self.folders()
        found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        del found[".llm-array.json"]
        return found

    def loaded_from(self, index: int = 0) -> set[bytes]:
        """The folders that the engines of a partition have loaded."""
        return set(read_output(self.run_uri, self.plan, index).splitlines())


@contextmanager
def patched(variables: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def host(hub: FakeHub, tmp_path: Path) -> Host:
    return Host(tmp_path, hub.variables(tmp_path / "hf"), model=MODEL, model_revision=COMMIT)


def test_a_hubs_model_comes_once_for_all_engines_and_only_what_they_read(hub: FakeHub, host: Host) -> None:
    first, second = host.end(0, "--engines", "8"), host.end(1)

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert host.contents() == FILES
    assert {name: count for name, count in hub.asked.items() if name != "api"} == dict.fromkeys(FILES, 1)
    assert host.loaded_from(0) == host.loaded_from(1) == {os.fsencode(host.folders()[0])}
    downloading, downloaded = first.one("model.downloading"), first.one("model.downloaded")
    assert (downloading["size_bytes"], downloading["file_count"]) == (sum(map(len, FILES.values())), len(FILES))
    assert (downloaded["place"], downloaded["revision"]) == (MODEL, COMMIT)
    assert downloaded["bytes_per_s"] > 0
    assert second.one("model.found")["folder"] == str(host.folders()[0])
    assert not second.of("model.downloading")
    manifest = manifest_of(host.run_uri, 0, 8)
    assert manifest.model == MODEL
    assert manifest.times
    assert manifest.times.model_s


def test_a_damaged_partition_costs_no_download(hub: FakeHub, host: Host) -> None:
    partition = Path(RunLayout(host.run_uri).partition(0, 8))
    partition.write_bytes(partition.read_bytes()[:-2] + b" }")

    ended = host.end(0)

    assert ended.exit_code == 65
    assert hub.asked == {}
    assert not ended.of("model.downloading")


def test_of_workers_that_start_at_once_one_downloads_and_the_others_wait(hub: FakeHub, host: Host) -> None:
    hub.faults[LARGE] = ["held"]
    with ExitStack() as stack:
        first = stack.enter_context(host.start(0))
        assert hub.holding.wait(60)
        others = [stack.enter_context(host.start(index)) for index in range(1, 4)]
        for other in others:
            other.wait_for("model.waiting")
        # One is told to stop: it leaves, and the others wait on.
        others[0].process.terminate()
        stopped = others.pop(0).end(limit_s=10)
        hub.released.set()
        ended = [worker.end() for worker in (first, *others)]

    assert stopped.exit_code == 75
    assert stopped.failure["reason"] == "SIGTERM"
    assert [one.exit_code for one in ended] == [0] * 3
    assert [len(one.of("model.downloaded")) for one in ended] == [1, 0, 0]
    assert hub.asked["config.json"] == 1
    assert host.contents() == FILES


def test_after_a_kill_in_the_middle_of_a_download_the_next_worker_has_it_whole(hub: FakeHub, host: Host) -> None:
    hub.faults[LARGE] = ["held"]
    with host.start() as worker:
        assert hub.holding.wait(60)
        (draft,) = host.folders()
        assert draft.name.startswith(".")
        worker.process.kill()
        worker.end()

    assert host.fetch() == host.folders()[0]
    assert host.contents() == FILES


def test_a_worker_that_is_told_to_stop_in_a_download_leaves_at_once(hub: FakeHub, host: Host) -> None:
    hub.faults[LARGE] = ["held"]
    with host.start() as worker:
        assert hub.holding.wait(60)
        worker.process.terminate()
        ended = worker.end(limit_s=10)

    assert ended.exit_code == 75
    assert ended.failure["reason"] == "SIGTERM"
    host.fetch()
    assert host.contents() == FILES


def test_faults_on_the_way_cost_retries_and_never_a_byte(
    hub: FakeHub, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    hub.faults = {LARGE: ["unavailable", "damaged"], "model-00002-of-00002.safetensors": ["cut"]}
    host.fetch()

    assert host.contents() == FILES
    assert "retry.scheduled" in caplog.messages


def test_a_download_that_hardly_comes_ends_as_one_to_be_tried_again(hub: FakeHub, host: Host, tmp_path: Path) -> None:
    hub.faults[LARGE] = ["held"]
    draft = tmp_path / "models" / "draft"
    draft.mkdir(parents=True)
    source = Source(content="model", place=MODEL, revision=COMMIT)
    request = FetchRequest(source=source, cache_folder=str(draft.parent), draft=str(draft), stall_s=0.5)
    ended = subprocess.run(
        [sys.executable, "-m", "worker.fetch"],
        input=msgspec.json.encode(request),
        env={**os.environ, **host.variables},
        capture_output=True,
        check=True,
        timeout=60,
    )

    last = decode_line(ended.stdout.splitlines()[-1])
    assert isinstance(last, FetchFailed)
    assert last.code == StorageError.code
    assert "it hardly comes (expected 1,048,576 bytes or more in 0.5 s)" in last.message


@pytest.mark.parametrize("name", ["/{0}/escaped.json", "../../escaped.json", "a//b.json", "x" * 256])
def test_a_hub_that_lists_what_can_be_no_files_name_is_refused(
    name: str, hub: FakeHub, host: Host, tmp_path: Path
) -> None:
    name = name.format(tmp_path)
    hub.repositories[MODEL] = Lying(write_model(tmp_path / "lying", FILES), COMMIT, name=name)

    with pytest.raises(InputError, match="can be no file's name") as caught:
        host.fetch()
    assert repr(name) in caught.value.message
    assert list(tmp_path.rglob("escaped.json")) == []
    assert host.folders() == []


def test_a_damaged_copy_is_fetched_again(hub: FakeHub, host: Host, caplog: pytest.LogCaptureFixture) -> None:
    os.truncate(host.fetch() / LARGE, 1000)
    host.fetch()

    assert "model.damaged" in caplog.messages
    assert host.contents() == FILES
    assert hub.asked[LARGE] == 2


def test_what_is_cached_needs_no_hub_and_another_revision_is_another_folder(
    hub: FakeHub, host: Host, tmp_path: Path
) -> None:
    first = host.fetch()
    other = Host(tmp_path / "other", host.variables, model=MODEL, model_revision=COMMIT[::-1])
    other.work = host.work
    hub.repositories[MODEL].commit = COMMIT[::-1]
    second = other.fetch()
    host.variables["HF_HUB_OFFLINE"] = "1"
    hub.is_silent = True

    assert (host.fetch(), other.fetch()) == (first, second)
    assert first != second


def test_a_gated_model_is_refused_with_the_way_to_a_token_and_no_token_is_ever_shown(hub: FakeHub, host: Host) -> None:
    hub.repositories[MODEL].gated = True
    host.variables["HF_TOKEN"] = "hf_wrong"
    refused = host.end()
    host.variables["HF_TOKEN"] = hub.token
    ended = host.end()

    assert refused.exit_code == 78
    assert "gated" in refused.failure["message"]
    assert "Secrets Manager" in refused.failure["hint"]
    assert ended.exit_code == 0
    assert host.contents() == FILES
    assert not any(word in f"{one.events}{one.stderr}" for one in (refused, ended) for word in ("hf_wrong", hub.token))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model": "org/other"}, "there is none on the hub"), ({"model_revision": "9" * 40}, "no such revision")],
)
def test_what_the_hub_has_not_is_a_failure_to_boot(
    change: dict[str, str], words: str, hub: FakeHub, tmp_path: Path
) -> None:
    plan = {"model": MODEL, "model_revision": COMMIT} | change
    host = Host(tmp_path, hub.variables(tmp_path / "hf"), **plan)

    with pytest.raises(EngineBootError, match=words):
        host.fetch()
    assert host.folders() == []


def test_a_path_that_the_host_has_not_ends_the_worker_before_an_engine_starts(tmp_path: Path) -> None:
    ended = Host(tmp_path, {}, model="/no/such/model").end()

    assert ended.exit_code == 69
    assert ended.failure["message"] == "find model /no/such/model: there is no such folder on this host"
    assert "s3:// prefix" in ended.failure["hint"]
    assert not ended.of("engine.started")


@pytest.mark.parametrize("place", ["./model", "a/b/c", "s3:/bucket/model", "~nobody/model"])
def test_what_can_be_no_hubs_id_is_a_path(place: str, tmp_path: Path) -> None:
    with pytest.raises(EngineBootError, match="there is no such folder"):
        Host(tmp_path, {}, model=place).fetch()


def test_a_path_is_loaded_where_it_is(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", FILES)
    host = Host(tmp_path, {}, model=f"file://{folder}")

    assert host.fetch() == folder
    assert not (host.work / "models").exists()


def test_a_hubs_model_that_is_not_pinned_is_left_to_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert str(Host(tmp_path, {}, model=MODEL).fetch()) == MODEL
    assert "model.unpinned" in caplog.messages


def test_offline_a_model_in_the_hubs_own_cache_is_used_in_place(tmp_path: Path) -> None:
    # The one that all tests have.
    host = Host(tmp_path, {}, model="org/model", model_revision="c" * 40)
    other = Host(tmp_path / "other", {}, model=MODEL, model_revision="9" * 40)

    assert (host.fetch() / "config.json").is_file()
    with pytest.raises(EngineBootError, match="HF_HUB_OFFLINE is set"):
        other.fetch()


def test_what_the_hubs_own_cache_has_is_not_downloaded_and_damage_in_it_is_noticed(
    hub: FakeHub, host: Host, tmp_path: Path
) -> None:
    write_model(tmp_path / "hf" / "models--org--model" / "snapshots" / COMMIT, {**FILES, LARGE: bytes(300_000)})
    host.fetch()

    assert host.contents() == FILES
    assert {name: count for name, count in hub.asked.items() if name != "api"} == {LARGE: 1}


class TestOnS3:
    @pytest.fixture
    def place(self, s3_bucket: str) -> str:
        place = f"s3://{s3_bucket}/models/it +#?%"
        for name, content in (FILES | BESIDE).items():
            open_store(place).write(f"{place}/{name}", content)
        open_store(place).write(f"{place}-2/config.json", b"another's")
        return place

    @pytest.fixture
    def host(self, place: str, tmp_path: Path) -> Host:
        digest = digest_of(list_objects(open_store(place), place, "model"))
        return Host(tmp_path, {}, model=place, model_revision=digest)

    def test_a_model_comes_once_and_only_what_an_engine_reads(
        self, host: Host, caplog: pytest.LogCaptureFixture
    ) -> None:
        ended = host.end()

        assert ended.exit_code == 0
        assert host.contents() == FILES
        assert host.loaded_from() == {os.fsencode(host.folders()[0])}
        assert ended.of("model.downloaded")
        caplog.clear()
        host.fetch()
        assert caplog.messages == ["model.found"]

    def test_a_model_that_has_changed_since_it_was_planned_is_refused(self, host: Host, place: str) -> None:
        open_store(place).write(f"{place}/{LARGE}", b"trained on")

        with pytest.raises(InputError, match="its objects have changed since the run was planned"):
            host.fetch()
        assert host.folders() == []

    @pytest.mark.parametrize("name", ["{0}/escaped.json", "../../../escaped.json", "config.json/b.json", "x" * 256])
    def test_an_object_writes_nothing_outside_of_the_cache_and_its_model_is_refused(
        self, name: str, place: str, tmp_path: Path
    ) -> None:
        name = name.format(tmp_path)
        bucket, _, key = f"{place}/{name}".removeprefix("s3://").partition("/")
        boto3.client("s3").put_object(Bucket=bucket, Key=key, Body=b"{}")
        # As a planner that looks at no names would pin it.
        listed = {one.uri.removeprefix(f"{place}/"): one for one in open_store(place).list(f"{place}/")}
        assert name in listed
        for number, revision in enumerate((digest_of(listed), None)):
            host = Host(tmp_path / str(number), {}, model=place, model_revision=revision)
            ended = host.end()

            assert ended.exit_code == 65
            assert ended.failure["message"].startswith(f"list model at {place}: {name!r} can be no file's name")
            assert "remove the object" in ended.failure["hint"]
            assert not ended.of("engine.started")
        assert list(tmp_path.rglob("escaped.json")) == []

    def test_keys_that_show_folders_in_consoles_are_no_files(self, host: Host, place: str) -> None:
        client = boto3.client("s3")
        bucket, _, key = place.removeprefix("s3://").partition("/")
        for folder in ("", "1_Pooling/", "1_Pooling//"):
            client.put_object(Bucket=bucket, Key=f"{key}/{folder}", Body=b"")
        host.fetch()

        assert host.contents() == FILES

    def test_without_a_pin_what_is_there_is_taken(self, place: str, tmp_path: Path) -> None:
        host = Host(tmp_path, {}, model=place)
        host.fetch()

        assert host.contents() == FILES

    def test_a_place_without_a_model_is_refused(self, place: str, tmp_path: Path) -> None:
        host = Host(tmp_path, {}, model=place.removesuffix("/it +#?%"), model_revision="xxh3_128:0")

        with pytest.raises(EngineBootError, match=r"config\.json is missing"):
            host.fetch()

    def test_a_large_file_comes_in_ranges(self, s3_bucket: str, tmp_path: Path) -> None:
        place, content = f"s3://{s3_bucket}/large", os.urandom(RANGE_BYTES + 5)
        for name in ("config.json", "a.safetensors", "deeper/b.safetensors"):
            open_store(place).write(f"{place}/{name}", content)
        open_store(place).write(f"{place}/empty.txt", b"")
        found = list_objects(open_store(place), place, "model")
        begun: list[tuple[int, int]] = []
        source = Source(content="model", place=place, revision=digest_of(found))

        def begin(*sizes: int) -> Callable[[], AbstractContextManager[None]]:
            begun.append((sizes[0], sizes[1]))
            return nullcontext

        assert fetch_objects(source, tmp_path, begin) == 3 * len(content)
        assert begun == [(3 * len(content), 4)]
        assert (tmp_path / "deeper" / "b.safetensors").read_bytes() == content
        assert (tmp_path / "a.safetensors").read_bytes() == content
        assert (tmp_path / "empty.txt").read_bytes() == b""

    @pytest.mark.parametrize("algorithm", ["SHA256", "SHA1", "CRC32"])
    def test_what_came_is_held_against_the_checksum_that_s3_has(
        self, algorithm: Any, s3_bucket: str, tmp_path: Path
    ) -> None:
        uri, content = f"s3://{s3_bucket}/it/model.safetensors", os.urandom(1000)
        boto3.client("s3").put_object(
            Bucket=s3_bucket, Key="it/model.safetensors", Body=content, ChecksumAlgorithm=algorithm
        )
        info = open_store(uri).head(uri)
        assert info
        (tmp_path / "came").write_bytes(content)
        check_object(S3Store(), info, tmp_path / "came")
        (tmp_path / "came").write_bytes(bytes(1000))

        with pytest.raises(StorageError, match=f"it came damaged .{algorithm} expected"):
            check_object(S3Store(), info, tmp_path / "came")
