"""What one worker is to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.contract.layout import RunLayout
from worker.contract.plan import Partition, Plan
from worker.contract.store import Store
from worker.metadata import Host
from worker.partition_input import PartitionInput
from worker.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One partition, and all that is known before work on it begins."""

    settings: Settings
    store: Store
    layout: RunLayout
    plan: Plan
    partition_index: int
    writer_id: str
    """This process, among all that ever worked on the partition."""
    host: Host
    started_at: str
    started: float
    """The same on the monotonic clock."""

    @property
    def partition(self) -> Partition:
        return self.plan.partition(self.partition_index)

    def find_input(self) -> PartitionInput:
        """Where the partition's records are.

        Raises:
            UnfinishedStageError: they are an output of another run, and not there yet.
        """
        return PartitionInput.find(self.store, self.layout, self.plan, self.partition_index)

    @property
    def output_uri(self) -> str:
        return self.layout.output(self.partition_index, len(self.plan.partitions), self.plan.compression)

    @property
    def manifest_uri(self) -> str:
        return self.layout.manifest(self.partition_index, len(self.plan.partitions))

    @property
    def checkpoints_uri(self) -> str:
        return self.layout.checkpoints(self.partition_index, len(self.plan.partitions))

    def segment_uri(self, number: int) -> str:
        """Of this worker's n-th segment."""
        return self.layout.segment(self.partition_index, len(self.plan.partitions), self.writer_id, number)

    @property
    def input_uris(self) -> list[str]:
        """What `Source.input_index` counts."""
        return [source.uri for source in self.plan.inputs]

    @property
    def engine_args(self) -> dict[str, Any]:
        return {**self.plan.engine_args, **self.settings.engine_args}
