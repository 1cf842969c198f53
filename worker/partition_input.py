"""Where the records of a partition are: in an object of the run's own, or in an output of the run that it comes after."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from worker.contract.compression import decompressed, undamaged
from worker.contract.errors import InputError
from worker.contract.formats import Checksum
from worker.contract.layout import RunLayout
from worker.contract.plan import Compression, Partition, Plan, input_of
from worker.contract.store import Store, open_store
from worker.partition_reader import CHUNK_BYTES, PartitionReader, load_partition


class UnfinishedStageError(InputError):
    """The run that this one comes after has not got so far."""

    code = "unfinished_stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInput:
    """A partition's object, as it was when it was looked up."""

    store: Store
    uri: str
    compression: Compression
    partition: Partition
    etag: str | None
    """None of an object of the run's own: what it must be, the plan says."""

    @classmethod
    def find(cls, store: Store, layout: RunLayout, plan: Plan, index: int) -> Self:
        """Look a partition's object up, where no plan can know it.

        Raises:
            UnfinishedStageError: it is an output of another run, and not there.
        """
        partition = plan.partition(index)
        uri, compression = input_of(plan, layout, index, len(plan.partitions))
        if plan.after is None:
            return cls(store=store, uri=uri, compression=compression, partition=partition, etag=None)
        before = open_store(uri)
        found = before.head(uri)
        if found is None:
            raise UnfinishedStageError(
                f"read partition {index}: it is an output of {plan.after.run_uri}, and {uri} is not there yet",
                hint=f"submit resume {plan.after.run_uri}, then submit resume {layout.run_uri}",
            )
        return cls(store=before, uri=uri, compression=compression, partition=partition, etag=found.etag)

    @property
    def identity(self) -> str:
        """What results are answers to: those of other bytes are of no use."""
        return self.partition.checksum or f"etag:{self.etag}"

    def load(self, folder: Path) -> PartitionReader:
        """Fetch it: see `load_partition`."""
        return load_partition(self.store, self.uri, self.partition, self.compression, folder, etag=self.etag)

    def checksum(self) -> str:
        """Of its bytes, before compression; reads them if the plan does not know it.

        Raises:
            InputError: they have changed since they were looked up, or are damaged.
        """
        if self.partition.checksum:
            return self.partition.checksum
        found = Checksum()
        whole = undamaged(f"partition {self.uri}", "its run can be verified: submit verify")
        with closing(self.store.open_read(self.uri, self.etag)) as stored, whole:
            content = decompressed(stored, self.compression)
            while chunk := content.read(CHUNK_BYTES):
                found.update(chunk)
        return found.value
