"""Ids given twice are found as by a set of all ids, for any ids, in any form, cut any way."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from submitter.split import SplitRequest, split_run
from submitter.split_tuning import SplitTuning
from worker.contract.errors import InputError

SHOWN_COUNT = 10

texts = st.sampled_from(["", "a", "b", "é", "😀", "\u2028", "\x00", "7", "\\", '"']) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=3
)
ids = texts | st.integers(0, 30) | st.sampled_from([None, True, 1.0, [], ["a"], {"a": 1}])


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from([b"", b" \r", b"[1]", b'{"custom_id":"a"', b'{"custom_id":"a","url":"\xff"}']))
    fields: dict[str, Any] = {} if kind == 1 else {"custom_id": draw(ids)}
    deep = kind == 2 and draw(st.booleans())
    body: Any = {"prompt": "x", "max_tokens": draw(st.integers(0, 9))}
    encoded = json.dumps({**fields, "body": body}, ensure_ascii=draw(st.booleans()))
    return (encoded[:-1] + ',"a":' + "[" * 1_000 + "]" * 1_000 + "}" if deep else encoded).encode()


tunings = st.builds(
    SplitTuning,
    block_bytes=st.sampled_from([4, 64, 1_000]),
    smallest_block_bytes=st.just(4),
    chunk_bytes=st.sampled_from([7, 50, 1_000]),
    whole_bytes=st.sampled_from([0, 100, 10_000]),
    id_limit=st.sampled_from([1, 5, 1_000]),
    ids_in_memory_bytes=st.sampled_from([0, 300, 10_000]),
    parallel_bytes=st.just(1 << 30),
)


def pairs_in(paths: Sequence[Path], contents: Sequence[Sequence[bytes]]) -> list[tuple[str, str]]:
    first: dict[tuple[type, Any], str] = {}
    pairs = []
    for path, content in zip(paths, contents, strict=True):
        for number, line in enumerate(content, 1):
            try:
                found = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            one = found.get("custom_id") if isinstance(found, dict) else None
            if type(one) in (str, int):
                place = f"{path}:{number}"
                earlier = first.setdefault((type(one), one), place)
                if earlier != place:
                    pairs.append((earlier, place))
    return pairs


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(lines(), max_size=25), st.booleans()), min_size=1, max_size=4), tunings)
def test_all_are_counted_and_the_first_are_named(files: list[tuple[list[bytes], bool]], tuning: SplitTuning) -> None:
    with tempfile.TemporaryDirectory() as name, patch("tempfile.tempdir", name):
        paths = [Path(name, f"in-{number}") for number in range(len(files))]
        contents = [[*content, b'{"body":{}}'] for content, _ in files]
        for path, content, (_, zipped) in zip(paths, contents, files, strict=True):
            path.write_bytes(gzip.compress(b"\n".join(content)) if zipped else b"\n".join(content))
        request = SplitRequest(
            inputs=tuple(map(str, paths)),
            run_uri=f"{name}/run",
            partition_count=2,
            model="m",
            shape="openai",
            on_invalid="keep",
        )
        expected = pairs_in(paths, contents)
        if not expected:
            split_run(request, tuning=tuning)
        else:
            with pytest.raises(InputError, match=f": custom_id given twice: {len(expected)} of ") as raised:
                split_run(request, tuning=tuning)
            assert raised.value.code == "duplicate_custom_id"
            shown = raised.value.message.split("\n")[1:]
            assert shown[:SHOWN_COUNT] == [f"  {earlier} and {later}" for earlier, later in expected[:SHOWN_COUNT]]
            assert len(shown) == min(len(expected), SHOWN_COUNT + 1)
        assert {path.name for path in Path(name).iterdir()} <= {*(path.name for path in paths), "run"}
