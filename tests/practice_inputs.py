"""Ways to write input files, and values to write into them, such as are found in practice."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
from collections.abc import Callable
from dataclasses import dataclass

import orjson
from backports import zstd

from tests.worker_runs import lines
from worker.contract.plan import Shape

BOM = b"\xef\xbb\xbf"
MIB = 1 << 20
Packer = Callable[[list[bytes]], bytes]
"""From records to an object's bytes."""


@dataclass(frozen=True, slots=True)
class Written:
    """Records as somebody wrote them into an object."""

    key: str
    pack: Packer
    values: tuple[bytes, ...]
    """What is the records' own: ids, and fields that are no parameters."""
    text: bytes = b"Hi."
    """Of their prompts."""


def skippable_frame(content: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A50, len(content)) + content


def two(pack: Callable[[bytes], bytes]) -> Packer:
    """Two streams, one after the other; the first ends in the middle of a record."""

    def packed(records: list[bytes]) -> bytes:
        content = lines(records)
        return pack(content[: len(records[0]) - 3]) + pack(content[len(records[0]) - 3 :])

    return packed


def plainly(pack: Callable[[bytes], bytes] = bytes) -> Packer:
    return lambda records: pack(lines(records))


def written(key: str, pack: Packer, text: bytes = b"Hi.") -> Written:
    return Written(key, pack, tuple(orjson.dumps(f"{key} {number}") for number in range(3)), text)


COMPRESSIONS = [
    written("none.gz", plainly()),
    written("gz.jsonl", plainly(gzip.compress)),
    written("zst.gz", plainly(zstd.compress)),
    written("bz2.txt", plainly(bz2.compress)),
    written("xz.zst", plainly(lzma.compress)),
]
SEVERAL_STREAMS = [
    written("members.gz", two(gzip.compress)),
    written("an empty member.gz", lambda records: gzip.compress(b"") + two(gzip.compress)(records)),
    written("frames.zst", two(zstd.compress)),
    written("skippable.zst", lambda records: skippable_frame(b"own data") + two(zstd.compress)(records)),
    written("streams.bz2", two(bz2.compress)),
    written("streams.xz", two(lzma.compress)),
]
KEYS = [
    written(key, plainly())
    for key in (
        "a b.jsonl", "a+b.jsonl", "a#b.jsonl", "a?b.jsonl", "a%20b.jsonl", "a%b.jsonl", "a@b.jsonl", "a:b.jsonl", "?x=1&y=#z",
        "a\tb.jsonl", "größe 東京 😀.jsonl", "e\u0301.jsonl", "a*b.jsonl", "[a].jsonl", "a\\b.jsonl", "a=1/b=2/c.jsonl",
    )
]  # fmt: skip
KEYS_ON_S3 = [
    written(key, plainly()) for key in ("a//b.jsonl", "//c.jsonl", "d/../e.jsonl", "f/./g.jsonl", "http://h/i")
]
MARKS = [
    written("bom.jsonl", lambda records: BOM + lines(records)),
    written("bom.jsonl.gz", lambda records: gzip.compress(BOM + lines(records))),
    written("bom before a blank line.jsonl", lambda records: BOM + b"\r\n" + lines(records)),
]
LINE_ENDS = [
    written("lf.jsonl", plainly()),
    written("crlf.jsonl", b"\r\n".join),
    written("both.jsonl", lambda records: records[0] + b"\r\n" + records[1] + b"\n" + records[2] + b"\r\n"),
    written("no last end.jsonl", b"\n".join),
    written("blank.jsonl", lambda records: b"\n \n\r\n" + b"\n\n\t\n".join(records) + b"\n\n  "),
]
SEPARATORS = [
    Written("separators.jsonl", plainly(), tuple(f'"a{mark}b"'.encode() for mark in ("\u2028", "\u2029", "\u0085")))
]
LONG_LINES = [
    written("megabytes.jsonl", plainly(), b"x" * 3 * MIB),
    written("megabytes.jsonl.zst", plainly(zstd.compress), "größe \u2028 東京 😀 ".encode() * (MIB // 16)),
]
VALUES = Written(
    "values.jsonl",
    plainly(),
    (
        b"9007199254740993", b"9223372036854775808", b"18446744073709551616", b"-9223372036854775809",
        b"123456789012345678901234567890", b"1.10", b"1.0", b"-0", b"-0.0", b"1e2", b"1E+2", b"1E-400",
        b"0.1000000000000000055511151231257827", b'{"a":1,"a":2}', b'{"b":1,"a":{"x":[1,1.0]},"b":null}',
        rb'"\u0041\/\"\\\b\f\n\r\t\u0000\u001f"', rb'"\ud83d\ude00\u2028\u00e9\u00E9"', '"😀é\u007f\ufeff\uffff"'.encode(), b'""',
        b"[1,\r2 ,\t3]", b'{ "a" : [ true , false , null ] }', b"[" * 200 + b"]" * 200,
    ),
)  # fmt: skip
TWICE = Written("twice.jsonl", plainly(), (b'"the same"', b'"another"', b'"the same"', rb'"the \u0073ame"'))

GOOD = [*COMPRESSIONS, *SEVERAL_STREAMS, *KEYS, *MARKS, *LINE_ENDS, *SEPARATORS, *LONG_LINES, VALUES, TWICE]

NO_JSON = [
    b"NaN", b"Infinity", b"-Infinity", b"1e400", rb'"\ud800"', rb'"\udc00\ud800"', b'"\xff"', b'"\xed\xa0\x80"', b'"a\tb"',
    b"01", b"'a'", b"{", b'"', b"None",
]  # fmt: skip
"""Put where a value goes."""
TOO_LARGE = b"1e400"
"""Of no use to anyone who reads numbers as floats, but JSON."""
PYTHONS_OWN = (b"NaN", b"Infinity", b"-Infinity", rb'"\ud800"', rb'"\udc00\ud800"')
"""What Python's `json` writes among it."""
NO_OBJECTS = [b"null", b"[1]", b'"x"', b"7", b"18446744073709551616", b"1.10", b"[]", b"true", b' [ {"a":1.10} ] ']


def record_of(shape: Shape, value: bytes, text: bytes = b"Hi.") -> bytes:
    match shape:
        case "openai":
            body = b'{"messages":[{"role":"user","content":"%b"}]}' % text
            return b'{"custom_id":%b,"method":"POST","url":"/v1/chat/completions","body":%b}' % (value, body)
        case "bedrock":
            return b'{"recordId":%b,"modelInput":%b}' % (value, model_input(value, text))
    return b'{"own":%b,"prompt":"%b","own":%b}' % (value, text, value)


def model_input(value: bytes, text: bytes) -> bytes:
    return (
        b'{"anthropic_version":"bedrock-2023-05-31","max_tokens":4,"metadata":%b,"messages":'
        b'[{"role":"user","content":"%b"}]}' % (value, text)
    )


def bad_lines(shape: Shape) -> list[bytes]:
    return [*(bad_record(shape, f'"bad {place}"'.encode(), value) for place, value in enumerate(NO_JSON)), *NO_OBJECTS]


def bad_record(shape: Shape, record_id: bytes, value: bytes) -> bytes:
    if shape == "openai":
        return b'%b,"body":{"metadata":%b}}' % (record_of(shape, record_id).partition(b',"body":')[0], value)
    return record_of(shape, value)


def content_of(shape: Shape, one: Written) -> bytes:
    return one.pack([record_of(shape, value, one.text) for value in one.values])
