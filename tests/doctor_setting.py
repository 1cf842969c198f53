"""What the tests of `submit doctor` share; the fixture `account` is in `integration/conftest.py`."""

from __future__ import annotations

import functools
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from submitter.doctor_check import Aws, Check
from worker.contract import store_s3

P5_SPOT = "L-C4BD4855"


@functools.cache
def aws() -> Aws:
    """One for all tests: a new one reads the models of its services anew."""
    return Aws("us-east-1")


def named(checks: list[Check], name: str) -> Check:
    """The only check of a name."""
    (found,) = [check for check in checks if check.name == name]
    return found


class web_server:  # noqa: N801  used as a context manager
    """Answers every request alike."""

    def __init__(self, status: int, content: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET  # noqa: N815  the base class's name

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class silent_server:  # noqa: N801  used as a context manager
    """Takes connections and says nothing."""

    def __enter__(self) -> str:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def forget_clients() -> None:
    """The store keeps its clients, and with them their endpoint."""
    store_s3._client.cache_clear()
    store_s3._streaming_client.cache_clear()
