"""The metadata service's answers, good and bad, and what the worker makes of them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_imds import ACTION_PATH, NOTICE, REBALANCE, REBALANCE_PATH, FakeImds
from worker.contract.errors import InterruptedRunError
from worker.interrupt import Interrupt
from worker.metadata import DEFAULT_ENDPOINT, metadata_endpoint
from worker.pool import EnginePool
from worker.spot import ATTEMPT_COUNT, SpotWatch

POLL_S = 0.01
LIMIT_S = 30.0


@pytest.fixture
def imds() -> Iterator[FakeImds]:
    with FakeImds() as imds:
        yield imds


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    with Interrupt() as interrupt:
        yield interrupt


def wait_until_woken(interrupt: Interrupt) -> None:
    """As the worker waits: for engines, or to be woken."""
    pool = EnginePool(("no", "engine"), interrupt.wake_fd)
    pool.poll(LIMIT_S)
    pool.stop(0)


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == event]


def test_a_notice_wakes_and_interrupts(imds: FakeImds, interrupt: Interrupt) -> None:
    with SpotWatch(imds.url, interrupt, POLL_S):
        imds.wait_for_requests(6)
        interrupt.check()
        imds.documents[ACTION_PATH] = NOTICE
        wait_until_woken(interrupt)

    with pytest.raises(InterruptedRunError, match=r"a Spot notice \(terminate at 2026-01-01T00:02:00Z\)") as raised:
        interrupt.check()
    assert raised.value.to_dict()["reason"] == interrupt.reason == "spot_interruption"


def test_each_question_is_asked_with_a_token_that_is_asked_for_once(imds: FakeImds, interrupt: Interrupt) -> None:
    with SpotWatch(imds.url, interrupt, POLL_S):
        asked = imds.wait_for_requests(5)

    assert asked == [
        "PUT /latest/api/token",
        *[f"GET {ACTION_PATH}", f"GET {REBALANCE_PATH}"] * 2,
    ]


def test_a_token_that_is_no_longer_good_is_replaced(imds: FakeImds, interrupt: Interrupt) -> None:
    with SpotWatch(imds.url, interrupt, POLL_S):
        imds.wait_for_requests(3)
        imds.forget_tokens()
        imds.documents[ACTION_PATH] = NOTICE
        wait_until_woken(interrupt)

    assert interrupt.reason == "spot_interruption"


@pytest.mark.parametrize("notice", [b"", b"{", b"[]", b'{"action":5}', b"\xff"])
def test_a_notice_that_nobody_can_read_is_a_notice(imds: FakeImds, interrupt: Interrupt, notice: bytes) -> None:
    imds.documents[ACTION_PATH] = notice

    with SpotWatch(imds.url, interrupt, POLL_S):
        wait_until_woken(interrupt)

    assert interrupt.reason == "spot_interruption"


def test_a_rebalance_recommendation_is_logged_once(
    imds: FakeImds, interrupt: Interrupt, caplog: pytest.LogCaptureFixture
) -> None:
    imds.documents[REBALANCE_PATH] = REBALANCE

    with SpotWatch(imds.url, interrupt, POLL_S):
        imds.wait_for_requests(12)

    assert len(fields_of(caplog, "spot.rebalance_recommended")) == 1
    assert interrupt.reason is None


def test_what_came_first_is_the_reason(interrupt: Interrupt) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    interrupt.request("spot_interruption", "a Spot notice")

    with pytest.raises(InterruptedRunError, match="stopped by SIGTERM") as raised:
        interrupt.check()
    assert raised.value.reason == "SIGTERM"


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_service_that_never_answers_well_is_soon_asked_no_more(
    imds: FakeImds, interrupt: Interrupt, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.INFO, "worker")
    imds.status = status

    with SpotWatch(imds.url, interrupt, POLL_S) as watch:
        watch.join(LIMIT_S)

    # The last answer may be here before its request is noted there.
    imds.wait_for_requests(ATTEMPT_COUNT)
    assert len(imds.requests) == ATTEMPT_COUNT
    assert len(fields_of(caplog, "spot.unwatched")) == 1
    assert interrupt.reason is None


def test_no_service_at_all_is_said_once(interrupt: Interrupt, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker")
    with FakeImds() as gone:
        url = gone.url

    with SpotWatch(url, interrupt, POLL_S) as watch:
        watch.join(LIMIT_S)

    (fields,) = fields_of(caplog, "spot.unwatched")
    assert "ConnectionRefusedError" in fields["cause"]


def test_a_service_that_has_answered_is_asked_again_after_any_number_of_failures(
    imds: FakeImds, interrupt: Interrupt
) -> None:
    with SpotWatch(imds.url, interrupt, POLL_S):
        count = len(imds.wait_for_requests(3))
        imds.status = 500
        imds.wait_for_requests(count + 2 * ATTEMPT_COUNT + 2)
        imds.documents[ACTION_PATH] = NOTICE
        imds.status = None
        wait_until_woken(interrupt)

    assert interrupt.reason == "spot_interruption"


def test_a_proxy_is_never_asked(imds: FakeImds, interrupt: Interrupt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    with SpotWatch(imds.url, interrupt, POLL_S):
        imds.wait_for_requests(1)


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({}, None),
        ({"AWS_BATCH_JOB_ID": "j"}, DEFAULT_ENDPOINT),
        ({"AWS_BATCH_JOB_ID": "local-0001", "LLM_ARRAY_PARENT_PID": "1"}, None),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://x"}, "http://x"),
        ({"AWS_BATCH_JOB_ID": "j", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://x"}, "http://x"),
        ({"AWS_BATCH_JOB_ID": "j", "AWS_EC2_METADATA_DISABLED": "True"}, None),
        ({"AWS_BATCH_JOB_ID": "j", "AWS_EC2_METADATA_DISABLED": "false"}, DEFAULT_ENDPOINT),
    ],
)
def test_only_workers_on_aws_ask(variables: dict[str, str], endpoint: str | None) -> None:
    assert metadata_endpoint(variables) == endpoint
