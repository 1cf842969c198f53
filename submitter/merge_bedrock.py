"""`manifest.json.out`: the counts that Bedrock puts beside the results of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from submitter.merge_accounts import Account
from submitter.merge_target import Target, TargetExistsError
from worker.contract.errors import UsageError
from worker.contract.store import NotFoundError, open_store

NAME = "manifest.json.out"


@dataclass(frozen=True, slots=True)
class BedrockManifest:
    uri: str
    content: bytes

    @classmethod
    def beside(cls, target: Target, total_record_count: int, account: Account) -> BedrockManifest:
        """For a target: the same counts under the names that Bedrock has for them."""
        counts = {
            "totalRecordCount": total_record_count,
            "processedRecordCount": account.record_count,
            "successRecordCount": account.ok_count,
            "errorRecordCount": account.error_count,
            "inputTokenCount": account.tokens.prompt_tokens,
            "outputTokenCount": account.tokens.completion_tokens,
        }
        folder = target.uri.rpartition("/")[0]
        return cls(f"{folder}/{NAME}", orjson.dumps(counts))

    def check_apart(self, *others: Target | None) -> None:
        """See that nothing else is to be written there.

        Raises:
            UsageError: something is.
        """
        if any(other is not None and other.uri == self.uri for other in others):
            raise UsageError(
                f"write {self.uri}: the counts of a run of Bedrock's shape go there (expected another name)"
            )

    def check_free(self, *, overwrite: bool) -> None:
        """See that it can be written: nothing is there, or the same.

        Raises:
            TargetExistsError: something else is there.
        """
        if overwrite:
            return
        try:
            found = open_store(self.uri).read(self.uri)
        except NotFoundError:
            return
        if found != self.content:
            raise self._exists()

    def commit(self, *, overwrite: bool) -> None:
        """Write it.

        Raises:
            TargetExistsError: something else is there.
            StorageError, ConfigError: storage gave no answer, or refused.
        """
        store = open_store(self.uri)
        if overwrite:
            store.write(self.uri, self.content)
        elif not store.create(self.uri, self.content, owner=NAME):
            self.check_free(overwrite=False)

    def _exists(self) -> TargetExistsError:
        return TargetExistsError(
            f"write {self.uri}: there is another one already",
            hint="give the output a folder of its own, or --overwrite to replace it",
        )
