"""`submit merge`: the outputs of a run as one file or object, in input order; errors apart where they are asked for.

The output appears last and by one conditional write, as everything does: once it is there, all that belongs to it is.
Where nothing has to be looked at, bytes are copied: on S3 by S3 itself.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from submitter.merge_accounts import Account, Source, accounted
from submitter.merge_bedrock import BedrockManifest
from submitter.merge_parts import S3_LIMITS, PartLimits
from submitter.merge_write import Copied, Writing, columns_for
from submitter.output import Output, count, kinds_of_errors
from submitter.planned_run import Outputs, PlannedRun
from submitter.progress import progress_bar
from submitter.resume_command import resume_command_of
from submitter.split_tuning import SplitTuning
from worker.contract.errors import ExitCode, InputError
from worker.contract.submission import ranges_of

if TYPE_CHECKING:
    from submitter.merge_options import MergeRequest

SHOWN_RANGES = 100


@dataclass(slots=True, kw_only=True)
class Merged:
    """What came of it."""

    run: PlannedRun
    missing: list[int]
    """Partitions without an output, left out."""
    strays: tuple[str, ...]
    """URIs in `outputs/` that belong to no partition, left out."""
    account: Account = field(default_factory=Account)
    copied: Copied = "lines"
    size_bytes: int = 0
    bedrock_manifest_uri: str | None = None


def merge(request: MergeRequest, limits: PartLimits = S3_LIMITS) -> Merged:
    """Write what is asked for.

    Raises:
        UsageError: the output would lie among the run's own objects, or where its counts go.
        InputError: the run is unfinished and that is not asked for, or an output is not as planned.
        TargetExistsError: there is something already where the output or the errors go.
        StorageError, ConfigError: storage gave no answer, or refused; or the local disk is full.
    """
    run = PlannedRun.open(request.run_uri)
    _check_targets(request, run)
    outputs = run.outputs()
    merged = Merged(
        run=run,
        missing=[index for index in range(run.partition_count) if index not in outputs],
        strays=outputs.strays,
    )
    _check_finished(request, run, outputs)
    sources = _accounts(run, outputs, merged.account)
    bedrock = None
    if run.plan.shape == "bedrock":
        bedrock = BedrockManifest.beside(request.target, run.plan.record_count, merged.account)
        bedrock.check_apart(request.target, request.errors)
        bedrock.check_free(overwrite=request.overwrite)
        merged.bedrock_manifest_uri = bedrock.uri
    process_count = request.process_count or _process_count(outputs)
    writing = Writing(
        request=request,
        run=run,
        outputs=outputs,
        sources=sources,
        process_count=process_count,
        account=merged.account,
        owner=secrets.token_hex(8),
        columns=columns_for(run, outputs, request.target, request.select, process_count),
        error_columns=columns_for(run, outputs, request.errors, (), process_count) if request.errors else None,
        limits=limits,
        before_end=[] if bedrock is None else [lambda: bedrock.commit(overwrite=request.overwrite)],
    )
    merged.copied = writing.write()
    found = writing.target_store.head(request.target.uri)
    merged.size_bytes = found.size_bytes if found else 0
    return merged


def merge_run(request: MergeRequest, output: Output) -> int:
    """The command."""
    merged = merge(request)
    if merged.strays:
        output.note(f"left out, since they belong to no partition: {count(len(merged.strays), 'object')} in outputs/")
    output.document(_document(request, merged), _lines(request, merged))
    return ExitCode.OK


def _check_targets(request: MergeRequest, run: PlannedRun) -> None:
    for target in (request.target, request.errors):
        if target is None:
            continue
        target.check_apart(run.layout)
        if target.form == "parquet":
            from submitter.merge_tables import require_parquet  # noqa: PLC0415

            require_parquet()
        if not request.overwrite:
            target.check_free()


def _check_finished(request: MergeRequest, run: PlannedRun, outputs: Outputs) -> None:
    missing_count = run.partition_count - len(outputs.by_index)
    if not missing_count or (request.partial and outputs.by_index):
        return
    raise InputError(
        f"merge outputs of {run.layout.run_uri}: {missing_count:,} of {count(run.partition_count, 'partition')} have no "
        f"output yet (expected {'at least one output' if request.partial else 'a finished run'})",
        hint=f"finish it: {resume_command_of(run)}"
        + ("" if request.partial else "; or take what there is with --partial"),
    )


def _accounts(run: PlannedRun, outputs: Outputs, total: Account) -> list[Source]:
    sources: list[Source] = []
    with progress_bar("look at outputs", "partitions") as show:
        indices = sorted(outputs.by_index)
        for source, account in accounted(run.task(index, outputs) for index in indices):
            total.add(account)
            sources.append(source)
            show(len(sources), len(indices), "")
    return sources


def _process_count(outputs: Outputs) -> int:
    total_bytes = sum(found.size_bytes for found in outputs.by_index.values())
    if total_bytes < SplitTuning().parallel_bytes:
        return 1
    return min(len(os.sched_getaffinity(0)), len(outputs.by_index))


def _document(request: MergeRequest, merged: Merged) -> dict[str, Any]:
    account = merged.account
    return {
        "run_uri": merged.run.layout.run_uri,
        "run_id": merged.run.plan.run_id,
        "outcome": "merged",
        "output_uri": request.target.uri,
        "format": request.target.format_name,
        "size_bytes": merged.size_bytes,
        "errors_uri": request.errors.uri if request.errors else None,
        "manifest_uri": merged.bedrock_manifest_uri,
        "copied_by": merged.copied,
        "partition_count": merged.run.partition_count,
        "partition_done_count": merged.run.partition_count - len(merged.missing),
        "missing_ranges": ranges_of(merged.missing)[:SHOWN_RANGES],
        "record_count": account.record_count,
        "ok_count": account.ok_count,
        "error_count": account.error_count,
        "error_counts": dict(account.error_counts),
        "prompt_tokens": account.tokens.prompt_tokens,
        "completion_tokens": account.tokens.completion_tokens,
    }


def _lines(request: MergeRequest, merged: Merged) -> list[str]:
    account = merged.account
    if request.errors:
        lines = [
            f"{request.target.uri}: {count(account.ok_count, 'result')}",
            f"{request.errors.uri}: {count(account.error_count, 'error')}",
        ]
    else:
        lines = [
            f"{request.target.uri}: {count(account.record_count, 'record')}, {count(account.error_count, 'error')} among them"
        ]
    lines[0] += f", as {request.target.format_name}"
    if account.error_counts:
        lines.append(f"errors: {kinds_of_errors(account.error_counts)}")
    if merged.bedrock_manifest_uri:
        lines.append(f"{merged.bedrock_manifest_uri}: their counts")
    if merged.missing:
        lines.append(f"left out: {count(len(merged.missing), 'partition')} without an output yet")
    return lines
