"""Ids given twice, as the command line tells of them, and what comparing many of them takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from submitter.options import RetryRequest
from submitter.retry_failed import retry_failed
from submitter.split import SplitRequest, split_run
from tests.finished_runs import finish, records_of_run

ROOT = Path(__file__).parents[2]
SUBMIT = str(Path(sys.executable).parent / "submit")
RECORD = b'{"custom_id":"%b","url":"/v1/completions","body":{"prompt":"secret"}}\n'
SPLIT = (SUBMIT, "split", "in.jsonl", "--run", "r", "--model", "m", "--partitions", "2", "--json")

MOST_BYTES = 80 << 20
PROGRAM = """
import json, re, sys, tempfile
from pathlib import Path
from submitter.split import SplitRequest, split_run
from submitter.split_tuning import SplitTuning

path, run = sys.argv[1:]
spilled = []

def progress(shown):
    if shown.done_bytes == shown.total_bytes:
        spilled.append(sum(path.stat().st_size for path in Path(tempfile.gettempdir()).rglob("*.ids")))

try:
    split_run(
        SplitRequest(inputs=(path,), run_uri=run, partition_count=3, process_count=1, model="m"),
        tuning=SplitTuning(ids_in_memory_bytes=0),
        progress=progress,
    )
    message = ""
except Exception as error:
    message = str(error)
own_kib = int(re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps({"peak": own_kib << 10, "spilled": spilled[0], "message": message}))
"""


def test_the_command_line_names_the_lines_and_exits_65(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"".join(RECORD % one for one in (b"a", b"b", b"a")))
    refused = subprocess.run(SPLIT, cwd=tmp_path, capture_output=True, check=False)

    assert refused.returncode == 65
    assert refused.stdout == b""
    path = tmp_path / "in.jsonl"
    assert orjson.loads(refused.stderr.strip().split(b"\n")[-1]) == {
        "error": {
            "code": "duplicate_custom_id",
            "message": (f"split inputs: custom_id given twice: 1 of 3 (expected each once)\n  {path}:1 and {path}:3"),
            "hint": "mend them, or give --on-duplicate-id keep if nothing tells answers apart by it",
        }
    }
    assert not (tmp_path / "r").exists()

    kept = subprocess.run([*SPLIT, "--on-duplicate-id", "keep"], cwd=tmp_path, capture_output=True, check=False)
    assert kept.returncode == 0
    assert orjson.loads(kept.stdout)["record_count"] == 3


@pytest.mark.parametrize("by", ["file", "variable"])
def test_a_setting_keeps_duplicates_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(RECORD % b"a" * 3)
    if by == "file":
        (tmp_path / "submit.toml").write_text('on_duplicate_id = "keep"\n')
    else:
        monkeypatch.setenv("SUBMIT_ON_DUPLICATE_ID", "keep")

    assert subprocess.run(SPLIT, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_failed_records_whose_ids_were_kept_twice_are_retried(tmp_path: Path) -> None:
    path, run_uri, new_uri = tmp_path / "in.jsonl", str(tmp_path / "old"), str(tmp_path / "new")
    path.write_bytes(RECORD % b"a" * 3)
    request = SplitRequest(inputs=(str(path),), run_uri=run_uri, partition_count=2, model="m", on_duplicate_id="keep")
    plan = split_run(request).plan
    finish(run_uri, plan, lambda _record: "engine.died")
    retried = retry_failed(RetryRequest(run_uri=run_uri, new_run_uri=new_uri))

    assert retried.result is not None
    assert records_of_run(new_uri, retried.result.plan) == [RECORD[:-1] % b"a"] * 3


def test_a_million_ids_on_disk_take_no_memory(tmp_path: Path) -> None:
    path, count = tmp_path / "in.jsonl", 1_000_000
    with path.open("wb") as stream:
        for start in range(0, count, 10_000):
            stream.write(
                b"".join(
                    b'{"custom_id":"r%d","url":"u","body":{"max_tokens":9}}\n' % (start + n) for n in range(10_000)
                )
            )
        stream.write(b'{"custom_id":"r777","url":"u","body":{"max_tokens":9}}\n')
    command = [sys.executable, "-c", PROGRAM, str(path), str(tmp_path / "run")]
    (tmp_path / "tmp").mkdir()
    variables = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True, env=variables)
    assert shown.returncode == 0, shown.stderr
    found = orjson.loads(shown.stdout)
    print(found)

    assert found["message"] == (
        f"split inputs: custom_id given twice: 1 of {count + 1:,} (expected each once)\n  {path}:778 and {path}:{count + 1}"
    )
    assert found["spilled"] == (count + 1) * 8
    assert found["peak"] < MOST_BYTES
    assert list((tmp_path / "tmp").iterdir()) == []
