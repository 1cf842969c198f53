"""How much work a record is likely to be, so that partitions take about equally long.

Units are quarters of an input token: one byte of input, since a token is about four bytes. An output token costs four
times an input token (on the reference node, 6.9 µs against 1.6 µs: 330 requests/s at 1,000 + 400 tokens, 450 at
500 + 400, 880 at 1,000 + 128), hence 16 units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import msgspec
import orjson

from worker.contract.plan import Shape

BYTES_PER_TOKEN = 4
OUTPUT_TOKEN_WEIGHT = 16
ASSUMED_OUTPUT_TOKENS = 256
MOST_OUTPUT_TOKENS = 131_072
"""No model here answers at greater length: an absurd `max_tokens` must not empty the other partitions."""


def estimated_tokens(size_bytes: int, weight: int) -> int:
    """Tokens of prompts and of answers, read back from a weight: bytes count once in it, output tokens sixteen times."""
    return size_bytes // BYTES_PER_TOKEN + max(0, weight - size_bytes) // OUTPUT_TOKEN_WEIGHT


class _Limits(msgspec.Struct, gc=False):
    # Any: a field of the wrong type is the worker's to report, with the record's other faults.
    max_tokens: Any = None
    max_completion_tokens: Any = None


class _OpenAiRecord(msgspec.Struct, gc=False):
    body: _Limits | bool | int | float | str | list[Any] | None = None


class Weigher:
    """Reads of a JSON object only what its weight needs, at a fraction of the cost of decoding it whole."""

    def __init__(self, shape: Shape, sampling: Mapping[str, Any]) -> None:
        self.shape = shape
        self.assumed_tokens = _usable_limit(sampling, ASSUMED_OUTPUT_TOKENS)
        self._decode_openai = msgspec.json.Decoder(_OpenAiRecord).decode
        self._decode_plain = msgspec.json.Decoder(_Limits).decode

    def output_tokens(self, lines: Iterable[bytes | bytearray]) -> int:
        """The sum over lines that are JSON objects.

        Raises:
            msgspec.MsgspecError: a line is not a JSON object.
            RecursionError: a line is nested too deep for this decoder; `output_tokens_of` still takes it.
        """
        assumed, most, total = self.assumed_tokens, MOST_OUTPUT_TOKENS, 0
        for limits in self._limits(lines):
            if type(limits) is not _Limits:
                total += assumed
                continue
            tokens = limits.max_completion_tokens
            if tokens is None:
                tokens = limits.max_tokens
            if tokens is None:
                total += assumed
            elif type(tokens) is int and 0 <= tokens <= most:
                total += tokens
            else:
                total += _usable(limits.max_completion_tokens, limits.max_tokens, assumed)
        return total

    def output_tokens_of(self, line: bytes | bytearray) -> int:
        """The same of one line, decoded whole.

        Raises:
            orjson.JSONDecodeError: the line is not JSON.
        """
        record = orjson.loads(line)
        limits = record.get("body") if self.shape == "openai" else record
        return _usable_limit(limits, self.assumed_tokens) if isinstance(limits, dict) else self.assumed_tokens

    def _limits(self, lines: Iterable[bytes | bytearray]) -> Iterable[Any]:
        # No function of ours is called for each line: that would cost a tenth of the scan.
        if self.shape == "plain":
            return map(self._decode_plain, lines)
        return map(_body_of, map(self._decode_openai, lines))


_body_of = attrgetter("body")


def _usable_limit(fields: Mapping[str, Any], assumed: int) -> int:
    return _usable(fields.get("max_completion_tokens"), fields.get("max_tokens"), assumed)


def _usable(max_completion_tokens: Any, max_tokens: Any, assumed: int) -> int:
    for tokens in (max_completion_tokens, max_tokens):
        # `type`, not isinstance: true is no number of tokens.
        if type(tokens) is int and tokens >= 0:
            return min(tokens, MOST_OUTPUT_TOKENS)
    return assumed
