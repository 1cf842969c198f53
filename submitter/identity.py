"""Ids given twice: found by hash while pass 1 reads, then read again and named by line, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from submitter.id_hashes import ID_FIELDS, Repeated
from submitter.inputs import Input
from submitter.processes import Processes
from submitter.scan import SHOWN_INVALID_COUNT
from submitter.scan_inputs import ScanSettings, scan_inputs
from worker.contract.errors import InputError


class DuplicateIdError(InputError):
    """Records of the input have the same id."""

    code = "duplicate_custom_id"


@dataclass(slots=True)
class _Pairs:
    """Places of records that have an earlier one's id."""

    first: dict[bytes, str] = field(default_factory=dict)
    shown: list[tuple[str, str]] = field(default_factory=list)

    def add(self, digest: bytes, place: str) -> None:
        earlier = self.first.setdefault(digest, place)
        if earlier != place:
            self.shown.append((earlier, place))


def refuse_duplicates(
    repeated: Repeated,
    inputs: Sequence[Input],
    settings: ScanSettings,
    processes: Processes,
    record_count: int,
) -> None:
    """Raise if an id is given twice: those whose hashes are equal are looked for in the inputs once more.

    Different ids would have to agree in 64 bits of one hash and in 128 of another to be taken for equal.

    Raises:
        DuplicateIdError: names where the first ones are.
        InputError: an object has changed meanwhile.
    """
    pairs, what = _Pairs(), f"{ID_FIELDS[settings.shape]} given twice"

    def add(name: str, line: int, digest: bytes) -> None:
        pairs.add(digest, f"{name}:{line}")
        if len(pairs.shown) == SHOWN_INVALID_COUNT:
            raise _error(pairs, what, repeated.count, f"{record_count:,}")

    scan_inputs(inputs, replace(settings, ids=None, wanted_ids=repeated.candidates), processes, add)
    if pairs.shown:
        # Fewer than are shown, so all there are.
        raise _error(pairs, what, len(pairs.shown), f"{record_count:,}")


def _error(pairs: _Pairs, what: str, count: int, among: str) -> DuplicateIdError:
    shown = "".join(f"\n  {earlier} and {later}" for earlier, later in pairs.shown)
    more = f"\n  and {count - len(pairs.shown):,} more" if count > len(pairs.shown) else ""
    return DuplicateIdError(
        f"split inputs: {what}: {count:,} of {among} (expected each once){shown}{more}",
        hint="mend them, or give --on-duplicate-id keep if nothing tells answers apart by it",
    )
