"""What a Converse body asks beside its messages: tools, and the form of the answer."""

from __future__ import annotations

from typing import Any

import orjson

from worker.bedrock_chat import named_tool, refuse_doubled_names, tool
from worker.bedrock_fields import Fields, invalid


def converse_tools(model_input: Fields) -> dict[str, Any]:
    """The OpenAI parameters that `toolConfig` stands for.

    Raises:
        RecordError: names what cannot be read or served.
    """
    if "toolConfig" not in model_input:
        return {}
    config = model_input.fields("toolConfig")
    config.check_names(("tools", "toolChoice"))
    tools = [made for found in config.objects("tools", "tool") if (made := _tool(found)) is not None]
    refuse_doubled_names(tools, config.path("tools"))
    if not tools:
        raise invalid(config.path("tools"), "no toolSpec among them (expected 1 or more)")
    asked: Any = "auto"
    if "toolChoice" in config:
        choice = config.fields("toolChoice")
        kind = choice.kind(("auto", "any", "tool"))
        named = choice.fields(kind)
        named.check_names(("name",) if kind == "tool" else ())
        asked = {"auto": "auto", "any": "required"}.get(kind)
        if asked is None:
            asked = named_tool(named.name("name"), tools, named.path("name"))
    return {"tools": tools, "tool_choice": asked}


def _tool(found: Fields) -> dict[str, Any] | None:
    kind = found.kind(("toolSpec", "systemTool", "cachePoint"))
    if kind == "cachePoint":
        return None
    if kind == "systemTool":
        raise invalid(
            found.path(kind), "tools of Bedrock's own are not supported (expected toolSpec)", "unsupported_parameter"
        )
    spec = found.fields("toolSpec")
    spec.check_names(("name", "description", "inputSchema", "strict"))
    description = spec.text("description") if "description" in spec else None
    schema = spec.fields("inputSchema")
    schema.kind(("json",))
    return tool(spec.name("name"), description, schema.object("json"), strict=spec.flag("strict"))


def converse_output(model_input: Fields) -> dict[str, Any]:
    """The OpenAI parameters that `outputConfig` stands for.

    Raises:
        RecordError: names what cannot be read or served.
    """
    if "outputConfig" not in model_input:
        return {}
    config = model_input.fields("outputConfig")
    config.check_names(("textFormat", "effort"))
    found: dict[str, Any] = {}
    if "effort" in config:
        found["reasoning_effort"] = config.one_of("effort", ("low", "medium", "high", "xhigh", "max"))
    if "textFormat" in config:
        form = config.fields("textFormat")
        form.check_names(("type", "structure"))
        form.one_of("type", ("json_schema",))
        structure = form.fields("structure")
        structure.kind(("jsonSchema",))
        found["response_format"] = {
            "type": "json_schema",
            "json_schema": _schema(
                structure.fields(
                    "jsonSchema",
                )
            ),
        }
    return found


def _schema(given: Fields) -> dict[str, Any]:
    """A schema is JSON within a string there."""
    given.check_names(("schema", "name", "description"))
    at = given.path("schema")
    try:
        schema = orjson.loads(given.text("schema"))
    except orjson.JSONDecodeError as error:
        raise invalid(at, f"not JSON ({error.msg})") from error
    if not isinstance(schema, dict):
        raise invalid(at, "JSON of the wrong type (expected an object)")
    named = {name: given.text(name) for name in ("name", "description") if name in given}
    return {"name": "output", "schema": schema} | named
