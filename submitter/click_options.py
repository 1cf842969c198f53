"""How options are put on commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

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
