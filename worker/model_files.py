"""Which of the files that lie beside a model an engine reads: repositories often hold the same weights several times."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from worker.contract.errors import InputError
from worker.contract.model_place import ADAPTER_CONFIG, ADAPTER_WEIGHTS

WEIGHT_PATTERNS = {
    "auto": ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt"),
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "runai_streamer": ("*.safetensors",),
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
}
"""By vLLM's `load_format`: the first pattern that any file fits is the one that is loaded. Other formats have files of
their own: they get all there is."""

_OTHER_ENGINES = ("*.gguf", "*.h5", "*.msgpack", "*.mlmodel", "*.onnx", "*.onnx_data", "*.ot", "*.pth", "*.tflite")
_OTHER_FOLDERS = frozenset({"coreml", "metal", "onnx", "openvino", "original"})
_OF_TRAINING = frozenset({"optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "training_args.bin"})
_FOR_PEOPLE = ("*.gif", "*.jpeg", "*.jpg", "*.md", "*.mp4", "*.pdf", "*.png", "*.svg", "*.webp")


def needed_files(names: Iterable[str], load_format: str = "auto") -> set[str]:
    """Of a model's files, given by their paths in its folder, those that an engine may read."""
    kept = {name for name in names if not _is_of_others(PurePosixPath(name))}
    patterns = WEIGHT_PATTERNS.get(load_format)
    if patterns is None:
        return kept
    every_weight = {pattern for one in WEIGHT_PATTERNS.values() for pattern in one}
    by_folder: dict[PurePosixPath, set[str]] = {}
    for name in kept:
        if _fits(name, every_weight):
            by_folder.setdefault(PurePosixPath(name).parent, set()).add(name)
    weights = {name for found in by_folder.values() for name in _loaded(found, patterns)}
    return kept.difference(*by_folder.values()) | weights


def adapter_files(names: Collection[str]) -> set[str]:
    """The same of an adapter's files, among them one of each kind."""
    weights = next((name for name in ADAPTER_WEIGHTS if name in names), None)
    return {ADAPTER_CONFIG} | ({weights} if weights else set())


def path_in(folder: Path, name: str) -> Path:
    """Where a file of this name is to be written.

    Raises:
        InputError: that is not in the folder.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"write {name!r} to {folder}: it would lie elsewhere")
    return path


def _is_of_others(path: PurePosixPath) -> bool:
    if any(part.startswith(".") for part in path.parts) or not _OTHER_FOLDERS.isdisjoint(path.parts[:-1]):
        return True
    return path.name in _OF_TRAINING or _fits(path.name, (*_OTHER_ENGINES, *_FOR_PEOPLE))


def _loaded(names: set[str], patterns: Iterable[str]) -> set[str]:
    return next(
        (found for pattern in patterns if (found := {name for name in names if _fits(name, (pattern,))})), set()
    )


def _fits(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in patterns)
