"""What `vllm.LLM` itself answers to plain records, one after the other: the product is held to this.

python reference.py MODEL < records.jsonl > answers.jsonl
"""

from __future__ import annotations

import os
import sys
from typing import Any

import orjson

ENGINE_ARGS: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "enforce_eager": True}
SAMPLING = (
    "max_tokens", "temperature", "stop", "n", "seed", "top_p", "top_k", "min_p", "logprobs", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    # vLLM logs on standard output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(model=sys.argv[1], **ENGINE_ARGS)
    defaults = llm.get_default_sampling_params()
    for line in sys.stdin.buffer:
        record = orjson.loads(line)
        parameters = SamplingParams(
            **{
                "top_k": defaults.top_k,
                "max_tokens": ENGINE_ARGS["max_model_len"],
                **{name: record[name] for name in SAMPLING if name in record},
            }
        )
        if "messages" in record:
            (found,) = llm.chat([record["messages"]], parameters, use_tqdm=False)
        else:
            (found,) = llm.generate([record["prompt"]], parameters, use_tqdm=False)
        first = found.outputs[0]
        logprobs = [step[token].logprob for token, step in zip(first.token_ids, first.logprobs or [], strict=False)]
        answer = {
            "logprobs": logprobs,
            "texts": [choice.text for choice in found.outputs],
            "finish_reasons": [choice.finish_reason for choice in found.outputs],
            "prompt_tokens": len(found.prompt_token_ids),
            "completion_tokens": sum(len(choice.token_ids) for choice in found.outputs),
        }
        answers.write(orjson.dumps(answer) + b"\n")
    answers.close()


if __name__ == "__main__":
    main()
