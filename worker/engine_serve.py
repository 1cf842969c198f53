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
from typing import Any

from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from worker.answers import LineWriter
from worker.engine_answers import AnswerMaker
from worker.engine_channel import Channel
from worker.engine_requests import Request, RequestMaker, record_error
from worker.engine_start import resolved_args, start_engine, versions
from worker.protocol import Boot, Item, Progress, Ready, Result, Results, Work
from worker.record_errors import RecordError
from worker.records import Record, RecordReader

WINDOW = 1.25
"""Records in flight per sequence of the batch. With fewer the batch is not full while results and work cross on the
socket; with more a step's bookkeeping grows (measured: 1.25 beats 1 by a fifth, and 2 by a third)."""
ADMIT_COUNT = 64
"""Records made into requests between two steps: enough to tokenize well in one call, and a step is not held up long."""
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
    # First, since it takes no time: wrong defaults must not cost a load of the model.
    reader = RecordReader("openai" if boot.shape == "openai" else "plain", boot.answer_key, boot.sampling)
    engine = start_engine(boot.model, boot.engine_args)
    resolved = resolved_args(engine)
    server = Server(boot, engine, reader)
    window = math.ceil(WINDOW * resolved["max_num_seqs"])
    ready = Ready(boot_s=time.monotonic() - started, window=window, resolved=resolved, versions=versions())
    return server, ready


class Server:
    """Answers records until the process ends."""

    def __init__(self, boot: Boot, engine: LLMEngine, reader: RecordReader) -> None:
        self._engine = engine
        self._reader = reader
        self._requests = RequestMaker(engine)
        self._answers = AnswerMaker(engine.model_config.served_model_name, engine.renderer.get_tokenizer())
        self._lines = LineWriter.from_boot(boot)
        self._max_num_seqs: int = engine.vllm_config.scheduler_config.max_num_seqs
        self._backlog: deque[Item] = deque()
        self._pending: dict[str, tuple[Item, Request]] = {}
        self._timeout_s = boot.record_timeout_s
        self._given_up_at: deque[tuple[float, str]] = deque()
        """When each request's time is over, on the working clock and in order; finished ones may be among them."""
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
        message = channel.receive_waiting() if self._backlog or self._pending else channel.receive()
        while message is not None:
            if not isinstance(message, Work):
                raise TypeError(f"receive message: a {type(message).__name__} out of turn (expected Work)")
            self._backlog.extend(message.items)
            message = channel.receive_waiting()

    def _admit(self) -> list[Result]:
        """Give some of the backlog to the engine; give the results of records that it cannot have."""
        results: list[Result] = []
        items: list[Item] = []
        records: list[Record] = []
        for _ in range(min(ADMIT_COUNT, len(self._backlog))):
            item = self._backlog.popleft()
            try:
                records.append(self._reader.read(item.raw))
            except RecordError as problem:
                results.append(self._failed(item, problem))
            else:
                items.append(item)
        for item, request in zip(items, self._requests.make(records), strict=True):
            refusal = request if isinstance(request, RecordError) else self._add(item, request)
            if refusal is not None:
                results.append(self._failed(item, refusal))
        return results

    def _add(self, item: Item, request: Request) -> RecordError | None:
        request_id = next(self._request_ids)
        try:
            self._engine.add_request(request_id, request.engine_input, request.params)
        except (EngineDeadError, MemoryError, OSError):
            # The engine's or the host's trouble, not the record's.
            raise
        except Exception as error:  # noqa: BLE001  it refused this request, whatever for; others are none the worse
            # Of several choices some may be in already.
            self._engine.abort_request([request_id])
            return record_error(error)
        self._pending[request_id] = item, request
        if self._timeout_s is not None:
            self._given_up_at.append((self._working_s() + self._timeout_s, request_id))
        return None

    def _give_up(self) -> list[Result]:
        """Take requests whose time is over from the engine; give their results."""
        results: list[Result] = []
        now = self._working_s()
        while self._given_up_at:
            given_up_at, request_id = self._given_up_at[0]
            if given_up_at > now and request_id in self._pending:
                break
            self._given_up_at.popleft()
            found = self._pending.pop(request_id, None)
            if found is not None:
                self._engine.abort_request([request_id])
                problem = RecordError(
                    "timeout", "record_timeout", f"run record: not answered within {self._timeout_s:g} s"
                )
                results.append(self._failed(found[0], problem))
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
        return [self._answered(output) for output in outputs if output.finished]

    def _answered(self, output: Any) -> Result:
        item, request = self._pending.pop(output.request_id)
        try:
            body = self._answers.make(output, request)
        except RecordError as error:
            return self._failed(item, error)
        usage = body["usage"]
        return Result(
            item.ordinal,
            "",
            usage["prompt_tokens"],
            usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            usage["completion_tokens"],
            self._lines.result_line(item, body),
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
        if now - self._progress_at < PROGRESS_EVERY_S or not (self._pending or self._backlog):
            return
        self._progress_at = now
        sequence_count = self._engine.get_num_unfinished_requests()
        running_count = min(sequence_count, self._max_num_seqs)
        channel.send(
            Progress(
                step_count=self._step_count,
                running_count=running_count,
                waiting_count=sequence_count - running_count + len(self._backlog),
            )
        )
