"""One partition recounted: its input against the plan, its output against the plan, and its manifest against both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from submitter.content import Content
from submitter.lines import is_blank
from submitter.planned_run import PartitionTask
from submitter.processes import Report
from worker.contract.errors import InputError
from worker.contract.manifest import Manifest, Tokens
from worker.contract.output_line import Summary, summarize_line
from worker.contract.plan import Plan
from worker.contract.store import ObjectInfo


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What was found of one partition."""

    index: int
    is_done: bool
    has_manifest: bool = False
    problems: list[str] = field(default_factory=list)
    ok_count: int = 0
    error_counts: Counter[str] = field(default_factory=Counter)
    tokens: Tokens = field(default_factory=Tokens)

    def add(self, summary: Summary) -> None:
        if summary.error:
            self.error_counts[summary.error] += 1
        else:
            self.ok_count += 1
        # An answer that stands beside an error has cost its tokens, too.
        self.tokens += Tokens(
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            completion_tokens=summary.completion_tokens,
        )

    def expect(self, what: str, expected: object, got: object) -> None:
        if expected != got:
            self.problems.append(f"check {what} (expected {expected}, got {got})")


def verify_partition(task: PartitionTask, report: Report) -> Verdict:
    """Recount a partition. What is wrong with it is in the verdict.

    Raises:
        StorageError, ConfigError: storage gave no answer, or refused.
    """
    verdict = Verdict(index=task.index, is_done=task.output is not None)
    input_checksum = task.partition.checksum
    try:
        input_checksum = _check_input(task, verdict)
    except InputError as error:
        verdict.problems.append(error.message)
    if task.output is not None:
        try:
            _check_output(task, task.output, input_checksum, verdict)
        except InputError as error:
            verdict.problems.append(error.message)
    report(record_count=task.partition.record_count)
    return verdict


def _check_input(task: PartitionTask, verdict: Verdict) -> str:
    """The checksum of the partition as it is planned to be, or of an output of the run before as it is; of one that is not
    there yet, empty.
    """
    planned = task.partition
    if not planned.checksum and task.output is None and task.find_input() is None:
        return ""
    stored = task.stored_input()
    uri, content = stored.uri, Content(stored, task.input_compression)
    record_count = sum(not is_blank(line) for line in content.lines())
    if planned.checksum:
        verdict.expect(f"partition {uri}: bytes", planned.size_bytes, content.size_bytes)
        verdict.expect(f"partition {uri}: checksum", planned.checksum, content.checksum.value)
    verdict.expect(f"partition {uri}: records", planned.record_count, record_count)
    line_count = sum(source.line_count for source in planned.sources)
    verdict.expect(f"partition {uri}: lines", line_count, content.line_count + content.has_open_end)
    return planned.checksum or content.checksum.value


def _check_output(task: PartitionTask, stored: ObjectInfo, input_checksum: str, verdict: Verdict) -> None:
    content = Content(stored, task.run.plan.compression)
    _count_results(task.run.plan, content, verdict)
    verdict.expect(f"output {stored.uri}: lines", task.partition.record_count, content.line_count)
    if content.has_open_end:
        verdict.problems.append(f"check output {stored.uri}: its last line has no end")
    uri, manifest = task.manifest_uri, task.read_manifest()
    if manifest is None:
        return
    verdict.has_manifest = True
    if manifest.fingerprint != task.run.plan.fingerprint:
        verdict.problems.append(f"check manifest {uri}: it is of another plan")
        return
    verdict.expect(f"manifest {uri}: partition index", task.index, manifest.partition_index)
    verdict.expect(f"manifest {uri}: partition count", task.partition_count, manifest.partition_count)
    if task.partition.checksum:
        verdict.expect(f"manifest {uri}: input checksum", input_checksum, manifest.input_checksum)
    elif input_checksum:
        verdict.expect(f"output {stored.uri} against {uri}: input checksum", manifest.input_checksum, input_checksum)
    for what, said, counted in _accounts(content, verdict, manifest):
        verdict.expect(f"output {stored.uri} against {uri}: {what}", said, counted)


def _count_results(plan: Plan, content: Content, verdict: Verdict) -> None:
    first_wrong = wrong_count = 0
    for number, line in enumerate(content.lines(), start=1):
        try:
            verdict.add(summarize_line(line, plan.shape, plan.answer_key))
        except (msgspec.MsgspecError, RecursionError):
            first_wrong = first_wrong or number
            wrong_count += 1
    if wrong_count:
        more = f", nor are {wrong_count - 1:,} more" if wrong_count > 1 else ""
        verdict.problems.append(
            f"read output {content.stored.uri}:{first_wrong}: it is no result line of this run{more}"
        )


def _accounts(content: Content, verdict: Verdict, manifest: Manifest) -> Iterator[tuple[str, object, object]]:
    """What the manifest says, and what was counted."""
    yield "bytes", manifest.output_bytes, content.size_bytes
    yield "checksum", manifest.output_checksum, content.checksum.value
    yield "records", manifest.record_count, content.line_count
    yield "results", manifest.ok_count, verdict.ok_count
    yield "errors by kind", dict(sorted(manifest.error_counts.items())), dict(sorted(verdict.error_counts.items()))
    yield "tokens", _numbers(manifest.tokens), _numbers(verdict.tokens)


def _numbers(tokens: Tokens) -> tuple[int, int, int]:
    return tokens.prompt_tokens, tokens.cached_tokens, tokens.completion_tokens
