"""Where things lie below a run's URI. Nothing else in the code spells these names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from worker.contract.errors import UsageError

MAX_PARTITION_COUNT = 99_999
COMPRESSION_SUFFIXES = {"none": "", "gz": ".gz", "zst": ".zst"}

_SUBMISSION_NAME = re.compile(r"(\d{4,})\.json")
_PARTITION_NAME = re.compile(r"part-(\d{5})-of-(\d{5})\.(?:jsonl|json)(?:\.gz|\.zst)?")


def normalize_uri(uri: str) -> str:
    """Give an `s3://bucket/key` as it is (less a closing slash), or an absolute local path.

    Bucket and key never go through a URL parser: keys may hold spaces, `?`, `#`, `%` and `//`.

    Raises:
        UsageError: `uri` is empty, has no bucket, or has a scheme that is neither `s3` nor `file`.
    """
    if uri.startswith("s3://"):
        bucket, _, key = uri[len("s3://") :].partition("/")
        if not bucket:
            raise UsageError(f"read URI {uri!r}: no bucket (expected s3://bucket/key)")
        return f"s3://{bucket}/{key.rstrip('/')}".rstrip("/")
    if re.match(r"s3:/?[^/]", uri, re.IGNORECASE):
        raise UsageError(f"read URI {uri!r}: it has too few slashes (expected s3://bucket/key)")
    if uri.startswith("file://"):
        uri = uri[len("file://") :]
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", uri):
        raise UsageError(f"read URI {uri!r}: unknown scheme (expected s3://…, file://… or a path)")
    if not uri:
        raise UsageError("read URI: it is empty (expected s3://bucket/key or a path)")
    return str(Path(uri).absolute())


def split_s3_uri(uri: str) -> tuple[str, str]:
    """Bucket and key of an `s3://` URI."""
    bucket, _, key = uri[len("s3://") :].partition("/")
    return bucket, key


def join(uri: str, *names: str) -> str:
    return "/".join([uri.rstrip("/"), *names])


def partition_name(index: int, count: int) -> str:
    """`part-00017-of-01000`: the same stem in partitions, outputs, manifests and checkpoints."""
    return f"part-{index:05d}-of-{count:05d}"


def partition_index_of(name: str) -> int | None:
    """The partition index in a file name made by `RunLayout`, or None for any other name."""
    found = _PARTITION_NAME.fullmatch(name)
    return int(found[1]) if found else None


def submission_id_of(name: str) -> str | None:
    """The id in a file name made by `RunLayout.submission`, or None for any other name."""
    found = _SUBMISSION_NAME.fullmatch(name)
    return found[1] if found else None


@dataclass(frozen=True, slots=True)
class RunLayout:
    """URIs of everything in one run."""

    run_uri: str
    """As `normalize_uri` gives it."""

    @property
    def plan(self) -> str:
        return join(self.run_uri, "run.json")

    @property
    def outputs(self) -> str:
        return join(self.run_uri, "outputs")

    @property
    def manifests(self) -> str:
        return join(self.run_uri, "manifests")

    @property
    def submissions(self) -> str:
        return join(self.run_uri, "submissions")

    def partition(self, index: int, count: int, compression: str = "none") -> str:
        name = f"{partition_name(index, count)}.jsonl{COMPRESSION_SUFFIXES[compression]}"
        return join(self.run_uri, "partitions", name)

    def output(self, index: int, count: int, compression: str = "none") -> str:
        return join(self.outputs, f"{partition_name(index, count)}.jsonl{COMPRESSION_SUFFIXES[compression]}")

    def manifest(self, index: int, count: int) -> str:
        return join(self.manifests, f"{partition_name(index, count)}.json")

    @property
    def all_checkpoints(self) -> str:
        """The folder of those of the partitions."""
        return join(self.run_uri, "checkpoints")

    def checkpoints(self, index: int, count: int) -> str:
        """The folder of a partition's segments."""
        return join(self.all_checkpoints, partition_name(index, count))

    def segment(self, index: int, count: int, writer_id: str, number: int) -> str:
        return join(self.checkpoints(index, count), f"{writer_id}-{number:06d}.jsonl.zst")

    def submission(self, submission_id: str) -> str:
        return join(self.submissions, f"{submission_id}.json")

    def submitted(self, submission_id: str) -> str:
        """What AWS Batch answered to a submission; beside it, since the submission itself never changes."""
        return join(self.submissions, f"{submission_id}.submitted.json")

    def claim(self, submission_id: str, claim_number: int) -> str:
        """Who alone may submit a submission, from the second submitter on: the first holds it by having written it."""
        return join(self.submissions, f"{submission_id}.claim-{claim_number:03d}.json")
