"""Whatever stands in a chat's parts, an engine is given no place to open: images in it, or an error."""

from __future__ import annotations

import base64
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.image_server import png
from worker.contract.record_errors import RecordError
from worker.media import MediaFetcher

DATA_URL = "data:image/png;base64," + base64.b64encode(png()).decode()
MEDIA_KEYS = ("image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url",
              "video_embeds", "prompt_embeds")  # fmt: skip

urls = st.sampled_from(
    [DATA_URL, "data:,x", "file:///etc/passwd", "http://169.254.169.254/", "https://h/a", "s3://b/k", ""]
)
values = st.one_of(
    st.none(), urls, st.fixed_dictionaries({"url": urls}, optional={"detail": st.just("auto")}), st.integers()
)
parts: st.SearchStrategy[Any] = st.one_of(
    st.text(),
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(
                st.none(), st.just([]), st.sampled_from(["text", "image_url", "input_image", "video_url", "other"])
            ),
            "text": st.text(),
            "uuid": st.one_of(st.none(), st.just("1")),
            **dict.fromkeys(MEDIA_KEYS, values),
        },
    ),
)
messages = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.one_of(st.text(), st.lists(parts))}))

# One for all examples: it allows nothing, so it opens nothing.
FETCHER = MediaFetcher([], threads=1)


@given(messages)
def test_an_engine_is_given_images_in_place_or_nothing(found: list[dict[str, Any]]) -> None:
    done = FETCHER.start({"messages": found})
    error = done.exception()
    if error is not None:
        assert isinstance(error, RecordError)
        return
    given_parts = [
        part for message in done.result()["messages"] for part in message["content"] if isinstance(part, dict)
    ]
    for part in given_parts:
        named = {key: part[key] for key in (*MEDIA_KEYS, "uuid") if part.get(key) is not None}
        assert named in ({}, {"image_url": {"url": DATA_URL}})
