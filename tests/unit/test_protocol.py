from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.protocol import (
    MAX_FRAME_BYTES,
    Boot,
    BootFailed,
    Frames,
    FromEngine,
    Item,
    Progress,
    Ready,
    Result,
    Results,
    ToEngine,
    Work,
    decode_from_engine,
    decode_to_engine,
    frame,
)

numbers = st.integers(0, 1 << 62)
items = st.builds(Item, numbers, numbers, numbers, st.binary(max_size=50))
results = st.builds(Result, numbers, st.text(max_size=10), numbers, numbers, numbers, st.binary(max_size=50))
to_engine: st.SearchStrategy[ToEngine] = st.one_of(
    st.builds(
        Boot,
        engine_index=numbers,
        partition_index=numbers,
        engine_args=st.just({"max_model_len": 5}),
        sampling=st.just({"top_p": 0.5}),
    ),
    st.builds(Work, st.lists(items, max_size=5)),
)
from_engine: st.SearchStrategy[FromEngine] = st.one_of(
    st.builds(Ready, boot_s=st.floats(0, 1e9), window=numbers, resolved=st.just({"a": [1, None]})),
    st.builds(BootFailed),
    st.builds(Results, st.lists(results, max_size=5)),
    st.builds(Progress, step_count=numbers, running_count=numbers, waiting_count=numbers),
)


def cut(content: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(content[:size])
        content = content[size:]
    return [*pieces, content]


@settings(deadline=None)
@given(messages=st.lists(to_engine, max_size=5), sizes=st.lists(st.integers(0, 40), max_size=20))
def test_messages_to_an_engine_arrive_whole_in_whatever_pieces(messages: list[ToEngine], sizes: list[int]) -> None:
    frames = Frames()

    arrived = [
        decode_to_engine(body) for piece in cut(b"".join(map(frame, messages)), sizes) for body in frames.feed(piece)
    ]

    assert arrived == messages


@settings(deadline=None)
@given(messages=st.lists(from_engine, max_size=5), sizes=st.lists(st.integers(0, 40), max_size=20))
def test_messages_from_an_engine_arrive_whole_in_whatever_pieces(messages: list[FromEngine], sizes: list[int]) -> None:
    frames = Frames()

    arrived = [
        decode_from_engine(body) for piece in cut(b"".join(map(frame, messages)), sizes) for body in frames.feed(piece)
    ]

    assert arrived == messages


def test_a_length_that_no_message_has_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="expected under"):
        Frames().feed(struct.pack("<I", MAX_FRAME_BYTES))
