"""Where a merge writes to, and in which form: told by the name's ending, or said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from worker.contract.errors import PlanExistsError, UsageError
from worker.contract.layout import RunLayout, normalize_uri, split_s3_uri
from worker.contract.plan import Compression
from worker.contract.store import Produce, open_store

if TYPE_CHECKING:
    from worker.contract.multipart import Part

Form = Literal["jsonl", "csv", "parquet"]

FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "csv", "csv.gz", "csv.zst", "parquet")
_OWN_FOLDERS = ("partitions", "outputs", "manifests", "checkpoints", "submissions", "logs", "run.json")


class TargetExistsError(PlanExistsError):
    """There is something already where a merge is to be written."""

    code: ClassVar[str] = "target_exists"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One file or object to be."""

    uri: str
    form: Form
    compression: Compression

    @classmethod
    def of(cls, uri: str, option: str, format_name: str | None) -> Target:
        """Read what was given on the command line.

        Raises:
            UsageError: it names no file or object.
        """
        if uri == "-" or uri.endswith("/") or (uri.startswith("s3://") and not split_s3_uri(uri)[1]):
            raise UsageError(f"read {option}: {uri!r} names no file or object (expected a path or s3://bucket/key)")
        found = normalize_uri(uri)
        if not found.startswith("s3://") and Path(found).is_dir():
            raise UsageError(f"read {option}: {uri!r} is a folder (expected a file)")
        form, compression = _format_of(format_name or found)
        return cls(uri=found, form=form, compression=compression)

    @property
    def format_name(self) -> str:
        return self.form if self.compression == "none" else f"{self.form}.{self.compression}"

    def check_apart(self, layout: RunLayout) -> None:
        """See that it is not among what the run itself is made of.

        Raises:
            UsageError: it is.
        """
        if self.uri.startswith(f"{layout.run_uri}/"):
            first = self.uri.removeprefix(f"{layout.run_uri}/").split("/")[0]
            if first in _OWN_FOLDERS:
                raise UsageError(
                    f"write {self.uri}: {first} is the run's own (expected a place outside)",
                    hint="whoever reads all outputs would read the merged one, too",
                )

    def check_free(self) -> None:
        """See that nothing is there yet.

        Raises:
            TargetExistsError: something is.
            StorageError, ConfigError: storage gave no answer, or refused.
        """
        if open_store(self.uri).head(self.uri) is not None:
            raise self.exists()

    def commit(self, produce: Produce, *, overwrite: bool, owner: str) -> None:
        """Write it whole or not at all.

        Raises:
            TargetExistsError: something is there.
            StorageError, ConfigError: storage gave no answer, or refused.
        """
        store = open_store(self.uri)
        if overwrite:
            store.write_stream(self.uri, produce)
        elif not store.create_stream(self.uri, produce, owner):
            raise self.exists()

    def commit_parts(self, parts: Callable[[], Iterable[Part]], *, overwrite: bool, owner: str) -> None:
        """The same, on S3, by parts that S3 copies itself.

        Raises:
            TargetExistsError: something is there.
            InputError: an object that is copied from has changed, or is gone.
            StorageError, ConfigError: storage gave no answer, or refused.
        """
        from worker.contract.store_s3 import S3Store  # noqa: PLC0415  loads boto3

        if overwrite:
            S3Store().write_from_parts(self.uri, parts)
        elif not S3Store().create_from_parts(self.uri, parts, owner):
            raise self.exists()

    def exists(self) -> TargetExistsError:
        return TargetExistsError(
            f"write {self.uri}: it exists already", hint="nothing was changed; to replace it give --overwrite"
        )


def _format_of(name: str) -> tuple[Form, Compression]:
    lowered = name.lower()
    compression: Compression = "gz" if lowered.endswith(".gz") else "zst" if lowered.endswith(".zst") else "none"
    ending = lowered.removesuffix(f".{compression}").rpartition(".")[2]
    if ending == "parquet" and compression != "none":
        raise UsageError(f"read format of {name}: Parquet is compressed within (expected an ending of .parquet)")
    return ("parquet" if ending == "parquet" else "csv" if ending == "csv" else "jsonl"), compression
