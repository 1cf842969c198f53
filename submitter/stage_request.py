"""What `--after` asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from submitter.split import SplitRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A run that comes after another."""

    after: str
    """The URI of the run that it comes after."""
    partition_count: int | None
    """None: as many as that has."""
    settings: SplitRequest
    """All else. Its inputs are that run's outputs, and how many partitions there are does not stand in it yet."""

    @property
    def run_uri(self) -> str:
        return self.settings.run_uri

    @property
    def model(self) -> str:
        return self.settings.model

    @property
    def engine_args(self) -> dict[str, Any]:
        return self.settings.engine_args
