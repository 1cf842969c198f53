"""`submit doctor`: whether the run's place takes what a worker writes, and keeps it as it should."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from submitter.doctor_check import Aws, Check, RefusedError, Report, asked, report_problem
from worker.contract.errors import ArrayError, ConfigError
from worker.contract.layout import join, split_s3_uri
from worker.contract.store import Store, open_store

PROBE_BYTES = b"doctor"
_LOW_DISK_BYTES = 10 << 30
_GIB = 1 << 30


def check_bucket(aws: Aws, run_uri: str, report: Report) -> None:
    """The bucket, its settings, and what may be done below the run."""
    bucket, _ = split_s3_uri(run_uri)
    client = aws.client("s3")
    if report_problem("bucket", report, lambda: report(_bucket_check(aws, client, bucket))):
        report_problem("access", report, lambda: check_access(run_uri, report, aws=aws))
        check_settings(client, run_uri, report)


def _bucket_check(aws: Aws, client: Any, bucket: str) -> Check:
    try:
        found = asked("s3:ListBucket", lambda: client.head_bucket(Bucket=bucket))
    except RefusedError as error:
        if error.aws_code in ("404", "NoSuchBucket"):
            raise ConfigError(f"{bucket} does not exist", hint="create it, or correct --run") from error
        raise
    region = found.get("BucketRegion")
    if region and aws.region and region != aws.region:
        what = f"{bucket} is in {region}, and {aws.region} is where jobs are submitted"
        advice = "use a bucket in the queue's region: traffic from one to another costs, and takes longer"
        return Check(name="bucket", status="warning", found=what, advice=advice)
    return Check(name="bucket", status="ok", found=f"{bucket} in {region or 'a region that S3 does not name'}")


def check_access(run_uri: str, report: Report, *, aws: Aws | None = None) -> None:
    """Do with one small object what a worker does with its output, by the same code, and remove it."""
    store = open_store(run_uri)
    probe = join(run_uri, f"doctor-{secrets.token_hex(8)}")
    new_folders = [] if aws else [folder for folder in Path(probe).parents if not folder.exists()]
    problems: list[Check] = []

    def works(action: str, step: Callable[[], bool]) -> bool:
        problem = _step_problem(run_uri, action, step)
        problems.extend([problem] if problem else [])
        return problem is None

    if works("s3:PutObject", lambda: store.create(probe, PROBE_BYTES, owner="doctor")):
        works("s3:PutObject", lambda: not store.create(probe, PROBE_BYTES, owner="another"))
        works("s3:GetObject", lambda: store.read(probe) == PROBE_BYTES)
        works("s3:ListBucket", lambda: any(found.uri == probe for found in store.list(_listed(probe))))
    if not works("s3:DeleteObject", lambda: _is_removed(store, probe)):
        what = f"{probe} may be left behind"
        problems.append(Check(name="access", status="warning", found=what, advice="remove it, it is 6 bytes"))
    for folder in new_folders:
        with suppress(OSError):
            folder.rmdir()
    for problem in problems:
        report(problem)
    if not problems:
        done = "a conditional write, a second one that is refused, a read, a list and a delete work"
        left = (aws and _kept_version(aws, probe)) or "nothing is left behind"
        whose = " with your credentials, which are not the workers'" if aws else ""
        report(Check(name="access", status="ok", found=f"below {run_uri} {done}{whose}; {left}"))


def _listed(probe: str) -> str:
    """On S3 the start of keys, on a disk a folder."""
    return probe if probe.startswith("s3://") else str(Path(probe).parent)


def _is_removed(store: Store, probe: str) -> bool:
    store.delete(probe)
    return store.head(probe) is None


def _step_problem(run_uri: str, action: str, step: Callable[[], bool]) -> Check | None:
    """What is wrong, if anything is."""
    is_s3 = run_uri.startswith("s3://")
    try:
        if step():
            return None
        what = "storage took a conditional write and did not keep to it"
        return Check(name="access", status="failed", found=what, advice="use S3 itself, or a disk that keeps links")
    except ArrayError as error:
        advice = f"allow {action} below {run_uri}/" if is_s3 else error.hint
        return Check(name="access", status="failed", found=error.message, advice=advice)


def _kept_version(aws: Aws, probe: str) -> str:
    """A bucket that keeps versions keeps the probe's, too: it is removed where that is allowed."""
    bucket, key = split_s3_uri(probe)
    client = aws.client("s3")
    try:
        found = asked("s3:ListBucketVersions", lambda: client.list_object_versions(Bucket=bucket, Prefix=key))
        for version in [*found.get("Versions", []), *found.get("DeleteMarkers", [])]:
            asked(
                "s3:DeleteObjectVersion",
                partial(_delete_version, client, bucket, key, version["VersionId"]),
            )
    except ArrayError:
        return "if the bucket keeps versions, it keeps one of this object of 6 bytes"
    return ""


def _delete_version(client: Any, bucket: str, key: str, version_id: str) -> None:
    client.delete_object(Bucket=bucket, Key=key, VersionId=version_id)


def check_settings(client: Any, run_uri: str, report: Report) -> None:
    """What keeps a bucket tidy and closed. One that may not be looked at is no obstacle to a run."""
    for name, make in _SETTINGS.items():
        report_problem(name, report, partial(_check_setting, name, make, client, run_uri, report))


def _check_setting(name: str, make: Callable[[Any, str], Check], client: Any, run_uri: str, report: Report) -> None:
    try:
        report(make(client, run_uri))
    except RefusedError as error:
        report(Check(name=name, status="warning", found=f"not known: {error.message}", advice=error.hint))


def _lifecycle_check(client: Any, run_uri: str) -> Check:
    bucket, prefix = split_s3_uri(run_uri)
    rules = _setting(
        "s3:GetLifecycleConfiguration",
        "NoSuchLifecycleConfiguration",
        lambda: client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"],
        [],
    )
    for rule in rules:
        if rule["Status"] == "Enabled" and "AbortIncompleteMultipartUpload" in rule and _covers(rule, prefix):
            days = rule["AbortIncompleteMultipartUpload"].get("DaysAfterInitiation")
            return Check(name="lifecycle", status="ok", found=f"unfinished uploads are removed after {days} days")
    return Check(
        name="lifecycle",
        status="warning",
        found="no rule removes unfinished uploads, which stay, unseen and paid for, where a worker was killed",
        advice="give the bucket a rule with AbortIncompleteMultipartUpload",
    )


def _covers(rule: dict[str, Any], prefix: str) -> bool:
    selected = rule.get("Filter") or {}
    if selected.keys() - {"Prefix"}:
        return False
    return f"{prefix}/".startswith(selected.get("Prefix") or rule.get("Prefix") or "")


def _public_check(client: Any, run_uri: str) -> Check:
    bucket, _ = split_s3_uri(run_uri)
    found = _setting(
        "s3:GetBucketPublicAccessBlock",
        "NoSuchPublicAccessBlockConfiguration",
        lambda: client.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"],
        {},
    )
    names = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    missing = [name for name in names if not found.get(name)]
    if missing:
        what = f"the bucket does not set {', '.join(missing)}"
        advice = "block public access of the bucket, unless the whole account does"
        return Check(name="public access", status="warning", found=what, advice=advice)
    return Check(name="public access", status="ok", found="is blocked")


def _encryption_check(client: Any, run_uri: str) -> Check:
    bucket, _ = split_s3_uri(run_uri)
    rules = _setting(
        "s3:GetEncryptionConfiguration",
        "ServerSideEncryptionConfigurationNotFoundError",
        lambda: client.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"],
        [],
    )
    defaults = [rule.get("ApplyServerSideEncryptionByDefault") or {} for rule in rules]
    algorithm = next((found["SSEAlgorithm"] for found in defaults if "SSEAlgorithm" in found), None)
    if algorithm is None:
        advice = "set the bucket's default encryption"
        return Check(name="encryption", status="warning", found="the bucket sets no default", advice=advice)
    if algorithm == "AES256":
        return Check(name="encryption", status="ok", found="by S3's own keys")
    advice = "the job role needs kms:Decrypt and kms:GenerateDataKey for that key"
    return Check(name="encryption", status="ok", found=f"by {algorithm}", advice=advice)


_SETTINGS: dict[str, Callable[[Any, str], Check]] = {
    "lifecycle": _lifecycle_check,
    "public access": _public_check,
    "encryption": _encryption_check,
}


def _setting(action: str, absent_code: str, get: Callable[[], Any], absent: Any) -> Any:
    try:
        return asked(action, get)
    except RefusedError as error:
        if error.aws_code == absent_code:
            return absent
        raise


def check_folder(run_uri: str, report: Report) -> None:
    """A run on a disk: what a worker does there, and room."""
    report_problem("access", report, lambda: check_access(run_uri, report))
    report_problem("disk", report, lambda: report(_disk_check(run_uri)))


def _disk_check(run_uri: str) -> Check:
    place = next(folder for folder in (Path(run_uri), *Path(run_uri).parents) if folder.is_dir())
    free_bytes = shutil.disk_usage(place).free
    what = f"{free_bytes / _GIB:,.1f} GiB are free at {place}"
    if free_bytes < _LOW_DISK_BYTES:
        advice = "make room: a run holds its input, its output, and for a while its checkpoints"
        return Check(name="disk", status="warning", found=what, advice=advice)
    return Check(name="disk", status="ok", found=what)
