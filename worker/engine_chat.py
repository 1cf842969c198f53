"""Chat templates, rendered as vLLM renders them, in a sixth of the time for the conversations that most records hold.

vLLM looks up anew for every conversation which template is meant, which variables it takes and what kind of content it
wants, though all of these hang on the request's parameters alone. Here they are asked of vLLM once for a set of
parameters. From then on a conversation of plain texts goes straight to the compiled template, provided that it has made
of some probes just what vLLM made of them. Any other conversation, and any that the template refuses, is vLLM's.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Template
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template
from vllm.renderers import BaseRenderer, ChatParams
from vllm.renderers.hf import (
    HfRenderer,
    resolve_chat_template,
    resolve_chat_template_content_format,
    resolve_chat_template_kwargs,
)

from worker.engine_tokenize import definers
from worker.remembered import MAX_REMEMBERED_COUNT, Remembered

Messages = Sequence[dict[str, Any]]

PROBED_USE = 8
"""Which conversation makes the probes worth their time (measured: 6 to 12): records may have parameters of their own."""

_PLAIN_KEYS = {"role", "content"}
_PLAIN_ROLES = ("system", "user", "assistant")
_REWRITTEN_PREFIX = "x-anthropic-billing-header"
"""vLLM takes this line away from where a system message begins."""
_PROBES: tuple[Messages, ...] = (
    [{"role": "user", "content": " One\ntwo "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": ""},
    ],
)
_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""What a tokenizer keeps for itself; all else is the template's."""
_UNUSUAL = ("tools", "documents", "tokenize", "continue_final_message", "return_assistant_tokens_mask")


class Chats:
    """Renders conversations for one engine."""

    def __init__(self, renderer: BaseRenderer[Any]) -> None:
        self._renderer = renderer
        self._known: Remembered[_ShortWay] = Remembered()

    def get(self, params: ChatParams) -> Chat:
        """What renders under these parameters.

        Raises:
            RecordError: they are nested too deeply to be told apart.
        """
        # What else stands in them is for renderers that have no template, and no short way.
        given = {"template": params.chat_template, "arguments": params.chat_template_kwargs}
        return Chat(self._renderer, params, self._known.get(params.chat_template_content_format, given, _ShortWay))


@dataclass(slots=True)
class _ShortWay:
    """Shared by all parameters that mean the same to a template."""

    use_count: int = 0
    template: _PlainTemplate | None = None


class Chat:
    """Renders conversations under one set of parameters."""

    def __init__(self, renderer: BaseRenderer[Any], params: ChatParams, short_way: _ShortWay) -> None:
        self._renderer = renderer
        self._params = params
        self._short_way = short_way

    def render(self, messages: Messages) -> tuple[Sequence[Any], Any]:
        """The conversation as the template sees it, and the prompt: vLLM's `DictPrompt`.

        Raises:
            Exception: whatever vLLM and the template raise.
        """
        short_way = self._short_way
        short_way.use_count += 1
        if short_way.use_count == PROBED_USE:
            short_way.template = _plain_template(self._renderer, self._params)
        if short_way.template is not None and messages and all(map(_is_plain, messages)):
            try:
                conversation = short_way.template.conversation(messages)
                return conversation, {"prompt": short_way.template.render(conversation)}
            except Exception:  # noqa: BLE001, S110  vLLM meets it again below, and has words for it
                pass
        found: tuple[Sequence[Any], Any] = self._renderer.render_messages(list(messages), self._params)
        return found


class _PlainTemplate:
    """A compiled template and all of its variables but the messages."""

    def __init__(self, renderer: HfRenderer, params: ChatParams) -> None:
        """Ask vLLM what it renders with.

        Raises:
            LookupError: there is no template.
            Exception: whatever else vLLM and Jinja raise.
        """
        tokenizer = renderer.get_tokenizer()
        config = renderer.model_config
        given = {name: value for name, value in params.chat_template_kwargs.items() if name not in _UNUSUAL}
        source = resolve_chat_template(tokenizer, params.chat_template, None, model_config=config)
        if source is None:
            raise LookupError
        variables = resolve_chat_template_kwargs(tokenizer, source, given)
        self._variables = {
            **tokenizer.special_tokens_map,
            **{name: value for name, value in variables.items() if name not in _ARGUMENTS},
            "tools": None,
            "documents": params.chat_template_kwargs.get("documents"),
            "add_generation_prompt": variables.get("add_generation_prompt", False),
        }
        self._template = _compiled(source)
        self._wants_parts = (
            resolve_chat_template_content_format(
                params.chat_template, None, params.chat_template_content_format, tokenizer, model_config=config
            )
            == "openai"
        )

    def conversation(self, messages: Messages) -> list[dict[str, Any]]:
        return [
            {
                "role": message["role"],
                "content": [{"type": "text", "text": message["content"]}] if self._wants_parts else message["content"],
            }
            for message in messages
        ]

    def render(self, conversation: Messages) -> str:
        return self._template.render(messages=conversation, **self._variables)


@lru_cache(maxsize=MAX_REMEMBERED_COUNT)
def _compiled(source: str) -> Template:
    template: Template = _compile_jinja_template(source).environment.from_string(source)
    # It is a chain of mappings, which every rendering would go through name by name.
    template.globals = dict(template.globals)
    return template


def _plain_template(renderer: BaseRenderer[Any], params: ChatParams) -> _PlainTemplate | None:
    if (
        not isinstance(renderer, HfRenderer)
        or type(renderer).render_messages is not HfRenderer.render_messages
        or renderer.model_config.enable_prompt_embeds
        or definers(renderer.get_tokenizer(), "apply_chat_template") != [PreTrainedTokenizerBase]
        or any(params.chat_template_kwargs.get(name) for name in _UNUSUAL)
        # An empty list of tools, too, chooses another of a model's templates.
        or params.chat_template_kwargs.get("tools") is not None
    ):
        return None
    try:
        template = _PlainTemplate(renderer, params)
    except Exception:  # noqa: BLE001  vLLM says it to each record
        return None
    found = {_agrees(renderer, params, template, probe) for probe in _PROBES}
    return template if True in found and False not in found else None


def _agrees(renderer: HfRenderer, params: ChatParams, template: _PlainTemplate, probe: Messages) -> bool | None:
    """Whether vLLM makes the same of it; None if the template refuses it."""
    conversation = template.conversation(probe)
    try:
        rendered = template.render(conversation)
    except Exception:  # noqa: BLE001  templates are programs; what this one refuses goes to vLLM
        return None
    try:
        return bool(renderer.render_messages(list(probe), params) == (conversation, {"prompt": rendered}))
    except Exception:  # noqa: BLE001  vLLM refuses what this would have let pass
        return False


def _is_plain(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return (
        message.keys() == _PLAIN_KEYS
        and isinstance(content, str)
        and message["role"] in _PLAIN_ROLES
        and not (message["role"] == "system" and content.startswith(_REWRITTEN_PREFIX))
    )
