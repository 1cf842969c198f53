"""How records become requests, as it is asked for on the command line: into the plan, out of it, and on to a retry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from submitter.cli import cli
from submitter.fingerprint import fingerprint_of
from submitter.split import SplitRequest
from tests.finished_runs import finish
from tests.worker_runs import lines, write_run
from worker.contract.errors import InputError, PlanExistsError, UsageError
from worker.contract.formats import decode
from worker.contract.plan import InputObject, Plan, RequestSettings

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = b'{"id":1,"title":"A"}\n{"id":2,"title":"B","lang":"de"}\n'
MESSAGES = '[{"role": "user", "content": "{{ title }}"}]'
GIVEN = (
    ("--template", "{{ title }}"),
    ("--endpoint", "chat"),
    ("--system", "Be brief."),
    ("--select", "$['id','title']"),
    ("--on-too-long", "truncate-left"),
    ("--max-output-tokens", "7"),
    ("--strict-model",),
    ("--lora", "a=/adapters/a"),
    ("--lora", "c=org/c"),
    ("--allow-media", "images.example.com"),
    ("--allow-media", "s3://b/images"),
)
ALL = tuple(word for words in GIVEN for word in words)
ALL_SETTINGS = RequestSettings(
    template="{{ title }}",
    endpoint="chat",
    system="Be brief.",
    select=("id", "title"),
    on_too_long="truncate-left",
    max_output_tokens=7,
    strict_model=True,
    adapters={"a": "/adapters/a", "c": "org/c"},
    media_hosts=("images.example.com", "s3://b/images"),
)

Split = Callable[..., Plan]


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Split:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_bytes(ROWS)

    def run(*arguments: str) -> Plan:
        given = ("split", "in.jsonl", "--run", "r", "--model", "m", "--partitions", "1", *arguments)
        cli.main(given, standalone_mode=False)
        return plan_at("r")

    return run


def plan_at(run: str) -> Plan:
    return decode((Path(run) / "run.json").read_bytes(), Plan, run)


def test_all_of_it_is_in_the_plan(split: Split) -> None:
    plan = split(*ALL)

    assert plan.requests == ALL_SETTINGS
    assert plan.shape == "template"


def test_nothing_asked_for_is_nothing_in_the_plan(split: Split) -> None:
    Path("in.jsonl").write_bytes(b'{"prompt":"x"}\n')

    assert split().requests == RequestSettings()
    assert msgspec.json.decode(Path("r/run.json").read_bytes())["requests"] == {}


def test_variables_give_it_too(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "TEMPLATE": "{{ title }}",
        "ENDPOINT": "chat",
        "SYSTEM": "Be brief.",
        "SELECT": "id title",
        "ON_TOO_LONG": "truncate-left",
        "MAX_OUTPUT_TOKENS": "7",
        "STRICT_MODEL": "1",
        "LORA": "a=/adapters/a c=org/c",
        "ALLOW_MEDIA": "s3://b/images images.example.com",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"SUBMIT_{name}", value)

    assert split().requests == ALL_SETTINGS


def test_the_same_command_again_finds_the_same_run_in_whatever_order(split: Split) -> None:
    plan = split(*ALL)

    assert split(*(word for words in reversed(GIVEN) for word in words)) == plan
    assert len(list(Path("r/partitions").iterdir())) == 1


EACH: dict[str, tuple[tuple[str, str], str]] = {
    "template": (("--template", "{{ title }}!"), "template: another text"),
    "system": (("--system", "Be long."), "system: another text"),
    "endpoint": (("--endpoint", "embedding"), "endpoint (expected chat, got embedding)"),
    "select": (("--select", "lang"), "select (expected id, title, got id, lang, title)"),
    "on_too_long": (("--on-too-long", "error"), "on_too_long (expected truncate-left, got error)"),
    "max_output_tokens": (("--max-output-tokens", "8"), "max_output_tokens (expected 7, got 8)"),
    "strict_model": (("--no-strict-model", "--json"), "strict_model (expected True, got False)"),
    "adapters": (("--lora", "a=/other"), "adapters: a"),
    "media_hosts": (("--allow-media", "x.org"), "media_hosts (expected images.example.com, s3://b/images, got images"),
}


@pytest.mark.parametrize("name", EACH)
def test_another_setting_is_another_run_and_the_error_says_which(split: Split, name: str) -> None:
    split(*ALL)
    other, said = EACH[name]
    if name == "endpoint":
        other = ("--template", MESSAGES)
        said = "template: another text"

    with pytest.raises(PlanExistsError) as raised:
        split(*ALL, *other)

    assert said in raised.value.message
    assert "title }}" not in raised.value.message


def test_each_setting_is_in_the_fingerprint() -> None:
    def fingerprint(requests: RequestSettings, **shape: Any) -> str:
        request = SplitRequest(
            inputs=("in.jsonl",),
            run_uri="s3://b/r",
            partition_count=4,
            model="org/model",
            engines=2,
            engine_args={"max_model_len": 100},
            sampling={"max_tokens": 5},
            requests=requests,
            **shape,
        )
        return fingerprint_of(request, [InputObject(uri="s3://b/in.jsonl", size_bytes=10, etag="e")])

    changed = [
        msgspec.structs.replace(ALL_SETTINGS, **{name: value})
        for name, value in (
            ("template", "{{ other }}"),
            ("system", None),
            ("select", ("id",)),
            ("on_too_long", "error"),
            ("max_output_tokens", None),
            ("strict_model", False),
            ("adapters", {}),
            ("media_hosts", ()),
            ("endpoint", None),
        )
    ]
    found = {fingerprint(one) for one in (ALL_SETTINGS, RequestSettings(), *changed)}

    assert len(found) == 2 + len(changed)
    # As the first version wrote it: a run that it planned goes on under this one.
    assert fingerprint(RequestSettings()) == "xxh3_128:772fcd3030d43c28eb8a58f9887e30dd"


def test_plans_from_before_and_after_there_was_anything_to_ask_are_read() -> None:
    before = decode((GOLDEN / "plan.v1.before-requests.json").read_bytes(), Plan, "golden")
    after = decode((GOLDEN / "plan.v1.requests.json").read_bytes(), Plan, "golden")

    assert before.requests == RequestSettings()
    assert after.requests.adapters == {"pirate": "s3://bucket/adapters/pirate"}
    assert msgspec.structs.replace(after, requests=RequestSettings(), shape="plain") == before


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.jinja", "A: {{ title }}\n"), ("t.json", f"\ufeff{MESSAGES}\n"), ("long name.txt", "{{ title }}")],
)
def test_a_template_may_be_a_file(split: Split, name: str, content: str) -> None:
    Path(name).write_text(content)

    assert split("--template", name).requests.template == content.removeprefix("\ufeff")


@pytest.mark.parametrize("text", ["x\n" * 3000 + "{{ title }}", MESSAGES, "{% if title %}a{% endif %}"])
def test_a_template_may_be_a_text(split: Split, text: str) -> None:
    assert split("--template", text).requests.template == text


@pytest.mark.parametrize(
    ("given", "content"), [("@s.txt", "Be brief."), ("@@home", "@home"), ("", None), ("{{ as it is }}", None)]
)
def test_a_system_message_is_a_text_or_a_file(split: Split, given: str, content: str | None) -> None:
    Path("s.txt").write_text("Be brief.\n")
    Path("in.jsonl").write_bytes(b'{"prompt":"x"}\n')

    assert split("--system", given).requests.system == (content or given or None)


@pytest.mark.parametrize(
    ("paths", "fields"),
    [
        (["id"], ("id",)),
        (["$.id", "first name"], ("first name", "id")),
        (["$['b', \"a.b\",'it\\'s']"], ("a.b", "b", "it's")),
        (["id", "$"], ()),
        (["id", "$.id"], ("id",)),
        (["$['$.x']"], ("$.x",)),
    ],
)
def test_fields_are_selected_by_name(split: Split, paths: list[str], fields: tuple[str, ...]) -> None:
    given = (word for path in paths for word in ("--select", path))

    assert split("--template", "{{ title }}", *given).requests.select == fields


@pytest.mark.parametrize("path", ["$.a.b", "a.b", "$['a']['b']", "$.a[0]", "$[0]", "$.*", "a,b", "$['a'", "", "$$"])
def test_paths_deeper_than_the_top_are_for_merge(split: Split, path: str) -> None:
    with pytest.raises(UsageError, match="no field of a record") as raised:
        split("--template", "{{ title }}", "--select", path)

    assert "submit merge --select" in (raised.value.hint or "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--template", "nowhere.jinja"), "'nowhere.jinja': there is no such file"),
        (("--template", "."), "there is no such file"),
        (("--template", "latin.jinja"), "latin.jinja: not UTF-8"),
        (("--template", "{{ title"), "line 1: unexpected end"),
        (("--template", "{{ title | nothing }}"), "no filter named 'nothing'"),
        (("--template", "{% if true %}{% endif %}"), "reads no field"),
        (("--template", "{{ title }}", "--shape", "plain"), "expected shape 'template'"),
        (("--shape", "template"), "there is no template"),
        (("--endpoint", "completion"), "there is no template"),
        (("--template", MESSAGES, "--endpoint", "completion"), "no prompt of a completion"),
        (("--template", "{{ title }}", "--endpoint", "completion", "--system", "S"), "there are no messages"),
        (("--system", "@nowhere"), "there is no such file"),
        (("--shape", "openai", "--select", "id"), "shape 'openai' have fields of their own"),
        (("--shape", "bedrock", "--select", "id"), "shape 'bedrock' have fields of their own"),
        (("--lora", "a"), "no pair"),
        (("--lora", "a="), "adapter 'a' has no URI"),
        (("--lora", "m=s3://b/a"), "the model's own name"),
        (("--allow-media", "https://h/path"), "not a host"),
        (("--allow-media", "file:///etc"), "not a host"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    split: Split, arguments: tuple[str, ...], said: str
) -> None:
    Path("latin.jinja").write_bytes(b"{{ title }} \xe9")

    with pytest.raises(UsageError) as raised:
        split(*arguments)

    assert said in raised.value.message
    assert not Path("r").exists()


def test_fields_are_not_selected_from_lines_that_turn_out_to_have_none(split: Split) -> None:
    Path("in.jsonl").write_bytes(b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}}\n')

    with pytest.raises(UsageError, match="shape 'openai'"):
        split("--select", "id")
    assert not Path("r").exists()


def test_fields_that_first_records_lack_are_noted_but_for_those_that_may_be_missing(
    split: Split, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{{ title }}{{ titel }}{{ lang }}{{ x | default('') }}{% if y is defined %}{{ y }}{% endif %}"
    split("--template", template, "--system", "In {{ lang }}.")
    noted = capsys.readouterr().err.replace("\n", " ")

    assert "'titel', which 2 of the first 2 records lack" in noted
    assert "did you mean 'title'?" in noted
    assert "'lang', which 1 of the first 2 records lack" in noted
    assert "'x'" not in noted
    assert "'y'" not in noted
    assert "the system message is no template" in noted


def test_selected_fields_that_first_records_lack_are_noted(split: Split, capsys: pytest.CaptureFixture[str]) -> None:
    split("--template", "{{ title }}", "--select", "id", "--select", "titel")
    noted = capsys.readouterr().err.replace("\n", " ")

    assert "--select names 'titel', which none of the first records has: did you mean 'title'?" in noted
    assert "names 'id'" not in noted


def test_a_field_that_the_answer_would_take_is_refused(split: Split) -> None:
    with pytest.raises(InputError, match=r"in.jsonl:2 has a field 'lang'"):
        split("--template", "{{ title }}", "--answer-key", "lang")


def test_any_object_is_a_record_of_a_template(split: Split) -> None:
    rows = b'{"custom_id":"a","url":"u","body":{}}\n{"modelInput":1}\n{}\n{"prompt":"x","max_tokens":"many"}\n'
    Path("in.jsonl").write_bytes(rows)

    plan = split("--template", "{{ title }}")

    assert (plan.record_count, plan.invalid_record_count) == (4, 0)
    assert Path("r/partitions/part-00000-of-00001.jsonl").read_bytes() == rows


def finished_run(**requests: Any) -> Plan:
    shape = "template" if "template" in requests else "plain"
    plan = write_run("r", [lines([b'{"prompt":"x","id":1}'])], shape=shape, requests=RequestSettings(**requests))
    finish("r", plan, lambda _record: "length.prompt_too_long")
    return plan


def retried(*arguments: str) -> Plan:
    cli.main(("retry-failed", "r", "--run", "new", *arguments), standalone_mode=False)
    return plan_at("new")


def test_a_retry_asks_for_the_same(split: Split) -> None:
    old = finished_run(template="{{ id }}", select=("id",), adapters={"a": "/a"}, strict_model=True)

    new = retried()

    assert (new.shape, new.requests) == ("template", old.requests)


def test_a_retry_takes_what_it_is_given_over_that(split: Split) -> None:
    finished_run(
        template="{{ id }}", system="S", select=("id",), adapters={"a": "/a", "b": "/b"}, strict_model=True,
        media_hosts=("h.org",), on_too_long="truncate-left",
    )  # fmt: skip

    new = retried(
        *("--template", "{{ id }}!", "--system", "", "--select", "$", "--lora", "b=/other", "--no-strict-model"),
        *("--allow-media", "a.org", "--on-too-long", "truncate-right", "--max-output-tokens", "9"),
    )

    assert new.requests == RequestSettings(
        template="{{ id }}!",
        adapters={"a": "/a", "b": "/other"},
        media_hosts=("a.org", "h.org"),
        on_too_long="truncate-right",
        max_output_tokens=9,
    )


def test_a_retry_may_bring_a_template_to_plain_records(split: Split) -> None:
    finished_run()

    assert retried("--template", "{{ prompt }}").shape == "template"


def test_a_retry_reads_neither_variables_nor_the_file(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run()
    monkeypatch.setenv("SUBMIT_TEMPLATE", "{{ id }}")
    monkeypatch.setenv("SUBMIT_STRICT_MODEL", "1")
    monkeypatch.setenv("SUBMIT_LORA", "a=/a")

    assert retried().requests == RequestSettings()
