"""Answer the examples on this machine, and merge each run's answers into a file of a folder.

    python examples/record_answers.py FOLDER --model models/smollm2-135m-instruct --embedder PATH

What `examples/answers` holds was written by this. URIs of inputs are shortened to what follows this repository's folder.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUBMIT = Path(sys.executable).parent / "submit"
MODEL = "SmolLM2-135M-Instruct"
EMBEDDER = "all-MiniLM-L6-v2"
PARALLEL_COUNT = 2
"""Loading an engine keeps one core busy."""


@dataclass(frozen=True, slots=True)
class Example:
    """A run over some of the examples."""

    inputs: tuple[str, ...]
    options: tuple[str, ...] = ()
    embeds: bool = False


EXAMPLES = {
    "openai": Example(("openai.jsonl",)),
    "bedrock": Example(("bedrock.jsonl",)),
    "plain": Example(
        ("prompts.jsonl", "rows.csv"),
        ("--sampling", "max_tokens=12", "--sampling", "temperature=0", "--max-output-tokens", "16"),
    ),
    "template": Example(
        ("rows.jsonl",),
        (
            *(
                "--template",
                "examples/template.jinja",
                "--system",
                "You are terse.",
                "--select",
                "id",
                "--select",
                "stars",
            ),
            *("--sampling", "max_tokens=12", "--sampling", "temperature=0"),
        ),
    ),
    # Each of these files calls one of its records "cut".
    "pooling": Example(("embeddings.jsonl", "score.jsonl", "rerank.jsonl"), ("--on-duplicate-id", "keep"), embeds=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="what generates text")
    parser.add_argument("--embedder", required=True, help="what embeds it")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as runs, ThreadPoolExecutor(PARALLEL_COUNT) as executor:

        def record(name: str) -> None:
            example = EXAMPLES[name]
            model = options.embedder if example.embeds else options.model
            answer(example, model, Path(runs, name), folder / f"{name}.jsonl")

        list(executor.map(record, EXAMPLES))
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes().replace(f"{ROOT}/".encode(), b""))


def answer(example: Example, model: str, run: Path, output: Path) -> None:
    inputs = [f"examples/{name}" for name in example.inputs]
    # The models' names, wherever they lie.
    engine_args = {
        "served_model_name": EMBEDDER if example.embeds else MODEL,
        "dtype": "float32",
        "enforce_eager": "true",
    }
    if not example.embeds:
        engine_args["max_model_len"] = "512"
    engine_options = [word for pair in engine_args.items() for word in ("--engine-arg", "=".join(pair))]
    place = ("--run", str(run), "--model", model, "--partitions", "1", "--local")
    submit("run", *inputs, *place, *engine_options, *example.options)
    submit("merge", str(run), "-o", str(output), "--overwrite")


def submit(*arguments: str) -> None:
    done = subprocess.run([str(SUBMIT), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"submit {arguments[0]}: exit {done.returncode}\n{done.stderr}")


if __name__ == "__main__":
    main()
