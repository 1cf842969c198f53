from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.contract.errors import InputError
from worker.contract.manifest import EarlierAttempt
from worker.contract.store import open_store
from worker.protocol import Result
from worker.segments import Facts, Identity, decode_segment, encode_segment, read_segments, remove_segments

IDENTITY = Identity(run_id="r-1", fingerprint="f", partition_index=3, input_checksum="c", record_count=1000)
ATTEMPT = EarlierAttempt(
    writer_id="w1", attempt=1, job_id="j", compute_environment="ce", host="h", started_at="2025-01-01T00:00:00.000Z"
)

results = st.builds(
    Result,
    ordinal=st.integers(0, 999),
    error=st.sampled_from(["", "length.prompt_too_long", "parse.invalid_json"]),
    prompt_tokens=st.integers(0, 1 << 40),
    cached_tokens=st.integers(0, 1 << 40),
    completion_tokens=st.integers(0, 1 << 40),
    line=st.binary(min_size=1).map(lambda line: line.replace(b"\n", b"\\n")),
)


def encoded(found: list[Result], identity: Identity = IDENTITY) -> bytes:
    return encode_segment(identity, ATTEMPT, list(map(Facts.of, found)), [result.line for result in found])


SOME = [Result(number, "", 3, 1, 2, b'{"n":%d,"text":"\xe2\x80\xa8"}' % number) for number in range(5)]


@given(st.lists(results))
def test_results_come_back_byte_for_byte(found: list[Result]) -> None:
    segment = decode_segment(encoded(found), "uri")

    assert list(segment.results) == found
    assert (segment.header.identity, segment.header.attempt) == (IDENTITY, ATTEMPT)


def test_a_segment_torn_anywhere_is_no_segment() -> None:
    whole = encoded(SOME)

    for size in range(len(whole)):
        with pytest.raises(InputError, match="uri"):
            decode_segment(whole[:size], "uri")


def test_a_segment_with_any_byte_damaged_is_no_segment_or_the_same() -> None:
    whole = encoded(SOME)

    for place in range(len(whole)):
        damaged = whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
        try:
            segment = decode_segment(damaged, "uri")
        except InputError:
            continue
        # A frame has bits that mean nothing.
        assert list(segment.results) == SOME


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("torn", encoded(SOME)[:-3]),
        ("empty", b""),
        ("text", b"not a segment"),
        ("of-another-plan", encoded(SOME, msgspec.structs.replace(IDENTITY, fingerprint="g"))),
        ("of-another-partition", encoded(SOME, msgspec.structs.replace(IDENTITY, partition_index=4))),
        ("of-changed-input", encoded(SOME, msgspec.structs.replace(IDENTITY, input_checksum="d"))),
        ("with-a-record-too-many", encoded([*SOME, Result(1000, "", 0, 0, 0, b"{}")])),
    ],
)
def test_what_is_no_segment_of_this_work_is_passed_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes
) -> None:
    (tmp_path / f"a-{name}.jsonl.zst").write_bytes(content)
    (tmp_path / "b-good.jsonl.zst").write_bytes(encoded(SOME))
    caplog.set_level(logging.WARNING, "worker")

    (segment,) = read_segments(open_store(str(tmp_path)), str(tmp_path), IDENTITY)

    assert list(segment.results) == SOME
    (said,) = caplog.records
    assert said.getMessage() == "segment.ignored"
    assert f"a-{name}" in said.__dict__["fields"]["message"]


def test_removing_leaves_nothing_and_may_be_done_twice(tmp_path: Path) -> None:
    store, folder = open_store(str(tmp_path)), str(tmp_path / "part")
    for number in range(3):
        store.write(f"{folder}/{number}.jsonl.zst", encoded(SOME))

    remove_segments(store, folder)
    remove_segments(store, folder)

    assert list(store.list(folder)) == []
