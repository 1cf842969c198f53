"""Where splits are tested on a local disk."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from backports import zstd

from submitter.split import SplitRequest, SplitResult, split_run

RECORD = b'{"prompt":"x"}\n'
ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


class Place:
    """A folder with an input and a place for the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input = folder / "in.jsonl"
        self.run = folder / "runs/my run"
        self.request = SplitRequest(
            inputs=(str(self.input),), run_uri=str(self.run), partition_count=2, model="org/model"
        )

    def split(self, **changes: Any) -> SplitResult:
        options = {name: changes.pop(name) for name in ("progress", "tuning", "stdin") if name in changes}
        return split_run(replace(self.request, **changes), **options)

    def written(self) -> list[str]:
        return sorted(str(path.relative_to(self.run)) for path in self.run.rglob("*") if path.is_file())

    def partitions(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((self.run / "partitions").iterdir())]
