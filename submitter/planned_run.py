"""A run that has been planned: what is asked of it, and which of it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec

from worker.contract.errors import InputError, UsageError
from worker.contract.formats import decode
from worker.contract.layout import RunLayout, normalize_uri
from worker.contract.manifest import Manifest
from worker.contract.plan import Compression, Partition, Plan, input_of, read_plan
from worker.contract.store import NotFoundError, ObjectInfo, Store, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """One listing of `outputs/`."""

    by_index: dict[int, ObjectInfo]
    """By partition."""
    strays: tuple[str, ...]
    """URIs of what belongs to no partition."""

    def __contains__(self, index: int) -> bool:
        return index in self.by_index


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    store: Store
    layout: RunLayout
    plan: Plan

    @classmethod
    def open(cls, run_uri: str) -> Self:
        """Read a run's plan.

        Raises:
            InputError: there is none, or it is of a newer version.
        """
        layout = RunLayout(normalize_uri(run_uri))
        store = open_store(layout.run_uri)
        return cls(store=store, layout=layout, plan=read_plan(store, layout))

    @property
    def partition_count(self) -> int:
        return len(self.plan.partitions)

    def output_uri(self, index: int) -> str:
        return self.layout.output(index, self.partition_count, self.plan.compression)

    def outputs(self) -> Outputs:
        """What is done."""
        expected = {self.output_uri(index): index for index in range(self.partition_count)}
        by_index, strays = {}, []
        for found in self.store.list(f"{self.layout.outputs}/"):
            if found.uri in expected:
                by_index[expected[found.uri]] = found
            elif not found.uri.endswith("/"):  # consoles make such keys to show folders
                strays.append(found.uri)
        return Outputs(by_index=by_index, strays=tuple(strays))

    def manifest(self, index: int) -> Manifest | None:
        """A partition's manifest, of whatever plan it is.

        Raises:
            InputError: it cannot be read as one.
        """
        return _read_manifest(self.store, self.layout.manifest(index, self.partition_count))

    def task(self, index: int, outputs: Outputs) -> PartitionTask:
        alone = msgspec.structs.replace(self.plan, partitions=(self.plan.partitions[index],), inputs=())
        return PartitionTask(
            run=PlannedRun(store=self.store, layout=self.layout, plan=alone),
            index=index,
            partition_count=self.partition_count,
            output=outputs.by_index.get(index),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTask:
    """One partition of a run, small enough to be sent to another process: a plan may hold a hundred thousand."""

    run: PlannedRun
    """Its plan is that of this partition alone."""
    index: int
    partition_count: int
    output: ObjectInfo | None
    """None: there is none yet."""

    @property
    def partition(self) -> Partition:
        return self.run.plan.partitions[0]

    @property
    def manifest_uri(self) -> str:
        return self.run.layout.manifest(self.index, self.partition_count)

    def read_manifest(self) -> Manifest | None:
        """As `PlannedRun.manifest`."""
        return _read_manifest(self.run.store, self.manifest_uri)

    def stored_input(self) -> ObjectInfo:
        """Where its records are: an object of the run's own, or an output of the run that this one comes after.

        Raises:
            InputError: there is none.
        """
        found = self.find_input()
        if found is None:
            after = self.run.plan.after
            hint = f"submit resume {after.run_uri}" if after else "plan the run again under another URI"
            missing = "the run before has no such output" if after else "there is none"
            raise InputError(f"look up partition {self._input[0]}: {missing}", hint=hint)
        return found

    def find_input(self) -> ObjectInfo | None:
        """The same, or None."""
        uri, _ = self._input
        return open_store(uri).head(uri)

    @property
    def input_compression(self) -> Compression:
        """Of the same."""
        return self._input[1]

    @property
    def _input(self) -> tuple[str, Compression]:
        return input_of(self.run.plan, self.run.layout, self.index, self.partition_count)


def check_apart(run_uri: str, new_run_uri: str) -> None:
    """See that a run that is made from another does not lie within it.

    Raises:
        UsageError: it does.
    """
    if f"{new_run_uri}/".startswith(f"{run_uri}/"):
        raise UsageError(f"plan run {new_run_uri}: it lies within {run_uri} (expected a place of its own)")


def _read_manifest(store: Store, uri: str) -> Manifest | None:
    try:
        return decode(store.read(uri), Manifest, uri)
    except NotFoundError:
        return None
