"""What is refused before anything is read: a plan cannot be changed, and every host would find the mistake anew."""

from __future__ import annotations

from typing import Any

import pytest

from submitter.split import SplitRequest
from worker.contract.errors import UsageError


@pytest.mark.parametrize(
    ("fields", "said", "hint"),
    [
        ({"sampling": {"max_token": 5}}, "sampling default 'max_token'", "did you mean 'max_tokens'?"),
        ({"sampling": {"temperature": 3}}, r"temperature: out of range \(expected float <= 2.0\)", None),
        ({"sampling": {"max_tokens": 0}}, r"max_tokens: out of range \(expected int >= 1\)", None),
        ({"sampling": {"n": "2"}}, r"n: wrong type \(expected int, got str\)", None),
        ({"sampling": {"stream": True}}, "stream: not supported", None),
        ({"engine_args": {"max_modle_len": 5}}, "'max_modle_len': vLLM 0.32 has none", "did you mean 'max_model_len'?"),
        ({"engine_args": {"tool_cal_parser": "x"}}, "'tool_cal_parser'", "did you mean 'tool_call_parser'?"),
        ({"engine_args": {"data_parallel_size": 2}}, r"'data_parallel_size': it cannot be set .*see --engines", None),
        ({"engine_args": {"max_num_seq": 5}}, "'max_num_seq'", "did you mean 'max_num_seqs'?"),
        ({"engine_args": {"max_num_sseqs": 5}}, "'max_num_sseqs'", "did you mean 'max_num_seqs'?"),
        ({"engine_args": {"gpu_memory_utilisation": 0.5}}, "'gpu_memory_utilisation'", "did you mean 'gpu_memory_util"),
        ({"answer_key": "input"}, "answer key 'input'", None),
        ({"answer_key": "prompt"}, "answer key 'prompt'", None),
        ({"answer_key": ""}, "answer key ''", None),
        ({"engine_args": {"hf_token": "secret"}}, "'hf_token'", "set HF_TOKEN"),
        ({"engine_args": {"max-model-len": 5}}, "'max-model-len': it is none", "did you mean max_model_len"),
        ({"engine_args": {"model": "other"}}, "'model': it is none", "did you mean --model"),
    ],
)
def test_a_setting_that_no_worker_could_use_is_refused(fields: dict[str, Any], said: str, hint: str | None) -> None:
    given: dict[str, Any] = {"inputs": ("in.jsonl",), "run_uri": "r", "partition_count": 1, "model": "m"}

    with pytest.raises(UsageError, match=said) as caught:
        SplitRequest(**(given | fields))

    assert "secret" not in caught.value.message
    assert hint is None or (caught.value.hint or "").startswith(hint)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"temperature": None, "max_tokens": 5, "logprobs": True, "top_n": 2, "user": "me"}},
        {
            "engine_args": {
                "max_model_len": 5,
                "tool_call_parser": "hermes",
                "of_a_later_version": 1,
                "data_parallel_size": 1,
            }
        },
        {"engine_args": {"override_neuron_config": {}, "max_num_seqs_a_step": 5}},
    ],
)
def test_what_some_worker_can_use_is_not_refused(fields: dict[str, Any]) -> None:
    given: dict[str, Any] = {"inputs": ("in.jsonl",), "run_uri": "r", "partition_count": 1, "model": "m"}

    SplitRequest(**(given | fields))
