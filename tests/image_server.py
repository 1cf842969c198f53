"""A web server on this machine that answers as images' hosts do, and as they should not."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = Callable[["Handler"], None]


def png(red: int = 0, green: int = 0, blue: int = 0, size: int = 8) -> bytes:
    """A real image of one colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes((red, green, blue)) * size) * size)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


class Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        images = self.server.images
        path = self.path.partition("?")[0]
        images.requests[path] += 1
        images.hosts.append(self.headers["Host"])
        answer = images.answers.get(path)
        if answer is None:
            self.give(b"nothing", status=404)
        else:
            answer(self)

    def give(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.begin(status, **{"content_type": "image/png", "content_length": str(len(content)), **headers})
        self.write(content)

    def begin(self, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def write(self, content: bytes) -> bool:
        """Whether anybody still reads."""
        try:
            self.wfile.write(content)
        except OSError:
            return False
        return True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is the base's
        pass


class _Server(ThreadingHTTPServer):
    images: ImageServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class ImageServer:
    """Entered, it listens at `address`, an authority such as `127.0.0.1:4711`."""

    def __init__(self, answers: dict[str, Answer | bytes], tls: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        for path, answer in answers.items():
            self.answers[path] = _giving(answer) if isinstance(answer, bytes) else answer
        self.requests: Counter[str] = Counter()
        self.hosts: list[str] = []
        self.ending = threading.Event()
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.images = self
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        # One serve_forever's poll is what leaving takes.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.port: int = self._server.server_address[1]
        self.address = f"127.0.0.1:{self.port}"

    def url(self, path: str) -> str:
        return f"http://{self.address}{path}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _giving(content: bytes) -> Answer:
    return lambda handler: handler.give(content)


def in_turn(*answers: Answer) -> Answer:
    """Each answer once, then the last one for ever."""
    left = list(answers)

    def answer(handler: Handler) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(handler)

    return answer


def endless(handler: Handler) -> None:
    handler.begin(content_type="image/png")
    handler.write(png())
    while handler.write(bytes(1 << 16)):
        pass


def dripping(handler: Handler) -> None:
    """A byte now and then: no wait for the next one is ever long."""
    handler.begin(content_type="image/png")
    while handler.write(b"\x89") and not handler.server.images.ending.wait(0.02):
        pass


def dripping_headers(handler: Handler) -> None:
    handler.write(b"HTTP/1.1 200 OK\r\n")
    while handler.write(b"X-More: 1\r\n") and not handler.server.images.ending.wait(0.02):
        pass


def breaking_off(handler: Handler) -> None:
    handler.begin(content_type="image/png", content_length="1000")
    handler.write(png())


def resetting(handler: Handler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def redirecting(location: str, status: int = 302) -> Answer:
    return lambda handler: handler.give(b"", status=status, location=location)


def refusing(status: int) -> Answer:
    return lambda handler: handler.give(b"no", status=status)
