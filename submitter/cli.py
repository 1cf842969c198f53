"""The command line. `submit INPUT… --run URI …` is short for `submit run …`; the other commands stand beside it.

Imports of boto3, rich and the splitter wait until a command needs them: `submit --help` must be instant.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from submitter.batch_options import BatchFlags, batch_options, local_options
from submitter.doctor_options import DoctorRequest, doctor_options
from submitter.merge_options import MergeRequest, merge_options
from submitter.options import (
    RetryRequest,
    config_option,
    json_option,
    plan_options,
    processes_option,
    retry_options,
)
from submitter.output import Output, reported_errors, show_events
from submitter.settings import has_settings
from submitter.split import SplitRequest
from submitter.stage_request import StageRequest
from worker.contract.command_line import DefaultGroup
from worker.contract.errors import ExitCode, InterruptedRunError, UsageError


@click.group(
    cls=DefaultGroup,
    no_args_is_help=not has_settings(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="llm-array", message="llm-array %(version)s")
def cli() -> None:
    """Offline LLM inference over millions to billions of records, as AWS Batch array jobs of vLLM engines.

    \b
    submit in.jsonl --run s3://bucket/runs/r1 --model M --partitions 1000 --queue Q --job-definition D
    submit in.jsonl --run runs/try --model M --partitions 4 --local

    Options may also stand in submit.toml or in SUBMIT_* variables (SUBMIT_PARTITIONS=1000); the command line wins.
    """  # noqa: D301  click knows \b by itself


@cli.command(short_help="Split, plan and submit; may be left out: `submit INPUTS…`.")
@plan_options
@batch_options
@local_options
@config_option
@json_option
def run(
    *, request: SplitRequest | StageRequest, batch_flags: BatchFlags, local: bool, parallel: int, as_json: bool
) -> int:
    """Split the INPUTS, plan the run, and submit it: to AWS Batch, or with --local to this machine.

    An INPUT is a file (JSONL, Parquet, CSV or TSV), a folder, a glob, an s3:// object or prefix, or - for standard
    input; gz, zst, bz2 and xz are told by their bytes. --run, --model and --partitions are needed, and for AWS Batch
    --queue and --job-definition. The same command again submits nothing twice.

    --after RUN takes the output lines of another run in place of INPUTS, and its partitions: each is worked on once
    RUN has done it.
    """
    from submitter import running  # noqa: PLC0415

    output = Output(as_json=as_json)
    if local:
        return running.run_locally(request, batch_flags, parallel, output)
    return running.run_on_batch(request, batch_flags, output)


@cli.command(short_help="Write partitions and plan only.")
@plan_options
@config_option
@json_option
def split(*, request: SplitRequest | StageRequest, as_json: bool) -> int:
    """Write a run's partitions and its plan (run.json) from the INPUTS, and start nothing: `submit resume` does.

    INPUTS are as for `submit run`; --run, --model and --partitions are needed.
    """
    from submitter import running  # noqa: PLC0415

    return running.split_only(request, Output(as_json=as_json))


@cli.command(short_help="Register a job definition file if it has changed.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--image", metavar="URI", help="Fills ${IMAGE} in the file.")
@click.option("--job-role-arn", metavar="ARN", help="Fills ${JOB_ROLE_ARN}: what the worker may do.")
@click.option("--execution-role-arn", metavar="ARN", help="Fills ${EXECUTION_ROLE_ARN}: what starting it needs.")
@click.option(
    "--region", metavar="NAME", help="Fills ${AWS_REGION} and is where to register; default: of the AWS environment."
)
@json_option
def register(*, file: str, as_json: bool, region: str | None, **values: Any) -> int:
    """Register the job definition in FILE, if its content has changed since it was last registered."""
    from submitter.batch_client import open_batch  # noqa: PLC0415
    from submitter.job_definition import DefinitionValues  # noqa: PLC0415
    from submitter.job_definition import register as register_definition  # noqa: PLC0415

    found = register_definition(open_batch(region=region), file, DefinitionValues(region=None, **values))
    words = "registered" if found.outcome == "registered" else "unchanged, already registered"
    Output(as_json=as_json).document(found.to_dict(), [f"{found.name}:{found.revision} {words}"])
    return ExitCode.OK


@cli.command(short_help="Submit what is left of a run.")
@click.argument("run", metavar="RUN", envvar="SUBMIT_RUN")
@batch_options
@local_options
@config_option
@json_option
def resume(*, run: str, batch_flags: BatchFlags, local: bool, parallel: int, as_json: bool) -> int:
    """Submit the partitions of RUN that have no output yet: to AWS Batch, or with --local to this machine.

    It starts a run that was only planned (split, retry-failed), too. Partitions in jobs that have not ended are left
    alone. Queue and job definition are by default those of the run's last submission.
    """
    from submitter import resume as resuming  # noqa: PLC0415

    output = Output(as_json=as_json)
    if local:
        return resuming.resume_locally(run, batch_flags, parallel, output)
    return resuming.resume_on_batch(run, batch_flags, output)


@cli.command(short_help="Terminate the jobs of a run.")
@click.argument("run_uri", metavar="RUN")
@click.option(
    "--reason", metavar="TEXT", default="submit cancel", show_default=True, help="What AWS Batch shows as why."
)
@json_option
def cancel(*, run_uri: str, reason: str, as_json: bool) -> int:
    """Terminate every job of RUN on AWS Batch that has not ended. What is done is kept, and `submit resume` goes on.

    Running workers write down what they have finished. A run on this machine is ended by Ctrl-C.
    """
    from submitter.cancel import cancel_run  # noqa: PLC0415

    return cancel_run(run_uri, reason, Output(as_json=as_json))


@cli.command(short_help="Show how far a run is, what keeps it, and what failed.")
@click.argument("run_uri", metavar="RUN")
@click.option("--watch", is_flag=True, help="Look again and again, until nothing goes on any more.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=1),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: how often.",
)
@click.option(
    "--exact", is_flag=True, help="Read every manifest, where otherwise 200 tell errors, tokens and attempts."
)
@json_option
def status(*, run_uri: str, watch: bool, every_s: float, exact: bool, as_json: bool) -> int:
    """Show partitions by state, records, tokens per second, errors, attempts, time left, waits and failures of RUN.

    Exits 0 if RUN is done or goes on, 75 if partitions are left and nothing is at them. With --watch a line is printed
    when something has happened, on a terminal all is drawn anew; with --json each look is a line of JSON.
    """
    from submitter.status_watch import StatusRequest, show_status  # noqa: PLC0415

    request = StatusRequest(run_uri=run_uri, is_exact=exact, watch_every_s=every_s if watch else None)
    return show_status(request, Output(as_json=as_json))


@cli.command(short_help="Show the log of a partition.")
@click.argument("run_uri", metavar="RUN")
@click.option("--partition", type=click.IntRange(0), required=True, metavar="I", help="Its index, from 0.")
@click.option(
    "--attempt", type=click.IntRange(1), metavar="N", help="Which attempt of its job, from 1; default: the last."
)
@click.option("--submission", metavar="ID", help="Of which submission, such as 0002; default: the last that holds it.")
@click.option("--engine", is_flag=True, help="The engine's own output, too.")
@click.option("--follow", is_flag=True, help="Go on with what is logged from now on, until the attempt ends.")
@click.option("--tail", type=click.IntRange(1), metavar="N", help="The last N lines.")
@click.option("--json", "as_json", is_flag=True, help="Each line as one JSON object, as it was logged.")
def logs(*, run_uri: str, as_json: bool, **values: Any) -> int:
    """Show what the worker of one partition of RUN has logged: from CloudWatch, or of a local run from its files.

    Without --engine the worker's events alone, in words. Prompts and answers are never logged.
    """
    from submitter.logs import LogRequest, show_logs  # noqa: PLC0415

    return show_logs(LogRequest(run_uri=run_uri, **values), Output(as_json=as_json))


@cli.command(short_help="Recount a run against its plan.")
@click.argument("run_uri", metavar="RUN")
@processes_option
@json_option
def verify(*, run_uri: str, processes: int | None, as_json: bool) -> int:
    """Recount all records, results, errors and tokens of RUN, and all checksums, against its plan and manifests.

    Exits 0 if every partition is done and right, 65 if anything does not add up, and 75 if what is done adds up but
    partitions are left.
    """
    from submitter.verify import verify_run  # noqa: PLC0415

    return verify_run(run_uri, processes, Output(as_json=as_json))


@cli.command(short_help="Check credentials, bucket, queue, quotas, image and model before a run.")
@doctor_options
@config_option
@json_option
def doctor(*, request: DoctorRequest, as_json: bool) -> int:
    """Check what would keep a run from working: credentials, region, bucket, queues, job definition, quotas and model.

    INPUTS and options are as for `submit run`; what is not given is not looked at. Nothing is submitted, and nothing stays
    behind. Exits 78 if a check has failed, else 0.
    """
    from submitter.doctor import examine  # noqa: PLC0415

    return examine(request, Output(as_json=as_json))


@cli.command("retry-failed", short_help="Plan a new run of the records that failed.")
@retry_options
@json_option
def retry_failed(*, request: RetryRequest, as_json: bool) -> int:
    """Plan a NEW run from the records of RUN that ended as errors: their own bytes, in order, with RUN's settings.

    Like split it starts nothing: `submit resume NEW` does. RUN must be finished, unless --partial is given. The same
    command again changes nothing.
    """
    from submitter.retry_failed import retry_failed_run  # noqa: PLC0415

    return retry_failed_run(request, Output(as_json=as_json))


@cli.command(short_help="Put the outputs of a run into one file or object.")
@merge_options
@json_option
def merge(*, request: MergeRequest, as_json: bool) -> int:
    """Write the outputs of RUN, in input order, as one file or s3:// object: JSON lines, Parquet or CSV.

    RUN must be finished, unless --partial is given. What is there already is not replaced, unless --overwrite is.
    """
    from submitter.merge import merge_run  # noqa: PLC0415

    return merge_run(request, Output(as_json=as_json))


_AGAIN = "the same command again goes on from here"


def _raise_interrupted(number: int, _frame: object) -> None:
    raise InterruptedRunError(f"run command: stopped by {signal.Signals(number).name}", hint=_AGAIN)


def _check_arguments(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"read command line: {argument!r} is not UTF-8") from error


def main() -> None:
    """Run the command line and leave with its exit code."""
    with reported_errors(as_json="--json" in sys.argv):
        # Raised rather than fatal, so that what is half done is cleared away.
        signal.signal(signal.SIGTERM, _raise_interrupted)
        show_events()
        _check_arguments(sys.argv)
        try:
            answered = cli.main(prog_name="submit", standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            sys.exit(ExitCode.USAGE)
        except click.UsageError as error:
            help_of = error.ctx.command_path if error.ctx else "submit"
            raise UsageError(error.format_message(), hint=f"see {help_of} --help") from error
        except click.ClickException as error:
            raise UsageError(error.format_message()) from error
        except (click.Abort, KeyboardInterrupt) as error:
            raise InterruptedRunError("run command: stopped by SIGINT", hint=_AGAIN) from error
    sys.exit(answered)
