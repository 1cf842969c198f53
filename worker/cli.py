"""The worker's command line: `worker RUN`, as AWS Batch's containers run it and as people do by hand."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from typing import Any

import click

from worker.contract.command_line import DefaultGroup
from worker.contract.errors import ConfigError, UsageError
from worker.pool import DEFAULT_COMMAND
from worker.run import report_failure, run_worker
from worker.settings import (
    BOOT_TIMEOUT_S,
    CHECKPOINT_EVERY_S,
    CHECKPOINT_RECORD_COUNT,
    HANG_TIMEOUT_S,
    CheckpointPolicy,
    Limits,
    read_settings,
)


class Seconds(click.FloatRange):
    """More than none, and an end to it."""

    def __init__(self) -> None:
        super().__init__(min=0.0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return found


@click.group(cls=DefaultGroup, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llm-array", message="llm-array %(version)s")
def cli() -> None:
    """Work on partitions of an offline inference run. `worker RUN` is short for `worker run RUN`."""


@cli.command()
@click.argument("run_uri", metavar="[RUN]", required=False, envvar="LLM_ARRAY_RUN")
@click.option("--index", type=click.IntRange(0), help="The partition, for running by hand.")
@click.option(
    "--submission",
    "submission_id",
    metavar="ID",
    help="The submission that says which partition AWS_BATCH_JOB_ARRAY_INDEX stands for. Without it, and without "
    "--index, the variable is the partition.",
)
@click.option("--engines", type=click.IntRange(1), help="Engine processes. Default: the plan's, or as the GPUs allow.")
@click.option(
    "--engine-arg",
    "engine_args",
    metavar="KEY=VALUE",
    multiple=True,
    help="Overrides the plan's; VALUE is JSON or text.",
)
@click.option(
    "--work-dir", metavar="FOLDER", help="For models and temporary files. Default: /scratch, or the system's."
)
@click.option(
    "--checkpoint-every-s",
    type=Seconds(),
    default=CHECKPOINT_EVERY_S,
    envvar="LLM_ARRAY_CHECKPOINT_EVERY_S",
    show_default=True,
    help="Save finished results for a later attempt so often.",
)
@click.option(
    "--checkpoint-records",
    type=click.IntRange(1),
    default=CHECKPOINT_RECORD_COUNT,
    envvar="LLM_ARRAY_CHECKPOINT_RECORDS",
    show_default=True,
    help="Save them earlier once there are so many.",
)
@click.option(
    "--checkpoint-tag",
    metavar="KEY=VALUE",
    envvar="LLM_ARRAY_CHECKPOINT_TAG",
    help="Tag what is saved on S3, for a lifecycle rule. Needs s3:PutObjectTagging. Default: no tag.",
)
@click.option(
    "--hang-timeout-s",
    type=Seconds(),
    default=HANG_TIMEOUT_S,
    envvar="LLM_ARRAY_HANG_TIMEOUT_S",
    show_default=True,
    help="An engine that has work and finishes no step for so long is ended, and another is started.",
)
@click.option(
    "--boot-timeout-s",
    type=Seconds(),
    default=BOOT_TIMEOUT_S,
    envvar="LLM_ARRAY_BOOT_TIMEOUT_S",
    show_default=True,
    help="The same for one that is not ready so long after its start.",
)
@click.option(
    "--record-timeout-s",
    type=Seconds(),
    envvar="LLM_ARRAY_RECORD_TIMEOUT_S",
    help="A record that has been in vLLM for so long becomes an error line. Default: no limit.",
)
@click.option(
    "--metrics/--no-metrics",
    "has_metrics",
    default=None,
    envvar="LLM_ARRAY_METRICS",
    help="Log lines that CloudWatch makes metrics of. Default: in AWS Batch's containers alone.",
)
@click.option("--engine-command", envvar="LLM_ARRAY_ENGINE_COMMAND", hidden=True, help="What to start as an engine.")
def run(
    *,
    run_uri: str | None,
    index: int | None,
    submission_id: str | None,
    engines: int | None,
    engine_args: tuple[str, ...],
    work_dir: str | None,
    engine_command: str | None,
    checkpoint_every_s: float,
    checkpoint_records: int,
    checkpoint_tag: str | None,
    hang_timeout_s: float,
    boot_timeout_s: float,
    record_timeout_s: float | None,
    has_metrics: bool | None,
) -> None:
    """Answer every record of one partition of RUN, a URI (default: LLM_ARRAY_RUN), and commit its output.

    Exits 0 if the output exists, by whomever it was made. Log lines go to standard output, one JSON object each.
    """
    try:
        settings = read_settings(
            run_uri=run_uri,
            index=index,
            submission_id=submission_id,
            engines=engines,
            engine_args=engine_args,
            work_dir=work_dir,
            engine_command=tuple(shlex.split(engine_command)) if engine_command else DEFAULT_COMMAND,
            environment=os.environ,
            checkpoint_policy=CheckpointPolicy(
                every_s=checkpoint_every_s, record_count=checkpoint_records, tag=checkpoint_tag
            ),
            limits=Limits(boot_s=boot_timeout_s, hang_s=hang_timeout_s, record_s=record_timeout_s),
            has_metrics=has_metrics,
        )
    except UsageError as error:
        raise click.UsageError(error.message if error.hint is None else f"{error.message}; {error.hint}") from error
    except ConfigError as error:
        sys.exit(report_failure(error))
    exit_code = run_worker(settings)
    # All is done and said: what comes now must not make another exit code of it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(exit_code)
