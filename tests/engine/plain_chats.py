"""Compares what the worker makes of conversations and texts with what vLLM and the model's tokenizer make of them.

python plain_chats.py ROUNDS MODEL chats|texts|refusals …      exits 1 with an AssertionError where they differ

No engine is started: rendering and tokenizing need none.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

LLAMA_3 = (
    "{{- bos_token }}{% set ns = namespace(system='') %}"
    "{%- if messages[0]['role'] == 'system' %}{% set ns.system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% endif -%}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday: {{ date_string or strftime_now('%Y') }}\n{{ ns.system }}<|eot_id|>"
    "{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>"
    "{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %}{{ message.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
PARTS = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}{{ messages | tojson }}"
)
QWEN = (
    "{% for message in messages %}{% if loop.index > 4 %}{% break %}{% endif %}<|im_start|>{{ message.role }}\n"
    "{% generation %}{{ message.content }}{% endgeneration %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
TEMPLATES = {"own": None, "llama": LLAMA_3, "mistral": MISTRAL, "parts": PARTS, "qwen": QWEN}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"date_string": "1 May", "unknown": [1]},
    {"bos_token": "<other>", "documents": None, "tools": None},
]
UNUSUAL: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tools": []},
    {"documents": [{"title": "t", "text": "u"}]},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"messages": []},
]

texts = st.one_of(
    st.sampled_from(["", " ", "\n", "x-anthropic-billing-header: a\nb", "x-anthropic-billing-header", "<|im_end|>", "{{ 1 }}"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)  # fmt: skip
plain_messages = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts})
other_messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["tool", "developer", "function"]), "content": texts}),
    st.fixed_dictionaries({"role": st.just("user"), "content": texts, "name": texts}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none()}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": texts, "reasoning": texts}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.just([{"type": "text", "text": "part"}])}),
    st.fixed_dictionaries({"role": st.just("user")}),
    st.fixed_dictionaries({"role": st.sampled_from([7, None, ["user"], {"a": 1}]), "content": texts}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.sampled_from([7, True, ["a"], {"b": 2}])}),
)  # fmt: skip
conversations = st.booleans().flatmap(
    lambda is_plain: st.lists(plain_messages if is_plain else st.one_of(plain_messages, other_messages), max_size=6)
)


def renderer(model: str) -> Any:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config

    return renderer_from_config(EngineArgs(model=model, dtype="float32").create_engine_config())


def params(template: str | None, arguments: dict[str, Any]) -> Any:
    from vllm.renderers import ChatParams

    return ChatParams(template, "auto", {"tokenize": False, "add_generation_prompt": True, **arguments})


def outcome(render: Any, *given: Any) -> Any:
    try:
        return render(*given)
    except Exception as error:  # noqa: BLE001  whatever it is, both must have it
        return type(error), str(error)


def compare_chats(model: str, rounds: int) -> None:
    from worker.engine_chat import PROBED_USE, Chats

    vllm = renderer(model)
    render, rendered_count, short_count = vllm.render_messages, 0, 0
    chats = Chats(vllm)

    def counting(*given: Any) -> Any:
        nonlocal rendered_count
        rendered_count += 1
        return render(*given)

    vllm.render_messages = counting

    def compare(template: str | None, arguments: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        under = params(template, arguments)
        nonlocal short_count
        expected = outcome(render, [dict(one) for one in messages], under)
        before = rendered_count
        got = outcome(chats.get(under).render, [dict(one) for one in messages])
        short_count += rendered_count == before
        assert got == expected, (template, arguments, messages, got, expected)

    for template in TEMPLATES.values():
        for arguments in ARGUMENTS + UNUSUAL:
            compare(template, arguments, [{"role": "user", "content": "first"}])
            for number in range(PROBED_USE):
                compare(template, arguments, [{"role": "user", "content": f"again, {number}"}])
            is_plain = chats.get(params(template, arguments))._short_way.template is not None
            assert is_plain is (arguments not in UNUSUAL), (template, arguments)

    @settings(max_examples=rounds, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @seed(int(os.environ.get("FUZZ_SEED", "1")))
    @example("parts", {}, [{"role": "system", "content": ""}])
    @example("own", {}, [{"role": "system", "content": "x-anthropic-billing-header: a\nb"}])
    @example(
        "llama", {}, [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "user")]
    )
    @given(st.sampled_from(sorted(TEMPLATES)), st.sampled_from(ARGUMENTS * 2 + UNUSUAL), conversations)
    def all_alike(name: str, arguments: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        compare(TEMPLATES[name], arguments, messages)

    all_alike()
    # Comparing vLLM with vLLM would show nothing.
    assert short_count >= rounds // 6, short_count


def compare_refusals(model: str, _rounds: int) -> None:
    """What only vLLM can render, or what is another each time, is left to it."""
    from worker.engine_chat import PROBED_USE, Chats

    vllm = renderer(model)

    def is_plain(template: str | None, arguments: dict[str, Any]) -> bool:
        chat = Chats(vllm).get(params(template, arguments))
        for _ in range(PROBED_USE + 1):
            outcome(chat.render, [{"role": "user", "content": "one"}])
        return chat._short_way.template is not None

    assert is_plain(None, {})
    # Another at every look, so that probes cannot agree.
    assert not is_plain("{{ strftime_now('%f') }}{{ messages[0].content }}", {})
    assert not is_plain("{{ raise_exception('never') }}", {})
    assert not is_plain("{{ messages[0].content", {})
    assert not is_plain(None, {"chat_template": "{{ messages[0].content }}"})

    # Where a model has one for tools, an empty list of them chooses it: here, one that leaves thoughts out.
    named = {
        "default": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "tool_use": "{% for message in messages %}{{ message.content | replace('thought', '') }}{% endfor %}",
    }
    single, vllm.tokenizer.chat_template = vllm.tokenizer.chat_template, named
    chats = Chats(vllm)
    for tools in list[Any](([], None, {})):
        turns = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "thought and two"},
            {"role": "user", "content": "3"},
        ]
        for _ in range(PROBED_USE + 1):
            under = params(None, {"tools": tools})
            assert outcome(chats.get(under).render, turns) == outcome(vllm.render_messages, turns, under), tools
    vllm.tokenizer.chat_template = single

    class Own(type(vllm.tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            return "its own"

    vllm.tokenizer.__class__ = Own
    assert not is_plain(None, {})
    chat = Chats(vllm).get(params(None, {}))
    prompts = [chat.render([{"role": "user", "content": "one"}])[1] for _ in range(PROBED_USE + 1)]
    assert prompts == [{"prompt": "its own"}] * (PROBED_USE + 1), prompts

    class OwnRenderer(type(vllm)):  # type: ignore[misc]
        def render_messages(self, _messages: Any, under: Any) -> Any:
            return [], {"prompt": str(under.tool_choice)}

    vllm.__class__ = OwnRenderer
    chats = Chats(vllm)
    for tool_choice in ("auto", "required", "auto"):
        chat = chats.get(dataclasses.replace(params(None, {}), tool_choice=tool_choice))
        assert chat.render([{"role": "user", "content": "one"}]) == ([], {"prompt": tool_choice})


def compare_texts(model: str, rounds: int) -> None:
    from worker.engine_tokenize import BatchTokenizer

    tokenizer = renderer(model).get_tokenizer()
    batches = BatchTokenizer(tokenizer)
    assert batches._backend is not None

    @settings(max_examples=rounds, deadline=None, database=None)
    @seed(int(os.environ.get("FUZZ_SEED", "1")))
    @given(
        st.lists(st.one_of(texts, st.text(st.characters(exclude_categories=["Cs"]), max_size=2000)), max_size=5),
        st.booleans(),
    )
    def all_alike(given_texts: list[str], add_special_tokens: bool) -> None:
        # As a model's own files leave it, or whoever else has asked.
        tokenizer.backend_tokenizer.enable_truncation(3)
        tokenizer.backend_tokenizer.enable_padding(length=9)
        got = batches.encode(given_texts, add_special_tokens=add_special_tokens)
        expected = tokenizer(given_texts, add_special_tokens=add_special_tokens)["input_ids"] if given_texts else []
        assert got == expected, (given_texts, add_special_tokens)

    all_alike()

    tokenizer.split_special_tokens = True
    got = batches.encode([f"a{tokenizer.eos_token or tokenizer.sep_token}b"], add_special_tokens=False)
    split = tokenizer(
        [f"a{tokenizer.eos_token or tokenizer.sep_token}b"], add_special_tokens=False, split_special_tokens=True
    )
    assert got == split["input_ids"]

    class Own(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, given: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [[7]] * len(given)}

    tokenizer.__class__ = Own
    assert BatchTokenizer(tokenizer).encode(["a", "b"], add_special_tokens=False) == [[7], [7]]


if __name__ == "__main__":
    comparisons = {"chats": compare_chats, "refusals": compare_refusals, "texts": compare_texts}
    for name in sys.argv[3:]:
        comparisons[name](sys.argv[2], int(sys.argv[1]))
