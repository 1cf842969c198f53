"""What makes requests of records: for engines that generate text, or for those that embed and score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm.v1.engine.llm_engine import LLMEngine

from worker.contract.plan import RequestSettings
from worker.contract.record_errors import RecordError
from worker.engine_adapters import Adapters
from worker.engine_openai import LayerArgs, OpenAILayer
from worker.engine_pooling import PoolingRequestMaker, served_endpoints
from worker.engine_requests import Request, RequestMaker
from worker.records import ENDPOINTS, Record


class Maker(Protocol):
    def make(self, records: Sequence[Record]) -> list[Request | RecordError]:
        """A request, or what is wrong, for each record, in their order."""


class _OfServed:
    """Refuses what the model cannot do, and leaves the rest to one that can."""

    def __init__(self, engine: LLMEngine, maker: Maker) -> None:
        self._served = served_endpoints(engine)
        self._maker = maker

    def make(self, records: Sequence[Record]) -> list[Request | RecordError]:
        refused = [None if record.endpoint in self._served else self._refusal(record) for record in records]
        made = iter(self._maker.make([one for one, problem in zip(records, refused, strict=True) if problem is None]))
        return [next(made) if problem is None else problem for problem in refused]

    def _refusal(self, record: Record) -> RecordError:
        # The first URL of each is its usual one.
        urls = {endpoint: url for url, endpoint in reversed(ENDPOINTS.items()) if endpoint in self._served}
        expected = ", ".join(f"{endpoint} ({url})" for endpoint, url in sorted(urls.items()))
        return RecordError(
            "request",
            "unsupported_url",
            f"serve record: the model serves no {record.endpoint} (expected {expected})",
            "url",
        )


def request_maker(engine: LLMEngine, args: LayerArgs, settings: RequestSettings, adapters: Adapters) -> Maker:
    """The maker that goes with the engine's model."""
    served = engine.model_config.served_model_name
    model_name = served if isinstance(served, str) else served[0]
    if engine.model_config.runner_type == "pooling":
        return _OfServed(engine, PoolingRequestMaker(engine, model_name, settings.on_too_long, adapters))
    return _OfServed(engine, RequestMaker(engine, OpenAILayer(engine, args), settings, adapters, model_name))
