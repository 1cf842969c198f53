"""What may come after what: plans of runs whose partitions are another's outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from submitter.planned_run import PlannedRun
from submitter.split import SplitRequest
from submitter.stage_plan import after_of, line_fields, plan_stage, read_stage
from submitter.stage_request import StageRequest
from tests.unit.test_formats import PLAN
from tests.worker_runs import lines, records, write_run
from worker.contract.errors import InputError, PlanExistsError, UsageError
from worker.contract.formats import decode, encode
from worker.contract.layout import RunLayout
from worker.contract.plan import After, Plan, RequestSettings, Source
from worker.contract.store import open_store
from worker.contract.submission import Submission

GOLDEN = Path(__file__).parents[1] / "golden"
TEMPLATE = RequestSettings(template="{{ answer.choices[0].text }}")


def before(folder: Path, **changes: Any) -> str:
    """A run of three partitions."""
    uri = str(folder / "first")
    write_run(uri, [lines(records(count)) for count in (2, 1, 3)], **changes)
    return uri


def request(first: str, count: int | None = None, **settings: Any) -> StageRequest:
    run_uri = str(Path(first).parent / "second")
    given: dict[str, Any] = {"run_uri": run_uri, "model": ".", "answer_key": "second", "partition_count": 1}
    return StageRequest(
        after=first,
        partition_count=count,
        settings=SplitRequest(inputs=(RunLayout(first).outputs,), **(given | settings)),
    )


def plan_after(first: str, **settings: Any) -> Plan:
    return plan_stage(read_stage(request(first, **settings))).plan


def test_each_output_is_a_partition_of_the_next_run_before_there_is_any(tmp_path: Path) -> None:
    first = before(tmp_path, compression="gz")

    plan = plan_after(first, requests=TEMPLATE)

    assert [partition.record_count for partition in plan.partitions] == [2, 1, 3]
    assert {(partition.size_bytes, partition.checksum) for partition in plan.partitions} == {(0, "")}
    assert [one.uri for one in plan.inputs] == [RunLayout(first).output(index, 3, "gz") for index in range(3)]
    assert plan.partitions[2].sources == (Source(input_index=2, first_line=1, line_count=3),)
    assert plan.after == After(
        run_uri=first, run_id="r-1", fingerprint="xxh3_128:0", compression="gz", line_fields=("answer",)
    )
    assert (plan.shape, plan.compression) == ("template", "none")
    assert not Path(plan.after.run_uri, "../second/partitions").exists()


def test_the_same_stage_again_is_the_same_run_and_another_is_refused_with_what_differs(tmp_path: Path) -> None:
    first = before(tmp_path)
    stage = read_stage(request(first))
    made = plan_stage(stage)

    again = plan_stage(stage)
    with pytest.raises(PlanExistsError, match="answer_key"):
        plan_after(first, answer_key="third")
    write_run(first, [lines(records(2))] * 3, fingerprint="xxh3_128:1")
    with pytest.raises(PlanExistsError, match=r"differs: after \(expected .*xxh3_128:0, got .*xxh3_128:1\)"):
        plan_after(first)

    assert (made.created, again.created, again.plan) == (True, False, made.plan)


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ("plain", ["answer"]),
        ("template", ["answer"]),
        ("openai", ["id", "custom_id", "response", "error"]),
        ("bedrock", ["recordId", "modelInput", "modelOutput", "error"]),
    ],
)
def test_an_answer_never_goes_into_a_field_that_lines_have(tmp_path: Path, shape: str, taken: list[str]) -> None:
    first = before(tmp_path, shape=shape)

    for name in [name for name in taken if name not in ("error", "id")]:
        with pytest.raises(UsageError, match=f"answer key '{name}'.*have that field already") as refused:
            plan_after(first, answer_key=name, requests=TEMPLATE)
        assert refused.value.hint == "give another --answer-key, such as answer2"

    assert line_fields(PlannedRun.open(first).plan) == tuple(taken)


def test_fields_of_all_stages_before_are_taken_unless_select_has_left_them_out(tmp_path: Path) -> None:
    first = before(tmp_path, shape="openai")
    second = plan_after(first, requests=TEMPLATE)
    kept = plan_after(
        first, run_uri=str(tmp_path / "third"), requests=msgspec.structs.replace(TEMPLATE, select=("custom_id",))
    )

    assert line_fields(second) == ("id", "custom_id", "response", "error", "second")
    assert line_fields(kept) == ("custom_id", "second")


@pytest.mark.parametrize(
    ("shape", "settings", "said"),
    [
        ("openai", {}, "no records of any known shape"),
        ("bedrock", {}, "no records of any known shape"),
        ("template", {}, "no records of any known shape"),
        ("openai", {"shape": "plain"}, "no records of shape 'plain'"),
        ("plain", {"shape": "openai"}, "no records of shape 'openai'"),
    ],
)
def test_lines_that_are_no_requests_need_a_template(
    tmp_path: Path, shape: str, settings: dict[str, Any], said: str
) -> None:
    first = before(tmp_path, shape=shape)

    with pytest.raises(UsageError, match=said) as refused:
        plan_after(first, **settings)

    assert refused.value.hint
    assert "--template" in refused.value.hint


@pytest.mark.parametrize(("shape", "settings"), [("plain", {}), ("template", {"shape": "plain"})])
def test_plain_lines_and_rows_may_stay_plain(tmp_path: Path, shape: str, settings: dict[str, Any]) -> None:
    assert plan_after(before(tmp_path, shape=shape), **settings).shape == "plain"


def test_a_template_that_reads_no_answer_is_noted(tmp_path: Path) -> None:
    first = before(tmp_path)
    stage = read_stage(request(first, requests=RequestSettings(template="{{ prompt }}")))

    assert plan_stage(stage).notes == (f"the template reads no answer of {first}: its lines have them in 'answer'",)


def test_a_run_does_not_come_after_itself_or_lie_in_the_one_before(tmp_path: Path) -> None:
    first = before(tmp_path)

    for inner in (first, f"{first}/second"):
        with pytest.raises(UsageError, match="lies within"):
            plan_after(first, run_uri=inner)


def test_a_run_that_is_not_planned_has_nothing_after_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is none"):
        plan_after(str(tmp_path / "first"))


@pytest.mark.parametrize(("count", "is_matched"), [(None, True), (3, True), (2, False)])
def test_partitions_match_where_there_are_as_many(tmp_path: Path, count: int | None, *, is_matched: bool) -> None:
    stage = read_stage(request(before(tmp_path), count))

    assert (stage.is_matched, stage.settings.partition_count) == (is_matched, count or 3)


def test_outputs_without_a_plan_are_not_taken_for_a_stage_of_them(tmp_path: Path) -> None:
    first = before(tmp_path)
    open_store(first).write(str(tmp_path / "second/outputs/part-00000-of-00003.jsonl"), b"{}\n")

    with pytest.raises(PlanExistsError, match="it has outputs, but no plan"):
        plan_after(first)


def test_plans_and_submissions_from_before_there_were_stages_are_read() -> None:
    plan = decode((GOLDEN / "plan.v1.before-stages.json").read_bytes(), Plan, "golden")
    submission = decode((GOLDEN / "submission.v1.before-stages.json").read_bytes(), Submission, "golden")

    assert (plan.after, plan.partitions) == (None, PLAN.partitions)
    assert (submission.depends_on, submission.fallback, submission.is_fallback) == (None, None, False)


def test_the_golden_plan_of_a_stage_reads_and_writes_alike(tmp_path: Path) -> None:
    golden = (GOLDEN / "plan.v1.stage.json").read_bytes()
    plan = decode(golden, Plan, "golden")

    assert plan.after == replace_uri(after_of(PlannedRun.open(before(tmp_path))))
    assert encode(plan) == golden


def replace_uri(after: After) -> After:
    return msgspec.structs.replace(after, run_uri="s3://bucket/runs/first")
