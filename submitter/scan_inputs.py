"""Pass 1 over all inputs: plain objects in ranges, compressed ones and tables whole, small ones many at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from submitter.blocks import BlockTable
from submitter.id_finder import FoundId, IdFinder
from submitter.id_hashes import Hashes, IdCollector, IdSettings
from submitter.inputs import Input
from submitter.lines import line_blocks, without_bom
from submitter.processes import Processes, Report
from submitter.reading import (
    SMALL_AHEAD_COUNT,
    ByteRange,
    changed,
    fetch,
    fetch_pieces,
    magic_range,
)
from submitter.scan import SHOWN_INVALID_COUNT, Counts, InvalidLine, LineScanner
from submitter.split_tuning import SplitTuning
from submitter.tabular import form_of, json_line_pieces
from submitter.weight import Weigher
from worker.contract.errors import InputError
from worker.contract.plan import Shape

_MOST_PARTS = 256
_TAIL_BYTES = 256 << 10


class InvalidInputError(InputError):
    """Lines of the input are not JSON objects."""

    code = "invalid_json_line"


@dataclass(frozen=True, slots=True)
class ScanSettings:
    shape: Shape
    sampling: Mapping[str, Any]
    block_bytes: int
    chunk_bytes: int
    tuning: SplitTuning
    ids: IdSettings | None = None
    """None: ids are not compared."""
    wanted_ids: array[int] | None = None
    """Hashes of ids whose places are wanted."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines that begin in a range of one object."""

    input_index: int
    name: str
    range: ByteRange
    compression: str | None
    """As `form_of` says; None: small, and not looked at yet."""


@dataclass(frozen=True, slots=True)
class _ScanTask:
    settings: ScanSettings
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Scanned:
    input_index: int
    compression: str
    is_opening: bool
    has_bom: bool
    ends_with_newline: bool
    counts: Counts
    invalid_count: int
    invalid: list[InvalidLine]
    found_ids: list[FoundId]


@dataclass(slots=True)
class _ScannedTask:
    parts: list[_Scanned] = field(default_factory=list)
    ids: Hashes | None = None


@dataclass(slots=True)
class Scan:
    """All that pass 1 finds out."""

    table: BlockTable
    invalid_count: int
    invalid: list[tuple[str, InvalidLine]]
    """The first few, with their input's name."""
    ids: IdCollector | None
    """Of all records, if the settings ask for them."""


def scan_inputs(
    inputs: Sequence[Input],
    settings: ScanSettings,
    processes: Processes,
    on_id: Callable[[str, int, bytes], object] = lambda *_: None,
) -> Scan:
    """Validate and count every line. `on_id` is called with name, line and digest of ids that are wanted, in order.

    Raises:
        InputError: an object has changed or is damaged, or has a line too long to be held.
        StorageError: the temporary folder cannot hold what is remembered of ids.
    """
    ids = IdCollector(settings.ids) if settings.ids is not None else None
    scan = Scan(BlockTable(len(inputs), settings.block_bytes, settings.tuning.entry_limit), 0, [], ids)
    for scanned_task in processes.run(_scan, _tasks(inputs, settings)):
        if ids is not None and scanned_task.ids is not None:
            ids.add(scanned_task.ids)
        for scanned in scanned_task.parts:
            name, line_count = inputs[scanned.input_index].name, scan.table.inputs[scanned.input_index].line_count
            for found in scanned.found_ids:
                on_id(name, line_count + found.line, found.digest)
            _add(scan, name, scanned)
    for one, facts in zip(inputs, scan.table.inputs, strict=True):
        found_bytes = facts.content_start + facts.content_bytes
        # Ranges are cut at line ends that two processes find on their own: nothing may fall between them.
        if facts.compression == "none" and found_bytes != one.stored.size_bytes:
            raise changed(one.name, "bytes", one.stored.size_bytes, found_bytes)
    return scan


def refuse_invalid(invalid: Sequence[tuple[str, InvalidLine]], invalid_count: int, among: str) -> None:
    """Raise if there are invalid lines.

    Raises:
        InvalidInputError: names where the first ones are, and what is wrong with them.
    """
    if invalid_count:
        shown = "".join(f"\n  {name}:{found.line}: {found.problem}" for name, found in invalid)
        more = f"\n  and {invalid_count - len(invalid):,} more" if invalid_count > len(invalid) else ""
        raise InvalidInputError(
            f"split inputs: invalid records: {invalid_count:,} of {among} (expected JSON objects){shown}{more}",
            hint="mend them, or give --on-invalid keep to have them as error lines in the outputs",
        )


def _add(scan: Scan, name: str, scanned: _Scanned) -> None:
    facts = scan.table.inputs[scanned.input_index]
    room = SHOWN_INVALID_COUNT - len(scan.invalid)
    # A chunk knows lines by their place in it: only here is it known how many came before.
    scan.invalid += [
        (name, InvalidLine(facts.line_count + found.line, found.problem)) for found in scanned.invalid[:room]
    ]
    scan.invalid_count += scanned.invalid_count
    if scanned.is_opening:
        facts.compression, facts.has_bom = scanned.compression, scanned.has_bom
    if scanned.counts.size_bytes:
        facts.ends_with_newline = scanned.ends_with_newline
    scan.table.add(scanned.input_index, scanned.counts)


def _tasks(inputs: Sequence[Input], settings: ScanSettings) -> Iterator[_ScanTask]:
    small_bytes = settings.tuning.whole_bytes
    magics = fetch(
        (magic_range(one.stored) for one in inputs if one.stored.size_bytes > small_bytes), SMALL_AHEAD_COUNT
    )
    gathered: list[_Part] = []
    for index, one in enumerate(inputs):
        size = one.stored.size_bytes
        is_small = size <= small_bytes
        if gathered and (not is_small or _is_full(gathered, settings)):
            yield _ScanTask(settings, tuple(gathered))
            gathered = []
        if is_small:
            gathered.append(_Part(index, one.name, ByteRange(one.stored, 0, size), None))
            continue
        compression = form_of(next(magics), one.stored.uri)
        step = settings.chunk_bytes if compression == "none" else size
        for start in range(0, size, step):
            wanted = ByteRange(one.stored, start, min(start + step, size))
            yield _ScanTask(settings, (_Part(index, one.name, wanted, compression),))
    if gathered:
        yield _ScanTask(settings, tuple(gathered))


def _is_full(gathered: Sequence[_Part], settings: ScanSettings) -> bool:
    return len(gathered) >= _MOST_PARTS or sum(part.range.end for part in gathered) >= settings.chunk_bytes


def _scan(task: _ScanTask, report: Report) -> _ScannedTask:
    settings = task.settings
    collector = IdCollector(settings.ids) if settings.ids is not None else None
    finder = IdFinder(settings.shape, settings.sampling, settings.wanted_ids) if settings.wanted_ids else None
    listener = collector or finder
    weigher = Weigher(settings.shape, settings.sampling, listener.hear if listener else None)
    whole = fetch((part.range for part in task.parts if part.compression is None), SMALL_AHEAD_COUNT)
    results = _ScannedTask()
    for part in task.parts:
        content = next(whole) if part.compression is None else None
        compression = part.compression or form_of(content or b"", part.range.stored.uri)
        row_problems: dict[int, str] = {}
        pieces = _pieces(part, content, compression, report, row_problems)
        is_opening = part.range.start == 0
        has_bom, pieces = without_bom(pieces) if is_opening else (False, pieces)
        scanner = LineScanner(weigher)
        for block in line_blocks(pieces, settings.block_bytes, settings.tuning.line_limit_bytes, part.name):
            first_line = scanner.line_count + 1
            record_count = scanner.add(block)
            if finder is not None:
                finder.look(block, first_line)
            report(byte_count=len(block) if compression == "none" else 0, record_count=record_count)
        results.parts.append(
            _Scanned(
                part.input_index,
                compression,
                is_opening,
                has_bom,
                scanner.ends_with_newline,
                scanner.counts,
                scanner.invalid_count,
                [InvalidLine(one.line, row_problems.get(one.line, one.problem)) for one in scanner.invalid],
                finder.taken() if finder is not None else [],
            )
        )
    if collector is not None:
        results.ids = collector.taken()
    return results


def _pieces(
    part: _Part, content: bytes | None, compression: str, report: Report, problems: dict[int, str]
) -> Iterator[bytes]:
    if compression == "none":
        return iter((content,)) if content is not None else _owned_pieces(part.range)
    if content is not None:
        report(byte_count=len(content))
    return json_line_pieces(
        part.range.stored,
        compression,
        content=content,
        name=part.name,
        report=lambda count: report(byte_count=count),
        problems=problems,
    )


def _owned_pieces(owned: ByteRange) -> Iterator[bytes]:
    """The lines that begin in a range, whole: from the first line end on, and beyond the range to the next one."""
    stored, last = owned.stored, b"\n"
    # One byte early: a line begins at the very start of the range if a line end stands there.
    pieces: Iterable[bytes] = fetch_pieces(ByteRange(stored, max(owned.start - 1, 0), owned.end))
    if owned.start:
        pieces = _after_line_end(pieces)
    for piece in pieces:
        last = piece[-1:] or last
        yield piece
    position = owned.end
    while last != b"\n" and position < stored.size_bytes:
        wanted = ByteRange(stored, position, min(position + _TAIL_BYTES, stored.size_bytes))
        (tail,) = fetch((wanted,))
        end = tail.find(b"\n") + 1 or len(tail)
        yield tail[:end]
        last, position = tail[end - 1 : end], position + end


def _after_line_end(pieces: Iterable[bytes]) -> Iterator[bytes]:
    remaining = iter(pieces)
    for piece in remaining:
        if end := piece.find(b"\n") + 1:
            yield piece[end:]
            yield from remaining
