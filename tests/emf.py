"""The embedded metric format, held to its published specification: what CloudWatch Logs would make of a log line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

UNITS = {
    *("Seconds", "Microseconds", "Milliseconds", "Percent", "Count", "None"),
    *("Bytes", "Kilobytes", "Megabytes", "Gigabytes", "Terabytes"),
    *("Bits", "Kilobits", "Megabits", "Gigabits", "Terabits"),
    *("Bytes/Second", "Kilobytes/Second", "Megabytes/Second", "Gigabytes/Second", "Terabytes/Second"),
    *("Bits/Second", "Kilobits/Second", "Megabits/Second", "Gigabits/Second", "Terabits/Second", "Count/Second"),
}
MAX_METRICS = 100
MAX_DIMENSIONS = 30
MAX_VALUES = 100
MAX_NAME_CHARS = 1024
MAX_DIMENSION_NAME_CHARS = 250
MAX_DIMENSION_VALUE_CHARS = 1024
MAX_NAMESPACE_CHARS = 256
MAX_LINE_BYTES = 16 << 10
"""Where Docker cuts a line in two; CloudWatch Logs itself takes more."""
EARLIEST_MS = 1_500_000_000_000


@dataclass(frozen=True)
class Sample:
    namespace: str
    dimensions: dict[str, str]
    name: str
    unit: str
    values: list[float]


def samples_of(line: bytes) -> list[Sample]:
    """What CloudWatch makes of a line, that has to be all right if it says that it holds metrics; none if it does not."""
    assert len(line) <= MAX_LINE_BYTES
    root = orjson.loads(line)
    assert isinstance(root, dict)
    if "_aws" not in root:
        return []
    metadata = root["_aws"]
    assert metadata.keys() == {"Timestamp", "CloudWatchMetrics"}
    assert type(metadata["Timestamp"]) is int
    assert metadata["Timestamp"] > EARLIEST_MS, "milliseconds"
    assert metadata["CloudWatchMetrics"]
    return [sample for directive in metadata["CloudWatchMetrics"] for sample in _of_directive(directive, root)]


def _of_directive(directive: dict[str, Any], root: dict[str, Any]) -> list[Sample]:
    assert directive.keys() == {"Namespace", "Dimensions", "Metrics"}
    namespace, sets, metrics = directive["Namespace"], directive["Dimensions"], directive["Metrics"]
    assert re.fullmatch(r"[A-Za-z0-9._/#:-]+", namespace)
    assert len(namespace) <= MAX_NAMESPACE_CHARS
    assert not namespace.startswith(("AWS/", ":"))
    assert sets
    assert 0 < len(metrics) <= MAX_METRICS
    assert len({metric["Name"] for metric in metrics}) == len(metrics)
    found = []
    for names in sets:
        assert len(set(names)) == len(names) <= MAX_DIMENSIONS
        dimensions = {name: _dimension_value(name, root) for name in names}
        for metric in metrics:
            assert metric.keys() <= {"Name", "Unit", "StorageResolution"}
            assert isinstance(metric["Name"], str)
            assert 0 < len(metric["Name"]) <= MAX_NAME_CHARS
            assert metric["Unit"] in UNITS
            found.append(Sample(namespace, dimensions, metric["Name"], metric["Unit"], _values(root[metric["Name"]])))
    return found


def _dimension_value(name: str, root: dict[str, Any]) -> str:
    assert 0 < len(name) <= MAX_DIMENSION_NAME_CHARS
    assert name.isascii()
    assert not name.startswith(":")
    value = root[name]
    assert isinstance(value, str)
    assert value.strip()
    assert value.isascii()
    assert len(value) <= MAX_DIMENSION_VALUE_CHARS
    return value


def _values(target: Any) -> list[float]:
    values = target if isinstance(target, list) else [target]
    assert 0 < len(values) <= MAX_VALUES
    for value in values:
        # JSON has neither infinity nor NaN: what was one is null here.
        assert type(value) in (int, float)
        assert abs(value) < 2**360
    return [float(value) for value in values]
