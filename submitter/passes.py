"""Both passes over the data, from inputs to written partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from submitter.blocks import START, BlockTable, Position, stretches
from submitter.cut import CutRule, find_boundaries
from submitter.id_hashes import ID_FIELDS, IdSettings
from submitter.identity import refuse_duplicates
from submitter.inputs import Input
from submitter.meter import Meter
from submitter.partition_writer import Target, Written
from submitter.peek import (
    find_shape,
    first_plain_records_notes,
    first_template_records_notes,
    no_records,
    other_shape_notes,
    selected_fields_notes,
)
from submitter.processes import Processes
from submitter.reading import changed
from submitter.request_options import check_select, parsed_template, request_notes
from submitter.scan_inputs import Scan, ScanSettings, refuse_invalid, scan_inputs
from submitter.split import Passed, SplitRequest
from submitter.split_tuning import SplitTuning
from submitter.weight import Weigher, estimated_tokens
from submitter.write_plain import write_plain
from submitter.write_streamed import write_streamed
from worker.contract.layout import RunLayout
from worker.contract.plan import Partition, Shape, Source


def run_passes(
    request: SplitRequest,
    layout: RunLayout,
    inputs: Sequence[Input],
    *,
    tuning: SplitTuning,
    processes: Processes,
    meter: Meter,
    ids_folder: Path,
    before_writing: Callable[[], object],
) -> Passed:
    """Validate everything, then write all partitions.

    Raises:
        InputError: see `split_run`.
    """
    total_bytes = sum(one.stored.size_bytes for one in inputs)
    keeps_invalid = request.on_invalid == "keep"
    shape = request.known_shape or find_shape(inputs, tuning.line_limit_bytes, keeps_invalid=keeps_invalid)
    check_select(request.requests, shape)
    looks_wrong = _first_records_notes(request, shape, inputs, tuning.line_limit_bytes)
    settings = ScanSettings(
        shape,
        request.sampling,
        tuning.block_bytes_for(total_bytes, request.partition_count),
        tuning.chunk_bytes_for(total_bytes, processes.process_count),
        tuning,
        _id_settings(request, shape, tuning, total_bytes, ids_folder),
    )
    with meter.phase("scan"):
        scan = scan_inputs(inputs, settings, processes)
    if not keeps_invalid:
        refuse_invalid(scan.invalid, scan.invalid_count, f"{scan.table.record_count:,}")
    if not scan.table.record_count:
        raise no_records()
    if scan.ids is not None and (repeated := scan.ids.repeated(processes)).count:
        with meter.phase("scan"):
            refuse_duplicates(repeated, inputs, settings, processes, scan.table.record_count)
    before_writing()
    partition_count = min(request.partition_count, scan.table.record_count)
    target = Target(layout, partition_count, request.compression, tuning)
    with meter.phase("write"):
        positions, written = _write(inputs, scan.table, target, settings, processes)
    pairs = zip(positions[:-1], positions[1:], written, strict=True)
    partitions = tuple(_partition(inputs, scan.table, start, end, what) for start, end, what in pairs)
    return Passed(shape, partitions, scan.invalid_count, (*looks_wrong, *_notes(request, scan, partition_count)))


def _first_records_notes(
    request: SplitRequest, shape: Shape, inputs: Sequence[Input], line_limit_bytes: int
) -> list[str]:
    notes = request_notes(request.requests)
    if shape != "template":
        notes += other_shape_notes(inputs, shape, line_limit_bytes)
    if shape == "template":
        template = parsed_template(request.requests)
        notes += first_template_records_notes(inputs, request.answer_key, template, line_limit_bytes)
    elif shape == "plain":
        notes += first_plain_records_notes(inputs, request.answer_key, line_limit_bytes)
    if request.requests.select:
        notes += selected_fields_notes(inputs, request.requests.select, line_limit_bytes)
    return notes


def _id_settings(
    request: SplitRequest, shape: Shape, tuning: SplitTuning, total_bytes: int, folder: Path
) -> IdSettings | None:
    if request.on_duplicate_id == "keep" or shape not in ID_FIELDS:
        return None
    return IdSettings(folder=folder, always_spills=total_bytes > tuning.ids_in_memory_bytes, limit=tuning.id_limit)


def _write(
    inputs: Sequence[Input], table: BlockTable, target: Target, settings: ScanSettings, processes: Processes
) -> tuple[Sequence[Position], Sequence[Written]]:
    rule = CutRule(weight=table.weight, record_count=table.record_count, partition_count=target.partition_count)
    if any(facts.compression != "none" for facts in table.inputs):
        return write_streamed(inputs, table, rule=rule, target=target, settings=settings, processes=processes)
    weigher = Weigher(settings.shape, settings.sampling)
    boundaries = find_boundaries(table, [one.stored for one in inputs], rule, weigher)
    positions = [START, *boundaries, table.end()]
    copied = write_plain(
        inputs,
        table,
        positions=positions,
        target=target,
        chunk_bytes=settings.chunk_bytes,
        processes=processes,
    )
    return positions, list(copied)


def _partition(
    inputs: Sequence[Input], table: BlockTable, start: Position, end: Position, written: Written
) -> Partition:
    found = list(stretches(table.inputs, start, end))
    counted = sum(stretch.size_bytes for stretch in found), sum(stretch.line_count for stretch in found)
    if counted != (written.size_bytes, written.line_count):
        raise changed(
            inputs[start.input_index].name, "bytes and lines", counted, (written.size_bytes, written.line_count)
        )
    return Partition(
        record_count=end.record_count - start.record_count,
        size_bytes=written.size_bytes,
        checksum=written.checksum,
        weight=end.weight - start.weight,
        estimated_tokens=estimated_tokens(written.size_bytes, end.weight - start.weight),
        sources=tuple(
            Source(input_index=one.input_index, first_line=one.first_line, line_count=one.line_count) for one in found
        ),
    )


def _notes(request: SplitRequest, scan: Scan, partition_count: int) -> Iterator[str]:
    if partition_count < request.partition_count:
        yield (
            f"one record per partition gives {partition_count:,}, not {request.partition_count:,}: there are no more "
            "records"
        )
    if scan.invalid_count:
        name, first = scan.invalid[0]
        yield (
            f"invalid records kept, to become error lines: {scan.invalid_count:,}; the first is at "
            f"{name}:{first.line}: {first.problem}"
        )
