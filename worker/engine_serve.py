"""The engine's loop: vLLM's own offline engine, fed continuously.

Requests are added as others finish, so that the batch never drains between messages, and results leave as they finish.
They are told apart by request id, never by position. Nothing here catches what `step` raises: an engine that fails in the
middle of a batch knows nothing about its requests any more, and the parent starts another.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from worker.answers import LineWriter
from worker.contract.record_errors import RecordError
from worker.engine_adapters import Adapters, local_adapters, lora_engine_args
from worker.engine_channel import Channel
from worker.engine_errors import answer_error, record_error
from worker.engine_makers import Maker, request_maker
from worker.engine_openai import split_args
from worker.engine_requests import Request, add_prompt
from worker.engine_start import resolved_args, start_engine, versions
from worker.engine_stats import EngineFigures
from worker.fetched_records import FetchedRecords
from worker.protocol import Boot, Item, Progress, Ready, Result, Results, Work
from worker.records import Record, RecordReader

WINDOW = 1.25
"""Records in flight per sequence of the batch. With fewer the batch is not full while results and work cross on the
socket; with more a step's bookkeeping grows (measured: 1.25 beats 1 by a fifth, and 2 by a third)."""
ADMIT_COUNT = 64
"""Records made into requests between two steps: enough to tokenize well in one call, and a step is not held up long."""
MEDIA_WAIT_S = 0.05
PROGRESS_EVERY_S = 1.0
PAUSE_S = 10.0
"""More between two looks at the clock is a stopped process, or a step that is everybody's."""
RESULTS_BYTES = 16 << 20
"""About the size at which a Results message is sent off: answers with logprobs are megabytes each."""


def boot_engine(boot: Boot, started: float) -> tuple[Server, Ready]:
    """Start vLLM, and give what serves and what to tell the parent. `started` is the process's start, monotonic.

    Raises:
        ArrayError: the settings are wrong.
        Exception: whatever vLLM raises.
    """
    model_names = _model_names(boot)
    # First, since it takes no time: wrong defaults must not cost a load of the model.
    reader = RecordReader(boot.shape, boot.answer_key, boot.sampling, boot.requests, model_names)
    adapter_folders = local_adapters(boot.requests.adapters)
    engine_args, layer_args = split_args(boot.engine_args)
    # Answers name the model as the run does, wherever it is loaded from.
    named = {**engine_args, "served_model_name": engine_args.get("served_model_name") or boot.model}
    engine = start_engine(boot.model_path or boot.model, lora_engine_args(adapter_folders) | named)
    adapters = Adapters(adapter_folders)
    adapters.load(engine)
    resolved = resolved_args(engine)
    server = Server(boot, engine, reader, request_maker(engine, layer_args, boot.requests, adapters), model_names)
    window = math.ceil(WINDOW * resolved["max_num_seqs"])
    ready = Ready(boot_s=time.monotonic() - started, window=window, resolved=resolved, versions=versions())
    return server, ready


def _model_names(boot: Boot) -> frozenset[str]:
    served = boot.engine_args.get("served_model_name") or []
    return frozenset({boot.model, *([served] if isinstance(served, str) else served)})


@dataclass(slots=True)
class _Work:
    """A record in the engine."""

    item: Item
    record: Record
    request: Request
    request_ids: Sequence[str]
    outputs: dict[str, Any] = field(default_factory=dict)


class Server:
    """Answers records until the process ends."""

    def __init__(
        self, boot: Boot, engine: LLMEngine, reader: RecordReader, requests: Maker, model_names: frozenset[str]
    ) -> None:
        self._engine = engine
        self._figures = EngineFigures(engine)
        self._reader = reader
        self._requests = requests
        self._model_names = model_names | boot.requests.adapters.keys()
        self._lines = LineWriter.from_boot(boot)
        self._max_num_seqs: int = engine.vllm_config.scheduler_config.max_num_seqs
        self._media = FetchedRecords(boot.requests.media_hosts)
        self._backlog: deque[Item] = deque()
        self._pending: dict[str, _Work] = {}
        self._timeout_s = boot.record_timeout_s
        self._given_up_at: deque[tuple[float, _Work]] = deque()
        """When each record's time is over, on the working clock and in order; finished ones may be among them."""
        self._round_at = time.monotonic()
        self._paused_s = 0.0
        self._request_ids = map(str, itertools.count())
        self._step_count = 0
        self._progress_at = 0.0

    def run(self, channel: Channel) -> None:
        # What vLLM and the model's load have left lives as long as the process: no collection need look at it again.
        freeze_gc_heap()
        while True:
            self._receive(channel)
            results = self._admit()
            results += self._give_up()
            if self._pending:
                results += self._step()
            self._send(channel, results)
            self._report(channel)

    def _receive(self, channel: Channel) -> None:
        """Take all work that has come; wait for some if there is nothing else to do."""
        is_busy = bool(self._backlog or self._pending or self._media.count)
        message = channel.receive_waiting() if is_busy else channel.receive()
        while message is not None:
            if not isinstance(message, Work):
                raise TypeError(f"receive message: a {type(message).__name__} out of turn (expected Work)")
            self._backlog.extend(message.items)
            message = channel.receive_waiting()

    def _admit(self) -> list[Result]:
        """Give some of the backlog to the engine; give the results of records that it cannot have."""
        results: list[Result] = []
        ready: list[tuple[Item, Record]] = []
        for _ in range(min(ADMIT_COUNT, len(self._backlog))):
            item = self._backlog.popleft()
            try:
                record = self._reader.read(item.raw)
                if not self._media.start(item, record):
                    ready.append((item, record))
            except Exception as error:  # noqa: BLE001  a line that nobody thought of must not cost the others
                results.append(self._failed(item, record_error(error)))
        if self._media.count:
            # A short wait, if the engine has nothing to do meanwhile.
            for item, fetched in self._media.finished(0.0 if self._pending or ready else MEDIA_WAIT_S):
                if isinstance(fetched, Exception):
                    results.append(self._failed(item, record_error(fetched)))
                else:
                    ready.append((item, fetched))
        for (item, record), request in zip(ready, self._requests.make([record for _, record in ready]), strict=True):
            refusal = request if isinstance(request, RecordError) else self._add(item, record, request)
            if refusal is not None:
                results.append(self._failed(item, refusal))
        return results

    def _add(self, item: Item, record: Record, request: Request) -> RecordError | None:
        request_ids = [next(self._request_ids) for _ in request.prompts]
        work = _Work(item, record, request, request_ids)
        try:
            for request_id, prompt in zip(request_ids, request.prompts, strict=True):
                add_prompt(self._engine, request_id, prompt)
        except (EngineDeadError, MemoryError, OSError):
            # The engine's or the host's trouble, not the record's.
            raise
        except Exception as error:  # noqa: BLE001  it refused this request, whatever for; others are none the worse
            # Of several choices or prompts some may be in already.
            self._engine.abort_request(request_ids)
            return record_error(error)
        for request_id in request_ids:
            self._pending[request_id] = work
        if self._timeout_s is not None:
            self._given_up_at.append((self._working_s() + self._timeout_s, work))
        return None

    def _give_up(self) -> list[Result]:
        """Take records whose time is over from the engine; give their results."""
        results: list[Result] = []
        now = self._working_s()
        while self._given_up_at:
            given_up_at, work = self._given_up_at[0]
            is_pending = self._pending.keys() & work.request_ids
            if given_up_at > now and is_pending:
                break
            self._given_up_at.popleft()
            if is_pending:
                for request_id in is_pending:
                    del self._pending[request_id]
                self._engine.abort_request(list(is_pending))
                problem = RecordError(
                    "timeout", "record_timeout", f"run record: not answered within {self._timeout_s:g} s"
                )
                results.append(self._failed(work.item, problem))
        return results

    def _working_s(self) -> float:
        """A clock that stands still where the process does, or is deep in one step: no record is to blame for that."""
        now = time.monotonic()
        if now - self._round_at > PAUSE_S:
            self._paused_s += now - self._round_at
        self._round_at = now
        return now - self._paused_s

    def _step(self) -> list[Result]:
        outputs = self._engine.step()
        self._step_count += 1
        results = []
        for output in outputs:
            if output.finished:
                work = self._pending.pop(output.request_id)
                work.outputs[output.request_id] = output
                if len(work.outputs) == len(work.request_ids):
                    results.append(self._answered(work))
        return results

    def _answered(self, work: _Work) -> Result:
        try:
            return self._result(
                work, work.request.answer([work.outputs[request_id] for request_id in work.request_ids])
            )
        except Exception as error:  # noqa: BLE001  parsers of other people's making read what a model has written
            return self._failed(work.item, answer_error(error))

    def _result(self, work: _Work, body: dict[str, Any]) -> Result:
        item, record = work.item, work.record
        usage, problem = body["usage"], body.get("error")
        return Result(
            item.ordinal,
            f"{problem['stage']}.{problem['code']}" if problem else "",
            usage["prompt_tokens"],
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            usage.get("completion_tokens") or 0,
            self._lines.result_line(item, body, endpoint=record.endpoint, dialect=record.dialect),
            record.model is not None and record.model not in self._model_names,
        )

    def _failed(self, item: Item, error: RecordError) -> Result:
        return Result(item.ordinal, error.kind, 0, 0, 0, self._lines.error_line(item, error))

    def _send(self, channel: Channel, results: list[Result]) -> None:
        first, size = 0, 0
        for index, result in enumerate(results):
            size += len(result.line)
            if size >= RESULTS_BYTES or index + 1 == len(results):
                channel.send(Results(results[first : index + 1]))
                first, size = index + 1, 0

    def _report(self, channel: Channel) -> None:
        now = time.monotonic()
        if now - self._progress_at < PROGRESS_EVERY_S or not (self._pending or self._backlog or self._media.count):
            return
        self._progress_at = now
        sequence_count = self._engine.get_num_unfinished_requests()
        running_count = min(sequence_count, self._max_num_seqs)
        channel.send(
            Progress(
                # What comes from elsewhere is progress, too.
                step_count=self._step_count + self._media.fetch_count,
                running_count=running_count,
                waiting_count=sequence_count - running_count + len(self._backlog),
                kv_cache_usage=self._figures.kv_cache_usage,
                preemption_count=self._figures.preemption_count,
            )
        )
