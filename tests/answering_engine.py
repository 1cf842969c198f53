"""Stand-in engines that read records and write output lines as real ones do, and answer all alike, or what they were asked."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from tests.fakes import EchoEngine, serve
from worker.answers import LineWriter
from worker.contract.plan import Endpoint
from worker.contract.record_errors import RecordError
from worker.protocol import Boot, Item, Result, Results
from worker.records import RecordReader

ANSWER = "ok"


def answering_command(behaviour: str = "answering", argument: str = "") -> list[str]:
    return [sys.executable, "-m", "tests.answering_engine", behaviour, argument]


class AnsweringEngine(EchoEngine):
    """Answers each record that can be served with one word, and the others with what is wrong with them."""

    _reader: RecordReader
    _lines: LineWriter
    _model: str

    def boot(self, boot: Boot) -> None:
        self._model = boot.model
        self._reader = RecordReader(boot.shape, boot.answer_key, boot.sampling, boot.requests, {boot.model})
        self._lines = LineWriter.from_boot(boot)
        super().boot(boot)

    def work(self, items: Sequence[Item]) -> None:
        self.send(Results([self.answer(item) for item in items]))

    def answer(self, item: Item) -> Result:
        try:
            record = self._reader.read(item.raw)
        except RecordError as error:
            return Result(item.ordinal, error.kind, 0, 0, 0, self._lines.error_line(item, error))
        body = _body(record.endpoint, self.text(record.body))
        line = self._lines.result_line(item, body, endpoint=record.endpoint, dialect=record.dialect)
        return Result(item.ordinal, "", 3, 0, 1, line, record.model not in (None, self._model))

    def text(self, body: dict[str, Any]) -> str:  # noqa: ARG002
        return ANSWER


class RepeatingEngine(AnsweringEngine):
    """Answers each record with what it was asked."""

    def text(self, body: dict[str, Any]) -> str:
        asked: str = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        return f"<{asked}>"


class MortalEngine(RepeatingEngine):
    """The same, and crashes on each record that holds the argument."""

    def answer(self, item: Item) -> Result:
        if self.argument and self.argument.encode() in item.raw:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().answer(item)


class TiringEngine(RepeatingEngine):
    """Answers a few records, and no more."""

    _left_count = 5

    def work(self, items: Sequence[Item]) -> None:
        if self._left_count:
            super().work(items[: self._left_count])
        self._left_count = 0


def _body(endpoint: Endpoint, answer: str) -> dict[str, Any]:
    text = {"message": {"role": "assistant", "content": answer}} if endpoint == "chat" else {"text": answer}
    return {
        "object": "chat.completion" if endpoint == "chat" else "text_completion",
        "model": "fake",
        "choices": [{"index": 0, **text, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }


if __name__ == "__main__":
    serve({"answering": AnsweringEngine, "mortal": MortalEngine, "repeating": RepeatingEngine, "tiring": TiringEngine})
