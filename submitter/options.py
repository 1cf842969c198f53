"""The options that commands share, and the dataclasses they travel in from the command line down."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import click

from submitter.click_options import decorated, option, required
from submitter.request_options import read_request_changes, read_requests, request_options
from submitter.settings import FileSettings, merged_table, read_file
from submitter.split import SplitRequest
from submitter.stage_request import StageRequest
from worker.contract.errors import UsageError
from worker.contract.layout import MAX_PARTITION_COUNT, RunLayout, normalize_uri
from worker.contract.output_line import STAGES
from worker.contract.pairs import read_pairs
from worker.contract.plan import Compression
from worker.contract.sampling import nearest

DEFAULT_ANSWER_KEY = "response"
COMMANDLINE = click.core.ParameterSource.COMMANDLINE


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
    revision: str | None = None
    """None: the old run's, of the same model."""
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
    """Options that make up a `SplitRequest`, or with `--after` a `StageRequest`, passed as `request`."""

    @functools.wraps(command)
    def wrapped(*args: Any, **values: Any) -> Any:
        settings = click.get_current_context().obj or FileSettings({}, {}, None)
        inputs, partition_count, after = _read_inputs(values)
        request = SplitRequest(
            inputs=inputs,
            run_uri=normalize_uri(required("run", values.pop("run"), "the run's URI")),
            model=required("model", values.pop("model"), "a hub id, an s3:// prefix or a path"),
            revision=values.pop("revision"),
            partition_count=partition_count or 1,
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
        if after is None:
            return command(*args, request=request, **values)
        stage = StageRequest(after=after, partition_count=partition_count, settings=request)
        return command(*args, request=stage, **values)

    return decorated(
        wrapped,
        click.argument("inputs", nargs=-1, metavar="INPUTS...", envvar="SUBMIT_INPUTS"),
        click.option(
            "--after",
            metavar="RUN",
            help="In place of INPUTS: the output lines of another run, which need not be finished.",
        ),
        option("--run", metavar="URI", help="Where the run lives: s3://bucket/prefix or a folder."),
        option("--model", metavar="MODEL", help="A hub id, an s3:// prefix, or a path as the worker sees it."),
        option(
            "--revision",
            metavar="REV",
            help="A commit, branch or tag of a hub's model; default: what is current. The plan keeps the commit.",
        ),
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
            revision=values.pop("revision"),
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
        click.option("--revision", metavar="REV", help="Another revision; default: that of RUN's plan."),
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


def _read_inputs(values: dict[str, Any]) -> tuple[tuple[str, ...], int | None, str | None]:
    """What is to be read, in how many partitions (None: as many as the run before has), and the run before, if it is one."""
    inputs, partition_count, after = tuple(values.pop("inputs")), values.pop("partitions"), values.pop("after")
    if after is not None:
        context = click.get_current_context()
        given = {name for name in ("inputs", "partitions") if context.get_parameter_source(name) is COMMANDLINE}
        if "inputs" in given:
            raise UsageError(
                "read command line: INPUTS and --after (expected one of them)",
                hint=f"--after reads the outputs of {after} and nothing else",
            )
        # What a settings file has of them is the first stage's.
        run_uri = normalize_uri(after)
        return (RunLayout(run_uri).outputs,), partition_count if "partitions" in given else None, run_uri
    if not inputs:
        raise UsageError(
            "read command line: no INPUTS", hint="name files, folders, globs or s3:// URIs, or - for standard input"
        )
    return inputs, required("partitions", partition_count, "how many parts"), None


def processes_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--processes", type=click.IntRange(1, 256), metavar="N", help="Processes that read; default: one per core."
    )(command)
