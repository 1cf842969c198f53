"""From records to results: engines are fed, watched, and restarted a few times; every record gets its answer.

Engines boot while the partition is fetched. What goes wrong with one engine costs no record: see `dispatch.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from worker.checkpoint import Checkpoint
from worker.contract.errors import EngineBootError, EnginesDiedError
from worker.contract.logs import log_event
from worker.contract.manifest import EngineReport
from worker.dispatch import Dispatcher, ProtocolViolationError
from worker.figures import Figures
from worker.interrupt import Interrupt
from worker.partition_reader import PartitionReader
from worker.pool import Death, EnginePool, Event
from worker.protocol import Boot, BootFailed, Item, Progress, Ready, Result, Results, Work
from worker.restarts import Boots, RestartBudget
from worker.settings import BOOT_TIMEOUT_S, HANG_TIMEOUT_S
from worker.spool import joined
from worker.watch import EngineWatch

POLL_S = 1.0
KILLER_ERROR = "engine.engine_killer"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    restart_count: int = 3
    """Engine restarts without enough good work in between: see `RestartBudget`."""
    boot_s: float = BOOT_TIMEOUT_S
    """What an engine gets to start."""
    hang_s: float = HANG_TIMEOUT_S
    """What it gets from one progress to the next."""
    progress_every_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What is known of the work once all records are answered."""

    input_checksum: str
    """Of the partition as it was read."""
    engines: tuple[EngineReport, ...]
    versions: Mapping[str, str]
    boot_s: float
    generate_s: float


class Generation:
    """One partition's work with a pool of engines, which it starts. Whoever made the pool stops it."""

    def __init__(
        self,
        *,
        pool: EnginePool,
        boots: Sequence[Boot],
        environments: Sequence[Mapping[str, str]],
        load: Callable[[], PartitionReader],
        killer_line: Callable[[Item], bytes],
        checkpoint: Checkpoint,
        figures: Figures,
        interrupt: Interrupt,
        tuning: Tuning,
    ) -> None:
        """Prepare.

        Args:
            pool: without engines; its `poll` ends when `interrupt` wakes.
            boots: one per engine, in the order of their indices.
            environments: likewise.
            load: fetches the partition; called in another thread.
            killer_line: the output line for a record that kills engines.
            checkpoint: takes the results, and knows those of earlier attempts. Not opened yet.
            figures: of this work, for metrics.
            interrupt: asks to stop.
            tuning: budget and intervals.
        """
        self._pool = pool
        self._boots = Boots(boots)
        self._environments = environments
        self._load = load
        self._killer_line = killer_line
        self._checkpoint = checkpoint
        self._figures = figures
        self._interrupt = interrupt
        self._tuning = tuning
        self._dispatcher = Dispatcher(len(boots))
        self._loading: Future[tuple[PartitionReader, bytearray]] = Future()
        self._reader: PartitionReader | None = None
        self._ready: dict[int, Ready] = {}
        self._record_counts: Counter[int] = Counter()
        self._last_cause = ("", "")
        self._watch = EngineWatch(tuning.boot_s, tuning.hang_s)
        self._budget = RestartBudget(tuning.restart_count)
        self._started = time.monotonic()
        self._first_ready: float | None = None
        self._shown_at = self._started
        self._has_said_model = False
        self._shown_tokens = 0

    def run(self) -> Generated:
        """Work until every record is answered.

        Raises:
            EngineBootError: no engine has ever been ready, and one has failed.
            EnginesDiedError: no engine is left, nor a restart.
            InputError: the partition is not what the plan says.
            InterruptedRunError: a signal came.
            StorageError: the partition cannot be read, or the local disk is full.
        """
        threading.Thread(target=self._load_in_background, name="load", daemon=True).start()
        try:
            for boot in self._boots.all:
                self._start(boot)
            while not self._dispatcher.is_done:
                for event in self._pool.poll(POLL_S):
                    self._handle(event)
                self._interrupt.check()
                self._abort_hung()
                self._take_loaded()
                self._checkpoint.save_if_due()
                self._feed()
                self._restart()
                self._report_progress()
                self._figures.emit_if_due()
        finally:
            if self._reader:
                self._reader.close()
        return self._generated()

    def _load_in_background(self) -> None:
        try:
            reader = self._load()
            self._loading.set_result((reader, self._checkpoint.open()))
        except BaseException as error:  # noqa: BLE001  raised again in the main thread
            self._loading.set_exception(error)
        self._interrupt.wake()

    def _take_loaded(self) -> None:
        if self._reader is None and self._loading.done():
            self._reader, done = self._loading.result()
            self._dispatcher.load(self._reader.offsets, done)
            self._shown_tokens = self._checkpoint.tally.tokens.completion_tokens
            self._figures.loaded(self._checkpoint)
            log_event(
                logger,
                logging.INFO,
                "partition.loaded",
                record_count=self._reader.record_count,
                done_count=self._dispatcher.answered_count,
                size_bytes=self._reader.offsets[-1],
                load_s=round(time.monotonic() - self._started, 3),
            )

    def _start(self, boot: Boot) -> None:
        environment = self._environments[boot.engine_index]
        pid = self._pool.start(boot, environment)
        self._watch.started(boot.engine_index)
        self._figures.engine_started(boot.engine_index)
        log_event(
            logger,
            logging.INFO,
            "engine.started",
            engine_index=boot.engine_index,
            pid=pid,
            devices=environment.get("CUDA_VISIBLE_DEVICES"),
        )

    def _handle(self, event: Event) -> None:
        if isinstance(event, Death):
            self._on_death(event)
            return
        if self._pool.is_condemned(event.engine_index):
            return
        try:
            match event.message:
                case Results(items):
                    self._on_results(event.engine_index, items)
                case Ready():
                    self._on_ready(event.engine_index, event.message)
                case BootFailed():
                    self._on_boot_failed(event.engine_index, event.message)
                case Progress():
                    self._watch.stepped(event.engine_index, event.message.step_count)
                    self._figures.engine_progressed(event.engine_index, event.message)
        except ProtocolViolationError as error:
            self._pool.kill(event.engine_index, str(error))

    def _on_ready(self, engine_index: int, ready: Ready) -> None:
        self._dispatcher.add(engine_index, ready.window)
        self._watch.ready(engine_index)
        self._ready[engine_index] = ready
        if self._first_ready is None:
            self._first_ready = self._shown_at = time.monotonic()
            self._figures.engine_ready(self._first_ready - self._started)
        log_event(
            logger,
            logging.INFO,
            "engine.ready",
            engine_index=engine_index,
            boot_s=round(ready.boot_s, 3),
            window=ready.window,
            resolved=ready.resolved,
        )

    def _on_boot_failed(self, engine_index: int, failure: BootFailed) -> None:
        smaller = self._boots.halve(engine_index, failure)
        if smaller is not None:
            log_event(
                logger,
                logging.WARNING,
                "engine.batch_halved",
                engine_index=engine_index,
                tried=failure.max_num_seqs,
                max_num_seqs=smaller,
                cause=failure.message,
            )
        elif self._first_ready is None:
            raise EngineBootError(failure.message, hint=failure.hint)
        # It is replaced: at once, or where others run while the budget lasts.
        self._pool.kill(engine_index, failure.message)

    def _on_results(self, engine_index: int, results: Sequence[Result]) -> None:
        ordinals = [result.ordinal for result in results]
        block = joined([result.line for result in results])
        # Whoever answers before there is a question is found out here.
        self._dispatcher.answered(engine_index, ordinals)
        self._watch.answered(engine_index)
        self._checkpoint.add(results, block)
        self._record_counts[engine_index] += len(results)
        if not self._has_said_model and any(result.names_other_model for result in results):
            self._has_said_model = True
            log_event(
                logger,
                logging.WARNING,
                "record.names_other_model",
                model=self._boots.all[0].model,
                hint="the run's model answers whatever a record names: --strict-model makes such records errors",
            )

    def _abort_hung(self) -> None:
        for engine_index, reason in self._watch.hung(self._dispatcher.in_flight_count).items():
            log_event(logger, logging.WARNING, "engine.hung", engine_index=engine_index, cause=reason)
            self._pool.abort(engine_index, reason)

    def _on_death(self, death: Death) -> None:
        self._watch.ended(death.engine_index)
        if self._boots.take_retry(death.engine_index):
            self._start(self._boots.all[death.engine_index])
            return
        cause = death.describe()
        # Killed from outside says nothing against the engine: the host was short of memory, perhaps only for now.
        is_killed = death.signal_name == "SIGKILL" and not death.reason
        if self._first_ready is None and not (is_killed and self._budget.left):
            raise EngineBootError(
                f"boot engine {death.engine_index}: it ended before it was ready ({cause})", hint=_hint_for(death)
            )
        window = max((ready.window for ready in self._ready.values()), default=1)
        record_count = self._reader.record_count if self._reader else 0
        self._budget.died(self._dispatcher.answered_count, window, record_count)
        log_event(
            logger,
            logging.WARNING,
            "engine.died",
            engine_index=death.engine_index,
            pid=death.pid,
            exit_code=death.exit_code,
            signal=death.signal_name,
            cause=cause,
            in_flight_count=self._dispatcher.in_flight_count(death.engine_index),
            restarts_left=self._budget.left,
        )
        killer = self._dispatcher.remove(death.engine_index)
        if killer is not None:
            self._answer_killer(killer)
            if not death.reason:
                self._budget.killer_found(self._dispatcher.answered_count)
        self._last_cause = (f"engine {death.engine_index}, {cause}", _hint_for(death))

    def _answer_killer(self, ordinal: int) -> None:
        assert self._reader
        (item,) = self._reader.items((ordinal,))
        log_event(
            logger,
            logging.WARNING,
            "record.rejected",
            ordinal=ordinal,
            input_index=item.input_index,
            line=item.line,
            error=KILLER_ERROR,
        )
        line = self._killer_line(item)
        self._checkpoint.add([Result(ordinal, KILLER_ERROR, 0, 0, 0, line)], joined([line]))

    def _restart(self) -> None:
        """Put back engines that are missing, as far as there is work for them and the budget goes."""
        running = self._pool.engine_indices
        for boot in self._boots.all:
            if boot.engine_index in running or not self._dispatcher.wants_engines:
                continue
            if self._budget.spend():
                self._start(boot)
            elif not self._pool.engine_indices:
                cause, hint = self._last_cause
                raise EnginesDiedError(
                    f"run engines: none is left after {self._tuning.restart_count} restarts; the last was {cause}",
                    hint=hint,
                )

    def _feed(self) -> None:
        if self._reader is None:
            return
        for engine_index in self._dispatcher.engine_indices:
            while self._pool.accepts_work(engine_index):
                ordinals = self._dispatcher.take(engine_index)
                if not ordinals:
                    break
                self._pool.send(engine_index, Work(self._reader.items(ordinals)))

    def _report_progress(self) -> None:
        now = time.monotonic()
        if self._reader is None or self._first_ready is None or now - self._shown_at < self._tuning.progress_every_s:
            return
        tally = self._checkpoint.tally
        tokens = tally.tokens
        log_event(
            logger,
            logging.INFO,
            "partition.progress",
            done_count=self._dispatcher.answered_count,
            record_count=self._reader.record_count,
            error_count=tally.error_count,
            prompt_tokens=tokens.prompt_tokens,
            completion_tokens=tokens.completion_tokens,
            output_tokens_per_s=round((tokens.completion_tokens - self._shown_tokens) / (now - self._shown_at), 1),
        )
        self._shown_at, self._shown_tokens = now, tokens.completion_tokens

    def _generated(self) -> Generated:
        assert self._reader
        now = time.monotonic()
        first_ready = self._first_ready or now
        return Generated(
            input_checksum=self._reader.checksum,
            engines=tuple(
                EngineReport(
                    engine_index=engine_index,
                    boot_s=ready.boot_s,
                    record_count=self._record_counts[engine_index],
                    resolved=ready.resolved,
                )
                for engine_index, ready in sorted(self._ready.items())
            ),
            versions=next(iter(self._ready.values())).versions if self._ready else {},
            boot_s=first_ready - self._started,
            generate_s=now - first_ready,
        )


def _hint_for(death: Death) -> str:
    if death.signal_name == "SIGKILL" and not death.reason:
        return "the host may be out of memory: lower --engines, max_model_len or gpu_memory_utilization"
    return "the engine's own output is on standard error"
