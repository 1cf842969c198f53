"""Which fields of a record come back, byte for byte."""

from __future__ import annotations

import pytest

from worker.select import Selector


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"id":1,"b":2,"name":"x"}', b'{"id":1,"name":"x"}'),
        (b'{"name":"x","id":1}', b'{"name":"x","id":1}'),
        (b'{"b":{"id":1},"c":["name"]}', b"{}"),
        (b"{}", b"{}"),
        (
            b' \t{ "id" : 1.10 ,\r"b":[1,"]"] , "name":18446744073709551616 } \r',
            b'{"id":1.10,"name":18446744073709551616}',
        ),
        (b'{"id":1,"b":0,"id":2}', b'{"id":1,"id":2}'),
        (b'{"\\u0069d":"\\u0041","b":"\\"id\\":1"}', b'{"\\u0069d":"\\u0041"}'),
        ('{"id":"é\u2028📚\x7f"}'.encode(), '{"id":"é\u2028📚\x7f"}'.encode()),
        (b'{"id":{"b" : [ 1 , 2 ]},"b":1}', b'{"id":{"b" : [ 1 , 2 ]}}'),
        (b'{"id":%b}' % (b"1" * 5000), b'{"id":%b}' % (b"1" * 5000)),
        (b'{"b":%b,"id":1}' % (b"[" * 1000 + b"]" * 1000), b'{"id":1}'),
    ],
)
def test_chosen_fields_are_kept_in_order_with_their_own_bytes(raw: bytes, expected: bytes) -> None:
    assert Selector(["name", "id", "nowhere"]).keep(raw) == expected


@pytest.mark.parametrize("raw", [b' { "a" : 1 }', b"", b"\xff"])
def test_without_a_choice_nothing_is_touched(raw: bytes) -> None:
    assert Selector().keep(raw) is raw


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[1]",
        b'"id"',
        b"null",
        b'{"id":1',
        b'{"id":1,}',
        b'{"id":1}}',
        b'{"id":1} x',
        b'{"id" 1}',
        b'{"id":}',
        b"{1:2}",
        b'{"id":"\xff"}',
        b'{,"id":1}',
    ],
)
def test_what_is_no_object_comes_back_as_it_is(raw: bytes) -> None:
    assert Selector(["id"]).keep(raw) is raw
