"""CSV as JSON lines: values as they stand, and bad rows found one by one."""

from __future__ import annotations

import csv
import io
import tracemalloc
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from submitter.csv_rows import ROW_LIMIT_BYTES, csv_lines
from submitter.lines import BOM
from worker.contract.errors import InputError


def lines_of(content: bytes, delimiter: str | None = None, piece_bytes: int = 7) -> tuple[list[bytes], dict[int, str]]:
    problems: dict[int, str] = {}
    pieces = (content[start : start + piece_bytes] for start in range(0, len(content), piece_bytes))
    found = b"".join(csv_lines(pieces, delimiter, "in.csv", problems))
    assert not found or found.endswith(b"\n")
    return found.split(b"\n")[:-1], problems


def error_of(content: bytes) -> InputError:
    with pytest.raises(InputError) as caught:
        lines_of(content, piece_bytes=64 << 10)
    return caught.value


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10) | st.sampled_from(
    ['"', ",", "\r\n", "\u2028\x85"]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(texts.filter(bool).filter(lambda name: "\0" not in name), min_size=1, max_size=4, unique=True),
    st.data(),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.integers(1, 50),
)
def test_every_value_is_the_text_that_was_written(
    names: list[str], data: st.DataObject, line_end: str, quotes_all: bool, piece_bytes: int
) -> None:
    row = st.lists(texts, min_size=len(names), max_size=len(names))
    rows = data.draw(st.lists(row, max_size=6))
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    writer.writerow(names)
    if not quotes_all:
        # Python's own writer leaves it bare.
        rows = [[value.replace("\r", "") for value in row] for row in rows]
        writer = csv.writer(stream, lineterminator=line_end)
    writer.writerows(rows)
    content = stream.getvalue().encode()
    if data.draw(st.booleans()):
        content = content.removesuffix(line_end.encode())
    lines, problems = lines_of(data.draw(st.sampled_from([b"", BOM])) + content, ",", piece_bytes)

    assert problems == {}
    assert [orjson.loads(line) for line in lines] == [dict(zip(names, row, strict=True)) for row in rows]


def test_values_are_never_taken_for_numbers_or_nulls() -> None:
    lines, _ = lines_of(b"a,b,c,d,e\n007,1e5,null,, x \n")

    assert lines == [b'{"a":"007","b":"1e5","c":"null","d":"","e":" x "}']


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_header_says_what_parts_values(delimiter: str) -> None:
    lines, _ = lines_of(f'"a x"{delimiter}b\n1;,|\t2'.replace("1;,|\t2", f'"1;,|\t"{delimiter}2').encode())

    assert [orjson.loads(line) for line in lines] == [{"a x": "1;,|\t", "b": "2"}]


def test_a_table_of_one_column_may_hold_any_of_them_in_its_values() -> None:
    assert lines_of(b"prompt\na;b|c\td\n")[0] == [b'{"prompt":"a;b|c\\td"}']
    assert lines_of(b"a,b\n1,2\n", "\t")[0] == [b'{"a,b":"1,2"}']


def test_blank_lines_are_no_rows() -> None:
    assert lines_of(b"\n \r\na,b\n\n1,2\n \t\n\r\n3,4\n\n")[0] == [b'{"a":"1","b":"2"}', b'{"a":"3","b":"4"}']
    assert lines_of(b'a\n""\n\nx\n')[0] == [b'{"a":""}', b'{"a":"x"}']


@pytest.mark.parametrize("content", [b"", b"\n\n", BOM, b"a,b", b"a,b\r\n"])
def test_a_table_without_rows_is_empty(content: bytes) -> None:
    assert lines_of(content) == ([], {})


def test_a_bad_row_costs_no_other_and_is_told_by_its_number() -> None:
    lines, problems = lines_of(b'a,b\n1,2\n3\n4,5,6\n"7"x,8\n"9\n"x,0\nca\xff,1\nlast,row\n')

    assert lines == [
        b'{"a":"1","b":"2"}',
        b'["3"]',
        b'["4","5","6"]',
        b'"\\"7\\"x,8"',
        b'"\\"9\\n\\"x,0"',
        b'{"a":"ca\xff","b":"1"}',
        b'{"a":"last","b":"row"}',
    ]
    assert problems == {
        2: "wrong number of fields (expected 2, got 1)",
        3: "wrong number of fields (expected 2, got 3)",
        4: "not CSV: ',' expected after '\"'",
        5: "not CSV: ',' expected after '\"'",
    }


@pytest.mark.parametrize(
    ("content", "said", "hint"),
    [
        (b"a,b,a\n", "two columns are called 'a'", None),
        (b",a\n", "column 1 has no name", "index=False"),
        (b"a,\xe9\n1,2\n", "its header is not UTF-8", "UTF-8"),
        ("a,b\n1,2\n".encode("utf-16"), "its header is not UTF-8", "UTF-8"),
        (b'{"prompt":"x"}\n', "its first line looks like JSON", "any other ending"),
        (b"a\r1\r2\r", "its header is not CSV", None),
        (b'"a"x,b\n', "its header is not CSV", None),
        (b'a,b\n1,2\n"3,4\n5,6\n', ":2: the row does not end", "quote"),
        (b'a,b\n1,2\n"' + b"some words\n" * (ROW_LIMIT_BYTES // 10), ":2: the row does not end", "quote"),
        (b"a,b\n" + b"x" * (ROW_LIMIT_BYTES + 1), "is too long", None),
    ],
)
def test_what_is_no_table_is_an_error_that_says_why(content: bytes, said: str, hint: str | None) -> None:
    error = error_of(content)

    assert error.message.startswith(("read in.csv", "split in.csv"))
    assert said in error.message
    assert hint is None or hint in (error.hint or "")


def test_an_open_quote_does_not_fill_the_memory() -> None:
    def pieces() -> Iterator[bytes]:
        yield b'a\n"'
        while True:
            yield b"some words and more of them\n" * 1_000

    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="the row does not end"):
            list(csv_lines(pieces(), None, "in.csv", {}))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 120 << 20
