"""The commands that plan and start a run: split, run on AWS Batch, run here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from submitter.batch import dry_run, open_batch, submit
from submitter.batch_checks import check_target
from submitter.batch_records import Patience, Records
from submitter.job_definition import DEFAULT_RETRY_RULES, RetryRules, retry_rules
from submitter.limits import job_name_of
from submitter.local import ChildEnd, LocalOptions, run_children
from submitter.output import Output, count, duration
from submitter.progress import LocalProgress, progress_bar
from submitter.split import SplitProgress, SplitRequest, SplitResult, existing_plan, preview_plan, split_run
from worker.contract.errors import ConfigError, ExitCode, UsageError
from worker.contract.formats import decode
from worker.contract.layout import RunLayout
from worker.contract.manifest import Manifest, Tokens
from worker.contract.plan import Plan
from worker.contract.store import NotFoundError, open_store
from worker.contract.submission import Submission, ranges_of

if TYPE_CHECKING:
    from submitter.options import BatchFlags


def split_only(request: SplitRequest, output: Output) -> int:
    """Write partitions and plan, and start nothing."""
    result = _split(request, output)
    output.document(_split_document(request, result), _split_lines(request, result))
    return ExitCode.OK


def run_on_batch(request: SplitRequest, flags: BatchFlags, output: Output) -> int:
    """Split and submit to AWS Batch."""
    if flags.dry_run:
        return _dry_run(request, flags, output)
    options = flags.submit_options()
    batch = open_batch()
    # Before the input is read: a queue's mistyped name must not cost an hour of splitting.
    check_target(batch, options)
    result = _split(request, output)
    layout = RunLayout(request.run_uri)
    submitted = submit(open_store(request.run_uri), layout, result.plan, batch, options, notify=output.note)
    for warning in submitted.warnings:
        output.note(warning)
    lines = _split_lines(request, result)
    for job in submitted.jobs:
        words = "submitted" if job.outcome == "submitted" else f"was submitted at {job.submitted_at}"
        kind = f"array of {job.partition_count:,}" if job.partition_count > 1 else "job"
        lines.append(f"{kind} {words}: {job.job_name} in {job.job_queue}, job id {job.job_id}")
    output.document({**_split_document(request, result), "submission": submitted.to_dict()}, lines)
    return ExitCode.OK


def _dry_run(request: SplitRequest, flags: BatchFlags, output: Output) -> int:
    """Print the SubmitJob requests. Asks AWS what it can, lists the inputs without reading them, and writes nothing."""
    store, layout = open_store(request.run_uri), RunLayout(request.run_uri)
    plan = existing_plan(request)
    if plan is None:
        output.note(
            "the run is not planned yet: the job's name ends differently once it is, and there are fewer "
            "partitions if there are fewer records"
        )
        plan = preview_plan(request)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    batch = open_batch() if _has_credentials() else None
    found = dry_run(store, layout, plan, flags.submit_options(), batch=batch, region=region)
    for warning in found.warnings:
        output.note(warning)
    shown = json.dumps(list(found.requests), indent=2)
    output.document({"requests": list(found.requests)}, [shown])
    return ExitCode.OK


def _has_credentials() -> bool:
    import botocore.session  # noqa: PLC0415  costs 0.1 s that local runs need not pay

    return botocore.session.get_session().get_credentials() is not None


def run_locally(request: SplitRequest, flags: BatchFlags, parallel: int, output: Output) -> int:
    """Split, and run the workers on this machine."""
    if flags.dry_run:
        raise UsageError("read command line: --dry-run shows what AWS Batch would be asked, and --local asks nothing")
    started = time.monotonic()
    rules = _local_rules(flags.job_definition, output)
    result = _split(request, output)
    for line in _split_lines(request, result):
        output.say(line)
    run = _LocalRun(request.run_uri, result.plan, output)
    failed = run.finish(parallel, rules)
    document, lines = run.summary(failed, time.monotonic() - started)
    output.document({**_split_document(request, result), **document}, lines)
    return _exit_code(failed)


def _exit_code(failed: list[ChildEnd]) -> int:
    known = set(ExitCode)
    return next((end.exit_code if end.exit_code in known else ExitCode.ENGINES_DIED for end in failed), ExitCode.OK)


class _LocalRun:
    """A planned run whose partitions are worked on here."""

    def __init__(self, run_uri: str, plan: Plan, output: Output) -> None:
        self._run_uri = run_uri
        self._plan = plan
        self._output = output
        self._layout = RunLayout(run_uri)
        self._store = open_store(run_uri)

    def finish(self, parallel: int, rules: RetryRules) -> list[ChildEnd]:
        """Run the partitions that have no output yet; gives those that failed."""
        done = {index for index in self._committed_indices() if self._manifest(index)}
        # A worker that finds an output without its manifest, or another plan's, sees to it without starting an engine.
        remaining = [index for index in range(len(self._plan.partitions)) if index not in done]
        if not remaining:
            self._output.note("every partition has its output already: nothing to run")
            return []
        submission = self._new_submission(remaining)
        with progress_bar("run", "records") as show:
            progress = LocalProgress(
                partition_count=len(self._plan.partitions),
                record_count=self._plan.record_count,
                show=show,
                say=self._output.note,
                finished_partitions=len(done),
                finished_records=sum(self._plan.partitions[index].record_count for index in done),
            )
            options = LocalOptions(parallel=parallel, retry_rules=rules, log_folder=self._log_folder())
            ends = run_children(self._run_uri, submission, len(self._plan.partitions), options, progress.report)
        return [end for end in ends if end.exit_code]

    def summary(self, failed: list[ChildEnd], elapsed_s: float) -> tuple[dict[str, Any], list[str]]:
        done = sorted(self._committed_indices())
        manifests = [found for index in done if (found := self._manifest(index))]
        tokens = sum((manifest.tokens for manifest in manifests), Tokens())
        ok_count = sum(manifest.ok_count for manifest in manifests)
        error_count = sum(manifest.error_count for manifest in manifests)
        generate_s = sum(manifest.times.generate_s for manifest in manifests if manifest.times)
        document = {
            "partition_done_count": len(done),
            "ok_count": ok_count,
            "error_count": error_count,
            "prompt_tokens": tokens.prompt_tokens,
            "completion_tokens": tokens.completion_tokens,
            "generate_s": generate_s,
            "elapsed_s": elapsed_s,
            "outputs": self._layout.outputs,
            "failed": [
                {
                    "partition_index": end.partition_index,
                    "exit_code": end.exit_code,
                    "message": end.message,
                    "log": str(end.log_path),
                    "engine_log": str(end.engine_log_path),
                }
                for end in failed
            ],
        }
        rate = f", {tokens.completion_tokens / generate_s:,.0f} tokens/s while generating" if generate_s else ""
        lines = [
            (
                f"{count(ok_count, 'record')} answered, {count(error_count, 'error')}, {len(done):,} of "
                f"{count(len(self._plan.partitions), 'partition')} done in {duration(elapsed_s)}"
            ),
            f"{tokens.completion_tokens:,} output tokens{rate}",
            f"outputs: {self._layout.outputs}",
            *(
                f"partition {end.partition_index} failed with exit code {end.exit_code}: {end.message or 'no reason given'}; "
                f"its logs: {end.log_path}, {end.engine_log_path}"
                for end in failed
            ),
        ]
        return document, lines

    def _committed_indices(self) -> set[int]:
        there = {entry.uri for entry in self._store.list(f"{self._layout.outputs}/")}
        partition_count, compression = len(self._plan.partitions), self._plan.compression
        return {
            index
            for index in range(partition_count)
            if self._layout.output(index, partition_count, compression) in there
        }

    def _manifest(self, index: int) -> Manifest | None:
        """The manifest of a partition, if it has one that is of this plan."""
        uri = self._layout.manifest(index, len(self._plan.partitions))
        try:
            manifest = decode(self._store.read(uri), Manifest, uri)
        except NotFoundError:
            return None
        return manifest if manifest.fingerprint == self._plan.fingerprint else None

    def _new_submission(self, indices: list[int]) -> Submission:
        records = Records(store=self._store, layout=self._layout, patience=Patience())
        while True:
            submission_id = records.next_id()
            submission = Submission(
                submission_id=submission_id,
                created_at=records.timestamp(),
                target="local",
                job_name=job_name_of(self._plan.run_id, submission_id),
                job_queue=None,
                job_definition=None,
                partition_ranges=ranges_of(indices),
            )
            if records.create(submission):
                return submission

    def _log_folder(self) -> Path:
        if self._run_uri.startswith("s3://"):
            return Path(gettempdir(), "llm-array", self._plan.run_id, "logs")
        return Path(self._run_uri, "logs")


def _local_rules(job_definition: str | None, output: Output) -> RetryRules:
    if job_definition is None:
        return DEFAULT_RETRY_RULES
    try:
        definition = json.loads(Path(job_definition).read_text(encoding="utf-8"))
        if not isinstance(definition, dict) or not isinstance(definition.get("retryStrategy", {}), dict):
            raise ConfigError(f"read job definition {job_definition}: it is none (expected an object, as AWS takes it)")
        return retry_rules(definition)
    except FileNotFoundError:
        output.note(f"--job-definition {job_definition} is no file: this project's own retry rules hold here")
        return DEFAULT_RETRY_RULES
    except (OSError, ValueError) as error:
        raise ConfigError(f"read job definition {job_definition}: {error}") from error


def _split(request: SplitRequest, output: Output) -> SplitResult:
    with _split_progress() as progress:
        result = split_run(request, progress=progress)
    for note in result.notes:
        output.note(note)
    return result


@contextmanager
def _split_progress() -> Iterator[Callable[[SplitProgress], None]]:
    with progress_bar("split", "bytes") as show:

        def report(progress: SplitProgress) -> None:
            words = {"scan": "checking", "write": "writing"}[progress.phase]
            show(progress.done_bytes, progress.total_bytes, f"{words}, {count(progress.record_count, 'record')}")

        yield report


def _split_document(request: SplitRequest, result: SplitResult) -> dict[str, Any]:
    plan = result.plan
    return {
        "run_uri": request.run_uri,
        "run_id": plan.run_id,
        "created": result.created,
        "record_count": plan.record_count,
        "invalid_record_count": plan.invalid_record_count,
        "partition_count": len(plan.partitions),
    }


def _split_lines(request: SplitRequest, result: SplitResult) -> list[str]:
    plan = result.plan
    made = "planned" if result.created else "was planned before, with the same inputs and settings"
    return [
        (
            f"run {request.run_uri} {made}: {count(plan.record_count, 'record')} in "
            f"{count(len(plan.partitions), 'partition')}"
        )
    ]
