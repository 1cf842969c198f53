from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.contract.errors import UsageError
from worker.contract.layout import (
    MAX_PARTITION_COUNT,
    RunLayout,
    join,
    normalize_uri,
    partition_index_of,
    split_s3_uri,
)

buckets = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}[a-z0-9]", fullmatch=True)
keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(lambda key: key.rstrip("/")).filter(bool)


@given(buckets, keys)
def test_bucket_and_key_come_back_whatever_they_hold(bucket: str, key: str) -> None:
    assert split_s3_uri(normalize_uri(f"s3://{bucket}/{key}")) == (bucket, key)


@given(st.integers(1, MAX_PARTITION_COUNT).flatmap(lambda count: st.tuples(st.integers(0, count - 1), st.just(count))))
def test_every_name_made_for_a_partition_tells_its_index(place: tuple[int, int]) -> None:
    index, count = place
    layout = RunLayout("s3://bucket/run")
    made = [
        layout.partition(index, count),
        layout.partition(index, count, "gz"),
        layout.output(index, count, "zst"),
        layout.manifest(index, count),
    ]

    assert [partition_index_of(uri.rpartition("/")[2]) for uri in made] == [index] * 4


@given(st.text())
def test_other_names_are_no_partitions(name: str) -> None:
    assert partition_index_of("x" + name) is None


def test_names_are_those_of_the_design() -> None:
    layout = RunLayout("s3://bucket/runs/r1")

    assert layout.partition(17, 1000) == "s3://bucket/runs/r1/partitions/part-00017-of-01000.jsonl"
    assert layout.output(17, 1000, "gz") == "s3://bucket/runs/r1/outputs/part-00017-of-01000.jsonl.gz"
    assert layout.manifest(17, 1000) == "s3://bucket/runs/r1/manifests/part-00017-of-01000.json"
    assert layout.submission("0001") == "s3://bucket/runs/r1/submissions/0001.json"
    assert layout.plan == "s3://bucket/runs/r1/run.json"


def test_local_runs_are_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert normalize_uri("runs/demo/") == str(tmp_path / "runs/demo")
    assert normalize_uri("file:///a/b") == "/a/b"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("", "it is empty"),
        ("s3://", "no bucket"),
        ("s3:///key", "no bucket"),
        ("gs://b/k", "unknown scheme"),
        ("s3:/b/k", "too few slashes"),
    ],
)
def test_a_uri_that_cannot_be_one_is_refused(uri: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        normalize_uri(uri)


def test_join_does_not_double_slashes() -> None:
    assert join("s3://b/k/", "x", "y") == "s3://b/k/x/y"
