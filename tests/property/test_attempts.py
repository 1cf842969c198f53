"""Attempts at a partition, ended at any point in any way and in any order: nothing is ever lost or doubled."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.fakes import engine_command
from tests.mortal_worker import KILLED, Effect, MortalWorkers
from tests.worker_runs import answered_records, lines, manifest_of, read_output, write_run
from worker.contract.layout import RunLayout
from worker.contract.store import open_store
from worker.segments import Identity, read_segments

RECORD_COUNT = 160
CONTENT = lines(answered_records(RECORD_COUNT))
POINTS = st.integers(1, 60)


class Attempts(RuleBasedStateMachine):
    """One run of one partition, which is worked on until it has an output, and on."""

    workers: ClassVar[MortalWorkers]
    folder: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.run_uri = str(self.folder / f"run-{secrets.token_hex(4)}")
        self.plan = write_run(self.run_uri, [CONTENT])
        self.saved: set[int] = set()
        self.is_committed = False

    @rule(point=POINTS)
    def killed(self, point: int) -> None:
        self.attempt(point, "kill", KILLED)

    @rule(point=POINTS)
    def interrupted(self, point: int) -> None:
        self.attempt(point, "stop", 75)

    @rule(point=POINTS)
    def without_storage(self, point: int) -> None:
        self.attempt(point, "lose storage", 75)

    @rule()
    def resumed(self) -> None:
        self.attempt(0, "kill", 0)
        assert self.is_committed

    def attempt(self, point: int, effect: Effect, exit_code: int) -> None:
        ended = self.workers.attempt(
            self.run_uri, "--index", "0", "--checkpoint-records", "40", point=point, effect=effect
        )
        assert ended.exit_code in (0, exit_code), self.workers.log.read_text(encoding="utf-8")
        has_output = open_store(self.run_uri).head(RunLayout(self.run_uri).output(0, 1)) is not None
        assert has_output or ended.exit_code != 0
        # Once it is there, it stays.
        assert has_output or not self.is_committed
        self.is_committed = has_output

    @invariant()
    def an_output_is_whole(self) -> None:
        if self.is_committed:
            assert read_output(self.run_uri, self.plan) == CONTENT

    @invariant()
    def what_was_saved_stays_saved(self) -> None:
        if self.is_committed:
            return
        found = self.segments()
        assert found >= self.saved
        self.saved = found

    def segments(self) -> set[int]:
        identity = Identity(
            run_id=self.plan.run_id,
            fingerprint=self.plan.fingerprint,
            partition_index=0,
            input_checksum=self.plan.partitions[0].checksum,
            record_count=RECORD_COUNT,
        )
        found = read_segments(open_store(self.run_uri), RunLayout(self.run_uri).checkpoints(0, 1), identity)
        return {result.ordinal for segment in found for result in segment.results}

    def teardown(self) -> None:
        self.resumed()
        assert read_output(self.run_uri, self.plan) == CONTENT
        assert manifest_of(self.run_uri).record_count == RECORD_COUNT


def test_whatever_ends_attempts_conservation_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(engine_command("steady", "0.0005")))
    with MortalWorkers(tmp_path) as started:

        class AttemptsHere(Attempts):
            workers = started
            folder = tmp_path

        run_state_machine_as_test(
            AttemptsHere,
            settings=settings(
                max_examples=20, stateful_step_count=6, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
