"""The options that commands share, and the dataclasses they travel in from the command line down."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import click

from submitter.batch_request import SubmitOptions
from submitter.click_options import decorated, option
from submitter.request_options import read_request_changes, read_requests, request_options
from submitter.settings import FileSettings, merged_table, read_file
from submitter.split import SplitRequest
from worker.contract.errors import UsageError
from worker.contract.layout import MAX_PARTITION_COUNT, normalize_uri
from worker.contract.output_line import STAGES
from worker.contract.pairs import read_pairs
from worker.contract.plan import Compression
from worker.contract.sampling import nearest

DEFAULT_ANSWER_KEY = "response"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFlags:
    """Where and how a run is submitted."""

    queue: str | None
    job_definition: str | None
    share: str | None
    priority: int | None
    timeout_s: int | None
    attempts: int | None
    tags: dict[str, str]
    environment: dict[str, str]
    """Variables for the workers."""
    dry_run: bool

    def refuse_dry_run(self) -> None:
        """Where no request is made that could be shown.

        Raises:
            UsageError: one was asked for.
        """
        if self.dry_run:
            raise UsageError(
                "read command line: --dry-run shows what AWS Batch would be asked, and --local asks nothing"
            )

    def submit_options(self) -> SubmitOptions:
        """The same, checked against Batch's limits.

        Raises:
            UsageError: the queue or the job definition is missing, or a value breaks a limit.
        """
        return SubmitOptions(
            job_queue=_required("queue", self.queue, "the job queue"),
            job_definition=_required("job-definition", self.job_definition, "name or name:revision"),
            share_identifier=self.share,
            scheduling_priority=self.priority,
            timeout_s=self.timeout_s,
            attempts=self.attempts,
            tags=self.tags,
            environment=self.environment,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRequest:
    """Which failed records make up a new run, and what is other in it than in the old one."""

    run_uri: str
    new_run_uri: str
    only: tuple[str, ...] = ()
    """Kinds of errors, as `stage` or `stage.code`; empty for all."""
    partial: bool = False
    """Take what there is of an unfinished run."""
    model: str | None = None
    partition_count: int | None = None
    """None: as many as make partitions about as large as the old run's."""
    compression: Compression | None = None
    engines: int | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Over the old run's, key by key; so is `sampling`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    answer_key: str | None = None
    requests: dict[str, Any] = field(default_factory=dict)
    """Fields of `RequestSettings` that are given."""
    process_count: int | None = None

    def __post_init__(self) -> None:
        for kind in self.only:
            stage = kind.partition(".")[0]
            if stage not in STAGES:
                meant = nearest(stage, STAGES)
                raise UsageError(
                    f"read --only: {kind!r} is no kind of error (expected STAGE or STAGE.CODE; stages are "
                    f"{', '.join(STAGES)})",
                    hint=f"did you mean {meant!r}?" if meant else None,
                )


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(command)


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--config`. Decorates first (stands lowest), so that the file's values are there before other options are read."""
    return click.option(
        "--config",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_load_file,
        help="Settings file; default: submit.toml in this folder, if there is one.",
    )(command)


def _load_file(ctx: click.Context, _param: click.Parameter, path: str | None) -> None:
    settings = read_file(path, _known_options())
    ctx.default_map = settings.values
    ctx.obj = settings


def _known_options() -> set[str]:
    """Every option of every command that takes a settings file: one file serves them all."""
    from submitter.cli import cli  # noqa: PLC0415  the commands import this module

    known = set()
    for command in cli.commands.values():
        names = {parameter.name for parameter in command.params if parameter.name}
        if any("--config" in parameter.opts for parameter in command.params):
            known |= names
    return known - {"config", "as_json", "dry_run", "engine_arg", "lora", "sampling", "tag"}


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that make up a `SplitRequest`, passed as `request`."""

    @functools.wraps(command)
    def wrapped(*args: Any, **values: Any) -> Any:
        settings = click.get_current_context().obj or FileSettings({}, {}, None)
        if not values["inputs"]:
            raise UsageError(
                "read command line: no INPUTS", hint="name files, folders, globs or s3:// URIs, or - for standard input"
            )
        request = SplitRequest(
            inputs=tuple(values.pop("inputs")),
            run_uri=normalize_uri(_required("run", values.pop("run"), "the run's URI")),
            model=_required("model", values.pop("model"), "a hub id or a path"),
            partition_count=_required("partitions", values.pop("partitions"), "how many parts"),
            shape=values.pop("shape"),
            compression=values.pop("compress"),
            on_invalid=values.pop("on_invalid"),
            on_duplicate_id=values.pop("on_duplicate_id"),
            engines=values.pop("engines"),
            engine_args=merged_table("engine-args", settings, values.pop("engine_arg")),
            sampling=merged_table("sampling", settings, values.pop("sampling")),
            answer_key=values.pop("answer_key"),
            requests=read_requests(values, settings),
            process_count=values.pop("split_processes"),
        )
        return command(*args, request=request, **values)

    return decorated(
        wrapped,
        click.argument("inputs", nargs=-1, metavar="INPUTS...", envvar="SUBMIT_INPUTS"),
        option("--run", metavar="URI", help="Where the run lives: s3://bucket/prefix or a folder."),
        option("--model", metavar="MODEL", help="A hub id, or a path as the worker sees it."),
        option(
            "--partitions",
            type=click.IntRange(1, MAX_PARTITION_COUNT),
            metavar="N",
            help=f"How many parts to split the input into, 1 to {MAX_PARTITION_COUNT:,}; arrays hold 10,000 each.",
        ),
        option(
            "--shape",
            type=click.Choice(["openai", "bedrock", "plain", "template"]),
            help="Shape of the input lines; default: that of the first records, or template where one is given.",
        ),
        option(
            "--compress",
            type=click.Choice(["none", "gz", "zst"]),
            default="none",
            show_default=True,
            help="Compression of partitions and outputs.",
        ),
        option(
            "--on-invalid",
            type=click.Choice(["refuse", "keep"]),
            default="refuse",
            show_default=True,
            help="Lines that are no JSON objects: submit nothing, or keep them as error lines in the outputs.",
        ),
        option(
            "--on-duplicate-id",
            type=click.Choice(["error", "keep"]),
            default="error",
            show_default=True,
            help="A custom_id or recordId given twice: submit nothing, or do each of its records.",
        ),
        option(
            "--engines",
            type=click.IntRange(1, 64),
            metavar="N",
            help="Engine processes per worker; default: GPUs ÷ tensor-parallel size, 1 without GPUs.",
        ),
        click.option(
            "--engine-arg",
            multiple=True,
            metavar="KEY=VALUE",
            help="An argument of vLLM's engine, such as max_model_len=4096. May be repeated.",
        ),
        click.option(
            "--sampling",
            multiple=True,
            metavar="KEY=VALUE",
            help="A default for records that leave it out, such as max_tokens=256. May be repeated.",
        ),
        option(
            "--answer-key",
            default=DEFAULT_ANSWER_KEY,
            show_default=True,
            metavar="NAME",
            help="The field that holds the answer in the outputs of plain records, and of a template's.",
        ),
        *request_options(),
        option(
            "--split-processes",
            type=click.IntRange(1, 256),
            metavar="N",
            help="Processes that split; default: one per core.",
        ),
    )


def batch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that make up a `BatchFlags`, passed as `batch_flags`."""

    @functools.wraps(command)
    def wrapped(*args: Any, **values: Any) -> Any:
        settings = click.get_current_context().obj or FileSettings({}, {}, None)
        names = {one.name for one in fields(BatchFlags)} - {"tags", "environment", "timeout_s"}
        flags = BatchFlags(
            tags=merged_table("tags", settings, values.pop("tag"), as_text=True),
            environment=merged_table("env", settings, values.pop("env"), as_text=True),
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
        option("--share", metavar="ID", help="Share identifier; fair-share queues need one."),
        option("--priority", type=click.IntRange(0, 9999), metavar="N", help="Scheduling priority within the share."),
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
        click.option(
            "--dry-run", is_flag=True, help="Print the exact SubmitJob requests as JSON; write and submit nothing."
        ),
    )


def retry_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that make up a `RetryRequest`, passed as `request`.

    Neither variables nor the settings file give them: what stands there is of the run that failed.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **values: Any) -> Any:
        request = RetryRequest(
            run_uri=normalize_uri(values.pop("failed_run")),
            new_run_uri=normalize_uri(values.pop("run")),
            only=values.pop("only"),
            partial=values.pop("partial"),
            model=values.pop("model"),
            partition_count=values.pop("partitions"),
            compression=values.pop("compress"),
            engines=values.pop("engines"),
            engine_args=read_pairs(values.pop("engine_arg"), "--engine-arg"),
            sampling=read_pairs(values.pop("sampling"), "--sampling"),
            answer_key=values.pop("answer_key"),
            requests=read_request_changes(values),
            process_count=values.pop("processes"),
        )
        return command(*args, request=request, **values)

    return decorated(
        wrapped,
        click.argument("failed_run", metavar="RUN"),
        click.option("--run", required=True, metavar="NEW", help="Where the new run lives."),
        click.option(
            "--only",
            multiple=True,
            metavar="STAGE[.CODE]",
            help="Records with errors of this kind alone, such as engine or length.prompt_too_long. May be repeated.",
        ),
        click.option("--partial", is_flag=True, help="Take what has failed so far of an unfinished run."),
        click.option("--model", metavar="MODEL", help="Another model."),
        click.option(
            "--partitions",
            type=click.IntRange(1, MAX_PARTITION_COUNT),
            metavar="N",
            help="How many parts; default: parts about as large as RUN's.",
        ),
        click.option("--compress", type=click.Choice(["none", "gz", "zst"]), help="Another compression."),
        click.option(
            "--engines", type=click.IntRange(1, 64), metavar="N", help="Another number of engines per worker."
        ),
        click.option(
            "--engine-arg", multiple=True, metavar="KEY=VALUE", help="Over RUN's engine arguments. May be repeated."
        ),
        click.option(
            "--sampling", multiple=True, metavar="KEY=VALUE", help="Over RUN's sampling defaults. May be repeated."
        ),
        click.option("--answer-key", metavar="NAME", help="Another field for the answers of plain records."),
        *request_options(for_retry=True),
        processes_option,
    )


def processes_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--processes", type=click.IntRange(1, 256), metavar="N", help="Processes that read; default: one per core."
    )(command)


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


def _required(name: str, value: Any, what: str) -> Any:
    if value is None:
        raise UsageError(
            f"read command line: --{name} is missing ({what})",
            hint=f"give --{name}, set SUBMIT_{name.upper().replace('-', '_')}, or write it into submit.toml"
            + ("; --local needs none, and runs the workers on this machine" if name == "queue" else ""),
        )
    return value
