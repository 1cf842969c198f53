"""The notice that a Spot host is about to be taken back, asked for from the instance metadata service (IMDS).

AWS Batch does not forward it: nobody but the worker itself tells the worker. Two minutes are left when it comes. All that
can go wrong here is logged once and changes nothing else.
"""

from __future__ import annotations

import http.client
import logging
import threading
from types import TracebackType
from typing import Self

import msgspec

from worker.contract.logs import log_event
from worker.interrupt import Interrupt
from worker.metadata import Metadata

REASON = "spot_interruption"

POLL_S = 5.0
ATTEMPT_COUNT = 3
"""So many failures in a row at the start mean that there is no such service here."""

_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"

logger = logging.getLogger(__name__)


class _Action(msgspec.Struct, frozen=True):
    action: str
    time: str = ""


class SpotWatch:
    """Between entering and leaving, a thread asks every few seconds and passes a notice on to an `Interrupt`."""

    def __init__(self, endpoint: str | None, interrupt: Interrupt, poll_s: float = POLL_S) -> None:
        """Prepare.

        Args:
            endpoint: base URL of the service. None: nothing is asked, ever.
            interrupt: what is told.
            poll_s: pause between questions.
        """
        self._endpoint = endpoint
        self._interrupt = interrupt
        self._poll_s = poll_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(endpoint,), name="spot", daemon=True)

    def __enter__(self) -> Self:
        if self._endpoint is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()

    def join(self, limit_s: float) -> None:
        """Wait until nothing is asked any more."""
        self._thread.join(limit_s)

    def _run(self, endpoint: str) -> None:
        service, has_answered, failure_count, is_rebalance_known = Metadata(endpoint), False, 0, False
        while not self._is_over.is_set():
            try:
                notice = service.get(_ACTION_PATH)
                if notice is not None:
                    self._pass_on(notice)
                    return
                if not is_rebalance_known and service.get(_REBALANCE_PATH) is not None:
                    is_rebalance_known = True
                    log_event(logger, logging.WARNING, "spot.rebalance_recommended")
                has_answered, failure_count = True, 0
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure_count += 1
                if failure_count == ATTEMPT_COUNT:
                    cause = f"{type(error).__name__}: {error}"
                    log_event(logger, logging.INFO, "spot.unwatched", endpoint=endpoint, cause=cause)
                if failure_count >= ATTEMPT_COUNT and not has_answered:
                    return
            self._is_over.wait(self._poll_s)

    def _pass_on(self, notice: bytes) -> None:
        try:
            found = msgspec.json.decode(notice, type=_Action)
        except msgspec.MsgspecError:
            # That there is one is all that matters.
            found = _Action(action="unknown")
        log_event(logger, logging.WARNING, "spot.interruption_noticed", action=found.action, at=found.time)
        self._interrupt.request(REASON, f"a Spot notice ({found.action} at {found.time or 'an unknown time'})")
