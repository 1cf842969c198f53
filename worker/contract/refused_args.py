"""Engine arguments that vLLM knows, and that would be a promise nobody keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REFUSED_ARGS = {
    "model": "the run names it",
    "skip_tokenizer_init": "answers are text",
    "data_parallel_size": "engines are the data parallelism: see --engines",
}
"""Why not, by name."""

_UNSET: tuple[Any, ...] = (None, False, 1, "")


def refusal_of(engine_args: Mapping[str, Any]) -> str | None:
    """What is wrong with the first that is refused; None if none is. Values that ask for nothing are not."""
    for name, value in engine_args.items():
        if name in REFUSED_ARGS and value not in _UNSET:
            return f"read engine argument {name!r}: it cannot be set ({REFUSED_ARGS[name]})"
    return None
