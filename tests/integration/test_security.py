"""What SECURITY.md says of whole runs: data stays data, and stays out of logs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.answering_engine import answering_command
from tests.batch_setting import DEFINITION, Setting
from tests.worker_runs import lines, run_worker, write_run

SUBMIT = str(Path(sys.executable).parent / "submit")
MARKER = "Xq7-patient-Zw9"
KILLER = "kills-the-engine"
VALUE = "hunter2-Kp3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def submit(
    *arguments: str, folder: Path, engine: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Said:
    command = {"LLM_ARRAY_ENGINE_COMMAND": shlex.join(engine)} if engine else {}
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **command, **(variables or {})}
    done = subprocess.run([SUBMIT, *arguments], cwd=folder, env=environment, capture_output=True, check=False)
    return Said(exit_code=done.returncode, stdout=done.stdout.decode(), stderr=done.stderr.decode())


def openai_line(number: int, **body: Any) -> bytes:
    whole = {"messages": [{"role": "user", "content": f"{MARKER} {number}"}], **body}
    return json.dumps(
        {"custom_id": f"{MARKER}-{number}", "method": "POST", "url": "/v1/chat/completions", "body": whole}
    ).encode()


HOSTILE = [
    openai_line(0),
    openai_line(1, stop=[MARKER], user=MARKER),
    openai_line(2, max_tokens=MARKER),
    openai_line(3, **{MARKER: MARKER}),
    openai_line(4, response_format={"type": "json_schema", "json_schema": {"name": MARKER, "schema": MARKER}}),
    openai_line(5, tools=[{"type": MARKER}]),
    openai_line(6, messages=[{"role": MARKER, "content": MARKER}]),
    openai_line(7, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": MARKER}}]}]),
    openai_line(8, messages=[{"role": "user", "content": f"{MARKER} {KILLER}"}]),
    openai_line(9, model=MARKER),
    openai_line(10, structured_outputs={"grammar": MARKER, "regex": f"({MARKER}"}),
    b'{"custom_id": "%s", "method": "%s"}' % (f"{MARKER}-11".encode(), MARKER.encode()),
]


def test_no_log_metric_manifest_or_message_holds_what_records_say(tmp_path: Path) -> None:
    """With records that are answered, refused in every way, and one that kills engines."""
    (tmp_path / "in.jsonl").write_bytes(lines(HOSTILE))
    engine = answering_command("mortal", KILLER)
    plan = ("in.jsonl", "--run", "run", "--model", "m", "--partitions", "2", "--shape", "openai")

    given = ("--local", "--engines", "2", "--env", f"NOTE={VALUE}")
    ran = submit(*plan, *given, folder=tmp_path, engine=engine)
    said = [ran, *(submit(command, "run", folder=tmp_path) for command in ("verify", "resume"))]
    said.append(submit("merge", "run", "-o", "merged.jsonl", folder=tmp_path))

    assert ran.exit_code == 0, ran.text
    run = tmp_path / "run"
    answers = b"".join(path.read_bytes() for path in (run / "outputs").iterdir())
    assert answers.count(f"<{MARKER}".encode()) >= 2
    assert answers.count(b"\n") == len(HOSTILE)
    logs = b"".join(path.read_bytes() for path in (run / "logs").rglob("*") if path.is_file())
    assert b"engine.died" in logs
    kept = [*(run / "manifests").iterdir(), *(run / "submissions").iterdir(), run / "run.json"]
    assert MARKER.encode() not in logs
    assert [path.name for path in kept if MARKER.encode() in path.read_bytes()] == []
    assert [one.text for one in said if MARKER in one.text] == []
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path.name for path in files if VALUE.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "%s"\n' % MARKER.encode(),
        b'["%s"]\n' % MARKER.encode(),
        MARKER.encode() + b"\n",
        b'{"prompt": "\xff%s"}\n' % MARKER.encode(),
        b'{"prompt": 1, "%s": "\n' % MARKER.encode(),
    ],
)
def test_a_line_that_is_refused_is_named_and_not_shown(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)

    said = submit("split", "in.jsonl", "--run", "run", "--model", "m", "--partitions", "1", folder=tmp_path)

    assert said.exit_code == 65
    assert "in.jsonl:1" in said.text
    assert MARKER not in said.text


def test_a_worker_that_is_not_allowed_code_of_others_starts_no_engine(tmp_path: Path) -> None:
    run_uri = str(tmp_path / "run")
    write_run(run_uri, [b'{"prompt": "p"}\n'], engine_args={"worker_extension_cls": "evil.Extension"})

    refused = run_worker(run_uri, "--index", "0")
    allowed = run_worker(run_uri, "--index", "0", variables={"LLM_ARRAY_ALLOW_CODE": "1"})

    assert refused.failure["exit_code"] == 78
    assert "worker_extension_cls" in refused.failure["message"]
    assert refused.of("engine.started") == []
    assert allowed.exit_code == 0


def test_remote_code_must_be_asked_for_where_the_run_is_submitted(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "p"}\n')
    command = ("in.jsonl", "--run", "run", "--model", "m", "--partitions", "1", "--local")
    asked = (*command, "--engine-arg", "trust_remote_code=true")

    refused = submit(*asked, folder=tmp_path, engine=answering_command())
    ran = submit(*asked, "--env", "LLM_ARRAY_ALLOW_CODE=1", folder=tmp_path, engine=answering_command())
    gone_on = submit("resume", "run", "--local", folder=tmp_path, engine=answering_command())

    assert (refused.exit_code, gone_on.exit_code) == (78, 78)
    assert "LLM_ARRAY_ALLOW_CODE=1" in refused.text
    assert ran.exit_code == 0, ran.text


NAMES = ("$(touch pwned)`touch pwned`; touch pwned #", "a' b\" c\n&& touch pwned", "--help ${HOME} %s {0}")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_data_on_this_machine(tmp_path: Path, name: str) -> None:
    """As the run's, the input's, a tag's, a reason's and a template's text."""
    (tmp_path / f"in {name}.jsonl").write_bytes(b'{"city": "Oslo"}\n')
    run_uri = str(tmp_path / f"run {name}")
    (tmp_path / f"model {name}").mkdir()
    template = tmp_path / "template"
    template.write_text("{{ city }} " + name, encoding="utf-8")

    ran = submit(
        str(tmp_path / f"in {name}.jsonl"), "--run", run_uri, "--model", str(tmp_path / f"model {name}"), "--partitions", "1", "--local",
        "--template", "template", "--env", f"NOTE={name}", "--tag", "a=b",
        folder=tmp_path, engine=answering_command("repeating"),
    )  # fmt: skip

    assert ran.exit_code == 0, ran.text
    (output,) = (Path(run_uri) / "outputs").iterdir()
    (line,) = output.read_bytes().splitlines()
    assert f"Oslo {name}" in json.loads(line)["response"]["choices"][0]["message"]["content"]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_uri_is_one_word_of_the_containers_command(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "p"}\n')
    run_uri = str(tmp_path / f"run {name}")
    variables = {"AWS_ENDPOINT_URL_BATCH": setting.fake.url}

    said = submit(
        "in.jsonl", "--run", run_uri, "--model", "/m", "--partitions", "1", "--queue", "gpu",
        "--job-definition", DEFINITION, "--env", f"NOTE={name}", "--dry-run", "--json",
        folder=tmp_path, variables=variables,
    )  # fmt: skip

    assert said.exit_code == 0, said.text
    (request,) = json.loads(said.stdout)["requests"]
    overrides = request["containerOverrides"]
    assert overrides["command"][:2] == ["run", run_uri]
    assert {"name": "NOTE", "value": name} in overrides["environment"]
    assert not list(tmp_path.rglob("pwned"))
