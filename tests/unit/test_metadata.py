"""What host this is, asked of the metadata service and never waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_imds import HOST, HOST_FOLDER, FakeImds
from worker.metadata import HOST_LIMIT_S, Host, HostQuestion

LIMIT_S = 30.0
"""Nothing here takes so long, on any machine."""


@pytest.fixture
def imds() -> Iterator[FakeImds]:
    with FakeImds() as imds:
        yield imds


def test_the_service_says_what_host_this_is(imds: FakeImds) -> None:
    imds.documents |= HOST

    found = HostQuestion(imds.url, LIMIT_S).answer()

    assert found == Host(
        instance_type="p5en.48xlarge", market="spot", availability_zone="us-east-2b", instance_id="i-0123456789abcdef0"
    )
    # The last answer may be here before its request is noted there.
    token, *asked = imds.wait_for_requests(1 + len(HOST))
    assert token == "PUT /latest/api/token"
    assert sorted(asked) == sorted(f"GET {path}" for path in HOST)


def test_what_the_service_has_not_got_is_not_known(imds: FakeImds) -> None:
    imds.documents |= HOST
    del imds.documents[f"{HOST_FOLDER}/instance-life-cycle"]

    found = HostQuestion(imds.url, LIMIT_S).answer()

    assert (found.instance_type, found.market) == ("p5en.48xlarge", None)


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"x" * 65, b"\xff\xfe", b"spot\nmore", b"<html>\r\n</html>", b"\x1b[31m"]
)
def test_what_is_no_word_is_not_known(imds: FakeImds, content: bytes) -> None:
    imds.documents |= dict.fromkeys(HOST, content)

    assert HostQuestion(imds.url, LIMIT_S).answer() == Host()


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_service_that_refuses_leaves_the_host_unknown(imds: FakeImds, status: int) -> None:
    imds.status = status

    assert HostQuestion(imds.url, LIMIT_S).answer() == Host()


def test_no_service_leaves_the_host_unknown() -> None:
    with FakeImds() as gone:
        url = gone.url

    assert HostQuestion(url, LIMIT_S).answer() == HostQuestion(None, LIMIT_S).answer() == Host()


def test_a_service_that_says_nothing_is_not_waited_for_beyond_the_limit(imds: FakeImds) -> None:
    imds.may_answer.clear()

    question = HostQuestion(imds.url, limit_s=0.0)

    assert question.answer() == Host()
    assert not question._is_over.is_set()
    assert HOST_LIMIT_S <= 0.5
