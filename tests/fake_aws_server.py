"""The HTTP side of the stand-ins for AWS: requests and answers held to botocore's service models, faults on demand."""

from __future__ import annotations

import functools
import json
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, cast

import botocore.loaders
from botocore.model import ServiceModel, Shape, StructureShape
from botocore.validate import ParamValidator

Json = dict[str, Any]


class Fault(Enum):
    """How one call fails."""

    THROTTLE = "429, nothing done"
    ERROR_BEFORE = "500, nothing done"
    ERROR_AFTER = "500, but it is done"
    DROP_BEFORE = "no answer, nothing done"
    DROP_AFTER = "no answer, but it is done"
    GARBLED_AFTER = "an answer that is no JSON, but it is done"
    DENY = "403"


_REFUSALS = {
    Fault.THROTTLE: (429, "TooManyRequestsException"),
    Fault.ERROR_BEFORE: (500, "ServerException"),
    Fault.DENY: (403, "AccessDeniedException"),
}


class ClientError(Exception):
    """A 400 as the service gives it."""

    def __init__(self, message: str, code: str = "ClientException") -> None:
        super().__init__(message)
        self.code = code


class FakeService:
    """Operations over HTTP on a free port, in between entering and leaving.

    A subclass fills `handlers`: what does an operation, by its lower-case name. `calls` counts them, refused ones too.
    """

    handlers: Mapping[str, Callable[[Json, int], Json]]
    """Each gets the request and the size of its body."""

    def __init__(self) -> None:
        self._fault_lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.calls: Counter[str] = Counter()
        self.forget_faults()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def inject(self, operation: str, fault: Fault, times: int = 1) -> None:
        """Let the next calls of an operation (`submitjob`, `listjobs`, …) fail."""
        self._faults.setdefault(operation, deque()).extend([fault] * times)

    def throttle(self, share: float, rng: random.Random) -> None:
        """Refuse so large a share of all calls from now on, at random."""
        self._throttled_share, self._rng = share, rng

    def forget_faults(self) -> None:
        self._faults: dict[str, deque[Fault]] = {}
        self.throttle(0.0, random.Random(0))

    def next_fault(self, operation: str) -> Fault | None:
        with self._fault_lock:
            self.calls[operation] += 1
            if waiting := self._faults.get(operation):
                return waiting.popleft()
            return Fault.THROTTLE if self._rng.random() < self._throttled_share else None

    def call(self, operation: str, request: Json, size_bytes: int) -> Json:
        """Do one call.

        Raises:
            ClientError: the service refuses it.
        """
        model = _operations("batch") | _operations("logs")
        check_request(model[operation].input_shape, request)
        answer = self.handlers[operation](request, size_bytes)
        check_answer(model[operation].output_shape, answer)
        return answer


def check_request(shape: StructureShape, request: Json) -> None:
    """Types, required members, enums, and that there is nothing that the service does not know.

    Raises:
        ClientError: as the service would refuse it.
    """
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        raise ClientError(report.generate_report())
    _check_enums(shape, request)


def check_answer(shape: Shape, answer: Any) -> None:
    """A stand-in must not tell what the service never tells."""
    if shape.type_name == "structure":
        members = cast("StructureShape", shape).members
        unknown = answer.keys() - members.keys()
        assert not unknown, f"{shape.name} has no {unknown}"
        for name, value in answer.items():
            check_answer(members[name], value)
    elif shape.type_name == "list":
        for value in answer:
            check_answer(cast("Any", shape).member, value)


def _check_enums(shape: Any, value: Any) -> None:
    if shape.type_name == "structure":
        for name, member in value.items():
            _check_enums(shape.members[name], member)
    elif shape.type_name == "list":
        for member in value:
            _check_enums(shape.member, member)
    # Job definitions may write the action of a retry rule in either case.
    elif getattr(shape, "enum", None) and value not in shape.enum and value.upper() not in shape.enum:
        raise ClientError(f"{value!r} is none of {', '.join(shape.enum)}")


@functools.cache
def _operations(service: str) -> dict[str, Any]:
    loader = botocore.loaders.Loader()
    model = ServiceModel(loader.load_service_model(service, "service-2"))
    return {name.lower(): model.operation_model(name) for name in model.operation_names}


def now_ms() -> int:
    return int(time.time() * 1000)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, service: FakeService) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.service = service


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        # REST paths name the operation (`/v1/submitjob`), JSON 1.1 names it in a header (`Logs_20140328.GetLogEvents`).
        target = self.headers.get("X-Amz-Target", self.path.removeprefix("/v1/"))
        operation = target.rpartition(".")[2].lower()
        fault = self.server.service.next_fault(operation)
        if fault in _REFUSALS:
            status, code = _REFUSALS[fault]
            self._answer(status, {"message": "injected"}, code)
        elif fault is Fault.DROP_BEFORE:
            self.close_connection = True
        else:
            self._call(operation, body, fault)

    def _call(self, operation: str, body: bytes, fault: Fault | None) -> None:
        try:
            answer = self.server.service.call(operation, json.loads(body or b"{}"), len(body))
        except ClientError as error:
            self._answer(400, {"message": str(error)}, error.code)
            return
        if fault is Fault.DROP_AFTER:
            self.close_connection = True
        elif fault is Fault.ERROR_AFTER:
            self._answer(500, {"message": "injected"}, "ServerException")
        elif fault is Fault.GARBLED_AFTER:
            self._send(200, b"<html>", None)
        else:
            self._answer(200, answer, None)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Say nothing: pytest would show every request of a failed test."""

    def _answer(self, status: int, content: Json, error_type: str | None) -> None:
        if error_type:
            # Where JSON 1.1 has it; REST has it in the header.
            content = {"__type": error_type, **content}
        self._send(status, json.dumps(content).encode(), error_type)

    def _send(self, status: int, content: bytes, error_type: str | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if error_type:
            self.send_header("x-amzn-errortype", error_type)
        self.end_headers()
        self.wfile.write(content)
