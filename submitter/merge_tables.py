"""Parquet and CSV: rows of output lines as a piece of a table.

A piece of a Parquet file is a stream of Arrow's own; who puts the pieces together encodes it. CSV is RFC 4180: fields are
text, null is nothing at all, and an empty text `""`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from submitter.json_path import Selection
from submitter.merge_answers import COUNT_COLUMNS, Answer, row_of
from submitter.merge_columns import Columns, Type
from submitter.merge_target import Target
from worker.contract.compression import compressed
from worker.contract.errors import ConfigError
from worker.contract.output_line import Summary

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 4_096
BATCH_BYTES = 8 << 20
_NULL = b"null"
_QUOTED_FOR = frozenset('",\r\n')


def require_parquet() -> None:
    """See that Parquet can be written.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  half a second, for those who write such files
    except ImportError as error:
        raise ConfigError(
            "write Parquet: pyarrow is not installed", hint="install it: pip install 'llm-array[parquet]'"
        ) from error
    assert pa is not None


class CsvPiece:
    """Rows as text."""

    def __init__(self, stream: BinaryIO, target: Target, columns: Columns, selection: Selection) -> None:
        self._stream = compressed(stream, target.compression)
        self._columns = columns
        self._selection = selection

    def write(self, line: bytes, summary: Summary) -> None:
        own, answer = _row(line, summary, self._columns, self._selection)
        fields = [_text_of(own.get(name, _NULL)) for name, _ in self._columns.own]
        if answer is not None:
            fields += [None if value is None else str(value) for value in answer]
        self._stream.write(csv_line(fields))

    def close(self) -> None:
        self._stream.close()


class ArrowPiece:
    """Rows as an Arrow stream."""

    def __init__(self, stream: BinaryIO, columns: Columns, selection: Selection) -> None:
        import pyarrow as pa  # noqa: PLC0415

        self._columns = columns
        self._selection = selection
        self._schema = arrow_schema(columns)
        self._writer = pa.ipc.new_stream(stream, self._schema)
        self._rows: list[tuple[dict[str, bytes], Answer | None]] = []
        self._rows_bytes = 0

    def write(self, line: bytes, summary: Summary) -> None:
        self._rows.append(_row(line, summary, self._columns, self._selection))
        self._rows_bytes += len(line)
        if len(self._rows) >= BATCH_ROWS or self._rows_bytes >= BATCH_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa  # noqa: PLC0415

        if not self._rows:
            return
        arrays = [*self._own_arrays(), *self._answer_arrays()]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._rows.clear()
        self._rows_bytes = 0

    def _own_arrays(self) -> Iterator[pa.Array]:
        from_input = self._from_input()
        import pyarrow as pa  # noqa: PLC0415

        for position, (name, kind) in enumerate(self._columns.own):
            if name in from_input:
                yield from_input[name]
            else:
                values = [_value_of(own.get(name, _NULL), kind) for own, _ in self._rows]
                yield pa.array(values, self._schema.field(position).type)

    def _from_input(self) -> dict[str, pa.Array]:
        """Columns of the inputs' own types."""
        if self._columns.schema is None:
            return {}
        from submitter.arrow_json import from_json_rows  # noqa: PLC0415

        schema = _input_fields(self._columns)
        rows = [
            {name: orjson.loads(value) for name, value in own.items() if name in schema.names} for own, _ in self._rows
        ]
        return dict(zip(schema.names, from_json_rows(rows, schema).columns, strict=True))

    def _answer_arrays(self) -> Iterator[pa.Array]:
        import pyarrow as pa  # noqa: PLC0415

        answers = [answer for _, answer in self._rows if answer is not None]
        for position in range(len(self._columns.answer)):
            kind = self._schema.field(len(self._columns.own) + position).type
            yield pa.array([answer[position] for answer in answers], kind)


def _row(
    line: bytes, summary: Summary, columns: Columns, selection: Selection
) -> tuple[dict[str, bytes], Answer | None]:
    if selection.paths:
        return dict(selection.select_fields(line)), None
    return row_of(line, summary, columns.shape, columns.answer_key)


def arrow_schema(columns: Columns) -> pa.Schema:
    import pyarrow as pa  # noqa: PLC0415

    types: dict[Type, pa.DataType] = {
        "bool": pa.bool_(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "string": pa.string(),
        "json": pa.string(),
    }
    known = {field.name: field for field in _input_fields(columns)}
    own = [known.get(name) or pa.field(name, types[kind]) for name, kind in columns.own]
    answer = [
        pa.field(name, pa.int64() if meant in COUNT_COLUMNS else pa.string())
        for name, meant in zip(columns.answer, Answer._fields, strict=bool(columns.answer))
    ]
    return pa.schema([*own, *answer])


def _input_fields(columns: Columns) -> pa.Schema:
    """Of the inputs' schema, the fields that come up in the outputs."""
    import pyarrow as pa  # noqa: PLC0415

    if columns.schema is None:
        return pa.schema([])
    names = {name for name, _ in columns.own}
    # A record that is an error may lack a field that no row of the input does.
    found = pa.ipc.read_schema(pa.py_buffer(columns.schema))
    return pa.schema([pa.field(field.name, field.type) for field in found if field.name in names])


def _value_of(raw: bytes, kind: Type) -> Any:
    if raw == _NULL:
        return None
    match kind:
        case "int64":
            return int(raw)
        case "double":
            return float(raw)
        case "json":
            return raw.decode()
        case "string":
            return _text_of(raw)
    return orjson.loads(raw)


def _text_of(raw: bytes) -> str | None:
    if raw == _NULL:
        return None
    return str(orjson.loads(raw)) if raw.startswith(b'"') else raw.decode()


def csv_line(fields: Sequence[str | None]) -> bytes:
    # A line of one null would be a blank line, which readers skip.
    texts = ['""'] if list(fields) == [None] else [_csv_field(field) for field in fields]
    return (",".join(texts) + "\r\n").encode()


def _csv_field(text: str | None) -> str:
    if text is None:
        return ""
    if not text or not _QUOTED_FOR.isdisjoint(text):
        return '"' + text.replace('"', '""') + '"'
    return text
