"""Where models and adapters may lie (a hub, S3, a folder), and what pins one: submitter and worker must agree on both."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from worker.contract.errors import InputError
from worker.contract.formats import checksum_of
from worker.contract.store import ObjectInfo, Store

MAX_OBJECT_COUNT = 10_000
"""Below one prefix. No model has so many files: whoever names a whole bucket by mistake is told."""
MAX_PART_BYTES = 255
"""Of a name, between two slashes: what Linux's file systems take."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Of these the first that is there is the one that vLLM loads."""
MODEL_CONFIGS = ("config.json", "params.json")
"""One of them is in every model's folder; the second in those of Mistral's own format."""

Content = Literal["model", "adapter"]

_is_hub_id = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII).fullmatch


def is_on_s3(place: str) -> bool:
    return place.startswith("s3://")


def is_hub_id(place: str) -> bool:
    """Whether a hub could have something of this name. A folder may be named so, too."""
    return _is_hub_id(place) is not None


def local_path(place: str) -> Path:
    """A place as a path on this machine."""
    path = Path(place.removeprefix("file://"))
    try:
        return path.expanduser()
    except RuntimeError:  # there is no such user
        return path


def is_path(place: str) -> bool:
    """Whether a place is a path as seen from this machine: what is here is one, and what can be nothing else."""
    return not is_on_s3(place) and (local_path(place).exists() or not is_hub_id(place))


def folder_uri(place: str) -> str:
    """An `s3://` place, ending in a slash: what only begins with the same letters lies elsewhere."""
    return place.rstrip("/") + "/"


def list_objects(store: Store, place: str, content: Content) -> dict[str, ObjectInfo]:
    """What lies at an `s3://` place, by name below it. Of an adapter's place only what belongs to the adapter.

    Raises:
        InputError: there is far too much for a model, or an object whose name cannot be a file's in a folder.
        ArrayError: storage did not answer, or refused.
    """
    prefix, found = folder_uri(place), {}
    for info in store.list(prefix):
        name = info.uri.removeprefix(prefix)
        # Of a training run's output what lies deeper, and whatever else lies beside, are not for serving.
        if content == "adapter" and name not in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS):
            continue
        # Consoles make keys that end so to show folders.
        if info.size_bytes or not info.uri.endswith("/"):
            found[name] = info
        if len(found) > MAX_OBJECT_COUNT:
            raise InputError(
                f"list {content} at {place}: there are more than {MAX_OBJECT_COUNT:,} objects (expected a model's files)",
                hint="name the prefix that holds config.json",
            )
    check_names(f"list {content} at {place}", found, hint="remove the object, or name a prefix without it")
    return found


def check_names(what: str, names: Collection[str], hint: str) -> None:
    """See that files of these names, all of them, can lie in one folder, and none outside of it.

    Args:
        what: verb and object of the message.
        names: below the folder, parted by slashes.
        hint: the reader's next step.

    Raises:
        InputError: they cannot.
    """
    found = set(names)
    for name in names:
        fault = _fault_of(name)
        if fault is None and (
            clash := next((one for one in PurePosixPath(name).parents[:-1] if str(one) in found), None)
        ):
            fault = f"{str(clash)!r}, which lies there, too, would have to be a file and a folder"
        if fault:
            raise InputError(f"{what}: {name!r} can be no file's name: {fault}", hint=hint)


def _fault_of(name: str) -> str | None:
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:
        return "it is no Unicode text"
    if not {b"", b".", b".."}.isdisjoint(parts):
        return "it leads elsewhere (expected no empty part, no . and no .. between slashes)"
    if "\0" in name:
        return "it holds a NUL"
    if (longest := max(map(len, parts))) > MAX_PART_BYTES:
        return f"a part of it is too long (expected at most {MAX_PART_BYTES} bytes, got {longest:,})"
    return None


def digest_of(objects: Mapping[str, ObjectInfo]) -> str:
    """What pins objects on S3: it changes when one of them does, comes or goes."""
    return checksum_of(msgspec.json.encode(sorted((name, one.etag, one.size_bytes) for name, one in objects.items())))


def missing_file(content: Content, names: Iterable[str]) -> str | None:
    """The name of a file without which these are no model, or no adapter; None if all is there."""
    found = set(names)
    if content == "model":
        return None if found.intersection(MODEL_CONFIGS) else MODEL_CONFIGS[0]
    if ADAPTER_CONFIG not in found:
        return ADAPTER_CONFIG
    return None if found.intersection(ADAPTER_WEIGHTS) else ADAPTER_WEIGHTS[0]
