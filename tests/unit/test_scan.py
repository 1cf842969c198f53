"""Pass 1 on lines: which are records, which are invalid and why, and what they weigh."""

from __future__ import annotations

import pytest

from submitter.lines import lines_of
from submitter.scan import SHOWN_INVALID_COUNT, InvalidLine, LineScanner, weigh_line
from submitter.weight import ASSUMED_OUTPUT_TOKENS, OUTPUT_TOKEN_WEIGHT, Weigher

WEIGHER = Weigher("plain", {})
DEFAULT_WEIGHT = ASSUMED_OUTPUT_TOKENS * OUTPUT_TOKEN_WEIGHT

VALID = [
    b"{}",
    b'  {"a": 1}\t\r',
    b'{"a":18446744073709551616123456789}',
    b'{"a":1,"a":2}',
    b'{"a":"\\ud83d\\ude00"}',
    '{"a":"\u2028\u2029\u0085\x7f"}'.encode(),
    b'{"max_tokens":"many"}',
]
INVALID = {
    b"null": "not an object",
    b"[1]": "not an object",
    b' "x" ': "not an object",
    b"[1": "not JSON: ",
    b"{": "not JSON: it ends too early (byte 1)",
    b'{"a":NaN}': "not JSON: invalid character (byte 5)",
    b'{"a":Infinity}': "not JSON: invalid character (byte 5)",
    b'{"a":"\\ud800"}': "not JSON: ",
    b'{"a":"\\udc00\\ud83d"}': "not JSON: invalid utf-16 surrogate pair",
    b'{"a":"\x01"}': "not JSON: invalid character (byte 6)",
    b"{} {}": "not JSON: trailing characters (byte 4)",
    b"{'a':1}": "not JSON: expected '\"' (byte 1)",
    b'{"a":"\xff"}': "not UTF-8",
    b'{"a":"\xed\xa0\x80"}': "not UTF-8",
    b"\xef\xbb\xbf{}": "not JSON: ",
    b"\x0b": "not JSON: ",
    b'{"a":1}\x00': "not JSON: trailing characters",
}


def scanned(content: bytes, *, block_count: int = 1) -> LineScanner:
    scanner = LineScanner(WEIGHER)
    lines = list(lines_of([content]))
    step = -(-len(lines) // block_count)
    for start in range(0, len(lines), step):
        scanner.add(b"".join(lines[start : start + step]))
    return scanner


@pytest.mark.parametrize("line", VALID)
def test_a_json_object_is_a_valid_record(line: bytes) -> None:
    scanner = scanned(line + b"\n" + line)

    assert scanner.invalid_count == 0
    assert list(scanner.counts.record_count) == [2]
    assert list(scanner.counts.weight) == [2 * (len(line) + 1 + DEFAULT_WEIGHT)]


@pytest.mark.parametrize(("line", "problem"), INVALID.items())
def test_anything_else_is_an_invalid_record_and_its_fault_is_named(line: bytes, problem: str) -> None:
    scanner = scanned(b"{}\n" + line + b"\n{}\n")

    assert scanner.invalid_count == 1
    assert scanner.invalid[0].line == 2
    assert scanner.invalid[0].problem.startswith(problem)
    assert list(scanner.counts.record_count) == [3]


@pytest.mark.parametrize("line", INVALID)
def test_an_invalid_record_weighs_its_bytes_alone(line: bytes) -> None:
    assert weigh_line(line + b"\n", WEIGHER)[0] == len(line) + 1


@pytest.mark.parametrize("blank", [b"", b" ", b"\t\r", b"\r"])
def test_a_blank_line_is_a_line_but_no_record(blank: bytes) -> None:
    scanner = scanned(b"{}\n" + blank + b"\n[1]\n")

    assert list(scanner.counts.line_count) == [3]
    assert list(scanner.counts.record_count) == [2]
    assert list(scanner.counts.weight) == [3 + DEFAULT_WEIGHT + 4]
    assert scanner.invalid == [InvalidLine(3, "not an object")]


def test_a_value_over_two_lines_is_two_invalid_records() -> None:
    """Read as one stream of JSON it would be valid, and as many values as lines."""
    scanner = scanned(b'{"a":\n1}\n{} {}\n')

    assert [one.line for one in scanner.invalid] == [1, 2, 3]


def test_a_last_line_weighs_the_same_without_its_line_end() -> None:
    ended, unended = scanned(b'{"a":1}\n{"b":2}\n'), scanned(b'{"a":1}\n{"b":2}')

    assert ended.counts.weight == unended.counts.weight
    assert (ended.ends_with_newline, unended.ends_with_newline) == (True, False)
    assert list(unended.counts.size_bytes) == [15]


def test_line_numbers_and_sums_do_not_depend_on_blocks() -> None:
    content = b'{"a":1}\n\nnull\n{"a":\xff}\n{"max_tokens":3}\n[1]\n'
    whole, pieces = scanned(content), scanned(content, block_count=6)

    assert whole.invalid == pieces.invalid
    assert [one.line for one in whole.invalid] == [3, 4, 6]
    for name in ("size_bytes", "line_count", "record_count", "weight"):
        assert sum(getattr(whole.counts, name)) == sum(getattr(pieces.counts, name))
    assert len(pieces.counts.weight) == 6


def test_only_the_first_invalid_lines_are_remembered() -> None:
    scanner = scanned(b"null\n" * 1_000)

    assert scanner.invalid_count == 1_000
    assert [one.line for one in scanner.invalid] == list(range(1, SHOWN_INVALID_COUNT + 1))


@pytest.mark.parametrize("depth", [900, 990, 1_000, 1_020])
def test_nesting_up_to_the_worker_s_limit_is_valid_and_weighs_what_it_says(depth: int) -> None:
    """How deep the fast decoder gets depends on how deep its caller already is."""
    line = b'{"max_tokens":3,"a":' + b"[" * depth + b"]" * depth + b"}"

    weight = len(line) + 1 + 3 * OUTPUT_TOKEN_WEIGHT
    assert weigh_line(line, WEIGHER) == (weight, None)
    assert list(scanned(line).counts.weight) == [weight]


def test_nesting_beyond_the_worker_s_limit_is_invalid() -> None:
    _, problem = weigh_line(b'{"a":' + b"[" * 2_000 + b"]" * 2_000 + b"}", WEIGHER)

    assert problem is not None
    assert problem.startswith("not JSON: ")


@pytest.mark.parametrize("position", [0, (1 << 20) - 8, 1 << 20, 3 << 20])
def test_a_megabytes_long_line_is_checked_to_the_byte(position: int) -> None:
    text = ("é" * (3 << 19) + "😀" * 1_000).encode()
    good = b'{"a":"' + text + b'"}'
    bad = b'{"a":"' + text[:position] + b"\xff" + text[position:] + b'"}'

    assert weigh_line(good, WEIGHER)[1] is None
    assert weigh_line(bad, WEIGHER)[1] == "not UTF-8"
    assert weigh_line(good[:-3], WEIGHER)[1] == "not UTF-8"
