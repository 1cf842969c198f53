"""The options of `submit doctor`, and what they say."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from submitter.click_options import decorated, option
from worker.contract.layout import MAX_PARTITION_COUNT, normalize_uri


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRequest:
    """What a run would be made of; what is None is not looked at."""

    inputs: tuple[str, ...] = ()
    run_uri: str | None = None
    queue: str | None = None
    fallback_queue: str | None = None
    job_definition: str | None = None
    model: str | None = None
    revision: str | None = None
    partition_count: int | None = None
    local: bool = False
    """The workers are to run on this machine."""

    @property
    def needs_aws(self) -> bool:
        return not self.local or any(
            (uri or "").startswith("s3://") for uri in (self.run_uri, self.model, *self.inputs)
        )


def doctor_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that make up a `DoctorRequest`, passed as `request`."""

    @functools.wraps(command)
    def wrapped(*args: Any, **values: Any) -> Any:
        run_uri = values.pop("run")
        request = DoctorRequest(
            inputs=tuple(values.pop("inputs")),
            run_uri=None if run_uri is None else normalize_uri(run_uri),
            queue=values.pop("queue"),
            fallback_queue=values.pop("fallback_queue") or None,
            job_definition=values.pop("job_definition"),
            model=values.pop("model"),
            revision=values.pop("revision"),
            partition_count=values.pop("partitions"),
            local=values.pop("local"),
        )
        return command(*args, request=request, **values)

    return decorated(
        wrapped,
        click.argument("inputs", nargs=-1, metavar="[INPUTS]...", envvar="SUBMIT_INPUTS"),
        option("--run", metavar="URI", help="Where the run is to live: bucket, permissions, settings."),
        option("--queue", metavar="NAME", help="The job queue, its compute environments and their quotas."),
        option("--fallback-queue", metavar="NAME", help="Another queue, in the same way."),
        option("--job-definition", metavar="NAME[:REV]", help="The job definition, its image, log group and roles."),
        option("--model", metavar="MODEL", help="A hub id, s3:// prefix or path."),
        option("--revision", metavar="REVISION", help="A commit, branch or tag of a model on a hub."),
        option(
            "--partitions",
            type=click.IntRange(1, MAX_PARTITION_COUNT),
            metavar="N",
            help="How many hosts to ask quotas for at most; default: as many as the queue allows.",
        ),
        click.option("--local", is_flag=True, help="Check this machine instead of AWS Batch."),
    )
