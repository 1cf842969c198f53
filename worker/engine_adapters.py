"""LoRA adapters in vLLM: what the engine must be told to take them, and which one a record's `model` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from worker.adapters import max_rank
from worker.contract.errors import EngineBootError

ACTIVE_COUNT = 8
"""Adapters in one batch: each takes memory on the device for its highest rank, used or not."""


class Adapters:
    """The adapters of a run by name, for one engine. Their numbers are the same in every engine of the run."""

    def __init__(self, adapters: Mapping[str, str]) -> None:
        """Take each adapter's place: a folder, or a hub's id.

        Raises:
            EngineBootError: see `local_adapters`.
        """
        self._requests = {
            name: LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)
            for number, (name, path) in enumerate(sorted(local_adapters(adapters).items()), start=1)
        }

    def __contains__(self, name: object) -> bool:
        return name in self._requests

    def named(self, model: str | None) -> LoRARequest | None:
        """What to give the engine for a record with this `model`; None: the model itself answers."""
        return None if model is None else self._requests.get(model)

    def load(self, engine: LLMEngine) -> None:
        """Have the engine load each adapter once: one that does not fit would end it in the middle of the work.

        Raises:
            EngineBootError: the adapter is not one for this model.
        """
        for name, request in self._requests.items():
            try:
                engine.add_lora(request)
            except Exception as error:
                raise EngineBootError(
                    f"load adapter {name!r} from {request.lora_path}: {' '.join(str(error).split())[:400]}",
                    hint="was it trained on this model, and is it a LoRA without DoRA or bias?",
                ) from error


def local_adapters(adapters: Mapping[str, str]) -> dict[str, str]:
    """Each adapter's folder; those that are a hub's ids are brought to this host by vLLM's own rules.

    Raises:
        EngineBootError: one is not there.
    """
    return {name: _folder(name, place) for name, place in adapters.items()}


def _folder(name: str, place: str) -> str:
    try:
        found = get_adapter_absolute_path(place)
    except Exception as error:
        # Whatever the hub's client has to say of a hub that it may not, or cannot, ask.
        raise _not_found(name, place) from error
    if not Path(found).is_dir():
        raise _not_found(name, place)
    return str(found)


def _not_found(name: str, place: str) -> EngineBootError:
    return EngineBootError(
        f"find adapter {name!r} at {place}: it is neither a folder here nor on the hub",
        hint="is the id right, and can this host reach the hub? An s3:// prefix needs none",
    )


def lora_engine_args(adapters: Mapping[str, str]) -> dict[str, Any]:
    """Engine arguments for these adapters, whose place is a folder or a hub's id; none for no adapters.

    Raises:
        EngineBootError: one is not there, or its rank is higher than vLLM serves.
    """
    if not adapters:
        return {}
    rank, served = max_rank(local_adapters(adapters).values()), get_args(MaxLoRARanks)
    if rank > max(served):
        raise EngineBootError(f"read adapters: rank {rank} is not served (expected at most {max(served)})")
    return {
        "enable_lora": True,
        "max_loras": _slot_count(len(adapters)),
        "max_cpu_loras": max(len(adapters), _slot_count(len(adapters))),
        "max_lora_rank": min(one for one in served if one >= rank),
    }


def _slot_count(adapter_count: int) -> int:
    """How many adapters have a place in a batch.

    On CPUs one place more than there are adapters, which stays empty: there vLLM 0.32 gives a record of the model
    itself, if one of an adapter's is in the same batch, the adapter in the last place.
    """
    return adapter_count + 1 if current_platform.is_cpu() else min(adapter_count, ACTIVE_COUNT)
