"""How much work a record is likely to be, so that partitions take about equally long.

Units are quarters of an input token: one byte of input, since a token is about four bytes. An output token costs four
times an input token (on the reference node, 6.9 µs against 1.6 µs: 330 requests/s at 1,000 + 400 tokens, 450 at
500 + 400, 880 at 1,000 + 128), hence 16 units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import msgspec
import orjson

from submitter.id_hashes import ID_FIELDS
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
    custom_id: Any = None
    body: _Limits | bool | int | float | str | list[Any] | None = None


class _InferenceConfig(msgspec.Struct, gc=False, rename="camel"):
    max_tokens: Any = None


class _ModelInput(msgspec.Struct, gc=False, rename={"inference_config": "inferenceConfig"}):
    """A body of any of Bedrock's dialects, each of which has its own name for the limit."""

    max_completion_tokens: Any = None
    max_tokens: Any = None
    max_gen_len: Any = None
    inference_config: _InferenceConfig | bool | int | float | str | list[Any] | None = None


class _BedrockRecord(msgspec.Struct, gc=False, rename="camel"):
    record_id: Any = None
    model_input: _ModelInput | bool | int | float | str | list[Any] | None = None


class _TemplateRecord(msgspec.Struct, gc=False):
    """Its fields are the template's: one named `max_tokens` limits nothing."""


class Weigher:
    """Reads of a JSON object only what its weight needs, at a fraction of the cost of decoding it whole."""

    def __init__(
        self, shape: Shape, sampling: Mapping[str, Any], hear_ids: Callable[[list[Any]], object] | None = None
    ) -> None:
        """Take a run's settings; `hear_ids` is called with the ids of weighed records, if their shape has any.

        None stands for an id that is missing, and an id may be anything that JSON has. A line that is no JSON object has
        none.
        """
        self.shape = shape
        self._hear_ids = hear_ids
        self.assumed_tokens = _usable_limit(sampling, ASSUMED_OUTPUT_TOKENS)
        self._decode_openai = msgspec.json.Decoder(_OpenAiRecord).decode
        self._decode_plain = msgspec.json.Decoder(_Limits).decode
        self._decode_bedrock = msgspec.json.Decoder(_BedrockRecord).decode
        self._decode_template = msgspec.json.Decoder(_TemplateRecord).decode

    def output_tokens(self, lines: Iterable[bytes | bytearray]) -> int:
        """The sum over lines that are JSON objects.

        Raises:
            msgspec.MsgspecError: a line is not a JSON object.
            RecursionError: a line is nested too deep for this decoder; `output_tokens_of` still takes it.
        """
        if self.shape == "bedrock":
            return self._bedrock_tokens(lines)
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
                total += _usable(limits.max_completion_tokens, limits.max_tokens, assumed=assumed)
        return total

    def output_tokens_of(self, line: bytes | bytearray) -> int:
        """The same of one line, decoded whole.

        Raises:
            orjson.JSONDecodeError: the line is not JSON.
        """
        record = orjson.loads(line)
        if self._hear_ids is not None and self.shape in ID_FIELDS:
            self._hear_ids([record.get(ID_FIELDS[self.shape])])
        if self.shape == "template":
            return self.assumed_tokens
        if self.shape == "bedrock":
            return _usable(*_bedrock_limits(msgspec.convert(record, _BedrockRecord)), assumed=self.assumed_tokens)
        limits = record.get("body") if self.shape == "openai" else record
        return _usable_limit(limits, self.assumed_tokens) if isinstance(limits, dict) else self.assumed_tokens

    def _limits(self, lines: Iterable[bytes | bytearray]) -> Iterable[Any]:
        # No function of ours is called for each line: that would cost a tenth of the scan.
        if self.shape == "plain":
            return map(self._decode_plain, lines)
        if self.shape == "template":
            return map(self._decode_template, lines)
        records = list(map(self._decode_openai, lines))
        if self._hear_ids is not None:
            self._hear_ids(list(map(_custom_id_of, records)))
        return map(_body_of, records)

    def _bedrock_tokens(self, lines: Iterable[bytes | bytearray]) -> int:
        records = list(map(self._decode_bedrock, lines))
        if self._hear_ids is not None:
            self._hear_ids(list(map(_record_id_of, records)))
        assumed = self.assumed_tokens
        return sum([_usable(*_bedrock_limits(record), assumed=assumed) for record in records])


_body_of = attrgetter("body")
_custom_id_of = attrgetter("custom_id")
_record_id_of = attrgetter("record_id")


def _bedrock_limits(record: _BedrockRecord) -> tuple[Any, ...]:
    limits = record.model_input
    if not isinstance(limits, _ModelInput):
        return ()
    config = limits.inference_config
    own = config.max_tokens if isinstance(config, _InferenceConfig) else None
    return limits.max_completion_tokens, limits.max_tokens, limits.max_gen_len, own


def _usable_limit(fields: Mapping[str, Any], assumed: int) -> int:
    return _usable(fields.get("max_completion_tokens"), fields.get("max_tokens"), assumed=assumed)


def _usable(*limits: Any, assumed: int) -> int:
    for tokens in limits:
        # `type`, not isinstance: true is no number of tokens.
        if type(tokens) is int and tokens >= 0:
            return min(tokens, MOST_OUTPUT_TOKENS)
    return assumed
