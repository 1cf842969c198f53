"""How options are put on commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from worker.contract.errors import UsageError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(*names: str, **attributes: Any) -> Decorator:
    """An option that `SUBMIT_<NAME>` and the settings file can give too."""
    variable = "SUBMIT_" + names[0].partition("/")[0].removeprefix("--").upper().replace("-", "_")
    return click.option(*names, envvar=variable, **attributes)


def decorated(command: Callable[..., Any], *decorators: Decorator) -> Callable[..., Any]:
    """The command with all of them, in the order that its help has them in."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def required(name: str, value: Any, what: str) -> Any:
    """The value of an option that a command cannot do without.

    Raises:
        UsageError: it is not given. Says how it can be.
    """
    if value is None:
        raise UsageError(
            f"read command line: --{name} is missing ({what})",
            hint=f"give --{name}, set SUBMIT_{name.upper().replace('-', '_')}, or write it into submit.toml"
            + ("; --local needs none, and runs the workers on this machine" if name == "queue" else ""),
        )
    return value
