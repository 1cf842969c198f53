"""`manifests/part-….json`: what a committed output holds and how it was made. Derived: rebuilt if missing."""

from __future__ import annotations

from typing import Any

import msgspec

from worker.contract.errors import InputError
from worker.contract.formats import Document


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`, those the prefix cache held."""
    completion_tokens: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds on the monotonic clock of the attempt that committed."""

    model_s: float | None = None
    """Looking for the model and its adapters, and bringing them to the host or waiting until another worker has. None in
    manifests of earlier versions."""
    boot_s: float
    """From the start of the first engine process until the first was ready."""
    generate_s: float
    """From the first engine's ready to the last result."""
    commit_s: float
    """Writing the output."""
    total_s: float


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine said of itself when it was ready, and what it has done."""

    engine_index: int
    boot_s: float
    record_count: int
    resolved: dict[str, Any]
    """Engine arguments as vLLM resolved them, such as `max_num_seqs` and `max_num_batched_tokens`."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Who did it, and where."""

    writer_id: str
    attempt: int
    """Batch's own count, from 1."""
    job_id: str | None
    job_queue: str | None
    compute_environment: str | None
    host: str
    instance_type: str | None = None
    """AWS's name of the host's kind; None where nobody tells it, as everywhere but on AWS. So is the next."""
    market: str | None = None
    """`spot` or `on-demand`."""
    started_at: str
    ended_at: str


class EarlierAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that did not finish, and what it left."""

    writer_id: str
    attempt: int
    job_id: str | None
    compute_environment: str | None
    """Tells Spot from On-Demand where compute environments are named so."""
    host: str
    instance_type: str | None = None
    market: str | None = None
    started_at: str
    record_count: int = 0
    """Results that it left in segments."""
    ended_by: str | None = None
    """An error's code such as `interrupted`, or what stopped it, such as `SIGTERM`; None if it died without a word."""
    ended_at: str | None = None


class Manifest(Document, frozen=True, kw_only=True):
    """The account of one partition's output."""

    run_id: str
    fingerprint: str
    """The plan's: an output of another plan at the same URI is not this run's."""
    partition_index: int
    partition_count: int
    output_uri: str
    output_bytes: int
    """Of the JSONL, before compression."""
    output_checksum: str
    input_checksum: str
    """Empty in a manifest that was rebuilt when the run that this one comes after was gone."""
    record_count: int
    ok_count: int
    error_count: int
    error_counts: dict[str, int]
    """Errors by `stage.code`, such as `length.prompt_too_long`."""
    tokens: Tokens
    other_model_count: int | None = None
    """Records that name a model that did not answer them. None in a manifest that was rebuilt, as for `times`."""
    times: Times | None
    """None in a manifest that was rebuilt from the output: times are not in there."""
    model: str
    versions: dict[str, str]
    """Of llm-array, vllm, torch, transformers and python."""
    engines: tuple[EngineReport, ...]
    attempt: Attempt
    earlier_attempts: tuple[EarlierAttempt, ...] = ()
    """Those that left segments, in the order in which they started."""

    def __post_init__(self) -> None:
        if self.ok_count + self.error_count != self.record_count:
            raise InputError(
                f"read manifest of partition {self.partition_index}: {self.ok_count} results and {self.error_count} "
                f"errors do not add up to {self.record_count} records"
            )
        if sum(self.error_counts.values()) != self.error_count:
            raise InputError(
                f"read manifest of partition {self.partition_index}: errors by kind do not add up to {self.error_count}"
            )
