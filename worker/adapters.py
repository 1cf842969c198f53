"""LoRA adapters by the name that records give as their `model`: found before any engine boots.

A place is a folder, an `s3://` prefix, or a hub's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from worker.contract.errors import EngineBootError
from worker.contract.model_place import (
    ADAPTER_CONFIG,
    digest_of,
    is_hub_id,
    is_on_s3,
    list_objects,
    local_path,
    missing_file,
)
from worker.contract.store import open_store
from worker.fetch_source import Source
from worker.model_cache import ModelCache


class _Config(msgspec.Struct):
    """What is read of an `adapter_config.json`."""

    r: int
    rank_pattern: dict[str, int] | None = None


def resolve_adapters(adapters: Mapping[str, str], revisions: Mapping[str, str], cache: ModelCache) -> dict[str, str]:
    """A folder for each adapter, or a hub's id as it is where the plan has no revision of it.

    Raises:
        EngineBootError: one is not there, or is no LoRA adapter.
        ArrayError: see `ModelCache.model`.
    """
    return {name: _resolve(name, place, revisions.get(name), cache) for name, place in sorted(adapters.items())}


def max_rank(paths: Iterable[str]) -> int:
    """The highest rank among adapters in local folders; those of a hub's, whose rank nobody knows yet, are left out.

    Raises:
        EngineBootError: a folder's `adapter_config.json` cannot be read.
    """
    folders = [Path(path) for path in paths if Path(path).is_dir()]
    return max((_rank(folder, str(folder)) for folder in folders), default=0)


def _resolve(name: str, place: str, revision: str | None, cache: ModelCache) -> str:
    what = f"find adapter {name!r} at {place}"
    if is_on_s3(place):
        revision = revision or _digest(what, place)
    if revision is not None:
        local = cache.get(Source(content="adapter", place=place.rstrip("/"), revision=revision))
    else:
        local = local_path(place)
        if not local.exists() and is_hub_id(place):
            return place
        if not place or not local.is_dir():
            raise EngineBootError(
                f"{what}: there is no such folder",
                hint="give a folder that the worker's host has, an s3:// prefix, or a hub's id",
            )
        _check_names(what, {path.name for path in local.iterdir()})
    _rank(local, what)
    return str(local.absolute())


def _digest(what: str, place: str) -> str:
    found = list_objects(open_store(place), place, "adapter")
    _check_names(what, found)
    return digest_of(found)


def _check_names(what: str, names: Iterable[str]) -> None:
    if missing := missing_file("adapter", names):
        raise EngineBootError(
            f"{what}: no LoRA adapter lies there ({missing} is missing)",
            hint="name the folder that PEFT's save_pretrained wrote",
        )


def _rank(folder: Path, what: str) -> int:
    try:
        config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineBootError(
            f"{what}: {ADAPTER_CONFIG} is not one of a LoRA adapter's (expected an object with an integer r)"
        ) from error
    return max(config.r, *(config.rank_pattern or {}).values(), 1)
