"""What `submit merge` is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from submitter.json_path import Selection
from submitter.merge_target import FORMATS, Target
from submitter.options import processes_option
from worker.contract.errors import UsageError
from worker.contract.layout import normalize_uri


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRequest:
    """What is merged, into what."""

    run_uri: str
    target: Target
    errors: Target | None = None
    """Where error lines go; None: to the target, in their places."""
    select: tuple[str, ...] = ()
    """JSONPaths of what is kept of each line of the target; empty: all."""
    partial: bool = False
    """Take what there is of an unfinished run."""
    overwrite: bool = False
    process_count: int | None = None

    def __post_init__(self) -> None:
        if self.errors is not None and self.errors.uri == self.target.uri:
            raise UsageError(f"read --errors: {self.errors.uri} is where the results go (expected another place)")
        if self.select:
            selection = Selection.parse(self.select)
            if self.target.form != "jsonl":
                # A path's name is its column's.
                selection.require_names()


def merge_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that make up a `MergeRequest`, passed as `request`."""

    @functools.wraps(command)
    def wrapped(*args: Any, **values: Any) -> Any:
        format_name, errors_uri = values.pop("format_name"), values.pop("errors")
        target = Target.of(values.pop("output"), "--output", format_name)
        request = MergeRequest(
            run_uri=normalize_uri(values.pop("run_uri")),
            target=target,
            errors=None if errors_uri is None else Target.of(errors_uri, "--errors", format_name),
            select=values.pop("select"),
            partial=values.pop("partial"),
            overwrite=values.pop("overwrite"),
            process_count=values.pop("processes"),
        )
        return command(*args, request=request, **values)

    decorators = (
        click.argument("run_uri", metavar="RUN"),
        click.option("-o", "--output", required=True, metavar="URI", help="The file or s3:// object to write."),
        click.option("--errors", metavar="URI", help="Write error lines there, and results alone to the output."),
        click.option(
            "--format",
            "format_name",
            type=click.Choice(FORMATS),
            help="Of all that is written; default: by each name's ending, else jsonl.",
        ),
        click.option(
            "--select",
            multiple=True,
            metavar="PATH",
            help="What is kept of each line of the output: a JSONPath such as $['id','response']. May be repeated.",
        ),
        click.option("--partial", is_flag=True, help="Take what there is of an unfinished run."),
        click.option("--overwrite", is_flag=True, help="Replace what is there."),
        processes_option,
    )
    decorated: Callable[..., Any] = wrapped
    for decorate in reversed(decorators):
        decorated = decorate(decorated)
    return decorated
