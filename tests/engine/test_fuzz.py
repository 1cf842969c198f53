"""No record ends an engine: whatever is written in it, it gives a result or an error line, and good ones beside it theirs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.engine.boots import Ask, asking, boot, chat
from tests.fuzzed import LINES, mutations
from tests.models import tiny_embedder, tiny_llama
from worker.contract.output_line import summarize_line
from worker.contract.plan import Shape
from worker.pool import DEFAULT_COMMAND, EnginePool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

SEED = int(os.environ.get("FUZZ_SEED") or random.randrange(1_000_000))
LINE_COUNT = 500
ENGINES: list[tuple[Shape, str]] = [("openai", str(tiny_llama())), ("openai", str(tiny_embedder()))]


@pytest.fixture(params=ENGINES, ids=["generates", "embeds"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Shape, Ask]]:
    shape, model = request.param
    pool = EnginePool(DEFAULT_COMMAND)
    try:
        yield (
            shape,
            asking(pool, boot(shape=shape, model=model, engine_args={"dtype": "float32"}, sampling={"max_tokens": 4})),
        )
    finally:
        pool.stop(grace_s=1.0)


def test_nearly_right_records_are_all_answered_and_the_engine_lives(engine: tuple[Shape, Ask]) -> None:
    shape, ask = engine
    lines = fuzzed_lines()

    results = ask(lines)
    (after,) = ask([orjson.dumps(chat("still there?", max_tokens=2))])

    for result in results:
        assert summarize_line(result.line, shape, "response").error == result.error, f"FUZZ_SEED={SEED}"
    kinds = {result.error for result in results}
    assert "" in kinds
    assert len(kinds) > 5
    assert after.error in ("", "request.unsupported_url")


def fuzzed_lines() -> list[bytes]:
    found: list[bytes] = []

    @seed(SEED)
    @settings(
        max_examples=LINE_COUNT, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(raw=mutations([line for line in LINES if b'"url"' in line]))
    def gather(raw: bytes) -> None:
        found.append(raw)

    gather()
    return found
