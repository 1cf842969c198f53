from __future__ import annotations

from pathlib import Path

import pytest

from submitter.settings import FileSettings, merged_table, read_file
from worker.contract.errors import UsageError
from worker.contract.pairs import json_or_text

OPTIONS = {"run", "model", "partitions", "answer_key"}


def test_values_and_tables_are_read_and_dashes_are_underscores(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('partitions = 7\nanswer-key = "a"\n[engine-args]\nmax_model_len = 10\n[sampling]\nmax_tokens = 5\n')

    found = read_file(str(path), OPTIONS)

    assert found.values == {"partitions": 7, "answer_key": "a"}
    assert found.tables == {"engine-args": {"max_model_len": 10}, "sampling": {"max_tokens": 5}}


def test_submit_toml_in_this_folder_is_read_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_file(None, OPTIONS) == FileSettings({}, {}, None)

    (tmp_path / "submit.toml").write_text("partitions = 3")

    assert read_file(None, OPTIONS).values == {"partitions": 3}


def test_an_unknown_setting_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("partition = 7")

    with pytest.raises(UsageError, match="unknown setting 'partition'") as caught:
        read_file(str(path), OPTIONS)

    assert caught.value.hint == "did you mean 'partitions'?"


@pytest.mark.parametrize(
    ("content", "said"),
    [("partitions = ", "Invalid value"), ("[engine-args", "Expected"), ("sampling = 3", r"as in \[sampling\]")],
)
def test_a_broken_file_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(content)

    with pytest.raises(UsageError, match=f"s.toml.*{said}"):
        read_file(str(path), OPTIONS)


def test_a_file_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.toml: there is no such file"):
        read_file(str(tmp_path / "nothing.toml"), OPTIONS)


@pytest.mark.parametrize("variable", ['{"b": 2, "c": "v"}', "b=2 c=v"])
def test_tables_merge_key_by_key_and_the_command_line_wins(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("SUBMIT_ENGINE_ARGS", variable)
    settings = FileSettings({}, {"engine-args": {"a": 1, "b": 1, "c": "f"}}, None)

    assert merged_table("engine-args", settings, ["c=true"]) == {"a": 1, "b": 2, "c": True}


def test_tables_of_texts_are_taken_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMIT_TAGS", "b=007")
    settings = FileSettings({}, {"tags": {"a": 1, "c": True}}, None)

    found = merged_table("tags", settings, ["d=1.10", "e=true"], as_text=True)

    assert found == {"a": "1", "b": "007", "c": "true", "d": "1.10", "e": "true"}


@pytest.mark.parametrize("pair", ["novalue", "=3"])
def test_a_pair_without_a_key_or_value_is_refused(pair: str) -> None:
    with pytest.raises(UsageError, match="expected key=value"):
        merged_table("sampling", FileSettings({}, {}, None), [pair])


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("0.5", 0.5), ("true", True), ("float32", "float32"), ("", ""), ('{"a":1}', {"a": 1})]
)
def test_values_are_json_where_they_can_be(text: str, value: object) -> None:
    assert json_or_text(text) == value


@pytest.mark.parametrize(
    "line",
    ["engines = []", "partitions = 1.5", "partitions = true", "model = {a = 1}", "run = 2026-01-01", "inputs = [1]"],
)
def test_a_value_of_a_type_that_no_option_takes_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(line)

    with pytest.raises(UsageError, match=line.split(" ", maxsplit=1)[0]):
        read_file(str(path), OPTIONS | {"engines", "inputs"})


def test_a_file_may_open_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(b"\xef\xbb\xbfpartitions = 7")

    assert read_file(str(path), OPTIONS).values == {"partitions": 7}


def test_flags_lists_and_adapters_may_stand_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('strict-model = true\nselect = ["id", "name"]\nallow-media = "h"\n[lora]\na = "s3://b/a"\n')

    found = read_file(str(path), OPTIONS | {"strict_model", "select", "allow_media"})

    assert found.values == {"strict_model": True, "select": ["id", "name"], "allow_media": ["h"]}
    assert found.tables == {"lora": {"a": "s3://b/a"}}


@pytest.mark.parametrize("line", ["strict-model = 1", "select = [1]", "allow-media = {a = 1}"])
def test_a_flag_or_a_list_of_another_type_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(line)

    with pytest.raises(UsageError, match=line.split(" ", maxsplit=1)[0]):
        read_file(str(path), OPTIONS | {"strict_model", "select", "allow_media"})
