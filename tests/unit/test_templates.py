"""What a template makes of a record, and what it may not do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from worker.contract import jinja
from worker.contract.errors import UsageError
from worker.contract.record_errors import RecordError
from worker.contract.template import parse_template
from worker.json_lines import parse_line
from worker.templates import RecordTemplate

EXAMPLES = Path(__file__).parents[2] / "examples"


def text_of(template: str, raw: bytes) -> str:
    endpoint, body = RecordTemplate(template, endpoint="completion").render(raw)
    assert endpoint == "completion"
    found: str = body["prompt"]
    return found


def error_of(template: str, raw: bytes = b'{"a":"secret","n":null,"o":{"p":null},"list":["secret"]}') -> RecordError:
    with pytest.raises(RecordError) as raised:
        RecordTemplate(template).render(raw)
    assert "secret" not in raised.value.message
    return raised.value


@pytest.mark.parametrize(
    ("endpoint", "system", "body"),
    [
        (None, None, {"messages": [{"role": "user", "content": "Q: x"}]}),
        ("chat", "S", {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q: x"}]}),
        ("completion", None, {"prompt": "Q: x"}),
        ("embedding", None, {"input": "Q: x"}),
    ],
)
def test_a_text_becomes_what_is_asked_for(endpoint: Any, system: str | None, body: Mapping[str, Any]) -> None:
    assert RecordTemplate("Q: {{ a }}\n", system, endpoint).render(b'{"a":"x"}') == (endpoint or "chat", body)


def test_strings_of_messages_are_rendered_where_they_stand_and_the_rest_stays() -> None:
    template = (
        '[{"role": "user", "content": [{"type": "text", "text": "{{ a }}\\n"}, '
        '{"type": "image_url", "image_url": {"url": "https://h/{{ b }}.png", "detail": "low"}}], "n": 1.5, "x": null}]'
    )

    _, body = RecordTemplate(template, "S").render(b'{"a":"x","b":7}')

    parts = [
        {"type": "text", "text": "x\n"},
        {"type": "image_url", "image_url": {"url": "https://h/7.png", "detail": "low"}},
    ]
    assert body["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": parts, "n": 1.5, "x": None},
    ]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_messages_with_a_system_message_get_no_other(role: str) -> None:
    template = f'[{{"role": "{role}", "content": "own"}}, {{"role": "user", "content": "{{{{ a }}}}"}}]'

    _, body = RecordTemplate(template, "S").render(b'{"a":"x"}')

    assert body["messages"] == [{"role": role, "content": "own"}, {"role": "user", "content": "x"}]


def test_what_one_record_made_is_not_shared_with_the_next() -> None:
    template = RecordTemplate('[{"role": "user", "content": [{"type": "text", "text": "{{ a }}"}, {"k": ["c"]}]}]', "S")

    first = template.render(b'{"a":"x"}')[1]["messages"]
    first[0]["content"] = "changed"
    first[1]["content"][1]["k"].append("changed")

    again = template.render(b'{"a":"x"}')[1]["messages"]
    assert again[0]["content"] == "S"
    assert again[1]["content"][1] == {"k": ["c"]}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("{{ big }}", "18446744073709551616"),
        ("{{ price }} {{ half }} {{ tiny }}", "1.10 5E-1 1e-400"),
        ("{{ [price, {'p': price}] }}", "[1.10, {'p': 1.10}]"),
        ("{{ price ~ '' }} {{ price | string }} {{ '%s' | format(price) }} {{ '{}'.format(price) }}", "1.10 " * 4),
        ("{{ price + 1 }} {{ price * 2 }} {{ price > 1 }} {{ price | round(1) }}", "2.1 2.2 True 1.1 "),
        ("{{ '%.3f' | format(price) }} {{ big + 1 }} {{ [price, half] | min }}", "1.100 18446744073709551617 5E-1 "),
        ("{{ record | tojson }}", '{"big":18446744073709551616,"price":1.10,"half":5E-1,"tiny":1e-400}'),
    ],
)
def test_numbers_keep_their_text_and_are_numbers(expression: str, expected: str) -> None:
    raw = b'{"big":18446744073709551616,"price":1.10,"half":5E-1,"tiny":1e-400}'

    assert text_of(expression + " ", raw).strip() == expected.strip()


def test_tojson_escapes_for_json_alone() -> None:
    raw = '{"a":{"html":"<b>\'&\\"\\u2028\\n","é":[true,null,[],{}]}}'.encode()

    assert text_of("{{ a | tojson }}", raw) == '{"html":"<b>\'&\\"\u2028\\n","é":[true,null,[],{}]}'
    assert text_of("{{ a.é | tojson(indent=1) }}", raw) == "[\n true,\n null,\n [],\n {}\n]"


def test_text_is_not_escaped_and_one_newline_at_the_end_of_a_file_goes() -> None:
    assert text_of("{{ a }}\n\n", b'{"a":"<&>\\"\\r\\n"}') == '<&>"\r\n\n'
    assert text_of("{{ a }}\r\n", b'{"a":""}') == ""


def test_each_field_is_a_name_and_record_is_the_whole() -> None:
    raw = b'{"first name":"A","loop":"L","items":"I","a-b":{"c d":1}}'

    assert text_of('{{ record["first name"] }}{{ loop }}{{ record.items }}{{ record["a-b"]["c d"] }}', raw) == "ALI1"


@pytest.mark.parametrize("name", ["range", "dict", "namespace", "joiner", "record"])
def test_a_field_goes_before_what_jinja_means_by_its_name(name: str) -> None:
    assert text_of(f"{{{{ {name} }}}}", b'{"%b":"mine"}' % name.encode()) == "mine"


def test_a_field_of_an_object_goes_before_a_method() -> None:
    assert text_of("{{ a.items }} {{ a.keys }} {{ b.items() | list }}", b'{"a":{"items":1,"keys":2},"b":{"x":1}}') == (
        "1 2 [('x', 1)]"
    )


def test_the_last_of_two_fields_of_a_name_counts() -> None:
    assert text_of("{{ a }}", b'{"a":1,"a":2}') == "2"


@pytest.mark.parametrize(
    ("template", "param"),
    [
        ("{{ nope }}", "nope"),
        ("{% if nope %}{% endif %}", "nope"),
        ("{% for x in nope %}{% endfor %}", "nope"),
        ("{{ a }}{{ nope | upper }}", "nope"),
        ("{{ nope.deeper.still }}", "nope"),
        ("{{ o.nope }}", "o.nope"),
        ('{{ o["no pe"] }}', "o.no pe"),
        ("{{ record.nope }}", "nope"),
        ("{{ range }}", "range"),
        ("{{ a }} {{ dict }}", "dict"),
        ('[{"role":"user","content":"{{ a }}"},{"role":"user","content":[{"text":"{{ nope }}"}]}]', "nope"),
    ],
)
def test_a_missing_field_is_named(template: str, param: str) -> None:
    found = error_of(template)

    assert (found.stage, found.code, found.param) == ("request", "missing_field", param)
    assert found.message == f"render template: the record has no field {param!r}"


@pytest.mark.parametrize(("template", "param"), [("{{ n }}", "n"), ("{{ a }}{{ o.p }}", "o.p")])
def test_a_null_is_not_printed_as_none(template: str, param: str) -> None:
    found = error_of(template)

    assert (found.code, found.param) == ("missing_field", param)
    assert "is null" in found.message


@pytest.mark.parametrize(
    "template", ["{% if not n %}{% for x in o.values() %}{{ x }}{% endfor %}{% endif %}", "{{ n or o.p }}"]
)
def test_a_null_that_is_no_field_of_its_own_is_not_called_by_another_ones_name(template: str) -> None:
    found = error_of(template)

    assert (found.code, found.param) == ("template_failed", None)
    assert "a null or a function" in found.message


def test_a_field_that_is_looked_up_by_a_value_is_not_named() -> None:
    found = error_of("{{ o[a] }}")

    assert (found.code, found.param) == ("missing_field", None)


def test_what_may_be_missing_can_be_said() -> None:
    template = (
        "{{ x | default('-') }}{{ x is defined }}{{ n | default('-', true) }}{{ n is none }}{% if n %}!{% endif %}"
    )

    assert text_of(template, b'{"n":null}') == "-False-True"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ a + 1 }}", "line 1: it fails for this record (TypeError)"),
        ("\n\n{{ a.x() }}", "line 3"),
        ("{{ 1 / (list | length - 1) }}", "ZeroDivisionError"),
        ("{{ a | int + (a | list | tojson | length) % 0 }}", "ZeroDivisionError"),
        ("{{ a.upper }}", "a null or a function"),
        ("{{ '%c' | format(55296) }}{{ a }}", "UnicodeEncodeError"),
        ("{{ list | tojson(indent=a) }}", "TypeError"),
        ('[{"role":"user","content":"x"},{"role":"user","content":"\\n{{ a + 1 }}"}]', "messages[1].content, line 2"),
    ],
)
def test_a_template_that_fails_says_where_and_quotes_nothing(template: str, said: str) -> None:
    found = error_of(template)

    assert found.kind in ("request.template_failed", "request.missing_field")
    assert said in found.message or found.code == "missing_field"


@pytest.mark.parametrize(
    "template",
    [
        "{{ a.__class__ }}",
        "{{ a | attr('__class__') }}",
        "{{ '{0.__class__}'.format(a) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ a }}",
        "{{ list.append(1) }}",
        "{{ o.update(x=1) }}",
        "{{ record.clear() }}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    assert error_of(template).message == "render template: line 1: the sandbox forbids what it does"


@pytest.mark.parametrize(
    "template",
    [
        "{% for x in range(10 ** 9) %}{% endfor %}{{ a }}",
        "{{ a * 10 ** 9 }}",
        "{{ 10 ** 9 * list }}",
        "{{ 9 ** (9 ** 9) }}{{ a }}",
        "{% for x in range(100) %}{% for y in range(100000) %}{{ a }}{{ a }}{% endfor %}{% endfor %}",
    ],
)
def test_what_a_template_makes_is_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.templates.MAX_TEXT_LENGTH", 1 << 16)

    assert "it asks for too much" in error_of(template).message


HUGE = 9_999_999_999
GREEDY = json.dumps(
    {
        "w": HUGE,
        "s": "ab",
        "n": 7,
        "tabs": "\t" * 50,
        "lines": "a\n" * 50,
        "braces": f"{{:>{HUGE}}}",
        "percent": f"%{HUGE}d",
        "star": "%*d",
        "deep": json.loads("[" * 250 + "1," * 25_000 + "1" + "]" * 250),
        "x": "x" * 100_000,
    }
).encode()


@pytest.mark.parametrize(
    "expression",
    [
        "s.ljust(w)",
        "s.rjust(w, '-')",
        "s.center(w)",
        "s.zfill(w)",
        "s.encode().center(w)",
        "(s | attr('center'))(w)",
        "s | center(w)",
        "s | center(width=w)",
        "[s] | map('center', w) | first",
        "tabs.expandtabs(w)",
        "tabs.expandtabs(tabsize=w)",
        "lines | indent(w)",
        "lines | indent(width=w)",
        "lines | indent(x * 100)",
        "s | indent(w, true)",
        "braces.format(n)",
        "'{:{}}'.format(n, w)",
        "'{s:>{w}}'.format_map(record)",
        "'{:.{}f}'.format(n, w)",
        "('{0}' * 1000).format(x)",
        "(s | e).format(n) ~ (braces | e).format(n)",
        "percent % n",
        "percent | format(n)",
        "'%.9999999999d' % n",
        "star % (w, n)",
        "'%(n)9999999999d' % record",
        "'%(x)s' * 1000 % record",
        "'%((a))9999999999d' % record",
        "percent.encode() % n",
        "x.replace('x', x)",
        "x.replace('', x)",
        "x | replace('x', x)",
        "x | replace('', x)",
        "x | wordwrap(1, true, x)",
        "x | wordwrap(1, wrapstring=x)",
        "[x] * 1000",
        "([x] * 1000) | join",
        "range(1000) | join(x)",
        "x.join(['a'] * 1000)",
        "''.join([x] * 1000)",
        "([x] * 1000) | string",
        "[x] * 1000 ~ ''",
        "([x] * 1000) | tojson",
        "'%s' % ([[x] * 1000],)",
        "x.translate({120: x})",
        "n.to_bytes(w, 'big')",
        "[1] | batch(w, 0) | list",
        "[1] | slice(w, 0) | list",
        "n | round(w, 'ceil')",
        "deep | tojson(indent=16)",
        "range(w)",
        "s * w",
        "s.encode() * w",
        "2 ** w",
    ],
)
def test_a_record_cannot_ask_a_template_for_gigabytes(expression: str) -> None:
    assert "it asks for too much" in error_of(f"{{{{ {expression} }}}}", GREEDY).message


@pytest.mark.parametrize(
    "template",
    [
        "{% set o = namespace(v=x) %}{% for i in range(40) %}{% set o.v = o.v ~ o.v %}{% endfor %}",
        "{% set o = namespace(v=x) %}{% for i in range(40) %}{% set o.v = o.v + o.v %}{% endfor %}",
        "{% set o = namespace(v=[x]) %}{% for i in range(40) %}{% set o.v = o.v + o.v %}{% endfor %}",
        "{% set o = namespace(v=3) %}{% for i in range(40) %}{% set o.v = o.v * o.v %}{% endfor %}{{ x }}",
        "{% set o = namespace(v=x) %}{% for i in range(40) %}{% set y %}{{ o.v }}{{ o.v }}{% endset %}{% set o.v = y %}{% endfor %}",
        "{% macro m(v) %}{{ v ~ v }}{% endmacro %}{% set o = namespace(v=x) %}{% for i in [x] * 40 %}{% set o.v = m(o.v) %}{% endfor %}",
        "{% filter indent(w) %}{{ lines }}{% endfilter %}",
    ],
)
def test_no_text_grows_without_bound(template: str) -> None:
    assert "it asks for too much" in error_of(template, GREEDY).message


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("s.ljust(4) ~ s.zfill(4) ~ (s | center(4)) ~ '\\ta'.expandtabs(2)", "ab  00ab ab   a"),
        ("'{:>4}{!r}{s:.1}'.format(n, s, s=s)", "   7'ab'a"),
        ("'{n:03}'.format_map(record)", "007"),
        ("'%03d|%-4s|%.1f|%*d|%%' % (n, s, 1.25, 3, n)",
         "007|ab  |1.2|  7|%"),
        ("'%(n)03d' % record ~ ('%s-%s' | format(n, s)) ~ 7 % 4", "0077-ab3"),
        ("('a\\nb' | indent(2)) ~ ('a b' | wordwrap(1, true, '/'))", "a\n  ba/b"),
        ("'{}<'.format('<') ~ ('{}<' | e).format('<')", "<<&lt;&lt;"),
        ("[1, 2, 3] | batch(2, 0) | list ~ ([1, 2, 3] | slice(2) | list)", "[[1, 2], [3, 0]][[1, 2], [3]]"),
        ("['a', n] | join('-') ~ '+'.join(['a', 'b']) ~ ([{'k': 1}] | join(attribute='k'))", "a-7a+b1"),
        ("s.replace('a', 'cc') ~ (s | replace('b', '', 1)) ~ s.translate({97: 'z'}) ~ 2 * 3 ~ 2 ** 10 ~ (n | round(1))",
         "ccbazb610247"),
        ("([1] + [2]) ~ (1 + 2) ~ ('a' + 'b') ~ (n.to_bytes(1, 'big') | length)", "[1, 2]3ab1"),
        ("{'a': [1]} | tojson(indent=1)", '{\n "a": [\n  1\n ]\n}'),
        ("'1999 %s 12345678901' % s", "1999 ab 12345678901"),
    ],
)  # fmt: skip
def test_what_is_within_bounds_is_made(expression: str, expected: str) -> None:
    assert text_of(f"{{{{ {expression} }}}}{{% if s %}}{{% endif %}}", b'{"s":"ab","n":7}') == expected


def test_a_line_that_is_parsed_already_is_rendered_as_it_is_written() -> None:
    template = RecordTemplate("{{ a }} {{ b }}", endpoint="completion")

    for raw in (
        b'{"a":1.10,"b":"x"}',
        b'{"a":18446744073709551616,"b":"x"}',
        b'{"a":1E5,"b":"x"}',
        b'{"a":-7,"b":"1.5"}',
    ):
        assert template.render(raw, parse_line(raw)) == template.render(raw)
    assert template.render(b'{"a":1.10,"b":"x"}', {"a": 1.1, "b": "x"})[1] == {"prompt": "1.10 x"}


def test_a_template_without_an_end_goes_too_deep() -> None:
    assert "too deep" in error_of("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(a) }}").message


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b'{"a":NaN}', "parse.invalid_json_line"),
        (b'{"a":"\xff"}', "parse.invalid_json_line"),
        (b'{"a":"\\ud800"}', "parse.invalid_json_line"),
        (b"[1]", "parse.not_an_object"),
    ],
)
def test_lines_that_are_no_objects_are_refused_as_elsewhere(raw: bytes, kind: str) -> None:
    assert error_of("{{ a }}", raw).kind == kind


def test_a_record_may_be_as_deep_as_any_other() -> None:
    raw = b'{"b":"x","a":' + b"[" * 1000 + b"]" * 1000 + b"}"

    assert text_of("{{ b }}", raw) == "x"
    assert error_of("{{ a | tojson }}", raw).code == "template_failed"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("x\n{{ a", "line 2: unexpected end of template"),
        ("{% if a %}", "line 1: unexpected end of template"),
        ("{{ a | nothing }}", "line 1: no filter named 'nothing'"),
        ("{{ a is nothing }}", "line 1: no test named 'nothing'"),
        ("{{ list | random }}", "no filter named 'random'"),
        ("{% include 'b' %}{{ a }}", "line 1: it needs another template"),
        ("{{ a }}\n{% extends 'b' %}", "line 2: it needs another template"),
        ("{{ self }}", "'self' is Jinja's own name"),
        ("plain text", "reads no field"),
        ("{% for i in range(3) %}{{ i }}{% endfor %}", "reads no field"),
        ("{% set x = 1 %}{{ x }}", "reads no field"),
        ("[]", "has no messages"),
        ('[{"content": "{{ a }}"}]', "messages[0] has no role"),
        ('[{"role": "user", "content": "x"}, {"role": 1, "content": "{{ a }}"}]', "messages[1] has no role"),
        ('[{"role": "user", "content": ["{{ a"]}]', "messages[0].content[0], line 1: unexpected end"),
        ('[{"role": "{{ a }}", "content": "x"}]', "reads no field"),
        ("{% for x in a %}" * 30 + "{{ x }}" + "{% endfor %}" * 30, "cannot be compiled"),
    ],
)
def test_a_template_that_cannot_be_is_refused(template: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"read template: ") as raised:
        RecordTemplate(template)

    assert said in raised.value.message


@pytest.mark.parametrize(
    ("template", "system", "endpoint"),
    [
        ("{{ a }}", "S", "completion"),
        ("{{ a }}", "S", "embedding"),
        ('[{"role": "user", "content": "{{ a }}"}]', None, "completion"),
        ("{{ a }}", None, "rerank"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(template: str, system: str | None, endpoint: Any) -> None:
    with pytest.raises(UsageError):
        RecordTemplate(template, system, endpoint)


@pytest.mark.parametrize("text", ['["{{ a }}"]', "[{{ a }}]", '{"a": {{ a | tojson }}}'])
def test_what_only_looks_like_messages_is_a_text(text: str) -> None:
    assert parse_template(text).messages is None
    assert text_of(text, b'{"a":1}') == text.replace("{{ a }}", "1").replace("{{ a | tojson }}", "1")


def test_fields_that_a_template_reads_are_known_and_which_of_them_may_be_missing() -> None:
    found = parse_template(
        "{{ a.b }}{{ record['c d'].e }}{{ record.f }}{% for x in g %}{{ x.h }}{% endfor %}{{ range }}{{ range(3) }}"
        "{% if i is defined %}{{ i }}{% endif %}{{ j | default(1) }}{{ record.k | d('') }}{% set l = 1 %}{{ l }}"
    )

    assert found.fields == {"a", "c d", "f", "g", "range", "i", "j", "k"}
    assert found.optional_fields == {"i", "j", "k"}


def test_names_of_the_templates_own_are_no_fields() -> None:
    found = parse_template("{% for record in rows %}{{ record.x }}{% endfor %}{% set y = rows[0] %}{{ y.z }}")

    assert found.fields == {"rows"}


def test_the_same_record_makes_the_same_request_in_an_environment_without_chance() -> None:
    assert not {"lipsum"} & jinja.environment().globals.keys()
    assert not {"random"} & jinja.environment().filters.keys()


@pytest.mark.parametrize("name", ["template.jinja", "messages.json"])
def test_the_examples_go_together(name: str) -> None:
    template = RecordTemplate((EXAMPLES / name).read_text())
    rows = (EXAMPLES / "rows.jsonl").read_bytes().splitlines()

    contents = [template.render(row)[1]["messages"][-1]["content"] for row in rows]

    assert all("{" not in content for content in contents)
    assert "Rain jacket" in contents[4]
    assert name == "messages.json" or ("(80.10 EUR" in contents[4] and "in English." in contents[7])


@pytest.mark.parametrize(
    "source",
    [
        '[{"role":"user","content":"{{ id }}"},]',
        ' [ {"role": "user", "content": "{{ id }}"}, 5]',
        '[{"role": "{{ id }}"',
        '[{"role": "user"}, {{ id }}]',
    ],
)
def test_what_begins_like_messages_and_is_none_is_refused(source: str) -> None:
    with pytest.raises(UsageError, match="read template: "):
        parse_template(source)


def test_a_text_that_begins_with_a_bracket_is_a_text() -> None:
    for source in ("[{{ id }}]", "[x] {{ id }}", '[{% if id %}"{% endif %}'):
        assert parse_template(source).text is not None
