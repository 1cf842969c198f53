"""The two stages of docs/stages.md, as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import orjson
import pytest

from tests.answering_engine import ANSWER, answering_command
from tests.commands import submit_here

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"^submit (.+)$", (ROOT / "docs/stages.md").read_text(), re.MULTILINE)
LOCAL = [command for command in COMMANDS if "s3://" not in command]


def test_the_local_example_of_two_stages_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LLM_ARRAY_ENGINE_COMMAND", shlex.join(answering_command()))
    Path("examples").symlink_to(ROOT / "examples")
    Path("models/smollm2-135m-instruct").mkdir(parents=True)

    for command in LOCAL:
        words = shlex.split(command)
        done = submit_here(*words if words[0] == "verify" else ("run", *words, "--engines", "1"))
        assert done.exit_code == 0, done

    questions = [orjson.loads(line)["id"] for line in Path("examples/prompts.jsonl").read_bytes().splitlines()]
    lines = [
        line for path in sorted(Path("runs/verdicts/outputs").iterdir()) for line in path.read_bytes().splitlines()
    ]
    found = [orjson.loads(line) for line in lines]
    assert [line["id"] for line in found] == questions
    assert {line["verdict"]["choices"][0]["message"]["content"] for line in found} == {ANSWER}
    assert all(line.keys() == {"id", "verdict"} for line in found)
