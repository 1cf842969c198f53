"""What pins a run's model and adapters: found at planning, so that every worker of the run loads the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from worker.contract.errors import ArrayError, ConfigError, InputError, StorageError
from worker.contract.hub import ANSWER_S, HubError, ask_hub, cached_commit, is_commit, is_offline
from worker.contract.model_place import (
    Content,
    digest_of,
    is_on_s3,
    is_path,
    list_objects,
    local_path,
    missing_file,
)
from worker.contract.store import open_store

DEFAULT_REVISION = "main"
_PIN_HINT = "--revision COMMIT, all 40 digits of it, plans the run without asking the hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """As the plan has them."""

    model: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)


def find_pins(
    model: str, revision: str | None, adapters: Mapping[str, str], adapter_revisions: Mapping[str, str]
) -> Pins:
    """Ask each place what it holds now.

    Args:
        model: a hub's id, an `s3://` prefix, or a path: what is here is one, and what can be no hub's id.
        revision: what the user wants; None for whatever is current.
        adapters: places by name.
        adapter_revisions: those of adapters that are known already.

    Raises:
        InputError: there is no model, or another one than the revision says.
        ConfigError: this machine may not see it.
        StorageError: no answer, after retries.
    """
    return Pins(
        model=_pin("model", model, revision),
        adapters={
            name: pin
            for name, place in adapters.items()
            if (pin := _pin("adapter", place, adapter_revisions.get(name)))
        },
    )


def check_is_here(model: str) -> None:
    """See that a model that is a path is on this machine, where its workers are to run.

    Raises:
        InputError: it is not.
    """
    if is_path(model) and not local_path(model).is_dir():
        raise no_folder(model)


def no_folder(model: str) -> InputError:
    return InputError(
        f"find model {model}: there is no such folder on this machine, where the workers are to run",
        hint=f"is it spelt right? Relative paths are taken from {Path.cwd()}",
    )


def _pin(content: Content, place: str, revision: str | None) -> str | None:
    if is_path(place):
        return None
    if is_on_s3(place):
        return _digest(content, place, revision)
    if revision is not None and is_commit(revision):
        return revision
    what = f"find {content} {place}"
    if is_offline():
        return _cached(what, place, revision)
    try:
        return ask_hub(what, partial(_commit, place, revision))
    except HubError as error:
        raise _error_for(what, content, revision, error) from error


def _digest(content: Content, place: str, revision: str | None) -> str:
    found = list_objects(open_store(place), place, content)
    if missing := missing_file(content, found):
        raise InputError(
            f"find {content} at {place}: {missing} is missing", hint="name the prefix that holds the model's files"
        )
    digest = digest_of(found)
    if revision is not None and digest != revision:
        raise InputError(
            f"find {content} at {place}: its objects have changed (expected revision {revision}, got {digest})",
            hint="plan a run from the inputs to use them as they are now",
        )
    return digest


def _cached(what: str, place: str, revision: str | None) -> str:
    found = cached_commit(place, revision or DEFAULT_REVISION)
    if found is None:
        raise InputError(
            f"{what}: it is not in the hub's cache on this machine, and HF_HUB_OFFLINE is set",
            hint=f"unset it; or {_PIN_HINT}",
        )
    return found


def _commit(place: str, revision: str | None) -> str:
    from huggingface_hub import HfApi  # noqa: PLC0415  takes 0.4 s

    hub = HfApi(library_name="llm-array")
    found = hub.model_info(place, revision=revision, timeout=ANSWER_S)
    if found.gated:
        # Everybody may see that it is there; its files are another matter.
        hub.auth_check(place)
    if found.sha is None:
        raise HubError("no_revision", "the answer names no commit")
    return found.sha


def _error_for(what: str, content: Content, revision: str | None, error: HubError) -> ArrayError:
    elsewhere = "" if content == "adapter" else f"; where only the workers have one, {_PIN_HINT}"
    match error.refusal:
        case "missing":
            return InputError(
                f"{what}: it is neither a path here nor on the hub, as far as this machine may see ({error.detail})",
                hint=f"is it spelt right? A private one needs HF_TOKEN{elsewhere}",
            )
        case "no_revision":
            return InputError(
                f"{what}: the hub has no revision {revision or DEFAULT_REVISION!r} of it ({error.detail})"
            )
        case "gated":
            return ConfigError(
                f"{what}: it is gated, and this machine may not read it ({error.detail})",
                hint=f"accept its terms on the hub, and set HF_TOKEN{elsewhere}",
            )
        case "refused":
            return ConfigError(f"{what}: the hub refuses ({error.detail})", hint="is HF_TOKEN right?")
        case "silent":
            return StorageError(
                f"{what}: no answer from the hub ({error.detail}), and there is no such folder here",
                hint=f"for a folder, check the path: it is taken from {Path.cwd()}"
                + ("" if content == "adapter" else f"; {_PIN_HINT}"),
            )
