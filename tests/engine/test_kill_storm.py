"""The real engine in a storm of SIGKILLs: the output is that of an undisturbed run. STORM_SEED repeats a storm."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tests.models import tiny_llama
from tests.storm import Storm, ends, new_seed
from tests.worker_runs import lines, manifest_of, object_names, read_output, run_worker, write_run
from worker.pool import DEFAULT_COMMAND

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

KILL_COUNT = 10
RECORD_COUNT = 2500
ENGINE_ARGS = {"max_model_len": 256, "dtype": "float32", "enforce_eager": True, "seed": 1}
CONTENT = lines(
    [
        b'{"id":%d,"prompt":"record %d","temperature":0,"max_tokens":8}' % (number, number)
        for number in range(RECORD_COUNT)
    ]
)


class EngineStorm(Storm):
    """Strikes while engines boot and, every other time, once there are results to lose."""

    def calm(self, process: subprocess.Popen[bytes]) -> bool:
        if self.kill_count % 2 == 0:
            return super().calm(process)
        while b'"checkpoint.saved"' not in self.log.read_bytes():
            if ends(process, 0.1):
                return True
        return ends(process, self.rng.uniform(0, 0.5))


def test_a_storm_over_real_engines_changes_nothing(tmp_path: Path) -> None:
    model = str(tiny_llama())
    undisturbed = str(tmp_path / "undisturbed")
    plan = write_run(undisturbed, [CONTENT], model=model, engine_args=ENGINE_ARGS)
    assert run_worker(undisturbed, "--index", "0", engine=DEFAULT_COMMAND).exit_code == 0
    storm = EngineStorm(
        rng=random.Random(new_seed("STORM_SEED")),
        folder=tmp_path,
        arguments=("--engines", "1", "--checkpoint-records", "50"),
        variables={},
        longest_calm_s=10.0,
    )
    storms: list[str] = []
    # On a fast machine a run may end before it was struck so often.
    while storm.kill_count < KILL_COUNT:
        run_uri, _ = storm.new_run(CONTENT, model=model, engine_args=ENGINE_ARGS)
        storm.weather(run_uri, {}, wants_more=lambda: storm.kill_count < KILL_COUNT)
        storms.append(run_uri)

    for run_uri in storms:
        assert read_output(run_uri, plan) == read_output(undisturbed, plan)
        manifest = manifest_of(run_uri)
        assert (manifest.record_count, manifest.ok_count) == (RECORD_COUNT, RECORD_COUNT)
        assert [name for name in object_names(run_uri) if "outputs" in name] == ["/outputs/part-00000-of-00001.jsonl"]
