"""Images in chats, as far as nothing need be fetched; and which places the entries of `--allow-media` allow."""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest

from tests.image_server import png
from worker.contract.errors import UsageError
from worker.contract.media_allowed import DEFAULT_PORTS, read_allowed_media
from worker.contract.record_errors import RecordError
from worker.media import MediaFetcher
from worker.media_images import MAX_IMAGES, find_images
from worker.media_kinds import image_type
from worker.media_url import parse_http_url

DATA_URL = "data:image/png;base64," + base64.b64encode(png()).decode()
PUBLIC, PRIVATE, LOOPBACK, METADATA = "93.184.216.34", "10.0.0.7", "127.0.0.1", "169.254.169.254"


@pytest.fixture
def fetcher() -> Iterator[MediaFetcher]:
    found = MediaFetcher([], max_bytes=5000)
    yield found
    found.close()


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": list(parts)}]}


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


FORMS = [
    image,
    lambda url: {"type": "image_url", "image_url": url},
    lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "high"}, "uuid": "1"},
    lambda url: {"type": "input_image", "image_url": url, "detail": "auto"},
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_part_is_found_and_becomes_one_form(form: Any, fetcher: MediaFetcher) -> None:
    assert [found.url for found in find_images(chat({"type": "text", "text": "t"}, form("https://h/a")))] == [
        "https://h/a"
    ]
    body = fetcher.start(chat({"type": "text", "text": "t"}, form(DATA_URL))).result(timeout=0)

    assert body == chat({"type": "text", "text": "t"}, image(DATA_URL))


def test_each_image_is_found_where_it_stands_and_data_urls_are_not_fetched() -> None:
    body = chat(image("https://h/b"), image(DATA_URL), image("s3://b/k"), image("https://h/b"), image("HTTP://h/a"))

    assert [found.is_fetched for found in find_images(body)] == [True, False, True, True, True]
    assert [found.param for found in find_images(body)][:2] == [
        "messages[1].content[0].image_url",
        "messages[1].content[1].image_url",
    ]


@pytest.mark.parametrize(
    "body", [{"prompt": "p"}, chat(), chat("text", {"type": "text", "text": "t"}), {"messages": [{"role": "user"}]}]
)
def test_a_body_without_images_is_given_back_as_it_is(body: dict[str, Any], fetcher: MediaFetcher) -> None:
    assert find_images(body) == []
    assert fetcher.start(body).result(timeout=0) is body


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "a.png",
        "ftp://h/a.png",
        "gs://b/k",
        "",
        " https://h/a",
        "S3://b/k",
        "//h/a",
    ],
)
def test_other_places_are_never_fetched(url: str, fetcher: MediaFetcher) -> None:
    with pytest.raises(RecordError) as caught:
        find_images(chat(image(url)))
    assert (caught.value.stage, caught.value.code) == ("request", "media_not_allowed")
    assert fetcher.start(chat(image(url))).exception(timeout=0) is not None


@pytest.mark.parametrize("url", ["https://h/a", DATA_URL])
def test_a_record_has_so_many_images_and_no_more(url: str, fetcher: MediaFetcher) -> None:
    assert len(find_images(chat(*[image(url)] * MAX_IMAGES))) == MAX_IMAGES

    problem = fetcher.start(chat(*[image(url)] * (MAX_IMAGES + 1))).exception(timeout=0)
    assert isinstance(problem, RecordError)
    assert (problem.kind, problem.param) == ("request.too_many_images", f"messages[1].content[{MAX_IMAGES}].image_url")
    assert fetcher.fetch_count == 0


@pytest.mark.parametrize("url", [None, 1, [], {"url": "https://h/a"}])
def test_a_url_that_is_no_string_is_refused(url: Any) -> None:
    with pytest.raises(RecordError, match=r"read messages\[1\]\.content\[0\]\.image_url: no URL"):
        find_images(chat({"type": "image_url", "image_url": {"url": url}}))


@pytest.mark.parametrize(
    "part",
    [
        # vLLM takes the image of each of these, whatever the type says.
        {"text": "t", "image_url": "file:///etc/passwd"},
        {"type": "text", "text": "t", "uuid": "1", "image_url": "http://169.254.169.254/"},
        {"text": "t", "video_url": {"url": "http://h/"}},
        {"type": "text", "text": "t", "image_pil": "x"},
        {"text": "t", "audio_url": "http://h/"},
        {"text": "t", "image_embeds": "AAAA"},
    ],
)
def test_media_that_a_part_of_another_type_hides_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as caught:
        find_images(chat({"type": "text", "text": "t"}, part))
    assert caught.value.code == "unsupported_content"
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[1].content[1].")


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:image/png;base64,not base64!", "invalid_media"),
        (DATA_URL[:-5], "invalid_media"),
        (DATA_URL.replace("iVBO", "iVB\nO"), "invalid_media"),
        ("data:image/png;base64,", "invalid_media"),
        ("data:image/png," + png().hex(), "invalid_media"),
        ("data:image/png;base64", "invalid_media"),
        ("data:text/html;base64," + base64.b64encode(b"<html>").decode(), "invalid_media"),
        ("data:image/png;base64," + base64.b64encode(png() + bytes(5000)).decode(), "media_too_large"),
    ],
)
def test_a_data_url_must_hold_an_image(url: str, code: str, fetcher: MediaFetcher) -> None:
    problem = fetcher.start(chat(image(url))).exception(timeout=0)

    assert isinstance(problem, RecordError)
    assert (problem.stage, problem.code, problem.param) == ("request", code, "messages[1].content[0].image_url")


def test_no_media_are_fetched_where_none_are_allowed(fetcher: MediaFetcher) -> None:
    problem = fetcher.start(chat(image("https://images.example.com/a.png?sig=secret"))).exception()

    assert isinstance(problem, RecordError)
    assert problem.code == "media_not_allowed"
    assert "--allow-media images.example.com" in problem.message
    assert "secret" not in problem.message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (png(), "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a..", "image/gif"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "image/webp"),
        (b"RIFF\x10\0\0\0WAVEfmt ", None),
        (b"BM" + bytes(40), "image/bmp"),
        (b"BMW is a maker of cars and of motorcycles", None),
        (b"II*\0", None),
        (b"", None),
    ],
)
def test_the_first_bytes_tell_an_image(content: bytes, expected: str | None) -> None:
    assert image_type(content) == expected


# --- entries


def permits(entry: str, url: str, address: str) -> bool:
    place = parse_http_url(url)
    entries = read_allowed_media([entry]).hosts_for(place.scheme, place.host, place.port)
    return any(found.permits(ipaddress.ip_address(address)) for found in entries)


@pytest.mark.parametrize(
    ("entry", "url", "allowed"),
    [
        ("h.example", "https://h.example/a", True),
        ("h.example", "http://h.example/a", True),
        ("h.example", "https://H.Example./a", True),
        ("H.Example", "https://h.example", True),
        ("h.example", "https://h.example:443/a", True),
        ("h.example", "https://h.example:8443/a", False),
        ("h.example", "https://sub.h.example/a", False),
        ("h.example", "https://h.example.evil/a", False),
        ("h.example", "https://evil/h.example", False),
        ("h.example", "https://evil?h.example", False),
        ("h.example", "https://evil#h.example", False),
        ("https://h.example", "http://h.example/a", False),
        ("https://h.example/", "https://h.example/a", True),
        ("h.example:8443", "https://h.example:8443/a", True),
        ("h.example:8443", "https://h.example/a", False),
        ("http://h.example:8080", "https://h.example:8080/a", False),
        ("[2001:DB8::1]:80", "http://[2001:db8:0::1]/a", True),
    ],
)
def test_an_entry_allows_its_host_alone(entry: str, url: str, allowed: bool) -> None:
    place = parse_http_url(url)

    assert bool(read_allowed_media([entry]).hosts_for(place.scheme, place.host, place.port)) is allowed


@pytest.mark.parametrize(
    "address",
    [
        PRIVATE, LOOPBACK, METADATA, "0.0.0.0", "100.64.0.1", "169.254.170.2", "192.168.1.1", "224.0.0.1", "::1", "::",
        "fe80::1", "fd00:ec2::254", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "64:ff9b:1:a9fe:a9:fe00::", "fec0::1", "::127.0.0.1",
        "::169.254.169.254", "2002:a9fe:a9fe::1", "2001:0:5db8:d822::5601:5601", "2001:0:7f00:1::1", "2001:2::1", "2001:db8::1",
        "0.1.2.3", "127.1.2.3", "172.31.0.1", "192.0.0.1", "192.0.0.200", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1",
        "203.0.113.1", "240.0.0.1", "255.255.255.255", "ff0e::1", "100::1", "fc00::1", "::ffff:0:7f00:1", "4000::1",
    ],
)  # fmt: skip
def test_a_name_never_leads_to_a_private_address(address: str) -> None:
    assert not permits("h.example", "https://h.example/", address)


@pytest.mark.parametrize(
    "address",
    [PUBLIC, "2606:2800:220:1::1", "64:ff9b::5db8:d822", "::ffff:93.184.216.34", "2002:5db8:d822::1", "2a05:d018::1"],
)
def test_a_name_leads_to_public_addresses(address: str) -> None:
    assert permits("h.example", "https://h.example/", address)


@pytest.mark.parametrize(
    ("entry", "url", "address", "permitted"),
    [
        ("h.example:80", "http://h.example/", PRIVATE, True),
        ("h.example:80", "http://h.example/", LOOPBACK, True),
        ("h.example:80", "http://h.example/", METADATA, False),
        ("h.example:80", "http://h.example/", "::ffff:169.254.169.254", False),
        ("h.example:80", "http://h.example/", "fd00:ec2::254", False),
        ("h.example:80", "http://h.example/", "0.0.0.0", False),
        ("h.example:80", "http://h.example/", "0.0.0.1", False),
        ("h.example:80", "http://h.example/", "::", False),
        ("h.example:80", "http://h.example/", "::1", True),
        ("h.example:80", "http://h.example/", "fd12::1", True),
        ("h.example:80", "http://h.example/", "100.64.0.1", True),
        ("h.example:80", "http://h.example/", "::169.254.169.254", False),
        ("h.example:80", "http://h.example/", "64:ff9b:1::a9fe:a9fe", False),
        ("h.example:80", "http://h.example/", "2001:0:a9fe:a9fe::1", False),
        ("h.example:80", "http://h.example/", "2002:a9fe:a9fe::1", False),
        ("h.example:80", "http://h.example/", "255.255.255.255", False),
        (PRIVATE, f"http://{PRIVATE}/", PRIVATE, True),
        (PRIVATE, f"http://{PRIVATE}/", LOOPBACK, False),
        ("[fd12::1]", "http://[fd12::1]/", "fd12::1", True),
    ],
)
def test_a_private_address_must_be_named(entry: str, url: str, address: str, permitted: bool) -> None:
    assert permits(entry, url, address) is permitted


@pytest.mark.parametrize(
    "entry", ["", "https://", "https://h/path", "h:0", "h:99999", "ftp://h", "s3://", "s3:///k", "a@h", "h h", "*", "[::g]",
              "https://h?x", "file:///tmp", METADATA, f"http://{METADATA}:80", "[fd00:ec2::254]", "[::ffff:169.254.169.254]",
              "0.0.0.0", "[::]"],
)  # fmt: skip
def test_an_entry_that_is_no_place_is_refused(entry: str) -> None:
    with pytest.raises(UsageError, match="read --allow-media"):
        read_allowed_media([entry])


@pytest.mark.parametrize(
    "url",
    [
        "https://", "https:///a", "https://u@h/", "https://u:p@h/", "https://h:p/", "https://h:123456/", "https://h\\@e/",
        "https://h\n/", "https://h/\r\nX: 1", "https://bücher/", "https://[::1/", "https://[::g]/", "https://h/" + "a" * 9000,
        "ftp://h/",
    ],
)  # fmt: skip
def test_a_url_that_readers_may_read_differently_is_refused(url: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse_http_url(url)
    assert caught.value.code == "invalid_media"


@pytest.mark.parametrize(
    ("url", "target", "authority"),
    [
        ("https://h", "/", "h"),
        ("https://h?q", "/?q", "h"),
        ("https://h:8443/a b%20c/ü?x=é&y=%2F#f", "/a%20b%20c/%C3%BC?x=%C3%A9&y=%2F", "h:8443"),
        ("http://[::1]:80/", "/", "[::1]"),
    ],
)
def test_a_path_keeps_what_is_escaped_and_escapes_the_rest(url: str, target: str, authority: str) -> None:
    found = parse_http_url(url)

    assert (found.target, found.authority) == (target, authority)
    assert found.port in (*DEFAULT_PORTS.values(), 8443)
