"""Models for tests, built on the spot: no hub is asked for anything.

`tiny_llama` is a random Llama of 1 MB. Its text means nothing, but everything else about it is real: a byte-level
tokenizer with BOS and EOS, a chat template, stop strings that occur, and answers that end by themselves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 1024
VOCAB_SIZE = 1024

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


def default_cache() -> Path:
    """Kept between test runs, and shared by processes that run at once."""
    return Path(tempfile.gettempdir()) / f"llm-array-models-{os.getuid()}"


def tiny_llama(cache: Path | None = None) -> Path:
    """The folder of the tiny model, built if it is not there. Safe to call from several processes at once."""
    folder = (cache or default_cache()) / f"tiny-llama-{_VERSION}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _save_tiny_llama(scratch)
        # Whoever renames second finds a full folder in place, which rename refuses: theirs is as good as ours.
        scratch.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _save_tiny_llama(folder: Path) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
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


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
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
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=_CHAT_TEMPLATE
    )
