"""Names of a model's files come from elsewhere, and none leads out of the folder that they are written to."""

from __future__ import annotations

import pytest

from worker.contract.errors import InputError
from worker.contract.model_place import check_names

GOOD = [
    "config.json",
    "a b.json",
    "1_Pooling/config.json",
    "e😀.txt",
    "a\\b",
    "..a",
    "a..",
    ".gitattributes",
    "x" * 255,
]


def test_names_of_files_in_folders_are_taken_whatever_else_they_are() -> None:
    check_names("list it", GOOD, hint="none")


@pytest.mark.parametrize(
    "name",
    [
        "/tmp/x",
        "/",
        "",
        ".",
        "..",
        "../x",
        "a/../../x",
        "a/./x",
        "a//x",
        "a/",
        "//x",
        "a\0b",
        "\ud800",
        "a/" + "ü" * 128,
    ],
)
def test_a_name_that_leads_elsewhere_or_that_no_disk_holds_is_refused_and_told(name: str) -> None:
    with pytest.raises(InputError) as caught:
        check_names("list it", [*GOOD, name], hint="remove it")

    assert caught.value.message.startswith(f"list it: {name!r} can be no file's name: ")
    assert caught.value.hint == "remove it"


@pytest.mark.parametrize("names", [["a", "a/b.json"], ["a/b/c.json", "a"], ["a/b/c/d", "a/b"]])
def test_what_would_have_to_be_a_file_and_a_folder_is_refused(names: list[str]) -> None:
    with pytest.raises(InputError, match="would have to be a file and a folder"):
        check_names("list it", [*GOOD, *names], hint="remove it")
