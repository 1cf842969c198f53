"""What results amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.contract.manifest import Tokens
from worker.contract.output_line import Summary
from worker.protocol import Result


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of results and errors, and tokens."""

    ok_count: int = 0
    error_counts: Counter[str] = field(default_factory=Counter)
    """By `stage.code`."""
    tokens: Tokens = field(default_factory=Tokens)
    other_model_count: int = 0
    """Of records that name a model that did not answer them. An output's lines do not say."""

    @property
    def error_count(self) -> int:
        return self.error_counts.total()

    def add(self, results: Sequence[Result | Summary]) -> None:
        errors = [result.error for result in results if result.error]
        self.error_counts.update(errors)
        self.ok_count += len(results) - len(errors)
        self.other_model_count += sum([isinstance(result, Result) and result.names_other_model for result in results])
        self.tokens += Tokens(
            prompt_tokens=sum([result.prompt_tokens for result in results]),
            cached_tokens=sum([result.cached_tokens for result in results]),
            completion_tokens=sum([result.completion_tokens for result in results]),
        )
