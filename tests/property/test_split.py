"""Splitting loses, adds and moves nothing, for any bytes, in any form, cut any way."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest
from backports import zstd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from submitter.lines import BOM, is_blank
from submitter.scan import weigh_line
from submitter.split import SplitRequest, split_run
from submitter.split_tuning import SplitTuning
from submitter.weight import Weigher
from worker.contract.compression import MAGIC_BYTES, compression_of, decompressed
from worker.contract.errors import InputError
from worker.contract.layout import RunLayout
from worker.contract.plan import Compression, Plan, Shape

ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}

records = st.builds(
    lambda text, tokens: json.dumps({"prompt": text, "max_tokens": tokens}, ensure_ascii=False).encode(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.integers(0, 40),
)
lines = st.one_of(
    records,
    records.map(lambda record: record + b"\r"),
    st.sampled_from([b"", b" \t\r", b"null", b"[1]", '{"a":"\u2028\u0085"}'.encode(), b"\x0b", b'{"a":"\xff"}']),
    st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"")),
)
contents = st.builds(
    lambda bom, parts, end: bom + b"\n".join(parts) + end,
    st.sampled_from([b"", BOM]),
    st.lists(lines, max_size=30),
    st.sampled_from([b"", b"\n", b"\n\n"]),
).filter(lambda content: compression_of(content[:MAGIC_BYTES]) == "none")
tunings = st.builds(
    SplitTuning,
    block_bytes=st.sampled_from([4, 16, 64, 1_000]),
    smallest_block_bytes=st.sampled_from([1, 4]),
    chunk_bytes=st.sampled_from([1, 7, 50, 1_000]),
    whole_bytes=st.sampled_from([0, 10, 100, 10_000]),
    entry_limit=st.sampled_from([2, 4, 16, 1_000]),
    parallel_bytes=st.just(1 << 30),
)


def normal(content: bytes) -> bytes:
    """What a partition may hold of an object: no byte order mark, and a line end at the end."""
    content = content.removeprefix(BOM)
    return content + b"\n" if content and not content.endswith(b"\n") else content


def records_in(content: bytes) -> int:
    return sum(not is_blank(line) for line in content.split(b"\n"))


@contextmanager
def folder_with(*contents: bytes) -> Iterator[tuple[Path, tuple[str, ...]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / f"in-{index}" for index in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        yield folder, tuple(map(str, paths))


def partitions_of(plan: Plan, run: Path) -> list[bytes]:
    layout = RunLayout(str(run))
    count = len(plan.partitions)
    paths = [Path(layout.partition(index, count, plan.compression)) for index in range(count)]
    assert sorted((run / "partitions").iterdir()) == sorted(paths)
    return [decompressed(io.BytesIO(path.read_bytes()), plan.compression).read() for path in paths]


def split(inputs: tuple[str, ...], run: Path, tuning: SplitTuning | None = None, **changes: Any) -> Plan:
    options: dict[str, Any] = {"shape": "plain", "on_invalid": "keep", "model": "m", **changes}
    return split_run(SplitRequest(inputs=inputs, run_uri=str(run), **options), tuning=tuning).plan


any_data = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@any_data
@given(
    st.lists(st.tuples(contents, st.sampled_from(list(ENCODERS))), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from(get_args(Compression)),
    tunings,
)
def test_partitions_end_to_end_are_the_inputs_end_to_end(
    inputs: list[tuple[bytes, str]], partition_count: int, compression: Compression, tuning: SplitTuning
) -> None:
    expected = b"".join(normal(content) for content, _ in inputs)
    with folder_with(*(ENCODERS[name](content) for content, name in inputs)) as (folder, paths):
        run = folder / "run"
        if not records_in(expected):
            with pytest.raises(InputError, match="no records"):
                split(paths, run, tuning, partition_count=partition_count)
            return
        plan = split(paths, run, tuning, partition_count=partition_count, compression=compression)
        found = partitions_of(plan, run)

    assert b"".join(found) == expected
    assert len(found) == min(partition_count, records_in(expected))
    for partition, content in zip(plan.partitions, found, strict=True):
        assert partition.size_bytes == len(content)
        assert partition.record_count == records_in(content) >= 1
        sources = [
            normal(inputs[source.input_index][0]).split(b"\n")[source.first_line - 1 :][: source.line_count]
            for source in partition.sources
        ]
        assert b"".join(line + b"\n" for stretch in sources for line in stretch) == content


@any_data
@given(
    st.lists(contents, min_size=1, max_size=3).filter(lambda found: records_in(b"".join(map(normal, found))) > 0),
    st.lists(st.sampled_from(list(ENCODERS)), min_size=3, max_size=3),
    st.integers(1, 12),
    tunings,
)
def test_blocks_chunks_and_compression_change_no_partition(
    inputs: list[bytes], encodings: list[str], partition_count: int, tuning: SplitTuning
) -> None:
    encoded = [ENCODERS[name](content) for name, content in zip(encodings, inputs, strict=False)]
    with folder_with(*inputs) as (folder, paths):
        plain = split(paths, folder / "run", partition_count=partition_count)
    with folder_with(*encoded) as (folder, paths):
        other = split(paths, folder / "run", tuning, partition_count=partition_count)

    assert plain.partitions == other.partitions
    assert plain.invalid_record_count == other.invalid_record_count


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_more_processes_change_no_partition(data: st.DataObject) -> None:
    """Compressed inputs are dealt out to the processes by partitions, which are then cut apart from each other."""
    size = st.integers(1, 400)
    inputs = [
        b"".join(b'{"prompt":"%s"}\n' % (b"x" * data.draw(st.integers(0, 30))) * 7 for _ in range(data.draw(size)))
        for _ in range(data.draw(st.integers(2, 4)))
    ]
    encodings = data.draw(st.lists(st.sampled_from(["none", "gz"]), min_size=4, max_size=4))
    partition_count = data.draw(st.integers(1, 20))
    tuning = SplitTuning(
        block_bytes=200,
        smallest_block_bytes=200,
        chunk_bytes=5_000,
        whole_bytes=data.draw(st.sampled_from([0, 100_000])),
        entry_limit=data.draw(st.sampled_from([4, 100_000])),
        parallel_bytes=0,
    )
    encoded = [ENCODERS[name](content[: len(content) - 1]) for name, content in zip(encodings, inputs, strict=False)]
    with folder_with(*encoded) as (folder, paths):
        plans = [
            split(paths, folder / f"run-{count}", tuning, partition_count=partition_count, process_count=count)
            for count in (1, 3)
        ]
        found = [partitions_of(plan, folder / f"run-{count}") for plan, count in zip(plans, (1, 3), strict=True)]

    assert plans[0].partitions == plans[1].partitions
    assert found[0] == found[1]
    assert b"".join(found[0]) == b"".join(inputs)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), min_size=50, max_size=300), st.integers(1, 20))
def test_the_heaviest_partition_is_near_the_mean_when_records_are_small(
    shapes: list[tuple[int, int]], partition_count: int
) -> None:
    pattern = b"".join(b'{"prompt":"%s","max_tokens":%d}\n' % (b"x" * length, tokens) for length, tokens in shapes)
    content = pattern * 10
    heaviest_record = max(weigh_line(line + b"\n", Weigher("plain", {}))[0] for line in pattern.split(b"\n")[:-1])
    with folder_with(content) as (folder, paths):
        plan = split(paths, folder / "run", partition_count=partition_count)
    weights = [partition.weight for partition in plan.partitions]
    mean = sum(weights) / len(weights)

    # A boundary is at most half a record off, at either end of a partition.
    assert max(weights) <= mean + heaviest_record
    if heaviest_record <= mean / 20:
        assert max(weights) <= 1.05 * mean


# What is JSON

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(), max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=6), children, max_size=4),
    max_leaves=10,
)
json_lines = st.builds(
    lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"),
    st.dictionaries(st.sampled_from(["max_tokens", "body", "messages", "x"]), json_values, max_size=4) | json_values,
    st.booleans(),
)
tokens = [
    *(b'{ } [ ] : , " \\ \\u \\ud83d \\ude00 \\udc00 \\n \\x 0 1 01 -0 - . 1.5 e E+ 1e5 1e400 -1e-400 true null NaN Infinity'.split()),
    b"\t", b"\r", b"\x00", b"\x1f", b"\x7f", b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b'"a"', b'"max_tokens"', b'"body"', b" ", BOM,
]  # fmt: skip


@st.composite
def nearly_json(draw: st.DrawFn) -> bytes:
    line = bytearray(draw(json_lines))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(line)))
        line[start : start + draw(st.integers(0, 2))] = draw(st.sampled_from(tokens))
    return bytes(line).replace(b"\n", b"")


def is_object(line: bytes) -> bool | None:
    """Whether orjson takes a line for an object; None if it has a number that a double cannot hold."""
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError as error:
        return None if "infinity" in str(error) else False


@settings(max_examples=2_000, deadline=None)
@given(nearly_json() | st.lists(st.sampled_from(tokens), max_size=12).map(b"".join), st.sampled_from(get_args(Shape)))
def test_a_line_is_valid_if_and_only_if_the_worker_s_decoder_takes_it_for_an_object(line: bytes, shape: Shape) -> None:
    """But for numbers beyond a double, which the worker reports: the scan need not read numbers."""
    expected = is_object(line)
    for stored in (line, line + b"\n", line + b"\r\n"):
        weight, problem = weigh_line(stored, Weigher(shape, {}))
        if is_blank(line):
            assert (weight, problem) == (0, None)
        elif expected is not None:
            assert (problem is None) == expected, (line, problem)


@settings(max_examples=300, deadline=None)
@given(nearly_json())
def test_what_is_wrong_with_a_line_is_said_without_quoting_it(line: bytes) -> None:
    secret = b'"secret-word"'
    for spoiled in (line + secret, secret + line, line.replace(b":", b":" + secret, 1), line.replace(b"1", secret)):
        _, problem = weigh_line(spoiled, Weigher("openai", {}))
        assert "secret" not in (problem or "")
