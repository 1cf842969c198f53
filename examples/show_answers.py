"""Show some prompts and answers of a local run as a table, and what the run came to.

python examples/show_answers.py runs/demo [--rows 12]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=12)
    options = parser.parse_args()
    plan = orjson.loads((options.run / "run.json").read_bytes())
    if plan["shape"] != "plain":
        parser.error(f"{options.run} is a run of shape {plan['shape']!r}: this shows plain records")
    outputs = sorted((options.run / "outputs").glob("*.jsonl"))
    if not outputs:
        parser.error(f"{options.run} has no outputs")
    rows = [orjson.loads(line) for path in outputs for line in path.read_bytes().split(b"\n") if line]
    table = Table(
        "prompt", "answer", "finish", "tokens", title=f"the first {min(options.rows, len(rows))} of {len(rows)} records"
    )
    for row in rows[: options.rows]:
        table.add_row(*cells(row, plan["answer_key"]))
    console = Console()
    console.print(table)
    for line in totals(options.run):
        console.print(line, highlight=False)


def cells(row: dict[str, Any], answer_key: str) -> tuple[str, str, str, str]:
    prompt = row["messages"][-1]["content"] if "messages" in row else str(row.get("prompt"))
    response = row[answer_key]
    if "error" in response:
        return prompt, response["error"]["message"], "error", ""
    choice = response["choices"][0]
    answer = choice["message"]["content"] if "message" in choice else choice["text"]
    return prompt, answer.strip(), choice["finish_reason"], str(response["usage"]["completion_tokens"])


def totals(run: Path) -> list[str]:
    manifests = [orjson.loads(path.read_bytes()) for path in sorted((run / "manifests").glob("*.json"))]
    ok, errors = (sum(manifest[name] for manifest in manifests) for name in ("ok_count", "error_count"))
    tokens = sum(manifest["tokens"]["completion_tokens"] for manifest in manifests)
    seconds = sum(manifest["times"]["generate_s"] for manifest in manifests if manifest["times"])
    return [
        f"{ok} answered, {errors} errors, {len(manifests)} partitions",
        f"{tokens:,} output tokens in {seconds:.1f} s of generating"
        + (f": {tokens / seconds:,.0f} tokens/s" if seconds else ""),
        f"outputs: {run / 'outputs'}",
    ]


if __name__ == "__main__":
    main()
