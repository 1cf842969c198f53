"""Images by URL, over real sockets: from a web server on this machine, and from S3 as moto plays it."""

from __future__ import annotations

import base64
import gzip
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.image_server import (
    Answer,
    ImageServer,
    breaking_off,
    dripping,
    dripping_headers,
    endless,
    in_turn,
    png,
    redirecting,
    refusing,
    resetting,
)
from worker.contract.record_errors import RecordError
from worker.contract.store import open_store
from worker.media import MediaFetcher

IMAGE = png(red=200)
DATA_URL = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
PACKED = gzip.compress(IMAGE + bytes(30 << 20))
TIMEOUT_S = 10.0
MAX_BYTES = 100_000

Serve = Callable[..., ImageServer]


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Serve:
    def start(answers: dict[str, Answer | bytes], **options: Any) -> ImageServer:
        server = ImageServer(answers, **options)
        server.__enter__()
        request.addfinalizer(server.__exit__)
        return server

    return start


def chat(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, *parts]}]}


def fetch(allowed: str | list[str], *urls: str, **options: Any) -> list[str]:
    """The data URLs that the images have become."""
    entries = [allowed] if isinstance(allowed, str) else allowed
    fetcher = MediaFetcher(entries, **({"timeout_s": TIMEOUT_S, "max_bytes": MAX_BYTES} | options))
    try:
        body = fetcher.start(chat(*urls)).result()
    finally:
        fetcher.close()
    text, *images = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "what?"}
    return [image["image_url"]["url"] for image in images]


def refusal(allowed: str | list[str], url: str, **options: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        fetch(allowed, url, **options)
    assert caught.value.stage == "request"
    assert caught.value.param == "messages[0].content[1].image_url"
    return caught.value


def test_an_image_of_an_allowed_host_becomes_a_data_url(serve: Serve) -> None:
    server = serve({"/a b.png": IMAGE, "/a%20b.png": IMAGE})

    assert fetch(server.address, server.url("/a b.png?sig=1%2F2#part")) == [DATA_URL]
    assert server.requests == {"/a%20b.png": 1}
    assert server.hosts == [server.address]


def test_the_body_that_was_given_stays_as_it_was(serve: Serve) -> None:
    server = serve({"/a.png": IMAGE})
    body = chat(server.url("/a.png"))
    fetcher = MediaFetcher([server.address])
    try:
        changed = fetcher.start(body).result()
    finally:
        fetcher.close()

    assert body == chat(server.url("/a.png"))
    assert changed == chat(DATA_URL)


def test_the_same_url_is_fetched_once_for_many_records(serve: Serve) -> None:
    server = serve({"/a.png": IMAGE, "/b.png": png(blue=9)})
    fetcher = MediaFetcher([server.address])
    try:
        bodies = [chat(server.url("/a.png"), server.url("/b.png"), server.url("/a.png")) for _ in range(20)]
        found = [future.result() for future in [fetcher.start(body) for body in bodies]]
        found.append(fetcher.start(bodies[0]).result())
    finally:
        fetcher.close()

    assert server.requests == {"/a.png": 1, "/b.png": 1}
    assert all(body == found[0] for body in found)


def test_what_is_remembered_is_bounded(serve: Serve) -> None:
    server = serve({f"/{name}.png": IMAGE for name in "abc"})
    fetcher = MediaFetcher([server.address], cache_bytes=2 * len(DATA_URL))
    try:
        for name in "abcca":
            fetcher.start(chat(server.url(f"/{name}.png"))).result()
    finally:
        fetcher.close()

    assert server.requests == {"/a.png": 2, "/b.png": 1, "/c.png": 1}


def test_a_failure_is_not_remembered(serve: Serve) -> None:
    server = serve({"/a.png": in_turn(refusing(404), lambda handler: handler.give(IMAGE))})
    fetcher = MediaFetcher([server.address])
    try:
        with pytest.raises(RecordError, match="404"):
            fetcher.start(chat(server.url("/a.png"))).result()
        assert fetcher.start(chat(server.url("/a.png"))).result() == chat(DATA_URL)
    finally:
        fetcher.close()


@pytest.mark.parametrize(
    "trouble", [refusing(503), refusing(429), resetting, breaking_off], ids=["503", "429", "reset", "breaks off"]
)
def test_trouble_that_passes_is_waited_out(serve: Serve, trouble: Answer, caplog: pytest.LogCaptureFixture) -> None:
    server = serve({"/a.png": in_turn(trouble, lambda handler: handler.give(IMAGE))})

    with caplog.at_level(logging.WARNING, logger="worker.media_fetch"):
        assert fetch(server.address, server.url("/a.png?secret")) == [DATA_URL]
    assert server.requests == {"/a.png": 2}
    assert [record.message for record in caplog.records] == ["retry.scheduled"]
    assert "secret" not in str(vars(caplog.records[0]))


def test_a_missing_image_is_asked_for_once(serve: Serve) -> None:
    server = serve({})
    found = refusal(server.address, server.url("/gone.png?secret"))

    assert (found.code, found.message) == (
        "media_unavailable",
        "fetch image from 127.0.0.1: the host answered HTTP 404 (expected 200)",
    )
    assert server.requests == {"/gone.png": 1}


@pytest.mark.parametrize("slow", [dripping, dripping_headers])
def test_a_host_that_drips_is_given_up(serve: Serve, slow: Answer) -> None:
    server = serve({"/a.png": slow})
    found = refusal(server.address, server.url("/a.png"), timeout_s=0.2)

    assert (found.code, found.message) == (
        "media_unavailable",
        "fetch image from 127.0.0.1: no whole answer within 0.2 s",
    )
    assert server.requests == {"/a.png": 3}


@pytest.mark.parametrize(
    "answer",
    [
        endless,
        lambda handler: handler.give(IMAGE + bytes(MAX_BYTES)),
        # A length that is a lie: there is nothing behind it.
        lambda handler: handler.begin(content_type="image/png", content_length=str(1 << 40)),
    ],
    ids=["endless", "long", "said to be long"],
)
def test_an_image_beyond_the_limit_is_not_read_to_its_end(serve: Serve, answer: Answer) -> None:
    server = serve({"/a.png": answer})
    found = refusal(server.address, server.url("/a.png"), timeout_s=5.0)

    assert (found.code, found.message) == (
        "media_too_large",
        f"fetch image from 127.0.0.1: it is larger than {MAX_BYTES} bytes",
    )
    assert server.requests == {"/a.png": 1}


@pytest.mark.parametrize(
    "answer",
    [
        lambda handler: handler.give(b"<html>log in</html>", content_type="text/html"),
        lambda handler: handler.give(IMAGE, content_type="text/html"),
        lambda handler: handler.give(b"<svg/>", content_type="image/svg+xml"),
        lambda handler: handler.give(b""),
        # A bomb: thirty megabytes in thirty kilobytes.
        lambda handler: handler.give(PACKED, content_encoding="gzip"),
    ],
    ids=["a page", "an image as a page", "svg", "empty", "gzip"],
)
def test_what_is_no_image_is_refused(serve: Serve, answer: Answer) -> None:
    server = serve({"/a.png": answer})

    assert refusal(server.address, server.url("/a.png"), timeout_s=5.0, max_bytes=1 << 20).code == "invalid_media"
    assert server.requests == {"/a.png": 1}


@pytest.mark.parametrize("content_type", ["application/octet-stream", "binary/octet-stream", "image/jpeg"])
def test_the_bytes_say_of_which_kind_an_image_is(serve: Serve, content_type: str) -> None:
    server = serve({"/a": lambda handler: handler.give(IMAGE, content_type=content_type)})

    assert fetch(server.address, server.url("/a")) == [DATA_URL]


# --- where it may not go


def test_a_host_that_no_entry_names_is_never_asked(serve: Serve) -> None:
    server = serve({"/a.png": IMAGE})
    found = refusal("images.example.com", server.url("/a.png?secret"))

    assert found.code == "media_not_allowed"
    assert f"--allow-media {server.address}" in found.message
    assert "secret" not in found.message
    assert server.requests == {}


def test_a_name_that_leads_to_this_machine_is_refused_unless_its_port_is_named_too(serve: Serve) -> None:
    server = serve({"/a.png": IMAGE})
    # By name alone only the schemes' own ports are allowed, and of those no private address.
    found = refusal("localhost", "http://localhost/latest/meta-data")

    assert found.code == "media_not_allowed"
    assert "private address" in found.message
    assert refusal("localhost", f"http://localhost:{server.port}/a.png").code == "media_not_allowed"
    assert fetch(f"localhost:{server.port}", f"http://localhost:{server.port}/a.png") == [DATA_URL]
    assert server.requests == {"/a.png": 1}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_within_the_allowed_hosts_is_followed(serve: Serve, status: int) -> None:
    other = serve({"/b.png": IMAGE})
    server = serve({"/a.png": redirecting(other.url("/b.png"), status), "/c.png": redirecting("a.png")})

    assert fetch([server.address, other.address], server.url("/c.png")) == [DATA_URL]
    assert server.requests == {"/c.png": 1, "/a.png": 1}


def test_a_redirect_out_of_the_allowed_hosts_is_not_followed(serve: Serve) -> None:
    forbidden = serve({"/b.png": IMAGE})
    server = serve({"/a.png": redirecting(forbidden.url("/b.png"))})

    assert refusal(server.address, server.url("/a.png")).code == "media_not_allowed"
    assert forbidden.requests == {}


@pytest.mark.parametrize(
    ("location", "code"),
    [
        ("http://169.254.169.254/latest/meta-data/iam/security-credentials/", "media_not_allowed"),
        ("http://[fd00:ec2::254]/latest/meta-data", "media_not_allowed"),
        ("file:///etc/passwd", "invalid_media"),
        ("s3://bucket/key", "invalid_media"),
        (DATA_URL, "invalid_media"),
        ("", "media_unavailable"),
        ("http://a@b/", "invalid_media"),
    ],
)
def test_a_redirect_to_what_no_record_may_name_is_not_followed(serve: Serve, location: str, code: str) -> None:
    server = serve({"/a.png": redirecting(location)})

    assert refusal(server.address, server.url("/a.png")).code == code


def test_redirects_in_a_circle_end(serve: Serve) -> None:
    server = serve({"/a.png": redirecting("/a.png")})

    assert "too many redirects" in refusal(server.address, server.url("/a.png")).message
    assert server.requests == {"/a.png": 4}


def test_a_name_that_nobody_knows_is_an_error_of_the_record() -> None:
    found = refusal("no-such-host.invalid", "http://no-such-host.invalid/a.png")

    assert found.code == "media_unavailable"
    assert "no-such-host.invalid" in found.message


def test_an_image_that_fails_costs_its_own_record_alone(serve: Serve) -> None:
    server = serve({"/a.png": IMAGE})
    fetcher = MediaFetcher([server.address])
    try:
        bad = fetcher.start(chat(server.url("/a.png"), server.url("/gone.png")))
        good = fetcher.start(chat(server.url("/a.png")))
        assert good.result() == chat(DATA_URL)
        problem = bad.exception()
    finally:
        fetcher.close()

    assert isinstance(problem, RecordError)
    assert problem.param == "messages[0].content[2].image_url"


# --- TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """For the name localhost, signed by itself."""
    import datetime as dt

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    today = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(today - dt.timedelta(days=1))
        .not_valid_after(today + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path / "localhost.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def secure(serve: Serve, certificate: Path) -> ImageServer:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    return serve({"/a.png": IMAGE, "/slow.png": dripping}, tls=tls)


def test_a_host_must_prove_its_name(secure: ImageServer, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name, by_address = f"https://localhost:{secure.port}/a.png", f"https://127.0.0.1:{secure.port}/a.png"
    allowed = [f"localhost:{secure.port}", secure.address]

    assert "certificate is not good" in refusal(allowed, by_name).message
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert fetch(allowed, by_name) == [DATA_URL]
    # The address that was checked is what is connected to; the name is still what is proven.
    assert "certificate is not good" in refusal(allowed, by_address).message
    assert refusal(f"http://localhost:{secure.port}", by_name).code == "media_not_allowed"


def test_a_host_that_drips_is_given_up_under_tls_too(
    secure: ImageServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    found = refusal(f"localhost:{secure.port}", f"https://localhost:{secure.port}/slow.png", timeout_s=0.3)

    assert "no whole answer within 0.3 s" in found.message


# --- S3


def test_an_object_below_an_allowed_prefix_is_read(s3_bucket: str) -> None:
    uri = f"s3://{s3_bucket}/images/a b+#?%.png"
    open_store(uri).write(uri, IMAGE)

    assert fetch(f"s3://{s3_bucket}/images/", uri) == [DATA_URL]
    assert fetch(f"s3://{s3_bucket}", uri) == [DATA_URL]


@pytest.mark.parametrize("key", ["secret.png", "images-private/a.png", "images/../secret.png", "images.png"])
def test_an_object_beside_the_prefix_is_not(s3_bucket: str, key: str) -> None:
    uri = f"s3://{s3_bucket}/{key}"
    open_store(uri).write(uri, IMAGE)
    found = refusal(f"s3://{s3_bucket}/images", uri)

    assert found.code == "media_not_allowed"
    assert key not in found.message


@pytest.mark.parametrize(
    ("content", "code"),
    [(IMAGE + bytes(MAX_BYTES), "media_too_large"), (b"no image", "invalid_media"), (b"", "invalid_media")],
)
def test_an_object_that_is_no_image_within_the_limit_is_refused(s3_bucket: str, content: bytes, code: str) -> None:
    uri = f"s3://{s3_bucket}/a.png"
    open_store(uri).write(uri, content)

    assert refusal(f"s3://{s3_bucket}", uri).code == code


def test_an_object_that_is_not_there_is_an_error_of_the_record(s3_bucket: str) -> None:
    found = refusal(f"s3://{s3_bucket}", f"s3://{s3_bucket}/gone.png")

    assert found.code == "media_unavailable"
    assert found.message == f"fetch image from s3://{s3_bucket}: there is no such object"
    assert refusal("s3://no-such-bucket-here", "s3://no-such-bucket-here/a.png").code == "media_unavailable"


@pytest.fixture
def s3_host(serve: Serve, aws_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Starts a server that boto3 takes for S3."""

    def start(answer: Answer) -> ImageServer:
        server = serve({"/b/a.png": answer})
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url(""))
        return server

    return start


@pytest.mark.parametrize("slow", [dripping, dripping_headers])
def test_an_object_that_drips_is_given_up_as_a_hosts_image_is(s3_host: Serve, slow: Answer) -> None:
    server = s3_host(slow)
    found = refusal("s3://b", "s3://b/a.png", timeout_s=0.3)

    assert (found.code, found.message) == ("media_unavailable", "fetch image from s3://b: no whole answer within 0.3 s")
    assert server.requests == {"/b/a.png": 3}


@pytest.mark.parametrize("answer", [refusing(503), breaking_off, resetting], ids=["503", "breaking off", "resetting"])
def test_an_object_is_asked_for_as_often_as_a_hosts_image(s3_host: Serve, answer: Answer) -> None:
    server = s3_host(answer)

    assert refusal("s3://b", "s3://b/a.png").code == "media_unavailable"
    assert server.requests == {"/b/a.png": 3}


def test_an_object_that_comes_at_the_second_attempt_is_taken(s3_host: Serve) -> None:
    server = s3_host(in_turn(refusing(503), lambda handler: handler.give(IMAGE)))

    assert fetch("s3://b", "s3://b/a.png") == [DATA_URL]
    assert server.requests == {"/b/a.png": 2}


@pytest.mark.parametrize("answer", [refusing(403), endless, lambda handler: handler.give(IMAGE + bytes(MAX_BYTES))])
def test_an_object_that_is_not_to_be_had_is_asked_for_once(s3_host: Serve, answer: Answer) -> None:
    server = s3_host(answer)
    found = refusal("s3://b", "s3://b/a.png")

    assert "a.png" not in found.message
    assert server.requests == {"/b/a.png": 1}


# --- one record's images


def test_the_first_image_that_fails_settles_its_record_and_what_has_not_begun_never_does(serve: Serve) -> None:
    server = serve({f"/{number}.png": IMAGE for number in range(20)})
    fetcher = MediaFetcher([server.address], threads=1)
    bad = fetcher.start(chat(server.url("/gone.png"), *(server.url(f"/{number}.png") for number in range(20))))
    good = fetcher.start(chat(server.url("/3.png")))
    assert good.result() == chat(DATA_URL)
    fetcher.close()

    problem = bad.exception(timeout=0)
    assert isinstance(problem, RecordError)
    assert problem.param == "messages[0].content[1].image_url"
    assert server.requests == {"/gone.png": 1, "/3.png": 1}


def test_a_record_that_has_failed_waits_for_none_of_its_images(serve: Serve) -> None:
    server = serve({"/slow.png": dripping})
    fetcher = MediaFetcher([server.address], threads=2, timeout_s=1.5)
    failed = fetcher.start(chat(server.url("/slow.png"), server.url("/gone.png")))
    other = fetcher.start(chat(server.url("/slow.png")))

    problem = failed.exception()
    assert not other.done()
    fetcher.close()
    assert isinstance(problem, RecordError)
    assert problem.param == "messages[0].content[2].image_url"


def test_an_image_that_was_given_up_unbegun_is_fetched_for_the_next_record(serve: Serve) -> None:
    server = serve({"/a.png": IMAGE})
    fetcher = MediaFetcher([server.address], threads=1)
    try:
        assert fetcher.start(chat(server.url("/gone.png"), server.url("/a.png"))).exception() is not None
        assert fetcher.start(chat(server.url("/a.png"))).result() == chat(DATA_URL)
    finally:
        fetcher.close()


def test_closing_does_not_wait_for_what_has_not_begun(serve: Serve) -> None:
    server = serve({f"/{number}.png": dripping for number in range(50)})
    fetcher = MediaFetcher([server.address], threads=2, timeout_s=0.5)
    futures = [fetcher.start(chat(server.url(f"/{number}.png"))) for number in range(50)]
    fetcher.close()

    problems = [future.exception(timeout=0) for future in futures]
    assert all(isinstance(problem, RecordError) for problem in problems)
    assert server.requests.total() < 25
