"""A new run of what failed: its settings, its plan, and when there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from submitter.options import RetryRequest
from submitter.retry_failed import Retried, retry_failed
from tests.finished_runs import finish, records_of_run
from tests.worker_runs import lines, records, write_run
from worker.contract.errors import InputError, PlanExistsError, UsageError
from worker.contract.plan import InputObject, Plan, RequestSettings, Source

RECORDS = records(12)
CONTENTS = [lines(RECORDS[:6]), lines(RECORDS[6:])]
KINDS = {
    b'{"prompt":"record 1"}': "length.prompt_too_long",
    b'{"prompt":"record 2"}': "length.prompt_empty",
    b'{"prompt":"record 7"}': "engine.killed",
    b'{"prompt":"record 8"}': "length.prompt_too_long",
}
FAILED = list(KINDS)


@pytest.fixture
def run_uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def finished(run_uri: str, indices: list[int] | None = None, **changes: Any) -> Plan:
    plan = write_run(run_uri, CONTENTS, **changes)
    finish(run_uri, plan, lambda record: KINDS.get(record, ""), indices)
    return plan


def retried(run_uri: str, **values: Any) -> Retried:
    return retry_failed(RetryRequest(run_uri=run_uri, new_run_uri=f"{run_uri}-new", **values))


def planned(run_uri: str, **values: Any) -> Plan:
    result = retried(run_uri, **values).result
    assert result
    return result.plan


def test_it_has_the_settings_of_the_run_that_failed(run_uri: str) -> None:
    old = finished(
        run_uri,
        compression="gz",
        engines=3,
        engine_args={"max_model_len": 100, "dtype": "float32"},
        sampling={"max_tokens": 5},
    )

    new = planned(run_uri)

    names = ("model", "shape", "compression", "engines", "engine_args", "sampling", "answer_key")
    assert [getattr(new, name) for name in names] == [getattr(old, name) for name in names]
    assert records_of_run(f"{run_uri}-new", new) == FAILED
    assert new.run_id != old.run_id


def test_options_are_put_over_them_key_by_key(run_uri: str) -> None:
    finished(run_uri, engine_args={"max_model_len": 100, "dtype": "float32"}, sampling={"max_tokens": 5, "top_k": 1})

    new = planned(
        run_uri,
        model="other",
        engines=2,
        engine_args={"max_model_len": 200},
        sampling={"max_tokens": 9},
        answer_key="again",
        compression="zst",
        partition_count=4,
    )

    assert (new.model, new.engines, new.answer_key, new.compression) == ("other", 2, "again", "zst")
    assert new.engine_args == {"max_model_len": 200, "dtype": "float32"}
    assert new.sampling == {"max_tokens": 9, "top_k": 1}
    assert [partition.record_count for partition in new.partitions] == [1, 1, 1, 1]


def test_its_model_and_adapters_are_those_of_then_unless_others_are_asked_for(run_uri: str) -> None:
    then = "d" * 40
    finished(
        run_uri,
        model="org/model",
        model_revision=then,
        requests=RequestSettings(adapters={"a": "org/c", "b": "org/c"}),
        adapter_revisions={"a": then, "b": then},
    )
    same = planned(run_uri, requests={"adapters": {"b": "/adapters/b"}})
    other = retry_failed(RetryRequest(run_uri=run_uri, new_run_uri=f"{run_uri}-other", model="other")).result
    newer = retry_failed(RetryRequest(run_uri=run_uri, new_run_uri=f"{run_uri}-newer", revision="main")).result

    assert (same.model_revision, same.adapter_revisions) == (then, {"a": then})
    assert other
    assert other.plan.model_revision == "c" * 40
    assert newer
    assert newer.plan.model_revision == "c" * 40


def test_a_revision_among_the_engine_arguments_of_an_older_plan_becomes_the_runs_own(run_uri: str) -> None:
    finished(run_uri, model="org/model", engine_args={"revision": "e" * 40, "dtype": "float32"})
    new = planned(run_uri)

    assert new.model_revision == "e" * 40
    assert new.engine_args == {"dtype": "float32"}


def test_its_plan_says_where_its_records_come_from(run_uri: str) -> None:
    old = finished(run_uri)

    new = planned(run_uri)

    assert new.inputs[:-1] == old.inputs
    assert new.inputs[-1].uri == f"{run_uri}/outputs"
    # One line that is blank, and the lines 2 and 3, 2 and 3 of the parts: both are of the first input in this plan.
    assert [source for partition in new.partitions for source in partition.sources] == [
        Source(input_index=1, first_line=1, line_count=1),
        Source(input_index=0, first_line=2, line_count=2),
        Source(input_index=0, first_line=2, line_count=2),
    ]


def test_records_far_apart_are_stretches_of_their_own_and_near_ones_are_one(run_uri: str) -> None:
    many = records(5000)
    plan = write_run(run_uri, [lines(many)])
    wanted = {many[number] for number in (0, 900, 1800, 4999)}
    finish(run_uri, plan, lambda record: "engine.killed" if record in wanted else "")

    new = planned(run_uri)

    (partition,) = new.partitions
    assert partition.sources[1:] == (
        Source(input_index=0, first_line=1, line_count=1801),
        Source(input_index=0, first_line=5000, line_count=1),
    )
    assert partition.record_count == 4


def test_its_partitions_are_about_as_large_as_those_before(run_uri: str) -> None:
    plan = write_run(run_uri, [lines(records(10))] * 10)
    finish(run_uri, plan, lambda record: "engine.killed" if b"record 1" in record or b"record 2" in record else "")

    new = planned(run_uri)

    assert [partition.record_count for partition in new.partitions] == [10, 10]


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (("length",), [0, 1, 3]),
        (("length.prompt_too_long",), [0, 3]),
        (("engine",), [2]),
        (("engine", "length.prompt_empty"), [1, 2]),
    ],
)
def test_only_some_kinds_of_errors_may_be_chosen(run_uri: str, only: tuple[str, ...], expected: list[int]) -> None:
    finished(run_uri)

    new = planned(run_uri, only=only)

    assert records_of_run(f"{run_uri}-new", new) == [FAILED[number] for number in expected]


def test_answers_that_failed_validation_are_done_again(run_uri: str) -> None:
    plan = write_run(run_uri, CONTENTS)
    finish(run_uri, plan, lambda record: "validation.invalid_json" if record == RECORDS[9] else KINDS.get(record, ""))

    new = planned(run_uri, only=("validation",))

    assert records_of_run(f"{run_uri}-new", new) == [RECORDS[9]]


def test_a_stage_that_there_is_not_is_wrong_usage(run_uri: str) -> None:
    with pytest.raises(UsageError, match="'lenght' is no kind of error") as caught:
        retried(run_uri, only=("lenght",))

    assert caught.value.hint == "did you mean 'length'?"


@pytest.mark.parametrize("only", [("length.prompt",), ("timeout",)])
def test_a_kind_that_nothing_is_of_makes_no_run_and_says_what_there_is(run_uri: str, only: tuple[str, ...]) -> None:
    finished(run_uri)

    found = retried(run_uri, only=only)

    assert found.result is None
    assert dict(found.error_counts) == {"length.prompt_too_long": 2, "length.prompt_empty": 1, "engine.killed": 1}
    assert not Path(f"{run_uri}-new").exists()


def test_the_same_again_is_the_same_run(run_uri: str) -> None:
    finished(run_uri)

    first, second = retried(run_uri).result, retried(run_uri).result

    assert first
    assert second
    assert (first.created, second.created) == (True, False)
    assert first.plan == second.plan


def test_other_records_or_settings_at_the_same_place_are_refused(run_uri: str) -> None:
    finished(run_uri)
    planned(run_uri)

    with pytest.raises(PlanExistsError, match=r"inputs changed \(1\): .*/outputs"):
        retried(run_uri, only=("engine",), partition_count=1)
    with pytest.raises(PlanExistsError, match="model"):
        retried(run_uri, model="other")


def test_an_unfinished_run_is_refused_unless_what_there_is_will_do(run_uri: str) -> None:
    finished(run_uri, indices=[1])

    with pytest.raises(InputError, match="1 of 2 partitions have no output yet"):
        retried(run_uri)
    assert not Path(f"{run_uri}-new").exists()

    new = planned(run_uri, partial=True)
    assert records_of_run(f"{run_uri}-new", new) == FAILED[2:]


def test_what_failed_again_can_be_retried_again(run_uri: str) -> None:
    finished(run_uri)
    second = planned(run_uri)
    finish(f"{run_uri}-new", second, lambda record: "engine.killed" if b"record 7" in record else "")

    third = retry_failed(RetryRequest(run_uri=f"{run_uri}-new", new_run_uri=f"{run_uri}-third")).result

    assert third
    assert records_of_run(f"{run_uri}-third", third.plan) == [b'{"prompt":"record 7"}']
    assert [one.uri for one in third.plan.inputs] == ["s3://in/a.jsonl", f"{run_uri}/outputs", f"{run_uri}-new/outputs"]
    assert third.plan.partitions[0].sources[1:] == (Source(input_index=0, first_line=2, line_count=1),)


@pytest.mark.parametrize("inside", ["", "/again", "/outputs/again"])
def test_the_new_run_has_a_place_of_its_own(run_uri: str, inside: str) -> None:
    finished(run_uri)

    with pytest.raises(UsageError, match="lies within"):
        retry_failed(RetryRequest(run_uri=run_uri, new_run_uri=run_uri + inside))


@pytest.mark.parametrize(
    ("folder", "change", "said"),
    [
        ("outputs", lambda content: content[: content.index(b"\n") + 1], "not as planned"),
        ("outputs", lambda content: content + b'{"answer":{}}\n', "not as planned"),
        ("outputs", lambda _content: b"[]\n", "part-00000-of-00002.jsonl:1: it is no result line"),
        ("partitions", lambda content: content.replace(b"record 0", b"record 9"), "not as planned"),
        ("manifests", lambda content: content.replace(b"xxh3_128:0", b"xxh3_128:1"), "of another plan"),
    ],
)
def test_a_run_that_does_not_add_up_is_refused(run_uri: str, folder: str, change: Any, said: str) -> None:
    finished(run_uri)
    path = next(iter(sorted(Path(run_uri, folder).iterdir())))
    path.write_bytes(change(path.read_bytes()))

    with pytest.raises(InputError, match=said):
        retried(run_uri)
    assert not Path(f"{run_uri}-new").exists()


def test_partitions_whose_manifest_counts_no_error_are_not_read(run_uri: str) -> None:
    plan = write_run(run_uri, CONTENTS)
    finish(run_uri, plan, lambda record: "engine.killed" if b"record 7" in record else "")
    Path(run_uri, "partitions/part-00000-of-00002.jsonl").unlink()

    assert planned(run_uri).record_count == 1


def test_several_processes_make_the_same_plan(run_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(run_uri)
    first = retried(run_uri, process_count=1).result
    monkeypatch.setattr("submitter.split_tuning.SplitTuning.__init__", small_tuning)

    second = retried(run_uri, process_count=2).result

    assert first
    assert second
    assert not second.created
    assert second.plan == first.plan


def small_tuning(self: Any) -> None:
    for name in self.__dataclass_fields__:
        object.__setattr__(self, name, 1 if name == "parallel_bytes" else self.__dataclass_fields__[name].default)


def test_an_input_of_the_old_run_is_named_though_it_is_gone(run_uri: str) -> None:
    finished(run_uri, inputs=(InputObject(uri="s3://gone/b.jsonl", size_bytes=1, etag="1"),))

    assert planned(run_uri).inputs[0].uri == "s3://gone/b.jsonl"


def test_a_last_line_without_an_end_gets_one(run_uri: str) -> None:
    plan = write_run(run_uri, [RECORDS[0], lines(RECORDS[1:])])
    finish(run_uri, plan, lambda _record: "engine.killed")

    new = planned(run_uri, partition_count=1)

    assert records_of_run(f"{run_uri}-new", new) == RECORDS
