"""A run's status in lines for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from submitter.failures import Failure
from submitter.output import count, duration, kinds_of_errors
from submitter.queue_waits import QueueWait
from submitter.resume_command import resume_command
from submitter.run_states import STATES, State
from submitter.status import Status
from submitter.waiting_reasons import Cause
from worker.contract.errors import ExitCode

SHOWN_GROUP_COUNT = 5
SHOWN_PARTITION_COUNT = 3
_INDENT = 12
_WORDS: dict[State, str] = {
    "waiting": "waiting for another run",
    "ended": "ended without an output",
    "unknown": "in a state that is not known here",
    "not_submitted": "not submitted",
}
_LASTING: dict[int, str] = {
    ExitCode.INPUT: "if an input is wrong, or another than it was: plan again with another --run",
    ExitCode.ENGINE_BOOT: "if a setting is wrong: plan again with another --run, those of a planned run cannot change",
    ExitCode.CONFIG: "the log says what is wrong with environment, permissions or configuration",
}
"""What comes before a resume where that alone would fail again, by exit code."""
_OUTCOMES = {"done": "done", "going_on": "going on", "stopped": "stopped", "unknown": "not known whether it goes on"}


def status_lines(status: Status) -> list[str]:
    """All there is to say, a thing a line, its name in front."""
    return [
        f"run {status.run.layout.run_uri}: {_OUTCOMES[status.outcome]}",
        *_block("partitions", [_partitions(status)]),
        *_block("records", _records(status)),
        *_block("tokens", _tokens(status)),
        *_block("time left", _time_left(status)),
        *_block("attempts", _attempts(status)),
        *_block("waiting", _waiting(status)),
        *_block("failed", _failed(status)),
        *_block("told from", _sample(status)),
        *_block("next", _next(status)),
    ]


def status_line(status: Status) -> str:
    """The same in one line, which is another only if something has happened."""
    records = f"{status.record_done_count:,} of {count(status.run.plan.record_count, 'record')}"
    rate = status.tokens_per_s("completion_tokens")
    tokens = f"; {rate:,.0f} output tokens/s" if rate and status.outcome == "going_on" else ""
    left = f"; {_about(status.left_s)} left" if status.left_s else ""
    return f"{_OUTCOMES[status.outcome]}: {records}; {_partitions(status)}{tokens}{left}"


def progress_key(status: Status) -> tuple[object, ...]:
    """What is another only if something has happened: time alone changes nothing in it."""
    return (
        status.outcome,
        tuple(sorted(status.states.to_dict().items())),
        status.record_done_count,
        tuple((wait.job_queue, wait.causes) for wait in status.waits),
    )


def _block(name: str, lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{'' if number else name:{_INDENT}}{line}"


def _partitions(status: Status) -> str:
    counts = status.states.counts
    others = [f"{counts[state]:,} {_WORDS.get(state, state)}" for state in STATES if state != "done" and counts[state]]
    return ", ".join([f"{counts['done']:,} of {status.run.partition_count:,} done", *others])


def _records(status: Status) -> list[str]:
    total = status.run.plan.record_count
    share = f" ({_percent(status.record_done_count / total)})" if total else ""
    under_way = f", {status.local.done_count:,} of them not committed yet" if status.local.done_count else ""
    lines = [f"{status.record_done_count:,} of {total:,} done{share}{under_way}"]
    if status.error_rate is not None:
        scale = status.committed_count / status.sampled_count
        counts = {kind: round(number * scale) for kind, number in status.account.error_counts.items()}
        lines.append(f"{_percent(status.error_rate)} errors" + (f": {kinds_of_errors(counts)}" if counts else ""))
    if status.local.saved_s is not None:
        ago = duration(max(0.0, status.looked_at_s - status.local.saved_s))
        lines.append(f"checkpoints of {count(status.local.saved_partition_count, 'partition')}, the last {ago} ago")
    return lines


def _tokens(status: Status) -> list[str]:
    if not status.sampled_count:
        return []
    scale = status.committed_count / status.sampled_count
    tokens = status.account.tokens
    about = "" if scale == 1 else "about "
    so_far = (
        f"{about}{round(tokens.completion_tokens * scale):,} output and {round(tokens.prompt_tokens * scale):,} prompt "
        "tokens so far"
    )
    if not status.records_per_s:
        return [so_far]
    when = "now" if status.outcome == "going_on" else "while it went on"
    output, prompt = status.tokens_per_s("completion_tokens"), status.tokens_per_s("prompt_tokens")
    return [f"{output:,.0f} output and {prompt:,.0f} prompt tokens/s {when}", so_far]


def _time_left(status: Status) -> list[str]:
    if status.outcome != "going_on":
        return []
    if status.left_s is None:
        return ["not known yet: nothing has been committed since this work began"]
    if status.is_told_by_workers or status.pace is None:
        told = "as the workers here say"
    else:
        told = f"the last {count(status.pace.commit_count, 'commit')}, in {duration(status.pace.span_s)}"
    return [f"{_about(status.left_s)} at {_rate(status.records_per_s)} records/s ({told})"]


def _attempts(status: Status) -> list[str]:
    account, under_way, lines = status.account, status.under_way, []
    if account.manifest_count:
        line = f"{account.attempt_count:,} for {count(account.manifest_count, 'partition')} done"
        if cut_short := account.cut_short.total():
            line += f"; {cut_short:,} cut short: {kinds_of_errors(account.cut_short)}"
        lines.append(line)
    if under_way.interrupted_count:
        lines.append(
            f"{under_way.interrupted_count:,} of {count(under_way.partition_count, 'partition')} under way that were looked "
            f"at had an attempt end: {kinds_of_errors(under_way.cut_short)}"
        )
    return lines


def _waiting(status: Status) -> list[str]:
    lines = [line for wait in status.waits for line in _wait(wait, status.looked_at_s)]
    after = status.run.plan.after
    if status.states.counts["waiting"]:
        run = f" of run {after.run_uri}" if after else ""
        lines.append(f"{count(status.states.counts['waiting'], 'partition')} until a job{run} has done its part")
    return lines


def _wait(wait: QueueWait, now_s: float) -> Iterator[str]:
    since = "" if wait.since_s is None else f", for {duration(max(0.0, now_s - wait.since_s))} at most"
    place = "" if wait.position is None else f", the first of them at place {wait.position:,} of the queue"
    yield f"{count(wait.partition_count, 'partition')} RUNNABLE in {wait.job_queue}{since}{place}"
    for cause in wait.causes:
        yield from _cause(cause)


def _cause(cause: Cause) -> Iterator[str]:
    yield f"- {cause.text}" + (f" ({cause.given})" if cause.given else "")
    if cause.advice:
        yield f"  {cause.advice}"


def _failed(status: Status) -> list[str]:
    groups: defaultdict[tuple[int | None, str, str], list[Failure]] = defaultdict(list)
    for failure in status.failures:
        groups[failure.exit_code, failure.meaning, failure.reason].append(failure)
    ranked = sorted(groups.values(), key=lambda group: (-len(group), group[0].partition_index))
    lines = [line for group in ranked[:SHOWN_GROUP_COUNT] for line in _failure_group(group)]
    if len(ranked) > SHOWN_GROUP_COUNT:
        lines.append(f"and {sum(map(len, ranked[SHOWN_GROUP_COUNT:])):,} more, for other reasons (all with --json)")
    return lines


def _failure_group(group: Sequence[Failure]) -> Iterator[str]:
    first = group[0]
    named = ", ".join(f"{failure.partition_index}" for failure in group[:SHOWN_PARTITION_COUNT])
    more = f" and {len(group) - SHOWN_PARTITION_COUNT:,} more" if len(group) > SHOWN_PARTITION_COUNT else ""
    exit_code = "no exit code" if first.exit_code is None else f"exit {first.exit_code}"
    meaning = f", {first.meaning}" if first.meaning else ""
    yield f"{'partition' if len(group) == 1 else 'partitions'} {named}{more}: {exit_code}{meaning}"
    attempts = "" if first.attempt_count is None else f"; {count(first.attempt_count, 'attempt')}"
    if first.reason:
        yield f"  {first.reason.removesuffix('.')}{attempts}"
    if first.log:
        yield f"  log of partition {first.partition_index}: {first.log}"


def _sample(status: Status) -> list[str]:
    done, read = status.partition_done_count, status.account.manifest_count
    if read == done:
        return []
    return [f"{read:,} of {count(done, 'manifest')}: errors, tokens and attempts (--exact reads all)"]


def _next(status: Status) -> list[str]:
    run_uri = status.run.layout.run_uri
    lines, resume = [], resume_command(run_uri, status.last)
    lasting = [failure for failure in status.failures if failure.exit_code in _LASTING]
    if failures := lasting or status.failures:
        lines.append(f"submit logs {run_uri} --partition {failures[0].partition_index}")
    if status.outcome == "stopped":
        lines += dict.fromkeys(_LASTING.get(failure.exit_code or 0, "") for failure in lasting)
        lines.append(f"once the cause is put right: {resume}" if lasting else resume)
    return lines


def _percent(share: float) -> str:
    """Never 100 % or 0 % of what is not all or nothing."""
    if 0 < share < 0.0001:
        return "under 0.01 %"
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    return f"{min(share, 0.9999):.2%}".replace("%", " %")


def _about(seconds: float | None) -> str:
    return "" if seconds is None else f"about {duration(seconds)}"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"
