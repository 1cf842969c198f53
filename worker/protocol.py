"""What the worker's parent and its engine processes say to each other.

One stream socket per engine carries frames both ways: four bytes of little-endian length, then one message in
MessagePack. The engine process exits when its socket closes, so no engine outlives a killed parent.

    parent → engine    Boot, then any number of Work
    engine → parent    Ready or BootFailed, then any number of Results and Progress
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from worker.contract.plan import RequestSettings, Shape

MAX_FRAME_BYTES = 1 << 31
_LENGTH = struct.Struct("<I")


class Boot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message: all that an engine needs to know of the run."""

    engine_index: int
    model: str
    """As the run names it, and as answers do."""
    model_path: str | None = None
    """The folder to load it from. None: `model` says where it is."""
    engine_args: dict[str, Any]
    sampling: dict[str, Any]
    shape: Shape
    answer_key: str
    requests: RequestSettings = RequestSettings()
    run_id: str
    partition_index: int
    input_uris: list[str]
    """What `Item.input_index` counts."""
    record_timeout_s: float | None = None
    """What a record gets in vLLM, from being handed to its scheduler; then it is given up. None: no limit."""


# `gc=False` where there is one object per record: they hold numbers and bytes, so no cycles, and looking for some costs.


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record on its way to an engine."""

    ordinal: int
    """Its place in the partition, from 0."""
    input_index: int
    line: int
    """1-based line number in the input object."""
    raw: bytes
    """The line's bytes, without its end."""


class Work(msgspec.Struct, frozen=True, tag=True):
    items: list[Item]


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine has loaded its model and takes work."""

    boot_s: float
    window: int
    """How many records the engine wants in flight to stay busy."""
    resolved: dict[str, Any]
    """Engine arguments as vLLM resolved them."""
    versions: dict[str, str]


class BootFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot start. The process ends after this."""

    message: str
    """`verb object: what is wrong`, the cause included."""
    hint: str | None = None
    out_of_memory: bool = False
    max_num_seqs: int | None = None
    """What was tried, if that was too much for the memory."""


class Result(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record's answer."""

    ordinal: int
    error: str
    """Empty for a result, else `stage.code`."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    line: bytes
    """The output line, without its end."""
    names_other_model: bool = False
    """The record names a model that did not answer it."""


class Results(msgspec.Struct, frozen=True, tag=True):
    items: list[Result]


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A sign of life, sent between steps about once a second while there is work.

    Hung means that `step_count` stands still, or that none of these comes.
    """

    step_count: int
    running_count: int
    waiting_count: int
    kv_cache_usage: float | None = None
    """From 0 to 1; None: not known."""
    preemption_count: int | None = None
    """Records of this engine that lost their place in the KV cache and had to begin again; since its start."""


ToEngine = Boot | Work
FromEngine = Ready | BootFailed | Results | Progress

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """A message as it goes over the socket."""
    body = _encoder.encode(message)
    if len(body) >= MAX_FRAME_BYTES:
        raise ValueError(f"frame {type(message).__name__}: {len(body)} bytes (expected under {MAX_FRAME_BYTES})")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream, arriving in any pieces, into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """Take what a read gave; give each body that is now whole.

        Raises:
            ValueError: a length is past any message's: these are not frames, and waiting for their end fills memory.
        """
        self._buffer += received
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size >= MAX_FRAME_BYTES:
                raise ValueError(f"read frame: {size} bytes (expected under {MAX_FRAME_BYTES})")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
