"""`submit status`: how far a run is, what keeps it, and what failed.

Outputs are the truth of what is done: one listing says how many, when each was committed, and with the plan how many
records that is. AWS Batch says what the rest is at, by one DescribeJobs for a hundred jobs. What only manifests know,
tokens, kinds of errors and attempts, is told from a sample of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from submitter.attempts_under_way import UnderWay, attempts_under_way
from submitter.batch_records import Known, Patience, Records
from submitter.failures import Failure, failures_of
from submitter.local_states import LocalStates, local_states_of
from submitter.planned_run import Outputs, PlannedRun
from submitter.queue_waits import QueueWait, queue_waits
from submitter.run_accounts import Account, RunAccounts
from submitter.run_jobs import RunJob, look_up_jobs
from submitter.run_states import IN_HAND, RunStates, states_of
from submitter.run_times import Commit, Pace, pace_of
from worker.contract.errors import BatchError, ConfigError, ExitCode
from worker.contract.formats import seconds_of, timestamp_of
from worker.contract.submission import Submission

if TYPE_CHECKING:
    from submitter.batch_client import Batch

SAMPLE_SIZE = 200
"""Manifests that are read: enough to tell an error rate of 1 % to about 0.1 % from records by the hundred thousand."""
SHOWN_FAILURE_COUNT = 100
FEW_COMMITS = 10

Outcome = Literal["done", "going_on", "stopped", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run at one moment."""

    run: PlannedRun
    looked_at_s: float
    outcome: Outcome
    """`stopped`: partitions are left, and nothing here or on AWS Batch is at them."""
    last: Submission | None
    """The run's last submission; None before the first."""
    states: RunStates
    local: LocalStates
    account: Account
    """Of as many manifests as were read."""
    committed_count: int
    """Records in outputs."""
    sampled_count: int
    """Records in outputs whose manifests were read."""
    pace: Pace | None
    """Of the commits; None before the first of those that count."""
    left_s: float | None
    """Seconds until all is done if it goes on like this; None: not going on, or no pace yet."""
    waits: tuple[QueueWait, ...]
    under_way: UnderWay
    failures: tuple[Failure, ...]
    notes: tuple[str, ...]

    @property
    def partition_done_count(self) -> int:
        return self.states.counts["done"]

    @property
    def record_done_count(self) -> int:
        """In outputs, and answered by workers here."""
        return self.committed_count + self.local.done_count

    @property
    def is_over(self) -> bool:
        """Nothing will change by itself. Where AWS Batch cannot be asked that is not known before all is done."""
        return self.outcome in ("done", "stopped")

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.INTERRUPTED if self.outcome == "stopped" else ExitCode.OK

    @property
    def is_told_by_workers(self) -> bool:
        """Whether the pace is what workers here say of themselves, since there are few commits to tell it from."""
        return is_told_by_workers(self.local, self.pace)

    @property
    def records_per_s(self) -> float:
        if self.is_told_by_workers:
            return self.local.records_per_s
        return self.pace.records_per_s if self.pace else 0.0

    def tokens_per_s(self, kind: Literal["prompt_tokens", "completion_tokens"]) -> float:
        """Of the records that are done at this pace, as many tokens as the sampled ones have."""
        if kind == "completion_tokens" and self.is_told_by_workers:
            return self.local.output_tokens_per_s
        tokens: int = getattr(self.account.tokens, kind)
        return self.records_per_s * tokens / self.sampled_count if self.sampled_count else 0.0

    @property
    def error_rate(self) -> float | None:
        """Errors per record; None before anything is known."""
        return self.account.error_count / self.account.record_count if self.account.record_count else None

    def to_dict(self) -> dict[str, Any]:
        plan, account = self.run.plan, self.account
        error_rate = self.error_rate
        return {
            "run_uri": self.run.layout.run_uri,
            "run_id": plan.run_id,
            "looked_at": timestamp_of(self.looked_at_s),
            "outcome": self.outcome,
            "partition_count": self.run.partition_count,
            "partitions": self.states.to_dict(),
            "record_count": plan.record_count,
            "record_done_count": self.record_done_count,
            "records_per_s": round(self.records_per_s, 3),
            "output_tokens_per_s": round(self.tokens_per_s("completion_tokens"), 1),
            "prompt_tokens_per_s": round(self.tokens_per_s("prompt_tokens"), 1),
            "left_s": None if self.left_s is None else round(self.left_s),
            "sample": {
                "manifest_count": account.manifest_count,
                "record_count": account.record_count,
                "ok_count": account.ok_count,
                "error_count": account.error_count,
                "error_rate": None if error_rate is None else round(error_rate, 6),
                "error_counts": dict(account.error_counts),
                "prompt_tokens": account.tokens.prompt_tokens,
                "cached_tokens": account.tokens.cached_tokens,
                "completion_tokens": account.tokens.completion_tokens,
                "attempt_count": account.attempt_count,
                "cut_short": dict(account.cut_short),
            },
            "under_way": self.under_way.to_dict(),
            "waits": [
                {**wait.to_dict(), "since": None if wait.since_s is None else timestamp_of(wait.since_s)}
                for wait in self.waits
            ],
            "depends_on": self.states.depends_on,
            "failures": [failure.to_dict() for failure in self.failures[:SHOWN_FAILURE_COUNT]],
            "notes": list(self.notes),
        }


@dataclass(slots=True, kw_only=True)
class Watched:
    """A run that is looked at, once or again and again: what cannot change is read once."""

    run: PlannedRun
    ask: Callable[[Sequence[Known]], Batch | None]
    """Gives what jobs are looked up in; None: there are no credentials to ask with."""
    sample_size: int | None = SAMPLE_SIZE
    """None: every manifest."""
    patience: Patience = field(default_factory=Patience)
    _accounts: RunAccounts = field(init=False)
    _answered: dict[str, Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._accounts = RunAccounts(self.run, self.sample_size)

    def look(self) -> Status:
        """Look at submissions, then at their jobs, then at the outputs: what a job has finished is listed.

        Raises:
            StorageError, ConfigError: storage gave no answer, or refused.
        """
        run, now_s, notes = self.run, self.patience.now(), list[str]()
        submissions = self._submissions()
        jobs = self._jobs(submissions, notes.append)
        outputs = run.outputs()
        states = states_of(run.partition_count, submissions, jobs, outputs.by_index)
        notes += states.notes
        local = local_states_of(run, states.local)
        states.counts += local.counts
        sample = self._accounts.look(outputs.by_index.keys())
        account = Account.total(sample.values())
        sampled_count = sum(run.plan.partitions[index].record_count for index in sample)
        outcome = _outcome(states, local)
        pace = self._pace(outputs, states, submissions, list(sample.values()))
        return Status(
            run=run,
            looked_at_s=now_s,
            outcome=outcome,
            last=submissions[-1].submission if submissions else None,
            states=states,
            local=local,
            account=account,
            committed_count=sum(run.plan.partitions[index].record_count for index in outputs.by_index),
            sampled_count=sampled_count,
            pace=pace,
            left_s=self._left_s(outputs, states, local, pace) if outcome == "going_on" else None,
            waits=tuple(queue_waits(states.runnable, notes.append)),
            under_way=_under_way(states, notes.append),
            failures=tuple(self._failures(states, local, notes.append)),
            notes=tuple(dict.fromkeys(notes)),
        )

    def _submissions(self) -> list[Known]:
        records = Records(store=self.run.store, layout=self.run.layout, patience=self.patience)
        found = []
        for submission_id in records.ids():
            known = self._answered.get(submission_id) or records.read(submission_id)
            if not known.is_open or known.submission.target == "local":
                self._answered[submission_id] = known
            found.append(known)
        return found

    def _jobs(self, submissions: Sequence[Known], note: Callable[[str], None]) -> list[RunJob] | None:
        to_batch = [known for known in submissions if known.is_to_batch]
        if not to_batch:
            return []
        try:
            batch = self.ask(to_batch)
            if batch is not None:
                return look_up_jobs(batch, to_batch, self.patience.now())
            note("AWS Batch was not asked: there are no AWS credentials. What is done is known all the same")
        except (BatchError, ConfigError) as error:
            # What is in storage is worth telling without it.
            note(error.message + (f" ({error.hint})" if error.hint else ""))
        return None

    def _failures(self, states: RunStates, local: LocalStates, note: Callable[[str], None]) -> list[Failure]:
        try:
            found = failures_of(states.failed)
        except (BatchError, ConfigError) as error:
            note(error.message)
            found = failures_of(states.failed, described_count=0)
        return sorted([*found, *local.failures], key=lambda failure: failure.partition_index)

    def _pace(
        self, outputs: Outputs, states: RunStates, submissions: Sequence[Known], accounts: Sequence[Account]
    ) -> Pace | None:
        plan = self.run.plan
        commits = sorted(
            Commit(
                at_s=info.modified_s,
                record_count=plan.partitions[index].record_count,
                weight=plan.partitions[index].weight,
            )
            for index, info in outputs.by_index.items()
        )
        if not commits:
            return None
        begun_s = self._begun_s(states, submissions, accounts, first_s=commits[0].at_s)
        return pace_of(commits, begun_s, self.patience.now(), states.counts["running"])

    def _begun_s(
        self, states: RunStates, submissions: Sequence[Known], accounts: Sequence[Account], first_s: float
    ) -> float:
        """When the work that goes on was begun: with the oldest submission that does, else with the last of all.

        The time in which its first job waited for a host does not count, as far as manifests tell.
        """
        since_s = states.active_since_s
        if since_s is None and submissions:
            since_s = seconds_of(submissions[-1].submission.created_at)
        starts = [seconds_of(account.started_at) for account in accounts if account.started_at]
        if since_s is None:
            return min([*starts, first_s - 1.0])
        return min((start for start in starts if start >= since_s), default=since_s)

    def _left_s(self, outputs: Outputs, states: RunStates, local: LocalStates, pace: Pace | None) -> float | None:
        """Of what somebody is at: what has failed, say, waits for a resume."""
        partitions = self.run.plan.partitions
        left = [partition for index, partition in enumerate(partitions) if index not in outputs]
        share = _in_hand_count(states) / len(left)
        if is_told_by_workers(local, pace):
            record_count = sum(partition.record_count for partition in left) * share - local.done_count
            return max(0.0, record_count) / local.records_per_s
        if pace is None or not pace.weight_per_s:
            return None
        return sum(partition.weight for partition in left) * share / pace.weight_per_s


def _under_way(states: RunStates, note: Callable[[str], None]) -> UnderWay:
    try:
        return attempts_under_way(states.in_hand)
    except (BatchError, ConfigError) as error:
        note(error.message)
        return UnderWay()


def is_told_by_workers(local: LocalStates, pace: Pace | None) -> bool:
    return local.records_per_s > 0 and (pace is None or pace.commit_count < FEW_COMMITS)


def _outcome(states: RunStates, local: LocalStates) -> Outcome:
    counts = states.counts
    if counts.total() == counts["done"]:
        return "done"
    if _in_hand_count(states) or counts["stopping"] or local.is_going_on:
        return "going_on"
    return "unknown" if counts["unknown"] else "stopped"


def _in_hand_count(states: RunStates) -> int:
    return sum(states.counts[state] for state in IN_HAND)
