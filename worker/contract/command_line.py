"""What both command lines share."""

from __future__ import annotations

import re
from pathlib import Path

import click

from worker.contract.sampling import nearest

PARENT_VARIABLE = "LLM_ARRAY_PARENT_PID"
"""Set by who wants its workers to end with it, to its own pid: `submit --local` does."""


class DefaultGroup(click.Group):
    """A group whose first word may be left out: what is neither a command nor an option of its own belongs to `run`."""

    default_command = "run"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        is_named = bool(args) and (args[0] in self.commands or args[0] in own)
        if not is_named and args:
            self._refuse_mistyped(ctx, args[0])
        if not is_named and not (not args and self.no_args_is_help):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def _refuse_mistyped(self, ctx: click.Context, word: str) -> None:
        """A word that could be a command, and is neither one nor a file here, is more likely a mistake than a place."""
        if not re.fullmatch(r"[a-z]+(-[a-z]+)*", word) or Path(word).exists():
            return
        meant = nearest(word, self.commands)
        raise click.UsageError(
            f"{word!r} is neither a command nor a file here" + (f"; did you mean {meant!r}?" if meant else ""), ctx
        )
