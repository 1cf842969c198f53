"""The instance metadata service as a Spot host has it: version 2, its tokens checked, notices when the test says so."""

from __future__ import annotations

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
HOST_FOLDER = "/latest/meta-data"
HOST = {
    f"{HOST_FOLDER}/instance-type": b"p5en.48xlarge",
    f"{HOST_FOLDER}/instance-life-cycle": b"spot",
    f"{HOST_FOLDER}/placement/availability-zone": b"us-east-2b",
    f"{HOST_FOLDER}/instance-id": b"i-0123456789abcdef0",
}
NOTICE = b'{"action":"terminate","time":"2026-01-01T00:02:00Z"}'
REBALANCE = b'{"noticeTime":"2026-01-01T00:00:00Z"}'


class FakeImds:
    """Use it as a context. `documents` is what there is; `status` what it answers instead, where set.

    While `may_answer` is not set it says nothing, as behind a hop limit that is too low.
    """

    def __init__(self) -> None:
        self.documents: dict[str, bytes] = {}
        self.status: int | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._token_count = 0
        self._good_tokens: set[str] = set()
        self.requests: list[str] = []
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for_requests(self, count: int, limit_s: float = 30.0) -> list[str]:
        """The first so many requests, once they have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, limit_s), self.requests
            return self.requests[:count]

    def forget_tokens(self) -> None:
        self._good_tokens.clear()

    def _note(self, request: str) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                service._token_count += 1
                token = f"token-{service._token_count}"
                is_good = self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
                service._good_tokens.add(token)
                self._answer(200 if is_good else 400, token.encode())

            def do_GET(self) -> None:
                if self.headers.get("X-aws-ec2-metadata-token") not in service._good_tokens:
                    self._answer(401, b"")
                    return
                content = service.documents.get(self.path)
                self._answer(404 if content is None else 200, content or b"")

            def _answer(self, status: int, content: bytes) -> None:
                service.may_answer.wait()
                self.send_response(service.status or status)
                self.send_header("Content-Length", str(len(content)))
                # Whoever asked need not have waited.
                with suppress(BrokenPipeError, ConnectionResetError):
                    self.end_headers()
                    self.wfile.write(content)
                service._note(f"{self.command} {self.path}")

            def log_message(self, *_: object) -> None:
                pass

        return Handler
