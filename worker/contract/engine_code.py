"""Engine arguments by which vLLM loads code that is not its own.

They stand in `run.json`, and whoever may write below a run's prefix could put them there. Code is therefore allowed by
the worker's environment alone, which belongs to the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from worker.contract.errors import ConfigError

ALLOW_VARIABLE = "LLM_ARRAY_ALLOW_CODE"

CODE_ARGS = frozenset(
    {
        "io_processor_plugin",
        "log_config_file",  # Python's own format: it calls what it names
        "logging_config",
        "logits_processors",
        "model_class_overrides",
        "reasoning_parser_plugin",
        "scheduler_cls",
        "tool_parser_plugin",
        "trust_remote_code",
        "worker_cls",
        "worker_extension_cls",
    }
)

_UNSET: tuple[Any, ...] = (None, False, "", "auto", [], {})
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_MODULE_KEYS = ("module_path", "module", "_cls", "_class", "_plugin")
"""Endings of what names a module, a class or a file of code, with or without a dot in it, as `kv_connector_module_path`
does."""
_OPERATOR_LISTS = frozenset({"splitting_ops"})
"""Names of vLLM's own operators look like those of modules."""


def code_args(engine_args: Mapping[str, Any]) -> list[str]:
    """Names of the arguments that bring code: those made for it, and those with the name of a module somewhere inside."""
    return sorted(
        name
        for name, value in engine_args.items()
        if (name in CODE_ARGS and value not in _UNSET) or (_may_nest(name, value) and any(_modules(value)))
    )


def check_code_args(engine_args: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """See that the environment allows what the arguments ask for.

    Raises:
        ConfigError: it does not.
    """
    found = code_args(engine_args)
    if found and environment.get(ALLOW_VARIABLE) != "1":
        raise ConfigError(
            f"read engine argument {found[0]!r}: it runs code that is not vLLM's own, and workers are not told to",
            hint=f"if that code is trusted: submit … --env {ALLOW_VARIABLE}=1; by hand set the variable",
        )


def _may_nest(name: str, value: Any) -> bool:
    return isinstance(value, dict) or name == "distributed_executor_backend"


def _modules(value: Any) -> Iterator[str]:
    if isinstance(value, str) and _DOTTED.fullmatch(value):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            if one not in _UNSET and (name in CODE_ARGS or name.endswith(_MODULE_KEYS)):
                yield name
            elif name not in _OPERATOR_LISTS:
                yield from _modules(one)
    elif isinstance(value, list):
        for one in value:
            yield from _modules(one)
