"""A proxy between the code and S3 as moto plays it, which answers as S3 does on bad days: microburst, in a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from aiohttp import web
from microburst import detection, forward
from microburst.app import make_app
from microburst.core.pipeline import Microburst
from microburst.detection.rest import rest_operations

# Three slips of microburst 0.10: it looks for `UploadId` in queries that say `uploadId`, and so takes every multipart call
# for another; it drops the length of what it passes on, the one thing that a HEAD is for; and it reads the models of all AWS
# services, for seconds, to look for a meaning in the host's name.
for _operation in rest_operations("s3"):
    _operation["required_query"] = {name[0].lower() + name[1:] for name in _operation["required_query"]}
forward.HOP_BY_HOP -= {"content-length"}
detection.parse_host = lambda _: (None, None, None)

LOST = "x-lost"

Answer = TypeVar("Answer")
Fault = dict[str, Any]
"""A rule as microburst reads it."""


def answered(operation: str, status: int, code: str, times: int | None = None) -> Fault:
    """S3 refuses: it has not done anything."""
    return {"service": "s3", "operation": operation, "error": {"code": code, "status": status}, "times": times}


def reset(operation: str, times: int | None = None) -> Fault:
    """The connection is reset before S3 has seen the request."""
    return {"service": "s3", "operation": operation, "reset": True, "times": times}


def cut_upload(operation: str, after_bytes: int, times: int | None = None) -> Fault:
    """The connection is reset in the middle of what is sent."""
    cut = {"cut_upload": {"after_bytes": after_bytes}}
    return {"service": "s3", "operation": operation, "request": cut, "times": times}


def lost_answer(operation: str, times: int | None = None) -> Fault:
    """S3 has done what was asked for, and the connection is reset before its answer comes."""
    return {"service": "s3", "operation": operation, "response": {"set_headers": {LOST: ""}}, "times": times}


def cut_answer(operation: str, after_bytes: int, times: int | None = None) -> Fault:
    """The connection is reset in the middle of an answer."""
    return {"service": "s3", "operation": operation, "response": {"abort_bytes": after_bytes}, "times": times}


def slow(operation: str, latency_ms: float, times: int | None = None) -> Fault:
    return {"service": "s3", "operation": operation, "latency": latency_ms, "times": times}


class FaultProxy:
    """Entered, it listens at `endpoint`; without faults it passes everything on."""

    def __init__(self, upstream: str) -> None:
        self._proxy = Microburst(upstream)
        self._loop = asyncio.new_event_loop()
        app = make_app(self._proxy)
        app.on_response_prepare.append(_lose)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self.endpoint = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._await(self._listen())
        host, port = self._runner.addresses[0][:2]
        self.endpoint = f"http://{host}:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._await(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        # Here, where the test that cut connections can still say that it does not mind.
        gc.collect()

    def inject(self, *faults: Fault) -> None:
        """These faults from now on, and no others; of several that fit a request the first one counts."""
        self._await(self._call(lambda: self._proxy.engine.set_rules(list(faults))))
        self._proxy.fired.clear()

    @property
    def fired_count(self) -> int:
        """Of the faults that were injected last."""
        return len(self._proxy.fired)

    async def _listen(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def _call(self, call: Callable[[], Answer]) -> Answer:
        return call()

    def _await(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _lose(request: web.Request, response: web.StreamResponse) -> None:
    if LOST in response.headers and request.transport:
        request.transport.abort()
