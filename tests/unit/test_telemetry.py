"""The lines that CloudWatch makes metrics of: their form, and that what they count is what was done."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from botocore.exceptions import EndpointConnectionError

from tests.emf import UNITS, Sample, samples_of
from worker.checkpoint import Checkpoint, CheckpointPlace
from worker.contract.logs import JsonFormatter
from worker.contract.manifest import EarlierAttempt
from worker.contract.retry import call_with_retries
from worker.contract.retry_count import retries
from worker.contract.store import open_store
from worker.figures import EMIT_EVERY_S, Figures
from worker.protocol import Progress, Result
from worker.segments import Identity
from worker.settings import CheckpointPolicy
from worker.telemetry import EVENT, METRICS

PROPERTIES = {"run_id": "r-1", "partition_index": 17, "attempt": 2, "market": "spot", "model": "org/model"}
RECORD_COUNT = 1_000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def checkpoint_of(folder: Path) -> Iterator[Checkpoint]:
    """Whose saves are never due."""
    place = CheckpointPlace(
        store=open_store(str(folder)),
        folder_uri=str(folder / "segments"),
        segment_uri=lambda number: str(folder / "segments" / f"{number}.jsonl.zst"),
        identity=Identity(
            run_id="r-1", fingerprint="f", partition_index=0, input_checksum="c", record_count=RECORD_COUNT
        ),
        attempt=EarlierAttempt(
            writer_id="w", attempt=1, job_id=None, compute_environment=None, host="h", started_at="2025-01-01T00:00:00Z"
        ),
    )
    with closing(Checkpoint(place, CheckpointPolicy(every_s=1e9), folder)) as checkpoint:
        checkpoint.open()
        yield checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    with checkpoint_of(tmp_path) as checkpoint:
        yield checkpoint


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def figures(clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Figures:
    caplog.set_level("INFO", "worker")
    # One process is one attempt; this one has other tests behind it.
    monkeypatch.setattr(retries, "count", 0)
    return Figures(PROPERTIES, clock=clock)


def answer(checkpoint: Checkpoint, first: int, count: int, error: str = "") -> None:
    """Each of 7 tokens, 3 of which were known, and 5 more."""
    lines = [b"{}"] * count
    results = [Result(first + number, error, 7, 3, 5, line) for number, line in enumerate(lines)]
    checkpoint.add(results, b"".join(line + b"\n" for line in lines))


def progress(usage: float | None = None, preemption_count: int | None = None) -> Progress:
    return Progress(
        step_count=1, running_count=1, waiting_count=0, kv_cache_usage=usage, preemption_count=preemption_count
    )


def logged(caplog: pytest.LogCaptureFixture) -> list[bytes]:
    return [JsonFormatter({}).format(record).encode() for record in caplog.records if record.getMessage() == EVENT]


def said(caplog: pytest.LogCaptureFixture) -> list[dict[str, list[float]]]:
    return [{sample.name: sample.values for sample in samples_of(line)} for line in logged(caplog)]


def total(lines: list[dict[str, list[float]]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in lines:
        found.update({name: int(sum(values)) for name, values in line.items()})
    return found


def work(figures: Figures, checkpoint: Checkpoint) -> None:
    figures.engine_started(0)
    figures.loaded(checkpoint)
    figures.engine_ready(17.25)


def test_a_full_line_holds_every_metric_in_the_published_form(
    figures: Figures, checkpoint: Checkpoint, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    work(figures, checkpoint)
    answer(checkpoint, 0, 12)
    answer(checkpoint, 12, 2, "engine.engine_killer")
    figures.engine_progressed(0, progress(0.5, 3))
    figures.engine_progressed(0, progress(0.25, 4))
    figures.engine_progressed(3, progress(1.0, 0))
    clock.now += EMIT_EVERY_S

    figures.emit_if_due()

    (line,) = logged(caplog)
    samples = samples_of(line)
    found = {(sample.name, sample.unit): sample.values for sample in samples}
    assert found.pop(("checkpoint_age_s", "Seconds"))[0] >= 0
    assert found == {
        ("records_ok", "Count"): [12],
        ("records_error", "Count"): [2],
        ("prompt_tokens", "Count"): [98],
        ("completion_tokens", "Count"): [70],
        ("output_tokens_per_s", "Count/Second"): [1.2],
        ("kv_cache_usage_percent", "Percent"): [37.5, 100],
        ("prefix_cache_hit_percent", "Percent"): [42.86],
        ("preemptions", "Count"): [4],
        ("engine_restarts", "Count"): [0],
        ("storage_retries", "Count"): [0],
        ("boot_s", "Seconds"): [17.25],
    }
    assert {(sample.namespace, *sample.dimensions.items()) for sample in samples} == {("llm-array", ("run_id", "r-1"))}


def test_a_line_holds_nothing_but_metrics_and_what_they_are_of(
    figures: Figures, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    work(figures, checkpoint)
    figures.engine_progressed(2, progress(0.5))

    figures.finish()

    (record,) = [record for record in caplog.records if record.getMessage() == EVENT]
    fields: dict[str, Any] = record.__dict__["fields"]
    named = {metric.name for metric in METRICS}
    assert fields.keys() - named == {"_aws", "engines", *PROPERTIES}
    assert fields["engines"] == [2]


def test_the_metrics_have_names_and_units_of_their_own() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) == 14
    assert {metric.unit.value for metric in METRICS} <= UNITS


def test_what_the_lines_count_adds_up_to_what_this_attempt_has_done(
    figures: Figures, checkpoint: Checkpoint, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    answer(checkpoint, 0, 40)
    answer(checkpoint, 40, 2, "length.prompt_too_long")
    work(figures, checkpoint)
    source, first = random.Random(1), 42
    while first < RECORD_COUNT:
        count = min(source.randrange(1, 30), RECORD_COUNT - first)
        answer(checkpoint, first, count, source.choice(["", "", "engine.x"]))
        first += count
        clock.now += source.randrange(40)
        figures.emit_if_due()
    figures.finish()

    lines = said(caplog)
    assert len(lines) > 5
    found, tally = total(lines), checkpoint.tally
    assert found["records_ok"] == tally.ok_count - 40
    assert found["records_error"] == tally.error_count - 2
    assert found["prompt_tokens"] == tally.tokens.prompt_tokens - 42 * 7
    assert found["completion_tokens"] == tally.tokens.completion_tokens - 42 * 5
    assert [line["boot_s"] for line in lines if "boot_s" in line] == [[17.25]]


def test_nothing_is_said_before_its_time_nor_twice(
    figures: Figures, checkpoint: Checkpoint, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    figures.engine_started(0)
    clock.now += EMIT_EVERY_S
    figures.emit_if_due()
    figures.loaded(checkpoint)
    clock.now += EMIT_EVERY_S
    figures.emit_if_due()
    figures.engine_ready(1.0)
    clock.now += EMIT_EVERY_S - 1
    figures.emit_if_due()
    assert logged(caplog) == []

    clock.now += 1
    figures.emit_if_due()
    figures.emit_if_due()
    figures.finish()
    figures.finish()
    figures.emit_if_due()

    assert len(logged(caplog)) == 2


def test_an_attempt_whose_engines_never_start_has_nothing_to_say(
    figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    figures.engine_started(0)

    figures.finish()

    assert logged(caplog) == []


def failing(count: int) -> Callable[[], None]:
    """A call that fails so often."""
    failures = [EndpointConnectionError(endpoint_url="http://x")] * count

    def call() -> None:
        if failures:
            raise failures.pop()

    return call


def test_retries_are_counted_and_also_those_before_and_after_the_work(
    figures: Figures, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    call_with_retries("read plan", failing(1))
    work(figures, checkpoint)
    figures.finish()
    call_with_retries("write output", failing(2))
    figures.finish()

    lines = said(caplog)
    assert [line["storage_retries"] for line in lines] == [[1], [2]]
    assert "output_tokens_per_s" not in lines[1]


def test_engines_that_are_started_again_are_counted_and_begin_from_none(
    figures: Figures, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    work(figures, checkpoint)
    figures.engine_started(1)
    figures.engine_progressed(0, progress(preemption_count=5))
    figures.engine_progressed(1, progress(preemption_count=1))
    figures.engine_started(0)
    figures.engine_progressed(0, progress(preemption_count=2))

    figures.finish()

    (line,) = said(caplog)
    assert (line["engine_restarts"], line["preemptions"]) == ([1], [8])
    assert "kv_cache_usage_percent" not in line


def test_where_no_metrics_are_wanted_there_are_none(
    checkpoint: Checkpoint, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "worker")
    figures = Figures(PROPERTIES, is_on=False, clock=clock)
    work(figures, checkpoint)
    clock.now += EMIT_EVERY_S

    figures.emit_if_due()
    figures.finish()

    assert logged(caplog) == []


def test_the_age_of_a_checkpoint_is_that_of_what_a_death_would_cost(tmp_path: Path) -> None:
    with checkpoint_of(tmp_path) as checkpoint:
        assert checkpoint.age_s == 0.0
        answer(checkpoint, 0, 3)
        assert checkpoint.age_s > 0.0

        checkpoint.finish("SIGTERM", 30.0)

        assert checkpoint.age_s == 0.0


def test_the_page_about_metrics_has_all_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")

    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert [(row[1].strip(" `"), row[2].strip()) for row in rows] == [
        (metric.name, metric.unit.value) for metric in METRICS
    ]


GOOD: dict[str, Any] = {
    "_aws": {
        "Timestamp": 1_700_000_000_000,
        "CloudWatchMetrics": [
            {"Namespace": "n", "Dimensions": [["d"]], "Metrics": [{"Name": "m", "Unit": "Count"}]},
        ],
    },
    "d": "x",
    "m": 1,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"1700000000000", b"1700000000"),
        (b"1700000000000", b"1.7e12"),
        (b'"Count"', b'"count"'),
        (b'"Namespace":"n"', b'"Namespace":"AWS/Batch"'),
        (b'"d":"x"', b'"d":5'),
        (b'"d":"x"', b'"d":" "'),
        (b'"m":1', b'"m":null'),
        (b'"m":1', b'"m":"1"'),
        (b'"m":1', b'"m":[]'),
        (b'"m":1', b'"m":' + orjson.dumps([1] * 101)),
    ],
)
def test_the_validator_of_these_tests_is_strict(old: bytes, new: bytes) -> None:
    good = orjson.dumps(GOOD)
    assert samples_of(good) == [Sample("n", {"d": "x"}, "m", "Count", [1.0])]

    with pytest.raises(AssertionError):
        samples_of(good.replace(old, new))


def test_other_lines_are_no_metrics() -> None:
    none: list[Sample] = samples_of(b'{"event":"worker.started"}')

    assert none == []
