"""Runs that come after another, on AWS Batch: which jobs wait for which, and what happens when one fails."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from submitter.batch import submit
from submitter.batch_records import Patience
from submitter.batch_work import Share
from submitter.planned_run import PlannedRun
from submitter.stage import look_at_before, offer
from tests.answering_engine import answering_command
from tests.batch_hosts import FakeHosts
from tests.batch_setting import DEFINITION, OPTIONS, Crash, CrashingStore, Setting, in_thread, join_all
from tests.commands import Done, submit_here
from tests.fake_aws_server import now_ms
from tests.worker_runs import Gate, lines, write_run
from worker.contract.formats import decode
from worker.contract.layout import RunLayout
from worker.contract.store import LocalStore, open_store
from worker.contract.submission import Submission

Json = dict[str, Any]
ON_QUEUE = ("--queue", "gpu", "--job-definition", DEFINITION, "--json")
SECOND = ("--model", ".", "--answer-key", "second", "--template", "again {{ response.choices[0].text }}")


@pytest.fixture
def place(on_batch: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A folder to run commands in, with repeating engines, and an account whose clock is the real one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(answering_command("repeating")))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    on_batch.fake.created_at_ms = now_ms
    return on_batch


def first_run(place: Setting, partition_count: int, statuses: str = "") -> Json:
    """A run `a` whose one job has children in states by their first letters; those that succeeded have outputs."""
    write_run(str(Path("a").absolute()), [lines([b'{"prompt":"p"}'])] * partition_count, answer_key="response")
    checked(submit_here("resume", "a", *ON_QUEUE))
    job = place.fake.jobs[-1]
    if statuses:
        move(place, job, statuses)
    return job


def move(place: Setting, job: Json, statuses: str) -> None:
    names = {"S": "SUCCEEDED", "F": "FAILED", "R": "RUNNING", "P": "PENDING"}
    if "children" in job:
        place.fake.set_children(job, [names[status] for status in statuses])
    else:
        place.fake.set_child(job, None, status=names[statuses])
    for index, status in zip(partitions_of("a", job), statuses, strict=True):
        if status == "S":
            put_output("a", index)


def put_output(run: str, index: int) -> None:
    planned = PlannedRun.open(run)
    planned.store.create(planned.output_uri(index), b'{"prompt":"p","response":{}}\n', "w")


def partitions_of(run: str, job: Json) -> list[int]:
    uri = RunLayout(str(Path(run).absolute())).submission(job["request"]["parameters"]["submission"])
    return list(decode(Path(uri).read_bytes(), Submission, uri).partition_indices())


def second_run(*options: str) -> Done:
    return submit_here("run", "--after", "a", "--run", "b", *SECOND, *ON_QUEUE, *options)


def checked(done: Done, exit_code: int = 0) -> Json:
    assert done.exit_code == exit_code, done
    return done.document


def test_each_child_waits_for_the_child_that_makes_its_input(place: Setting) -> None:
    first = first_run(place, 3)

    done = checked(second_run())

    (second,) = place.fake.jobs[1:]
    assert second["request"]["dependsOn"] == [{"jobId": first["jobId"], "type": "N_TO_N"}]
    assert second["request"]["arrayProperties"] == {"size": 3}
    assert partitions_of("b", second) == [0, 1, 2]
    assert (done["after"], done["partition_count"]) == (str(Path("a").absolute()), 3)
    assert done["submission"]["jobs"][0]["depends_on"] == first["jobId"]


def test_a_single_partition_waits_for_a_plain_job(place: Setting) -> None:
    first = first_run(place, 1)

    checked(second_run())

    request = place.fake.jobs[1]["request"]
    assert request["dependsOn"] == [{"jobId": first["jobId"]}]
    assert "arrayProperties" not in request


def test_what_is_done_waits_for_nothing_and_what_nobody_has_in_hand_is_held_back(place: Setting) -> None:
    move(place, first_run(place, 4), "SSFF")

    done = second_run()

    (second,) = place.fake.jobs[1:]
    assert checked(done)["partition_count"] == 4
    assert "dependsOn" not in second["request"]
    assert partitions_of("b", second) == [0, 1]
    assert "2 partitions not submitted" in done.stderr
    assert "submit resume" in done.stderr


def test_what_an_array_has_done_is_covered_by_the_job_that_waits_for_it(place: Setting) -> None:
    move(place, first_run(place, 4), "SRFS")

    checked(second_run())

    (second,) = place.fake.jobs[1:]
    assert partitions_of("b", second) == [0, 1, 2, 3]
    assert second["children"][2] == "FAILED"


def test_a_child_that_failed_where_another_job_made_the_output_waits_for_nothing(place: Setting) -> None:
    move(place, first_run(place, 4), "RRFS")
    put_output("a", 2)

    checked(second_run())

    held = [partitions_of("b", job) for job in place.fake.jobs[1:]]
    assert held == [[0, 1, 2, 3], [2]]
    assert ["dependsOn" in job["request"] for job in place.fake.jobs[1:]] == [True, False]


@pytest.mark.parametrize("statuses", ["", "FFF"])
def test_after_a_run_that_has_nothing_done_and_nothing_going_on_there_is_nothing_to_submit(
    place: Setting, statuses: str
) -> None:
    if statuses:
        first_run(place, 3, statuses)
    else:
        write_run(str(Path("a").absolute()), [lines([b'{"prompt":"p"}'])] * 3, answer_key="response")
    job_count = len(place.fake.jobs)

    done = second_run()

    assert (done.exit_code, done.error["code"]) == (65, "input")
    assert done.error["hint"] == f"submit resume {Path('a').absolute()} first"
    assert not Path("b").exists()
    assert len(place.fake.jobs) == job_count


def test_the_same_command_again_submits_nothing_twice(place: Setting) -> None:
    first_run(place, 3)

    checked(second_run())
    again = checked(second_run())

    assert len(place.fake.jobs) == 2
    assert [job["outcome"] for job in again["submission"]["jobs"]] == ["already_submitted"]


def test_a_failure_goes_through_the_stages_and_is_put_right_stage_by_stage(place: Setting) -> None:
    first = first_run(place, 3, "RRR")
    checked(second_run())
    move(place, first, "SFS")
    second = place.fake.jobs[1]
    assert second["children"][1] == "FAILED"

    early = submit_here("resume", "b", "--json")
    checked(submit_here("resume", "a", "--json"))
    checked(submit_here("resume", "b", "--json"))

    assert checked(early, 75)["outcome"] == "held_back"
    assert early.document["partition_held_count"] == 1
    again, waiting = place.fake.jobs[2:]
    assert (partitions_of("a", again), partitions_of("b", waiting)) == ([1], [1])
    assert waiting["request"]["dependsOn"] == [{"jobId": again["jobId"]}]


def test_two_arrays_that_have_a_partition_in_hand_one_after_the_other_are_both_followed(place: Setting) -> None:
    move(place, first_run(place, 3), "RFR")
    checked(submit_here("resume", "a", "--json"))

    checked(second_run())

    held = [(partitions_of("b", job), job["request"]["dependsOn"][0]["jobId"]) for job in place.fake.jobs[2:]]
    assert held == [([0, 1, 2], place.fake.jobs[0]["jobId"]), ([1], place.fake.jobs[1]["jobId"])]


def test_a_third_stage_waits_for_the_second_while_that_waits_for_the_first(place: Setting) -> None:
    first = first_run(place, 2)
    checked(second_run())

    template = ("--template", "{{ second.choices[0].text }}", "--answer-key", "third")
    checked(submit_here("run", "--after", "b", "--run", "c", "--model", ".", *template, *ON_QUEUE))

    second, third = place.fake.jobs[1:]
    assert third["request"]["dependsOn"] == [{"jobId": second["jobId"], "type": "N_TO_N"}]
    move(place, first, "SF")
    assert third["children"][1] == "FAILED"


def test_another_run_in_the_place_of_the_one_before_is_not_followed(place: Setting) -> None:
    first_run(place, 2)
    checked(submit_here("split", "--after", "a", "--run", "b", *SECOND, "--json"))
    write_run(str(Path("a").absolute()), [lines([b'{"prompt":"p"}'])] * 2, fingerprint="xxh3_128:1")

    done = submit_here("resume", "b", *ON_QUEUE)

    assert done.exit_code == 65
    assert "it is another run than the one to come after" in done.error["message"]
    assert len(place.fake.jobs) == 1


def test_jobs_in_another_region_are_not_waited_for(place: Setting) -> None:
    move(place, first_run(place, 3), "SRR")
    submitted = Path("a/submissions/0001.submitted.json")
    submitted.write_bytes(submitted.read_bytes().replace(b"us-east-1", b"eu-west-1"))

    done = second_run()

    assert checked(done)["submission"]["jobs"][0]["partition_ranges"] == [[0, 0]]
    assert "2 partitions not submitted: their inputs are still under way" in done.stderr
    assert f"submit resume {Path('a').absolute()}" not in done.stderr


def test_a_dry_run_shows_the_requests_with_what_they_wait_for(place: Setting) -> None:
    move(place, first_run(place, 4), "RRFF")
    put_output("a", 3)
    checked(submit_here("split", "--after", "a", "--run", "b", *SECOND, "--json"))

    shown = checked(second_run("--dry-run"))["requests"]

    assert len(place.fake.jobs) == 1
    checked(second_run())
    assert shown == [job["request"] for job in place.fake.jobs[1:]]
    assert [request.get("dependsOn", [{}])[0].get("type") for request in shown] == ["N_TO_N", None]


def test_a_dry_run_of_what_is_not_planned_writes_nothing(place: Setting) -> None:
    first_run(place, 3)

    (shown,) = checked(second_run("--dry-run"))["requests"]

    assert shown["dependsOn"][0]["type"] == "N_TO_N"
    assert not Path("b").exists()


def planned_second(place: Setting) -> tuple[PlannedRun, tuple[Share, ...]]:
    checked(submit_here("split", "--after", "a", "--run", "b", *SECOND, "--json"))
    found = offer(range(3), look_at_before(PlannedRun.open("a"), lambda: place.batch))
    return PlannedRun.open("b"), (*found.awaiting, Share(partition_indices=found.free))


def test_submitters_at_the_same_time_submit_a_stage_once(place: Setting) -> None:
    first_run(place, 3)
    run, shares = planned_second(place)

    def work() -> None:
        submit(run.store, run.layout, run.plan, place.batch, OPTIONS, shares=shares, patience=Patience())

    join_all([in_thread(work) for _ in range(3)])

    assert len(place.fake.jobs) == 2


@pytest.mark.parametrize(("at", "after"), [(1, True), (2, False)])
def test_a_submitter_that_dies_leaves_a_job_that_waits_all_the_same(place: Setting, at: int, *, after: bool) -> None:
    """Dead with a submission that has no job, or that has one that was not written down."""
    first = first_run(place, 3)
    run, shares = planned_second(place)
    patience = place.clock.patience()
    place.fake.created_at_ms = lambda: int(place.clock.now() * 1000)
    store = CrashingStore(at, after=after)
    with pytest.raises(Crash):
        submit(store, run.layout, run.plan, place.batch, OPTIONS, shares=shares, patience=patience)

    submit(LocalStore(), run.layout, run.plan, place.batch, OPTIONS, shares=shares, patience=patience)

    (second,) = place.fake.jobs[1:]
    assert second["request"]["dependsOn"] == [{"jobId": first["jobId"], "type": "N_TO_N"}]


def test_a_job_that_waits_is_not_made_twice_for_partitions_that_are_in_hand(place: Setting) -> None:
    first_run(place, 3, "RRR")
    before = look_at_before(PlannedRun.open("a"), lambda: place.batch)

    found = offer((0, 1), before, waiting=(2,))

    assert (found.free, found.awaiting, found.held) == ((), (), (0, 1))


def test_two_stages_submitted_at_once_run_to_the_end(
    place: Setting, gate: Gate, hosts: FakeHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RUN2 is there before RUN1 has an output; RUN3, with partitions of its own, waits for RUN1."""
    Path("in.jsonl").write_bytes(lines([b'{"id":%d,"prompt":"p%d"}' % (number, number) for number in range(4)]))
    first = ("in.jsonl", "--run", "a", "--partitions", "2", "--model", ".", "--engines", "1")
    checked(submit_here("run", *first, *ON_QUEUE))
    checked(second_run("--engines", "1"))
    looks, describe = iter(range(100)), place.fake.handlers["describejobs"]

    def open_at_second_look(request: Json, size_bytes: int) -> Json:
        """The first is before the wait, whose first look this is."""
        if next(looks) == 1:
            gate.open()
        return describe(request, size_bytes)

    monkeypatch.setattr(place.fake, "handlers", {**place.fake.handlers, "describejobs": open_at_second_look})
    settings = ("--model", ".", "--answer-key", "third", "--engines", "1")
    third = submit_here(
        *("run", "--after", "a", "--run", "c", "--partitions", "1", *settings, *ON_QUEUE),
        *("--wait", "--wait-every", "1"),
    )
    waited = checked(submit_here("resume", "b", "--wait", "--wait-every", "1", "--json"))

    assert checked(third)["wait"]["outcome"] == "done"
    assert f"waiting for {Path('a').absolute()}" in third.stderr
    assert waited["outcome"] in ("already_submitted", "already_done")
    assert checked(submit_here("verify", "b", "--json"))["ok_count"] == 4
    assert checked(submit_here("verify", "c", "--json"))["ok_count"] == 4
    found = [orjson.loads(line) for line in outputs_of("b")]
    assert [line["second"]["choices"][0]["message"]["content"] for line in found] == [
        f"<again <p{number}>>" for number in range(4)
    ]
    assert Counter(len(job.get("children", [1])) for job in place.fake.jobs) == {2: 2, 1: 1}


def outputs_of(run: str) -> list[bytes]:
    planned = PlannedRun.open(run)
    contents = (open_store(run).read(planned.output_uri(index)) for index in range(planned.partition_count))
    return [line for content in contents for line in content.removesuffix(b"\n").split(b"\n")]
