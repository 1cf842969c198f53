"""The CloudFormation template, put together from its source, the job definitions and the boothook.

One source each: a job definition is what is in job_definitions/, and the script that a host runs is the file that is tested. Needs PyYAML
and nothing of this project, so that a stack can be made where no engine is installed.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "infra" / "llm-array.yaml"
JOB_DEFINITIONS = ROOT / "job_definitions"
OUTPUT = ROOT / "build" / "llm-array.template.json"

MAX_TEMPLATE_BYTES = 51_200
"""What CloudFormation takes without a bucket to upload the template to."""

NAME_PREFIX = "llm-array-"
"""Of job definitions. In a stack its name takes this place, so that two stacks may stand side by side."""

CHECKPOINT_TAG = "llm-array=checkpoint"
"""What the bucket's lifecycle rule and the job role's permission name; the worker reads it from this variable."""
CHECKPOINT_TAG_VARIABLE = "LLM_ARRAY_CHECKPOINT_TAG"

_PLACEHOLDER = re.compile(r"\$\{([A-Z_]+)\}")
_PLACEHOLDERS = {
    "IMAGE": "${Repository.RepositoryUri}:${ImageTag}",
    "JOB_ROLE_ARN": "${JobRole.Arn}",
    "AWS_REGION": "${AWS::Region}",
}
_MAPS = {"options", "parameters", "tags"}
"""Fields whose keys are the user's own."""
_BOUNDARY = "==LLM-ARRAY=="


def render() -> dict[str, Any]:
    """The whole template, as CloudFormation takes it."""
    template: dict[str, Any] = yaml.load(SOURCE.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506  a SafeLoader
    for path in sorted(JOB_DEFINITIONS.glob("*.json")):
        template["Resources"][_logical_id(path.stem)] = job_definition(json.loads(path.read_text(encoding="utf-8")))
    return template


def job_definition(definition: dict[str, Any]) -> dict[str, Any]:
    """A RegisterJobDefinition request as a resource, with what the stack adds: its log, its secret and its tag for checkpoints."""
    properties: dict[str, Any] = _capitalised(definition)
    properties["JobDefinitionName"] = {
        "Fn::Sub": "${AWS::StackName}-" + definition["jobDefinitionName"].removeprefix(NAME_PREFIX)
    }
    container = properties["ContainerProperties"]
    container["LogConfiguration"]["Options"]["awslogs-group"] = {"Ref": "LogGroup"}
    container["Environment"].append({"Name": CHECKPOINT_TAG_VARIABLE, "Value": CHECKPOINT_TAG})
    container["ExecutionRoleArn"] = _with_token({"Fn::GetAtt": ["ExecutionRole", "Arn"]})
    container["Secrets"] = _with_token([{"Name": "HF_TOKEN", "ValueFrom": {"Ref": "HfTokenSecretArn"}}])
    # A submission that names a revision outlives an update of the stack.
    properties["ResourceRetentionPolicy"] = {"SkipDeregisterOnUpdate": True}
    return {"Type": "AWS::Batch::JobDefinition", "Properties": properties}


def to_bytes(template: dict[str, Any]) -> bytes:
    """The template as small as it gets.

    Raises:
        ValueError: it is too large for CloudFormation to take inline.
    """
    content = json.dumps(template, separators=(",", ":"), ensure_ascii=False).encode()
    if len(content) > MAX_TEMPLATE_BYTES:
        raise ValueError(
            f"render template: too large (expected at most {MAX_TEMPLATE_BYTES} bytes, got {len(content)})"
        )
    return content


class _Loader(yaml.SafeLoader):
    """YAML with CloudFormation's short forms and our own tags."""


def _intrinsic(loader: _Loader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    value = _plain(loader, node)
    if suffix in ("Ref", "Condition"):
        return {suffix: value}
    if suffix == "GetAtt":
        value = value.split(".", 1)
    return {f"Fn::{suffix}": value}


def _plain(loader: _Loader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    assert isinstance(node, yaml.MappingNode)
    return loader.construct_mapping(node, deep=True)


def _document(loader: _Loader, node: yaml.Node) -> Any:
    text = json.dumps(_plain(loader, node), separators=(",", ":"))
    return {"Fn::Sub": text} if "${" in text else text


def _file(loader: _Loader, node: yaml.Node) -> str:
    path: Path = SOURCE.parent / _plain(loader, node)
    return path.read_text(encoding="utf-8")


def _mime(loader: _Loader, node: yaml.Node) -> str:
    """User data in parts, the one form that AWS Batch takes."""
    parts = [
        f'--{_BOUNDARY}\nContent-Type: {part["type"]}; charset="us-ascii"\nMIME-Version: 1.0\n\n{part["content"]}\n'
        for part in _plain(loader, node)
    ]
    head = f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{_BOUNDARY}"\n\n'
    return f"{head}{''.join(parts)}--{_BOUNDARY}--\n"


_Loader.add_multi_constructor("!", _intrinsic)
_Loader.add_constructor("!Json", _document)
_Loader.add_constructor("!File", _file)
_Loader.add_constructor("!Mime", _mime)


def _logical_id(stem: str) -> str:
    return "JobDefinition" + "".join(word.capitalize() for word in stem.split("-"))


def _with_token(value: Any) -> dict[str, Any]:
    return {"Fn::If": ["WithToken", value, {"Ref": "AWS::NoValue"}]}


def _capitalised(found: Any) -> Any:
    if isinstance(found, dict):
        return {
            key[0].upper() + key[1:]: {name: _capitalised(text) for name, text in value.items()}
            if key in _MAPS
            else _capitalised(value)
            for key, value in found.items()
        }
    if isinstance(found, list):
        return [_capitalised(entry) for entry in found]
    return _filled(found) if isinstance(found, str) else found


def _filled(text: str) -> Any:
    filled = _PLACEHOLDER.sub(lambda match: _PLACEHOLDERS[match[1]], text)
    return text if filled == text else {"Fn::Sub": filled}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the CloudFormation template.")
    parser.add_argument("output", type=Path, nargs="?", default=OUTPUT)
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(to_bytes(render()))


if __name__ == "__main__":
    main()
