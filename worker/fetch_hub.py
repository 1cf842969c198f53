"""Fetches a commit's files from a model hub, by the hub's own client, and checks them against the hub's listing."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi, RepoFile, snapshot_download

from worker.contract.errors import ArrayError, ConfigError, EngineBootError, StorageError
from worker.contract.hub import HubError, UnansweredError, ask_hub
from worker.contract.model_place import check_names, missing_file
from worker.fetch_progress import Begin, Downloading
from worker.fetch_source import Source
from worker.model_files import adapter_files, needed_files, path_in

FILE_COUNT = 8
"""At a time."""
ACCESS_HINT = (
    "give the job definition HF_TOKEN by `secrets`, from Secrets Manager, of an account that may read it "
    "(job_definitions/README.md)"
)


@dataclass(frozen=True, slots=True)
class _File:
    """One file as the hub lists it."""

    size_bytes: int
    blob_id: str
    """Git's checksum of a small file."""
    sha256: str | None
    """Of a large one."""

    def is_same(self, path: Path) -> bool:
        if not path.is_file() or path.stat().st_size != self.size_bytes:
            return False
        with path.open("rb") as stream:
            if self.sha256:
                return hashlib.file_digest(stream, "sha256").hexdigest() == self.sha256
            digest = hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)
            return hashlib.file_digest(stream, lambda: digest).hexdigest() == self.blob_id


def fetch_snapshot(source: Source, draft: Path, begin: Begin) -> int:
    """Fill the draft; gives the number of bytes.

    Raises:
        EngineBootError: the hub has no such model, or commit, or it holds none.
        InputError: the hub lists what can be no files.
        ConfigError: the hub refuses.
        StorageError: it gave no answer after retries, or what it gave is damaged.
    """
    what = f"fetch {source.content} {source.place} at {source.revision}"
    try:
        listed = ask_hub(what, partial(_listed, source))
        check_names(what, listed, hint="no repository has such a file: is HF_ENDPOINT the hub that is meant?")
        if missing := missing_file(source.content, listed):
            raise EngineBootError(f"{what}: {missing} is missing", hint="is it a repository of another kind?")
        names = adapter_files(listed) if source.content == "adapter" else needed_files(listed, source.load_format)
        wanted = {name: listed[name] for name in sorted(names)}
        size_bytes = sum(one.size_bytes for one in wanted.values())
        for name in wanted:
            path_in(draft, name)
        _download_all(what, source, wanted, draft, begin(size_bytes, len(wanted)))
    except HubError as error:
        raise _error_for(what, error) from error
    # The client's notes of the download.
    shutil.rmtree(draft / ".cache", ignore_errors=True)
    return size_bytes


def _listed(source: Source) -> dict[str, _File]:
    found = HfApi(library_name="llm-array").list_repo_tree(source.place, recursive=True, revision=source.revision)
    return {
        one.path: _File(one.size, one.blob_id, one.lfs.sha256 if one.lfs else None)
        for one in found
        if isinstance(one, RepoFile)
    }


def _download_all(
    what: str, source: Source, wanted: Mapping[str, _File], draft: Path, downloading: Downloading
) -> None:
    """Download, and begin to count failures anew whenever something has come: hours of it may see many."""
    came_bytes = -1
    damaged: list[str] = []
    while True:
        try:
            return ask_hub(what, partial(_download, source, wanted, draft, damaged, downloading))
        except HubError as error:
            now_bytes = sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
            if error.refusal != "silent" or now_bytes <= came_bytes:
                raise
            came_bytes = now_bytes


def _download(
    source: Source, wanted: Mapping[str, _File], draft: Path, damaged: list[str], downloading: Downloading
) -> None:
    """One try. The client takes from its own cache on this machine what that has, but for what is known to be damaged."""
    with downloading():
        snapshot_download(
            source.place,
            revision=source.revision,
            local_dir=draft,
            allow_patterns=[glob.escape(name) for name in damaged or wanted],
            force_download=bool(damaged),
            max_workers=FILE_COUNT,
            library_name="llm-array",
        )
    with ThreadPoolExecutor(min(FILE_COUNT, os.cpu_count() or 1)) as pool:
        same = pool.map(lambda name: wanted[name].is_same(draft / name), wanted)
        damaged[:] = [name for name, is_same in zip(wanted, same, strict=True) if not is_same]
    if damaged:
        raise UnansweredError(f"{damaged[0]} came damaged")


def _error_for(what: str, error: HubError) -> ArrayError:
    match error.refusal:
        case "missing":
            return EngineBootError(
                f"{what}: there is none on the hub that this host may see ({error.detail})",
                hint=f"is the id right? A private one needs a token: {ACCESS_HINT}",
            )
        case "no_revision":
            return EngineBootError(
                f"{what}: the hub has no such revision", hint="plan a new run with another --revision"
            )
        case "gated":
            return ConfigError(f"{what}: it is gated, and this host may not read it ({error.detail})", hint=ACCESS_HINT)
        case "refused":
            return ConfigError(f"{what}: the hub refuses ({error.detail})", hint=ACCESS_HINT)
        case "silent":
            return StorageError(
                f"{what}: no answer from the hub ({error.detail})",
                hint="can this host reach it? A copy on S3 needs no hub: --model s3://…",
            )
