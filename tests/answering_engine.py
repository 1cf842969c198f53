"""A stand-in engine that reads records and writes output lines as real ones do, and answers all of them alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tests.fakes import EchoEngine, serve
from worker.answers import LineWriter
from worker.contract.plan import Endpoint
from worker.protocol import Boot, Item, Result, Results
from worker.record_errors import RecordError
from worker.records import RecordReader

ANSWER = "ok"


def answering_command() -> list[str]:
    return [sys.executable, "-m", "tests.answering_engine", "answering", ""]


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
        line = self._lines.result_line(item, _body(record.endpoint), endpoint=record.endpoint, dialect=record.dialect)
        return Result(item.ordinal, "", 3, 0, 1, line, record.model not in (None, self._model))


def _body(endpoint: Endpoint) -> dict[str, Any]:
    text = {"message": {"role": "assistant", "content": ANSWER}} if endpoint == "chat" else {"text": ANSWER}
    return {
        "object": "chat.completion" if endpoint == "chat" else "text_completion",
        "model": "fake",
        "choices": [{"index": 0, **text, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }


if __name__ == "__main__":
    serve({"answering": AnsweringEngine})
