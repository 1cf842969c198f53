"""`submit doctor`: whether the model is where workers will look for it, as far as that can be told from here."""

from __future__ import annotations

from pathlib import Path

from submitter.doctor_check import Check, Report
from submitter.model_source import find_pins, no_folder
from worker.contract.model_place import MODEL_CONFIGS, is_on_s3, is_path, list_objects, local_path, missing_file
from worker.contract.store import open_store

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_PICKLED = (".bin", ".pt")
_GIB = 1 << 30


def check_model(model: str, revision: str | None, report: Report) -> None:
    """An S3 prefix is listed, a hub asked, and of a path is said what can be said.

    Raises:
        ArrayError: what `submit run` would say.
    """
    if is_on_s3(model):
        objects = list_objects(open_store(model), model, "model")
        report(_files_check(model, {name: found.size_bytes for name, found in objects.items()}))
    elif not is_path(model):
        pin = find_pins(model, revision, {}, {}).model
        report(Check(name="model", status="ok", found=f"{model} at {pin} is on the hub, and may be read from here"))
    elif local_path(model).is_dir():
        report(_files_check(model, _sizes_in(local_path(model))))
    else:
        problem = no_folder(model)
        report(Check(name="model", status="failed", found=problem.message, advice=problem.hint))


def _sizes_in(folder: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in folder.iterdir() if entry.is_file()}


def _files_check(model: str, sizes: dict[str, int]) -> Check:
    if missing_file("model", sizes):
        what = f"{model} has none of {', '.join(MODEL_CONFIGS)}"
        advice = "put the model's files there, or correct --model"
        return Check(name="model", status="failed", found=what, advice=advice)
    weights = {name: size for name, size in sizes.items() if name.endswith(_WEIGHTS)}
    if not weights:
        advice = "put its .safetensors files there"
        return Check(name="model", status="failed", found=f"{model} has no weights", advice=advice)
    files = "1 file" if len(weights) == 1 else f"{len(weights)} files"
    what = f"{model}: {files} of weights, {sum(weights.values()) / _GIB:,.1f} GiB"
    if all(name.endswith(_PICKLED) for name in weights):
        return Check(name="model", status="warning", found=f"{what}, pickled", advice="prefer .safetensors")
    return Check(name="model", status="ok", found=what)
