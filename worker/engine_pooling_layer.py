"""All that is imported of vLLM's layer of embeddings and scores, which moves between its versions."""

from __future__ import annotations

from vllm.entrypoints.pooling.embed.io_processor import EmbedIOProcessor
from vllm.entrypoints.pooling.embed.protocol import EmbeddingBatchChatRequest, EmbeddingCompletionRequest
from vllm.entrypoints.pooling.factories import init_pooling_io_processors
from vllm.entrypoints.pooling.scoring.io_processor import CrossEncoderIOProcessor
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreDataRequest
from vllm.entrypoints.pooling.typing import PoolingEngineInput, PoolingServeContext
from vllm.entrypoints.pooling.utils import (
    enable_scoring_api,
    encode_pooling_output_base64,
    encode_pooling_output_float_or_ndarray,
)

__all__ = [
    "CrossEncoderIOProcessor",
    "EmbedIOProcessor",
    "EmbeddingBatchChatRequest",
    "EmbeddingCompletionRequest",
    "PoolingEngineInput",
    "PoolingServeContext",
    "RerankRequest",
    "ScoreDataRequest",
    "enable_scoring_api",
    "encode_pooling_output_base64",
    "encode_pooling_output_float_or_ndarray",
    "init_pooling_io_processors",
]
