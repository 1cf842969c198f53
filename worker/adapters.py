"""LoRA adapters by the name that records give as their `model`: found before any engine boots.

A place is a folder, an `s3://` prefix, or a hub's id. What lies on S3 is brought to the host once, whoever asks first;
the folder that holds it is named after the objects' etags, so a changed adapter is another folder.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from worker.contract.errors import EngineBootError
from worker.contract.store import ObjectInfo, Store, open_store

CONFIG_NAME = "adapter_config.json"
WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Of these the first that is there is the one that vLLM loads."""
COPY_BYTES = 8 << 20

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


class _Config(msgspec.Struct):
    """What is read of an `adapter_config.json`."""

    r: int
    rank_pattern: dict[str, int] | None = None


def resolve_adapters(adapters: Mapping[str, str], folder: Path) -> dict[str, str]:
    """A folder for each adapter, or a hub's id as it is. `folder` is the host's, for what must be brought to it.

    Raises:
        EngineBootError: one is not there, or is no LoRA adapter.
        ArrayError: storage did not answer, or refused.
    """
    return {name: _resolve(name, place, folder) for name, place in sorted(adapters.items())}


def max_rank(paths: Iterable[str]) -> int:
    """The highest rank among adapters in local folders; those of a hub's, whose rank nobody knows yet, are left out.

    Raises:
        EngineBootError: a folder's `adapter_config.json` cannot be read.
    """
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    return max((_rank(folder, str(folder)) for folder in folders), default=0)


def _resolve(name: str, place: str, folder: Path) -> str:
    what = f"find adapter {name!r} at {place}"
    if place.startswith("s3://"):
        local = _downloaded(what, place.rstrip("/") + "/", folder)
    else:
        local = Path(place.removeprefix("file://")).expanduser()
        if not local.exists() and _HUB_ID.fullmatch(place):
            return place
        if not place or not local.is_dir():
            raise EngineBootError(
                f"{what}: there is no such folder",
                hint="give a folder that the worker's host has, an s3:// prefix, or a hub's id",
            )
    names = {path.name for path in local.iterdir()}
    _check_names(what, names)
    _rank(local, what)
    return str(local.absolute())


def _check_names(what: str, names: Iterable[str]) -> str:
    """The name of the weights among these files."""
    found = set(names)
    weights = next((name for name in WEIGHT_NAMES if name in found), None)
    if CONFIG_NAME not in found or weights is None:
        missing = CONFIG_NAME if CONFIG_NAME not in found else WEIGHT_NAMES[0]
        raise EngineBootError(
            f"{what}: no LoRA adapter lies there ({missing} is missing)",
            hint="name the folder that PEFT's save_pretrained wrote",
        )
    return weights


def _rank(folder: Path, what: str) -> int:
    try:
        config = msgspec.json.decode((folder / CONFIG_NAME).read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineBootError(
            f"{what}: {CONFIG_NAME} is not one of a LoRA adapter's (expected an object with an integer r)"
        ) from error
    return max(config.r, *(config.rank_pattern or {}).values(), 1)


def _downloaded(what: str, prefix: str, folder: Path) -> Path:
    store = open_store(prefix)
    # Of a training run's output what lies deeper, and whatever else lies beside, are not for serving.
    found = {
        info.uri.removeprefix(prefix): info
        for info in store.list(prefix)
        if info.uri.removeprefix(prefix) in (CONFIG_NAME, *WEIGHT_NAMES)
    }
    weights = _check_names(what, found)
    wanted = {name: found[name] for name in (CONFIG_NAME, weights)}
    digest = xxhash.xxh3_128_hexdigest(repr(sorted((info.uri, info.etag) for info in wanted.values())).encode())
    target = folder / digest
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _one_writer(folder / f".{digest}.lock"):
        # Another of this host's workers may have been the one that was waited for.
        if not target.is_dir():
            _download(store, wanted, target)
    return target


@contextmanager
def _one_writer(path: Path) -> Iterator[None]:
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _download(store: Store, wanted: Mapping[str, ObjectInfo], target: Path) -> None:
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        for name, info in wanted.items():
            with store.open_read(info.uri, etag=info.etag) as source, (draft / name).open("wb") as stream:
                _copy(source, stream)
        # Other users' workers on this host read it, too.
        draft.chmod(0o755)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    shutil.copyfileobj(source, target, COPY_BYTES)
