"""The options that say where and how a run's partitions are worked on: on AWS Batch, or on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import click

from submitter.batch_request import SubmitOptions, is_same_queue
from submitter.click_options import decorated, option, required
from submitter.limits import check_environment
from submitter.settings import FileSettings, merged_table
from worker.contract.errors import UsageError
from worker.contract.submission import Fallback

if TYPE_CHECKING:
    from submitter.batch_records import Known

DEFAULT_FALLBACK_AFTER = 2
"""A submission has up to ten attempts of its own, and may have ended for a reason that nobody knows of any more: one may be
bad luck, two are a market without hosts."""
DEFAULT_WAIT_EVERY_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFlags:
    """Where and how a run is submitted."""

    queue: str | None
    fallback_queue: str | None
    """Empty: none, whatever was asked for before."""
    fallback_after: int | None
    job_definition: str | None
    share: str | None
    priority: int | None
    timeout_s: int | None
    attempts: int | None
    tags: dict[str, str]
    environment: dict[str, str]
    """Variables for the workers."""
    dry_run: bool
    wait: bool
    wait_every: int
    """Seconds."""
    remembered: frozenset[str] = frozenset()
    """As of `SubmitOptions`."""

    def refuse_dry_run(self) -> None:
        """Where no request is made that could be shown.

        Raises:
            UsageError: one was asked for.
        """
        if self.dry_run:
            raise UsageError(
                "read command line: --dry-run shows what AWS Batch would be asked, and --local asks nothing",
                hint="submit split plans a run and starts nothing; submit doctor --local looks what would keep it from working",
            )

    def submit_options(self) -> SubmitOptions:
        """The same, checked against Batch's limits.

        Raises:
            UsageError: the queue or the job definition is missing, or a value breaks a limit.
        """
        return SubmitOptions(
            job_queue=required("queue", self.queue, "the job queue"),
            job_definition=required("job-definition", self.job_definition, "name or name:revision"),
            share_identifier=self.share,
            scheduling_priority=self.priority,
            timeout_s=self.timeout_s,
            attempts=self.attempts,
            tags=self.tags,
            environment=self.environment,
            fallback=self.fallback(),
            remembered=self.remembered,
        )

    def fallback(self) -> Fallback | None:
        """What is asked for.

        Raises:
            UsageError: a number of times without a queue.
        """
        if self.fallback_queue:
            return Fallback(job_queue=self.fallback_queue, after=self.fallback_after or DEFAULT_FALLBACK_AFTER)
        if self.fallback_after is not None and self.fallback_queue is None:
            raise UsageError(
                "read --fallback-after: there is no queue to fall back to",
                hint="give --fallback-queue, an On-Demand queue",
            )
        return None

    def with_defaults(self, submissions: Sequence[Known]) -> BatchFlags:
        """What the run's last submissions say, where nothing else is said: none of them is undone by being silent."""
        if not submissions:
            return self
        last = submissions[-1].submission
        first_queue = [known.submission.job_queue for known in submissions if not known.submission.is_fallback]
        queue = self.queue or (first_queue[-1] if first_queue else None)
        flags, remembered = self, set()
        if self.fallback_queue is None and last.fallback and not is_same_queue(last.fallback.job_queue, queue or ""):
            after = self.fallback_after or last.fallback.after
            flags = replace(flags, fallback_queue=last.fallback.job_queue, fallback_after=after)
            remembered.add("fallback")
        if self.share is None and last.share_identifier is not None:
            flags = replace(flags, share=last.share_identifier)
            remembered.add("share_identifier")
        if self.priority is None and last.scheduling_priority is not None:
            flags = replace(flags, priority=last.scheduling_priority)
            remembered.add("scheduling_priority")
        return replace(
            flags,
            queue=queue,
            job_definition=self.job_definition or last.job_definition,
            remembered=frozenset(remembered),
        )


def _environment(variables: dict[str, str]) -> dict[str, str]:
    # Workers on this machine need no secret from here: they have the variables that this process has.
    check_environment(variables)
    return variables


def batch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that make up a `BatchFlags`, passed as `batch_flags`."""

    @functools.wraps(command)
    def wrapped(*args: Any, **values: Any) -> Any:
        settings = click.get_current_context().obj or FileSettings({}, {}, None)
        names = {one.name for one in fields(BatchFlags)} - {"tags", "environment", "timeout_s", "remembered"}
        flags = BatchFlags(
            tags=merged_table("tags", settings, values.pop("tag"), as_text=True),
            environment=_environment(merged_table("env", settings, values.pop("env"), as_text=True)),
            timeout_s=values.pop("timeout"),
            **{name: values.pop(name) for name in names},
        )
        return command(*args, batch_flags=flags, **values)

    return decorated(
        wrapped,
        option("--queue", metavar="NAME", help="The job queue to submit to."),
        option(
            "--job-definition",
            metavar="NAME[:REV]",
            help="The job definition; with --local a file whose retry rules hold.",
        ),
        option(
            "--fallback-queue",
            metavar="NAME",
            help="An On-Demand queue: what is left of a partition that was interrupted goes there. Remembered; '' for none.",
        ),
        option(
            "--fallback-after",
            type=click.IntRange(1),
            metavar="K",
            help=f"Interrupted submissions of a partition before it does. [default: {DEFAULT_FALLBACK_AFTER}]",
        ),
        option("--share", metavar="ID", help="Share identifier; fair-share queues need one. Remembered."),
        option(
            "--priority",
            type=click.IntRange(0, 9999),
            metavar="N",
            help="Scheduling priority within the share. Remembered.",
        ),
        option(
            "--timeout", type=click.IntRange(60), metavar="SECONDS", help="Time limit of each attempt; not retried."
        ),
        option(
            "--attempts",
            type=click.IntRange(1, 10),
            metavar="N",
            help="Attempts per partition; default: the definition's.",
        ),
        click.option("--tag", multiple=True, metavar="KEY=VALUE", help="A tag of the jobs. May be repeated."),
        click.option(
            "--env",
            multiple=True,
            metavar="NAME=VALUE",
            help="A variable for the workers, such as LLM_ARRAY_HANG_TIMEOUT_S=600; no secrets. May be repeated.",
        ),
        click.option("--wait", is_flag=True, help="Wait until no job goes on; exit 0 only if every partition is done."),
        option(
            "--wait-every",
            type=click.IntRange(1, 3600),
            default=DEFAULT_WAIT_EVERY_S,
            show_default=True,
            metavar="SECONDS",
            help="With --wait: look at the jobs so often.",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Print the exact SubmitJob requests as JSON; write and submit nothing."
        ),
    )


def local_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return decorated(
        command,
        click.option("--local", is_flag=True, help="Run the workers on this machine instead of AWS Batch."),
        option(
            "--parallel",
            type=click.IntRange(1, 256),
            default=1,
            show_default=True,
            metavar="K",
            help="With --local: workers at a time.",
        ),
    )
