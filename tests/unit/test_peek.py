"""What the first plain records look like: columns that no worker could use, and names that look misspelt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.split_place import Place
from worker.contract.bodies import SERVED, known_fields
from worker.contract.errors import InputError
from worker.contract.record_errors import RecordError
from worker.contract.sampling import (
    PLAIN_PARAMETERS,
    RESERVED_ANSWER_KEYS,
    SAMPLING_FIELDS,
    TEXT_PARAMETERS,
    plain_parameters,
)
from worker.records import RecordReader

PROMPTS: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
READER = RecordReader("plain", "answer", {})
SOME_TEXTS = ("a", "1", "true", "auto", "low", "left", "max_length", "float", "float32", "big")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def read(record: dict[str, Any]) -> Any:
    return READER.read(orjson.dumps(record))


def test_the_contract_has_the_parameters_that_plain_records_have() -> None:
    assert list(PLAIN_PARAMETERS) == list(PROMPTS)
    for number, field in enumerate(PLAIN_PARAMETERS):
        record = dict(list(PROMPTS.items())[number:])
        endpoint = read(record).endpoint
        served = SERVED[endpoint] & known_fields(endpoint, plain=True)
        assert plain_parameters(record) == PLAIN_PARAMETERS[field] == served - PROMPTS.keys()
    assert plain_parameters({"query": 1}) == frozenset()


@pytest.mark.parametrize("field", PLAIN_PARAMETERS)
def test_the_contract_knows_which_parameters_may_be_text(field: str) -> None:
    taken = {name for name in PLAIN_PARAMETERS[field] if any(is_taken(field, name, text) for text in SOME_TEXTS)}

    assert taken == PLAIN_PARAMETERS[field] & TEXT_PARAMETERS


def is_taken(field: str, name: str, text: str) -> bool:
    try:
        read({field: PROMPTS[field], name: text})
    except RecordError:
        return False
    return True


def test_names_that_no_plain_record_has_a_meaning_for_may_hold_answers() -> None:
    of_others = SAMPLING_FIELDS - RESERVED_ANSWER_KEYS

    assert of_others == {"documents", "max_tokens_per_doc", "max_tokens_per_query", "top_n"}
    assert PROMPTS.keys() <= RESERVED_ANSWER_KEYS


@pytest.mark.parametrize(
    "header",
    [
        "prompt,dimensions,padding,top_n,documents,use_activation,tool_choice,reasoning_effort,tools,stop",
        "messages,dimensions,padding,top_n,documents,embed_dtype,max_tokens_per_doc,truncation_side",
        "input,encoding_format,embed_dtype,endianness,padding,temperature,max_tokens,n,seed,top_n",
        "input,prompt,dimensions",
    ],
)
def test_columns_that_are_text_or_no_parameters_beside_such_a_prompt_are_taken(place: Place, header: str) -> None:
    path = place.folder / "in.csv"
    path.write_text(f"{header}\n{','.join('x' for _ in header.split(','))}\n")

    assert place.split(inputs=(str(path),)).created


@pytest.mark.parametrize(
    ("header", "column"),
    [
        ("prompt,max_tokens", "max_tokens"),
        ("messages,tools", "tools"),
        ("input,dimensions", "dimensions"),
        ("input,prompt,temperature,dimensions", "temperature"),
    ],
)
def test_a_column_for_a_parameter_that_is_no_text_is_refused(place: Place, header: str, column: str) -> None:
    path = place.folder / "in.csv"
    path.write_text(f"{header}\n{','.join('1' for _ in header.split(','))}\n")

    with pytest.raises(InputError, match=rf"the column '{column}' of .*/in\.csv is a parameter"):
        place.split(inputs=(str(path),))


@pytest.mark.parametrize(
    ("record", "meant"),
    [
        ('{"prompt":"a","temperture":1}', "temperature"),
        ('{"messages":null,"prompt":"a","temperture":1}', "temperature"),
        ('{"input":"a","dimension":1}', "dimensions"),
        ('{"prompt":"a","dimension":1,"document":"b","paddin":2}', None),
        ('{"messages":null,"prompt":"a","parallel_tool_call":1}', None),
        ('{"input":"a","temperture":1}', None),
        ('{"prompt":"a","temperture":null}', "temperature"),
    ],
)
def test_a_name_is_taken_for_misspelt_only_beside_what_the_parameter_belongs_to(
    place: Place, record: str, meant: str | None
) -> None:
    place.input.write_text(record + "\n")

    notes = [note for note in place.split(partition_count=1).notes if "is no parameter" in note]

    assert [f"did you mean {meant!r}?" in note for note in notes] == ([] if meant is None else [True])
