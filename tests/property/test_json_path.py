"""Paths find what a naive walk through decoded JSON finds, and keep the bytes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from submitter.json_path import JsonPath, Selection
from worker.contract.errors import UsageError

NOTHING = object()
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
few_names = st.sampled_from(["a", "b", "é b", "c'd", 'e"f', "g\\h", "", "\n"])
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), names)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(few_names | names, inner, max_size=4),
    max_leaves=12,
)
steps = st.lists(few_names | st.integers(-3, 3), max_size=3)
choices = st.one_of(
    st.none(),
    st.lists(few_names, min_size=2, max_size=3, unique=True),
    st.lists(st.integers(-3, 3), min_size=2, max_size=3).map(tuple),
    st.builds(slice, st.none() | st.integers(-3, 3), st.none() | st.integers(-3, 3)),
)


def quoted(name: str, mark: str) -> str:
    return mark + name.replace("\\", "\\\\").replace(mark, "\\" + mark) + mark


def text_of(path: list[str | int], choice: Any, mark: str) -> str:
    text = "$"
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if step.isalnum() and mark == "'" else f"[{quoted(step, mark)}]"
    match choice:
        case list():
            text += f"[{', '.join(quoted(name, mark) for name in choice)}]"
        case tuple():
            text += f"[{','.join(str(index) for index in choice)}]"
        case slice():
            bounds = ("" if bound is None else str(bound) for bound in (choice.start, choice.stop))
            text += f"[{':'.join(bounds)}]"
    return text


def found_by_walking(value: Any, path: list[str | int], choice: Any) -> Any:
    for step in path:
        is_there = (isinstance(value, dict) and isinstance(step, str) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and -len(value) <= step < len(value)
        )
        if not is_there:
            return NOTHING
        value = value[step]
    match choice:
        case None:
            return value
        case list() if isinstance(value, dict):
            return {name: value[name] for name in choice if name in value}
        case tuple() if isinstance(value, list):
            return [value[index] for index in choice if -len(value) <= index < len(value)]
        case slice() if isinstance(value, list):
            return value[choice]
    return NOTHING


@given(values, steps, choices, st.sampled_from(["'", '"']), st.booleans())
def test_a_path_finds_what_walking_finds(
    value: Any, path: list[str | int], choice: Any, mark: str, is_spaced: bool
) -> None:
    raw = json.dumps(value, ensure_ascii=is_spaced, indent=1 if is_spaced else None).encode()

    found = JsonPath.parse(text_of(path, choice, mark)).find(raw)

    expected = found_by_walking(value, path, choice)
    assert (NOTHING if found is None else json.loads(found)) == expected


@given(st.dictionaries(few_names, values), st.lists(few_names, min_size=2, max_size=3, unique=True))
def test_several_paths_make_an_object_of_what_each_finds(value: dict[str, Any], chosen: list[str]) -> None:
    paths = [f"$[{quoted(name, chr(39))}]" for name in chosen]

    found = Selection.parse(paths).select(json.dumps(value).encode())

    assert json.loads(found) == {name: value[name] for name in chosen if name in value}


RAW = b' {"big":123456789012345678901234567890, "f": 1.10 ,"twice":1,"twice":2,"deep":{"x":[1e5, {"y":"\\u00e9"}]}}\r\n'


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("$", RAW.strip()),
        ("$.big", b"123456789012345678901234567890"),
        ("$['f','big']", b'{"f":1.10,"big":123456789012345678901234567890}'),
        ("$.twice", b"2"),
        ("$.deep.x[1].y", b'"\\u00e9"'),
        ("$.deep.x[0:1]", b"[1e5]"),
        ("$.deep.x[-1]['y']", b'"\\u00e9"'),
        ("$.deep.x[:]", b'[1e5,{"y":"\\u00e9"}]'),
        ("$[0]", None),
        ("$.big.x", None),
    ],
)
def test_what_is_found_is_the_bytes_that_stand_there(path: str, found: bytes | None) -> None:
    assert JsonPath.parse(path).find(RAW) == found


def test_values_as_deep_as_workers_write_them_are_passed_over() -> None:
    deep = b"[" * 1000 + b"]" * 1000

    assert JsonPath.parse("$['a','b']").find(b'{"a":%b,"b":1}' % deep) == b'{"a":%b,"b":1}' % deep


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.b",
        "$x",
        "$.",
        "$..a",
        "$.*",
        "$[*]",
        "$[",
        "$[]",
        "$['a",
        "$[a]",
        "$['a',1]",
        "$[0:2:1]",
        "$[?(@.a)]",
        "$['a','b'].c",
        "$[0:2][0]",
        "$['a','a']",
        "$.a b",
        "$[1234567890]",
    ],
)
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="read path"):
        JsonPath.parse(text)


@given(st.text(st.sampled_from("$.[]'\"\\,:0-1ab *?@()"), max_size=8))
def test_any_text_is_a_path_or_refused(text: str) -> None:
    try:
        path = JsonPath.parse(text)
    except UsageError:
        return
    path.find(b'{"a":[0,1]}')


@pytest.mark.parametrize(
    "paths", [["$.a", "$.b.a"], ["$.a", "$"], ["$.a", "$[0]"], ["$.a", "$.a"], ["$['a','b']", "$.b"]]
)
def test_several_paths_need_names_of_their_own(paths: list[str]) -> None:
    with pytest.raises(UsageError, match="read path"):
        Selection.parse(paths)


def test_a_fields_name_alone_is_its_path() -> None:
    assert JsonPath.parse("id") == JsonPath.parse("$.id")
