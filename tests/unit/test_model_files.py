"""Of weights that a repository holds several times, those come that vLLM loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.contract.errors import InputError
from worker.model_files import adapter_files, needed_files, path_in

SMALL = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "modeling.py",
}
SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"}
PICKLED = {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"}
OTHERS = {
    ".gitattributes",
    "README.md",
    "figures/speed.png",
    "flax_model.msgpack",
    "model.gguf",
    "onnx/model.onnx",
    "openvino/openvino_model.bin",
    "optimizer.pt",
    "original/consolidated.00.pth",
    "original/params.json",
    "tf_model.h5",
    "training_args.bin",
}


def test_pickled_weights_beside_safetensors_and_files_of_other_engines_stay_away() -> None:
    assert needed_files(SMALL | SHARDS | PICKLED | OTHERS) == SMALL | SHARDS


def test_pickled_weights_come_where_there_are_no_others() -> None:
    assert needed_files(SMALL | PICKLED | OTHERS) == SMALL | PICKLED
    assert needed_files(SMALL | {"model.pt", "optimizer.pt"}) == SMALL | {"model.pt"}


def test_mistrals_own_format_goes_before_the_other_as_in_vllm() -> None:
    consolidated = {"consolidated.safetensors", "params.json"}

    assert needed_files(SMALL | SHARDS | consolidated) == SMALL | consolidated | {"model.safetensors.index.json"}
    assert needed_files(SMALL | SHARDS | consolidated, "mistral") >= consolidated
    assert needed_files(SMALL | SHARDS | PICKLED, "npcache") >= PICKLED


def test_each_folder_has_weights_of_its_own() -> None:
    dense = {"2_Dense/config.json", "2_Dense/pytorch_model.bin"}

    assert needed_files(SMALL | SHARDS | dense) == SMALL | SHARDS | dense


def test_a_format_that_has_files_of_its_own_gets_them_all() -> None:
    own = {"model-rank-0-part-0.safetensors", "pytorch_model.bin", "tensors.special"}

    assert needed_files(SMALL | own | OTHERS, "sharded_state") == SMALL | own


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_of_an_adapter_come_its_configuration_and_the_weights_that_are_loaded(weights: str) -> None:
    beside = {"adapter_config.json", "README.md", "checkpoint-10/adapter_model.safetensors", "optimizer.pt"}

    assert adapter_files({weights, "adapter_model.pt"} | beside) == {"adapter_config.json", weights}


def test_nothing_is_written_outside_of_the_folder_whatever_a_name_says(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)

    assert path_in(folder, "deeper/x.json") == folder / "deeper" / "x.json"
    for name in ("/etc/x.json", "../x.json", f"{folder}-2/x.json", "link/x.json"):
        with pytest.raises(InputError, match="it would lie elsewhere"):
            path_in(folder, name)
