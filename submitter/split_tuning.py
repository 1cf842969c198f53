"""Sizes that the splitter works in. They change how fast it is, never what it writes; tests use tiny ones."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTuning:
    block_bytes: int = 64 * KIB
    """What is scanned at a time, and the finest stretch whose counts are remembered. Fits a core's own cache."""
    smallest_block_bytes: int = 4 * KIB
    blocks_per_partition: int = 16
    """Blocks shrink until there are this many: the block around each boundary is read once more."""
    chunk_bytes: int = 64 * MIB
    """One process's share of a plain object at a time."""
    whole_bytes: int = 4 * MIB
    """Objects and partitions up to this size are read and written by one request."""
    entry_limit: int = 1 << 20
    """Blocks remembered for the whole input; beyond it neighbours are added up."""
    id_limit: int = 1 << 19
    """Hashes of ids that are compared at a time; what a process hears beyond it waits on disk."""
    ids_in_memory_bytes: int = 128 * MIB
    """Input whose ids are handed to one process, unless they are too many; those of a larger one wait on disk."""
    line_limit_bytes: int = 64 * MIB
    parallel_bytes: int = 32 * MIB
    """Input below which a second process takes longer to start than it saves."""

    def block_bytes_for(self, total_bytes: int, partition_count: int) -> int:
        wanted = total_bytes // (partition_count * self.blocks_per_partition)
        return min(self.block_bytes, max(self.smallest_block_bytes, wanted))

    def chunk_bytes_for(self, total_bytes: int, process_count: int) -> int:
        """Four chunks or more for each process, so that none idles long at the end."""
        return min(self.chunk_bytes, max(self.whole_bytes, total_bytes // (process_count * 4), 1))
