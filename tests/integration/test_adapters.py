"""Adapters are found, or brought from S3 to the host once, before any engine boots."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.fake_hub import Repository, running_hub
from worker import adapters
from worker.adapters import max_rank
from worker.contract.errors import ConfigError, EngineBootError
from worker.contract.store import open_store
from worker.interrupt import Interrupt
from worker.model_cache import ModelCache


def save_adapter(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | config))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def resolve_adapters(places: dict[str, str], work_folder: Path, **revisions: str) -> dict[str, str]:
    cache = ModelCache(work_folder, Interrupt())
    try:
        return adapters.resolve_adapters(places, revisions, cache)
    finally:
        cache.close()


def upload(folder: Path, prefix: str) -> None:
    for path in folder.iterdir():
        open_store(prefix).write(f"{prefix}/{path.name}", path.read_bytes())


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if not path.name.startswith(".")}


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = save_adapter(tmp_path / "formal")
    monkeypatch.chdir(tmp_path)
    found = resolve_adapters({"a": str(here), "b": f"file://{here}", "c": "formal"}, tmp_path / "work")

    assert found == {"a": str(here), "b": str(here), "c": str(here)}
    assert not (tmp_path / "work").exists()


def test_a_hubs_id_is_passed_on(tmp_path: Path) -> None:
    assert resolve_adapters({"a": "org/some-lora.v1", "b": "lora"}, tmp_path) == {"a": "org/some-lora.v1", "b": "lora"}


@pytest.mark.parametrize(
    "place", ["/no/such/folder", "./nothing", "a/b/c", "../no-such-folder", "https://hub/x", "", "org/"]
)
def test_what_is_neither_is_named_with_its_place(place: str, tmp_path: Path) -> None:
    with pytest.raises(EngineBootError) as caught:
        resolve_adapters({"formal": place}, tmp_path)
    assert caught.value.message == f"find adapter 'formal' at {place}: there is no such folder"
    assert caught.value.hint


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("is_on_s3", [False, True])
def test_a_folder_without_an_adapter_is_refused(missing: str, is_on_s3: bool, tmp_path: Path, s3_bucket: str) -> None:
    folder = save_adapter(tmp_path / "formal")
    (folder / missing).unlink()
    place = str(folder)
    if is_on_s3:
        place = f"s3://{s3_bucket}/formal"
        upload(folder, place)

    with pytest.raises(EngineBootError, match=rf"at {place}: no LoRA adapter lies there \({missing} is missing\)"):
        resolve_adapters({"formal": place}, tmp_path / "work")


@pytest.mark.parametrize("config", [b"{", b"[]", b"{}", b'{"r": "8"}', b'{"r": null}'])
def test_a_configuration_of_something_else_is_refused(config: bytes, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "formal")
    (folder / "adapter_config.json").write_bytes(config)

    with pytest.raises(EngineBootError, match=r"adapter_config\.json is not one of a LoRA adapter's"):
        resolve_adapters({"formal": str(folder)}, tmp_path)


def test_an_adapter_on_s3_comes_to_the_host_without_what_lies_beside_it(s3_bucket: str, tmp_path: Path) -> None:
    prefix = f"s3://{s3_bucket}/runs/formal +#?%"
    folder = save_adapter(tmp_path / "formal")
    (folder / "optimizer.pt").write_bytes(b"large")
    (folder / "adapter_model.bin").write_bytes(b"older")
    upload(folder, prefix)
    upload(save_adapter(tmp_path / "other", r=3), f"{prefix}-2")
    open_store(prefix).write(f"{prefix}/checkpoint-10/adapter_config.json", b"{}")
    found = resolve_adapters({"a": prefix, "b": f"{prefix}/"}, tmp_path / "work")

    assert contents(found["a"]) == {
        "adapter_config.json": (folder / "adapter_config.json").read_bytes(),
        "adapter_model.safetensors": b"weights",
    }
    assert found["b"] == found["a"]


def test_what_is_there_is_not_brought_again_and_what_has_changed_is(s3_bucket: str, tmp_path: Path) -> None:
    prefix = f"s3://{s3_bucket}/formal"
    upload(save_adapter(tmp_path / "formal"), prefix)
    first = resolve_adapters({"a": prefix}, tmp_path / "work")["a"]
    (Path(first) / "adapter_model.safetensors").write_bytes(b"unmoved")

    assert resolve_adapters({"a": prefix}, tmp_path / "work")["a"] == first
    assert (Path(first) / "adapter_model.safetensors").read_bytes() == b"unmoved"
    upload(save_adapter(tmp_path / "formal", r=16), prefix)
    second = resolve_adapters({"a": prefix}, tmp_path / "work")["a"]
    assert second != first
    assert max_rank([first, second]) == 16


def test_workers_that_ask_at_once_get_one_whole_folder(s3_bucket: str, tmp_path: Path) -> None:
    prefix = f"s3://{s3_bucket}/formal"
    upload(save_adapter(tmp_path / "formal"), prefix)
    barrier = threading.Barrier(6)
    found: list[dict[str, bytes]] = []

    def resolve() -> None:
        barrier.wait()
        found.append(contents(resolve_adapters({"a": prefix}, tmp_path / "work")["a"]))

    threads = [threading.Thread(target=resolve) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 6
    assert all(one == contents(str(tmp_path / "formal")) for one in found)
    assert len([path for path in (tmp_path / "work" / "models").iterdir() if path.is_dir()]) == 1


def test_a_bucket_that_is_not_there_is_a_configuration_error(aws_environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        resolve_adapters({"a": "s3://no-such-bucket-here/formal"}, tmp_path)


def test_the_highest_rank_counts_patterns_and_leaves_out_hub_ids(tmp_path: Path) -> None:
    low = save_adapter(tmp_path / "low", r=4)
    patterned = save_adapter(tmp_path / "patterned", r=4, rank_pattern={"q_proj": 24})

    assert max_rank([str(low), "org/lora"]) == 4
    assert max_rank([str(low), str(patterned)]) == 24
    assert max_rank(["org/lora"]) == 0


def test_a_hubs_adapter_comes_as_the_plan_has_pinned_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, commit = save_adapter(tmp_path / "formal", r=3), "0123456789abcdef0123456789abcdef01234567"
    (folder / "optimizer.pt").write_bytes(b"large")
    with running_hub() as hub:
        hub.repositories["org/formal"] = Repository(folder, commit)
        for name, value in hub.variables(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        found = resolve_adapters({"a": "org/formal"}, tmp_path / "work", a=commit)

    assert set(contents(found["a"])) == {"adapter_config.json", "adapter_model.safetensors"}
    assert max_rank(found.values()) == 3
