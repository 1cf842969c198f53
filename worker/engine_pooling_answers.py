"""From the outputs of vLLM's pooling models to the response bodies of its OpenAI layer, without `id` and `created`.

Embeddings are encoded at once, as vLLM's server has them: in the fewest digits that give the model's own numbers back,
half of what Python writes for them. Numbers that are not finite become null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson
import torch
from vllm.outputs import ScoringRequestOutput

from worker.contract.record_errors import RecordError
from worker.engine_pooling_layer import encode_pooling_output_base64, encode_pooling_output_float_or_ndarray


def finished(processor: Any, context: Any, outputs: Sequence[Any]) -> Sequence[Any]:
    """What vLLM's processor makes of a request's outputs: one for each input or pair.

    Raises:
        RecordError: the engine gave the request up.
    """
    for output in outputs:
        if output.error is not None or not output.outputs.data.numel():
            raise RecordError("engine", "not_finished", "embed input: the engine gave the request up")
    context.final_res_batch = list(outputs)
    with torch.inference_mode():
        processor.post_process_online(context)
    found: Sequence[Any] = context.final_res_batch
    return found


def embedding_body(outputs: Sequence[Any], context: Any, prompt_tokens: int) -> dict[str, Any]:
    request = context.request
    return {
        "object": "list",
        "model": context.model_name,
        "data": [
            {
                "index": index,
                "object": "embedding",
                "embedding": encode_pooling_output_base64(output, request.embed_dtype, request.endianness)
                if request.encoding_format == "base64"
                else _encoded(encode_pooling_output_float_or_ndarray(output)),
            }
            for index, output in enumerate(outputs)
        ],
        "usage": _usage(prompt_tokens) | {"completion_tokens": 0},
    }


def score_body(outputs: Sequence[Any], context: Any, prompt_tokens: int) -> dict[str, Any]:
    return {
        "object": "list",
        "model": context.model_name,
        "data": [
            {"index": index, "object": "score", "score": _score_of(output)} for index, output in enumerate(outputs)
        ],
        "usage": _usage(prompt_tokens) | {"completion_tokens": 0},
    }


def rerank_body(outputs: Sequence[Any], context: Any, prompt_tokens: int) -> dict[str, Any]:
    """The likeliest documents first."""
    request = context.request
    documents = request.documents if isinstance(request.documents, list) else [request.documents]
    results: list[dict[str, Any]] = [
        {"index": index, "document": _shown(documents[index]), "relevance_score": _score_of(output)}
        for index, output in enumerate(outputs)
    ]
    results.sort(key=lambda result: _rank(result["relevance_score"]), reverse=True)
    return {
        "model": context.model_name,
        "usage": _usage(prompt_tokens),
        "results": results[: request.top_n or len(results)],
    }


def _encoded(embedding: Any) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(embedding, option=orjson.OPT_SERIALIZE_NUMPY))


def _score_of(output: Any) -> float:
    found: float = ScoringRequestOutput.from_base(output).outputs.score
    return found


def _rank(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _shown(document: Any) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document, "multi_modal": None}
    return {"text": None, "multi_modal": document["content"]}


def _usage(prompt_tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
