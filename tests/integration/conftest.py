from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from submitter.batch_client import Batch, open_batch
from submitter.job_definition import register
from tests.batch_hosts import FakeHosts
from tests.batch_setting import FOLDER, VALUES, Setting
from tests.doctor_setting import P5_SPOT
from tests.fake_batch import FakeBatch
from tests.fake_quotas import FakeQuotas
from tests.warm_worker import WarmWorkers
from tests.worker_runs import Gate
from worker.contract.layout import RunLayout


@pytest.fixture(scope="session")
def batch_server() -> Iterator[FakeBatch]:
    with FakeBatch() as running:
        yield running


@pytest.fixture
def setting(batch_server: FakeBatch, aws_environment: dict[str, str], tmp_path: Path) -> Setting:
    """A queue of p5en hosts, the job definition for them, and a run that is not submitted yet."""
    batch_server.reset()
    batch_server.add_queue("gpu", ["p5en.48xlarge", "p5"])
    batch = _client(batch_server.url)
    register(batch, FOLDER / "8gpu-p5.json", VALUES)
    found = Setting(fake=batch_server, batch=batch, layout=RunLayout(str(tmp_path / "run")))
    batch_server.created_at_ms = lambda: int(found.clock.now() * 1000)
    return found


@functools.cache
def _client(url: str) -> Batch:
    """One for all tests: making a client costs more than most of them."""
    return open_batch(endpoint_url=url)


@pytest.fixture
def on_batch(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """The same, found by the console commands."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", setting.fake.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_CLOUDWATCH_LOGS", setting.fake.url)
    return setting


@pytest.fixture
def quotas(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeQuotas]:
    """Room for ten hosts of the queue's."""
    with FakeQuotas() as running:
        running.applied[P5_SPOT] = 1920.0
        monkeypatch.setenv("AWS_ENDPOINT_URL_SERVICE_QUOTAS", running.url)
        yield running


@pytest.fixture
def account(on_batch: Setting, quotas: FakeQuotas, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Setting:
    """A queue, a job definition and quotas that go together, and nothing of this machine's own AWS configuration."""
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    return on_batch


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Keeps all engines from working until it is opened."""
    found = Gate(tmp_path / "gate")
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


@pytest.fixture
def hosts(place: Setting, warm_workers: WarmWorkers) -> Iterator[FakeHosts]:
    """They run the jobs of the account in the fixture `place`, which each file has of its own."""
    with FakeHosts(place.fake, warm_workers, capacity=2) as running:
        yield running
