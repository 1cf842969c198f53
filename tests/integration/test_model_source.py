"""What a plan says of its model: asked for once, before anything is read, and kept from then on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.fake_hub import FakeHub, Repository, running_hub
from worker.contract.formats import decode
from worker.contract.model_place import digest_of, list_objects
from worker.contract.plan import Plan
from worker.contract.store import open_store

SUBMIT = str(Path(sys.executable).with_name("submit"))
COMMIT, LATER = "0123456789abcdef0123456789abcdef01234567", "76543210fedcba9876543210fedcba9876543210"
MODEL = "org/model"


@dataclass
class Done:
    exit_code: int
    document: dict[str, Any]
    """Of a failure what it says of itself."""

    @property
    def words(self) -> str:
        return f"{self.document.get('message')} | {self.document.get('hint')}"


@dataclass
class Place:
    """A folder with an input, from which runs are planned."""

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def split(self, *options: str, run: str = "r", **variables: str) -> Done:
        return self.submit("split", "in.jsonl", "--run", run, "--partitions", "1", *options, **variables)

    def submit(self, *words: str, **variables: str) -> Done:
        ended = subprocess.run(
            [SUBMIT, *words, "--json"],
            cwd=self.folder,
            env=os.environ | self.variables | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        last = ended.stderr.splitlines()[-1] if ended.returncode else ended.stdout
        found = json.loads(last)
        return Done(ended.returncode, found["error"] if ended.returncode else found)

    def plan(self, run: str = "r") -> Plan:
        path = self.folder / run / "run.json"
        return decode(path.read_bytes(), Plan, str(path))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    for name in ("repository", "adapter"):
        (tmp_path / name).mkdir()
    with running_hub() as found:
        found.repositories[MODEL] = Repository(tmp_path / "repository", COMMIT)
        found.repositories["org/adapter"] = Repository(tmp_path / "adapter", LATER)
        yield found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "in.jsonl").write_text('{"prompt":"a"}\n')
    return Place(folder)


@pytest.fixture
def online(place: Place, hub: FakeHub, tmp_path: Path) -> Place:
    place.variables = hub.variables(tmp_path / "hf")
    return place


def test_a_plan_keeps_the_commits_that_were_current_however_the_hub_moves_on(hub: FakeHub, online: Place) -> None:
    command = ("--model", MODEL, "--lora", "formal=org/adapter")
    first = online.split(*command)
    hub.repositories[MODEL].commit = hub.repositories["org/adapter"].commit = "8" * 40
    asked_count = hub.asked["api"]
    again = online.split(*command)

    assert (first.exit_code, again.exit_code) == (0, 0)
    assert (first.document["created"], again.document["created"]) == (True, False)
    assert online.plan().model_revision == COMMIT
    assert online.plan().adapter_revisions == {"formal": LATER}
    assert hub.asked["api"] == asked_count


def test_a_branch_is_pinned_to_its_commit_and_asked_for_by_its_name_again(hub: FakeHub, online: Place) -> None:
    hub.repositories[MODEL].branch = "v2"
    first = online.split("--model", MODEL, "--revision", "v2")
    hub.repositories[MODEL].commit = LATER
    again, other = (online.split("--model", MODEL, "--revision", name) for name in ("v2", LATER))

    assert (first.exit_code, again.exit_code) == (0, 0)
    assert online.plan().model_revision == COMMIT
    assert other.exit_code == 73
    assert f"revision (expected what was asked for when it was found to be {COMMIT}, got {LATER})" in other.words


def test_a_commit_is_taken_without_asking(hub: FakeHub, online: Place) -> None:
    hub.is_silent = True

    assert online.split("--model", "org/private", "--revision", LATER).exit_code == 0
    assert online.plan().model_revision == LATER
    assert hub.asked["api"] == 0


def test_what_the_hub_has_not_stops_the_submission_before_anything_is_written(hub: FakeHub, online: Place) -> None:
    hub.repositories["org/gated"] = Repository(hub.repositories[MODEL].folder, COMMIT, gated=True)
    hub.repositories["org/private"] = Repository(hub.repositories[MODEL].folder, COMMIT, private=True)
    missing = online.split("--model", "models/x")
    private = online.split("--model", "org/private")
    gated = online.split("--model", "org/gated")
    no_revision = online.split("--model", MODEL, "--revision", "v9")
    with_token = online.split("--model", "org/gated", run="gated", HF_TOKEN=hub.token)

    assert [one.exit_code for one in (missing, private, gated, no_revision)] == [65, 65, 78, 65]
    assert "find model models/x: it is neither a path here nor on the hub" in missing.words
    assert "A private one needs HF_TOKEN; where only the workers have one, --revision COMMIT" in private.words
    assert "it is gated, and this machine may not read it" in gated.words
    assert "the hub has no revision 'v9' of it" in no_revision.words
    assert not (online.folder / "r").exists()
    assert with_token.exit_code == 0
    assert online.plan("gated").model_revision == COMMIT
    assert hub.token not in (online.folder / "gated" / "run.json").read_text()


def test_a_hub_that_gives_no_answer_is_an_error_that_names_the_way_around(place: Place, tmp_path: Path) -> None:
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    ended = place.split("--model", MODEL, **closed)

    assert ended.exit_code == 75
    assert "no answer from the hub" in ended.words
    assert "--revision COMMIT, all 40 digits of it, plans the run without asking the hub" in ended.words


def test_offline_the_hubs_own_cache_says_what_a_branch_is(place: Place, tmp_path: Path) -> None:
    refs = tmp_path / "hf" / "models--org--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hf")}
    found, missing = (
        place.split("--model", MODEL, **offline),
        place.split("--model", "org/other", run="other", **offline),
    )

    assert found.exit_code == 0
    assert place.plan().model_revision == COMMIT
    assert missing.exit_code == 65
    assert "it is not in the hub's cache on this machine, and HF_HUB_OFFLINE is set" in missing.words


def test_a_path_has_no_revision(place: Place) -> None:
    (place.folder / "model").mkdir()

    assert place.split("--model", "model").exit_code == 0
    assert place.plan().model_revision is None
    refused = place.split("--model", "/models/it", "--revision", "main", run="other")
    assert refused.exit_code == 2
    assert "'main' is none of model /models/it" in refused.words


def test_an_engine_argument_does_not_say_the_revision(place: Place) -> None:
    refused = place.split("--model", MODEL, "--engine-arg", "revision=v2")

    assert refused.exit_code == 2
    assert "give it as --revision v2" in refused.words


def test_a_model_on_s3_is_pinned_by_its_objects(place: Place, s3_bucket: str) -> None:
    model = f"s3://{s3_bucket}/models/it"
    empty = place.split("--model", model)
    for name in ("config.json", "model.safetensors"):
        open_store(model).write(f"{model}/{name}", b"{}")
    digest = digest_of(list_objects(open_store(model), model, "model"))
    first = place.split("--model", model)
    open_store(model).write(f"{model}/model.safetensors", b"trained on")
    again = place.split("--model", model)
    as_planned = place.split("--model", model, "--revision", digest, run="other")

    assert empty.exit_code == 65
    assert "config.json is missing" in empty.words
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert place.plan().model_revision == digest
    assert as_planned.exit_code == 65
    assert "its objects have changed" in as_planned.words


def test_a_model_on_s3_with_an_object_that_can_be_no_file_stops_the_submission(place: Place, s3_bucket: str) -> None:
    model = f"s3://{s3_bucket}/models/bad"
    for name in ("config.json", "model.safetensors", "/tmp/x.json"):
        boto3.client("s3").put_object(Bucket=s3_bucket, Key=f"models/bad/{name}", Body=b"{}")
    refused = place.split("--model", model)

    assert refused.exit_code == 65
    assert f"list model at {model}: '/tmp/x.json' can be no file's name" in refused.words
    assert "remove the object" in refused.words
    assert not (place.folder / "r").exists()


def test_a_secret_is_refused_with_the_way_to_secrets_manager(place: Place) -> None:
    by_option = place.submit("resume", "r", "--env", "HF_TOKEN=hidden", "--local")
    (place.folder / "submit.toml").write_text('[env]\nHF_TOKEN = "hidden"\n')
    by_file = place.submit("resume", "r")

    for refused in (by_option, by_file):
        assert refused.exit_code == 2
        assert "check environment variable HF_TOKEN: it looks like a secret" in refused.words
        assert "Secrets Manager" in refused.words
        assert "hidden" not in refused.words
