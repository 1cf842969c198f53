"""OpenAI chat bodies, as Bedrock's two kinds of messages (Anthropic's and Converse's) are translated into them.

What OpenAI's form has no place for:

- A tool's result that says it is an error begins with `Error: `.
- Results stand in messages of their own, before and behind the text that they stood between.
- Text and tool calls of one message: the text comes first.
- A last message of the assistant's is gone on with, as Claude does: the answer holds what is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from worker.bedrock_fields import invalid
from worker.contract.record_errors import RecordError

ROLES = ("user", "assistant", "system")
ERROR_PREFIX = "Error: "

Part = dict[str, Any]


@dataclass(slots=True)
class Turn:
    """One message of the user's own, on its way into one or more of OpenAI's."""

    role: str
    at: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    _parts: list[Part] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)

    def expect(self, at: str, kind: str, role: str) -> None:
        """Raise RecordError if a kind of block is another role's."""
        if self.role != role:
            raise invalid(at, f"{kind} in a message of role {self.role!r} (expected it in one of role {role!r} only)")

    def add(self, part: Part) -> None:
        self._parts.append(part)

    def add_thought(self, text: str) -> None:
        self._thoughts.append(text)

    def add_call(self, call_id: str, name: str, arguments: bytes) -> None:
        function = {"name": name, "arguments": arguments.decode()}
        self._calls.append({"id": call_id, "type": "function", "function": function})

    def add_result(self, call_id: str, parts: list[Part], *, is_error: bool) -> None:
        self._flush()
        if is_error:
            parts = _marked_as_error(parts)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content_of(parts)})

    def finish(self) -> list[dict[str, Any]]:
        self._flush()
        # Nothing but redacted thoughts, say: the turns of the others must not run together.
        return self.messages or [{"role": self.role, "content": ""}]

    def _flush(self) -> None:
        if not (self._parts or self._calls or self._thoughts):
            return
        message: dict[str, Any] = {"role": self.role, "content": content_of(self._parts) if self._parts else None}
        if self._thoughts:
            message["reasoning"] = "\n".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        self.messages.append(message)
        self._parts, self._calls, self._thoughts = [], [], []


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def content_of(parts: list[Part]) -> str | list[Part]:
    """One text stands for itself; how several go together is the chat template's to say."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _marked_as_error(parts: list[Part]) -> list[Part]:
    if parts and parts[0]["type"] == "text":
        return [text_part(ERROR_PREFIX + parts[0]["text"]), *parts[1:]]
    return [text_part(ERROR_PREFIX.strip()), *parts]


def json_bytes(value: Any, at: str) -> bytes:
    """JSON within JSON: a tool call's arguments, a tool's result.

    Raises:
        RecordError: it is nested too deeply, or holds what JSON in UTF-8 cannot.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise invalid(at, "nested too deeply, or not JSON in UTF-8") from error


def tool(name: str, description: str | None, parameters: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description is not None:
        function["description"] = description
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def named_tool(name: str, tools: list[dict[str, Any]], at: str) -> dict[str, Any]:
    """The choice of one tool.

    Raises:
        RecordError: it is none of the request's.
    """
    if all(each["function"]["name"] != name for each in tools):
        raise invalid(at, "no tool of that name (expected one of the request's tools)")
    return {"type": "function", "function": {"name": name}}


def refuse_doubled_names(tools: list[dict[str, Any]], at: str) -> None:
    names = [each["function"]["name"] for each in tools]
    if len(set(names)) < len(names):
        raise invalid(at, "two tools of one name (expected names that differ)")


def prefill(messages: list[dict[str, Any]], at: str) -> dict[str, Any]:
    """The parameters that make the model go on with a last message of the assistant's, if there is one.

    Raises:
        RecordError: that message has nothing to go on with.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    if "tool_calls" in last:
        raise invalid(at, "the last message calls tools (expected their results behind it)")
    if not last["content"]:
        raise invalid(at, "the last message is the assistant's and has no text (expected text to go on with)")
    return {"continue_final_message": True, "add_generation_prompt": False}


def unsupported_block(at: str, kind: str, served: str) -> RecordError:
    return invalid(at, f"blocks of type {kind[:40]!r} are not supported (expected {served})", "unsupported_content")
