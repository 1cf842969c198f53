"""Any object under any template is a request or an error line; numbers and selected fields keep their bytes."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from worker.contract.record_errors import RecordError
from worker.select import Selector
from worker.templates import RecordTemplate

TEMPLATES = [
    RecordTemplate(template, system)
    for system in (None, "S")
    for template in (
        "{{ a }}",
        "{{ a.b }}{{ a['c'] }}{{ a[0] }}",
        "{{ record | tojson }}{{ record }}",
        "{% for x in a %}{{ x }}{% else %}{{ b }}{% endfor %}",
        "{% for k, v in record.items() %}{{ k }}={{ v }}{% endfor %}",
        "{% if a > b %}{{ a - b }}{% endif %}",
        "{{ a * b }}",
        "{{ a ** b }}",
        "{{ a % b }}",
        "{{ a | upper | trim | replace(b, 'x') }}",
        "{{ a | join(', ') }}{{ a | length }}{{ a | first }}",
        "{{ a | int }}{{ a | float }}{{ a | round(2) }}",
        "{{ a | sort | unique | list }}",
        "{{ a | default(b) }}{{ a is mapping }}",
        "{{ a | tojson(indent=2) }}",
        "{{ '%s %d' | format(a, b) }}{{ '{:>5}'.format(a) }}",
        "{{ a[b] }}{{ record[a] }}{{ a | attr(b) }}",
        '[{"role": "user", "content": "{{ a }}"}, {"role": "user", "content": [{"type": "text", "text": "{{ b }}"}]}]',
    )
]
SECRET = "quite-secret"

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.just(SECRET)
)
names = st.sampled_from(["a", "b", "c", "record", "range", "items", "__class__"]) | st.text(max_size=3)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)
objects = st.dictionaries(names, values, max_size=4)


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def rendered(template: RecordTemplate, line: bytes) -> dict[str, Any] | RecordError:
    try:
        return template.render(line)[1]
    except RecordError as error:
        return error


@given(record=objects, template=st.sampled_from(TEMPLATES))
def test_any_object_is_rendered_or_an_error_that_quotes_nothing(
    record: dict[str, Any], template: RecordTemplate
) -> None:
    found = rendered(template, encoded(record))

    if isinstance(found, RecordError):
        assert SECRET not in f"{found.message}{found.param}"
    else:
        assert orjson.loads(orjson.dumps(found)) == found


@given(line=st.binary(max_size=20), template=st.sampled_from(TEMPLATES))
def test_any_bytes_are_rendered_or_an_error(line: bytes, template: RecordTemplate) -> None:
    found = rendered(template, line)

    assert not isinstance(found, RecordError) or found.stage in ("parse", "request")


digits = st.integers(0, 10**30).map(str)
numbers = st.builds(
    lambda sign, whole, fraction, exponent: f"{sign}{whole}{fraction}{exponent}",
    st.sampled_from(["", "-"]),
    st.integers(1, 10**40).map(str),
    st.just("") | digits.map(".{}0".format),
    st.just("") | st.integers(-30, 30).map("e{}".format) | st.integers(0, 30).map("E+{}".format),
)
PRINTED = RecordTemplate("{{ a }} {{ a | tojson }} {{ [a] | tojson }}", endpoint="completion")


@given(number=numbers)
def test_a_number_is_printed_as_it_is_written(number: str) -> None:
    _, body = PRINTED.render(b'{"a":%b}' % number.encode())

    assert body["prompt"] == f"{number} {number} [{number}]"


space = st.text(" \t\r", max_size=2).map(str.encode)


@given(
    members=st.lists(st.tuples(names, values.map(encoded) | numbers.map(str.encode)), max_size=5),
    chosen=st.sets(names, min_size=1, max_size=3),
    data=st.data(),
)
def test_chosen_members_keep_their_bytes(
    members: list[tuple[str, bytes]], chosen: set[str], data: st.DataObject
) -> None:
    written = [(name, encoded(name), value) for name, value in members]
    gap = data.draw(space)
    raw = gap + b"{" + gap + b",".join(gap + key + gap + b":" + gap + value + gap for _, key, value in written) + b"}"

    kept = Selector(chosen).keep(raw)

    assert kept == b"{" + b",".join(key + b":" + value for name, key, value in written if name in chosen) + b"}"
