"""IAM against code: what it calls is allowed, and what is allowed it calls."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import smart_open.s3

from tests.infra.aws_calls import MANAGED, PERMISSIONS, SERVICES, calls_in, clients_in, needed, operations
from tests.infra.stack import Stack, allowed_actions, identity_policies

ROOT = Path(__file__).parents[2]
STREAMING = {
    "abort_multipart_upload",
    "complete_multipart_upload",
    "create_multipart_upload",
    "get_object",
    "put_object",
    "upload_part",
}
"""What smart_open's readers and writers call on the client that they are given."""


@functools.cache
def used(*folders: str) -> dict[str, str]:
    """Each operation that the code there calls, with a place that does."""
    return {
        name: f"{path.relative_to(ROOT)}:{line}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, line in calls_in(path)
    }


def test_every_call_has_its_permissions_written_down() -> None:
    """Where this fails: add the operation to PERMISSIONS, and its actions to the policy in infra/llm-array.yaml."""
    unknown = {name: place for name, place in used("worker", "submitter").items() if name not in PERMISSIONS | MANAGED}

    assert unknown == {}


def test_no_permission_is_written_down_for_a_call_that_nothing_makes() -> None:
    assert sorted(PERMISSIONS.keys() - used("worker", "submitter").keys() - STREAMING) == []


def test_clients_are_made_of_services_whose_calls_are_looked_for() -> None:
    made = {
        service
        for folder in ("worker", "submitter")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for service in clients_in(path)
    }

    assert "s3" in made
    assert sorted(made - {*SERVICES}) == []


def test_streaming_calls_what_smart_open_calls() -> None:
    in_its_source = {name for name, _ in calls_in(Path(smart_open.s3.__file__))}

    # It lists buckets and fetches whole objects only when asked to, which nothing of ours does.
    assert in_its_source - {"list_objects_v2", "download_fileobj"} == STREAMING


def test_a_workers_role_allows_its_calls_and_nothing_else() -> None:
    wanted = needed(used("worker").keys() | STREAMING)

    allowed = allowed_actions(identity_policies(Stack())["JobRole"])

    assert sorted(wanted - allowed) == []
    assert sorted(allowed - wanted) == []


def test_the_operators_policy_allows_what_submit_calls_and_nothing_else() -> None:
    """With `--local` the workers are the operator's, and tag nothing."""
    wanted = needed(used("worker", "submitter").keys() | STREAMING) - {"s3:PutObjectTagging"}

    allowed = allowed_actions(identity_policies(Stack())["OperatorPolicy"])

    assert sorted(wanted - allowed) == []
    assert sorted(allowed - wanted) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("client.head_object(Bucket=b)", {"head_object"}),
        ("partial(self._made_client().describe_jobs, jobs=x)", {"describe_jobs"}),
        ("batch.get_paginator('list_jobs')", {"list_jobs"}),
        ("client.put_object(Body=b, Tagging='a=b')", {"put_object", "put_object Tagging"}),
        ("self._client.download_file('b', 'k', 'f')", {"download_file"}),
        ("shutil.copy(a, b)", set()),
        ("found.delete_bucket()", {"delete_bucket"}),
    ],
)
def test_calls_are_found_however_they_are_made(tmp_path: Path, source: str, found: set[str]) -> None:
    path = tmp_path / "source.py"
    path.write_text(source, encoding="utf-8")

    assert {name for name, _ in calls_in(path)} == found


def test_every_operation_written_down_is_one() -> None:
    assert sorted({name.split(" ")[0] for name in PERMISSIONS} - operations()) == []
