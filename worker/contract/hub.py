"""Questions to a model hub, by its own client: under this project's retry policy, and with answers in a few words.

The client reads `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

ANSWER_S = 30.0
"""How long the hub may take to answer a question."""

Refusal = Literal["missing", "gated", "no_revision", "refused", "silent"]
Answer = TypeVar("Answer")

is_commit = re.compile(r"[0-9a-f]{40}").fullmatch

_TRANSIENT_STATUSES = (408, 425, 429, 500, 502, 503, 504)


class HubError(Exception):
    """The hub does not give what was asked for, also after retries."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(detail)
        self.refusal = refusal
        """`missing` is also what a hub says of a private repository, and of an unknown file."""
        self.detail = detail


class UnansweredError(ConnectionError):
    """No answer, or one that may be better a little later."""


def ask_hub(operation: str, ask: Callable[[], Answer]) -> Answer:
    """What a call of the hub's client gives; it is made again where that may help.

    Args:
        operation: what is asked, for the log.
        ask: safe to be called twice.

    Raises:
        HubError: see there.
        OSError: of this machine's own files.
    """
    from worker.contract.retry import call_with_retries  # noqa: PLC0415  loads botocore

    try:
        return call_with_retries(operation, lambda: _asked(ask))
    except UnansweredError as error:
        raise HubError("silent", str(error)) from error


def _asked(ask: Callable[[], Answer]) -> Answer:
    import httpx2  # noqa: PLC0415  this and the client itself take 0.4 s
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return ask()
    except OfflineModeIsEnabled as error:
        raise HubError("silent", "HF_HUB_OFFLINE is set") from error
    except GatedRepoError as error:
        raise HubError("gated", _status(error)) from error
    except RevisionNotFoundError as error:
        raise HubError("no_revision", _status(error)) from error
    except LocalEntryNotFoundError as error:
        # So the client says that it has nobody to ask.
        raise UnansweredError(type(error.__cause__ or error).__name__) from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise HubError("missing", _status(error)) from error
    except HfHubHTTPError as error:
        if error.response.status_code in _TRANSIENT_STATUSES:
            raise UnansweredError(_status(error)) from error
        raise HubError("refused", _status(error)) from error
    except httpx2.HTTPError as error:
        raise UnansweredError(type(error).__name__) from error


def _status(error: Exception) -> str:
    response = getattr(error, "response", None)
    return type(error).__name__ if response is None else f"HTTP {response.status_code}"


def is_offline() -> bool:
    """Whether the user has forbidden to ask the hub, in the client's own way."""
    found = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return found.upper() in ("1", "ON", "TRUE", "YES")


def cached_commit(hub_id: str, revision: str) -> str | None:
    """The commit that a branch or tag was when the hub's client last fetched it to this machine."""
    try:
        return _cache_folder(hub_id).joinpath("refs", revision).read_text(encoding="ascii").strip()
    except OSError:
        return None


def cached_snapshot(hub_id: str, commit: str) -> Path | None:
    """The folder in the client's own cache that holds files of a commit: all of them, or some."""
    found = _cache_folder(hub_id) / "snapshots" / commit
    return found if found.is_dir() else None


def _cache_folder(hub_id: str) -> Path:
    from huggingface_hub import constants  # noqa: PLC0415

    return Path(constants.HF_HUB_CACHE, f"models--{hub_id.replace('/', '--')}")
