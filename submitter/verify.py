"""`submit verify`: everything of a run, recounted against its plan."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from submitter.output import Output, count, kinds_of_errors
from submitter.planned_run import Outputs, PlannedRun
from submitter.processes import Processes
from submitter.progress import progress_bar
from submitter.resume_command import resume_command_of
from submitter.split_tuning import SplitTuning
from submitter.verify_partition import Verdict, verify_partition
from worker.contract.errors import ExitCode
from worker.contract.manifest import Tokens
from worker.contract.submission import ranges_of

SHOWN_PROBLEM_COUNT = 100


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was found of a run."""

    missing: list[int] = field(default_factory=list)
    """Partitions without an output."""
    missing_manifests: list[int] = field(default_factory=list)
    """Partitions with an output and without a manifest: no error, since it can be made again from the output."""
    problem_count: int = 0
    problems: list[str] = field(default_factory=list)
    """The first of them."""
    ok_count: int = 0
    error_counts: Counter[str] = field(default_factory=Counter)
    tokens: Tokens = field(default_factory=Tokens)

    def add(self, verdict: Verdict) -> None:
        if not verdict.is_done:
            self.missing.append(verdict.index)
        elif not verdict.has_manifest:
            self.missing_manifests.append(verdict.index)
        for problem in verdict.problems:
            self.add_problem(problem)
        self.ok_count += verdict.ok_count
        self.error_counts += verdict.error_counts
        self.tokens += verdict.tokens

    def add_problem(self, problem: str) -> None:
        self.problem_count += 1
        if len(self.problems) < SHOWN_PROBLEM_COUNT:
            self.problems.append(problem)

    @property
    def exit_code(self) -> ExitCode:
        if self.problem_count:
            return ExitCode.INPUT
        return ExitCode.INTERRUPTED if self.missing else ExitCode.OK


def verify(run: PlannedRun, process_count: int | None = None) -> Findings:
    """Read all that the run holds, once.

    Args:
        run: the run.
        process_count: None for one per core.

    Raises:
        StorageError, ConfigError: storage gave no answer, or refused.
    """
    outputs = run.outputs()
    findings = Findings()
    for uri in outputs.strays:
        findings.add_problem(f"check output {uri}: it belongs to no partition of {run.layout.plan}")
    with progress_bar("verify", "records") as show:
        done_count = 0

        def report(*, byte_count: int = 0, record_count: int = 0) -> None:  # noqa: ARG001  as processes report
            nonlocal done_count
            done_count += record_count
            show(done_count, run.plan.record_count, "")

        tasks = (run.task(index, outputs) for index in range(run.partition_count))
        with Processes(process_count or _process_count(run, outputs), report) as processes:
            for verdict in processes.run(verify_partition, tasks):
                findings.add(verdict)
    return findings


def verify_run(run_uri: str, process_count: int | None, output: Output) -> int:
    """The command."""
    run = PlannedRun.open(run_uri)
    findings = verify(run, process_count)
    output.document(_document(run, findings), _lines(run, findings))
    return findings.exit_code


def _process_count(run: PlannedRun, outputs: Outputs) -> int:
    total_bytes = sum(partition.size_bytes for partition in run.plan.partitions)
    total_bytes += sum(found.size_bytes for found in outputs.by_index.values())
    if total_bytes < SplitTuning().parallel_bytes:
        return 1
    return min(len(os.sched_getaffinity(0)), run.partition_count)


def _document(run: PlannedRun, findings: Findings) -> dict[str, Any]:
    outcomes = {ExitCode.OK: "verified", ExitCode.INTERRUPTED: "unfinished", ExitCode.INPUT: "wrong"}
    return {
        "run_uri": run.layout.run_uri,
        "run_id": run.plan.run_id,
        "outcome": outcomes[findings.exit_code],
        "record_count": run.plan.record_count,
        "partition_count": run.partition_count,
        "partition_done_count": run.partition_count - len(findings.missing),
        "missing_ranges": ranges_of(findings.missing)[:SHOWN_PROBLEM_COUNT],
        "missing_manifest_count": len(findings.missing_manifests),
        "ok_count": findings.ok_count,
        "error_count": findings.error_counts.total(),
        "error_counts": dict(findings.error_counts),
        "prompt_tokens": findings.tokens.prompt_tokens,
        "completion_tokens": findings.tokens.completion_tokens,
        "problem_count": findings.problem_count,
        "problems": findings.problems,
    }


def _lines(run: PlannedRun, findings: Findings) -> list[str]:
    done_count = run.partition_count - len(findings.missing)
    lines = [
        (
            f"run {run.layout.run_uri}: {done_count:,} of {count(run.partition_count, 'partition')} done, "
            f"{count(findings.ok_count, 'record')} answered, {count(findings.error_counts.total(), 'error')}"
        ),
        *([f"errors: {kinds_of_errors(findings.error_counts)}"] if findings.error_counts else []),
        *findings.problems,
    ]
    if findings.problem_count > len(findings.problems):
        lines.append(f"and {findings.problem_count - len(findings.problems):,} more")
    if findings.missing_manifests:
        lines.append(
            f"{count(len(findings.missing_manifests), 'output')} without a manifest: no error, a worker that finds one "
            "makes its manifest"
        )
    if findings.problem_count:
        lines += [
            f"it does not add up: {count(findings.problem_count, 'problem')}",
            "where an output is damaged: remove that object and its manifest, then",
            f"  {resume_command_of(run)}",
            "where a partition or the plan is: plan again with another --run",
            "where an object belongs to no partition: remove it",
        ]
    elif findings.missing:
        lines.append(
            f"what is done adds up, {count(len(findings.missing), 'partition')} without an output yet: "
            f"{resume_command_of(run)}"
        )
    else:
        lines.append("all of it adds up")
    return lines
