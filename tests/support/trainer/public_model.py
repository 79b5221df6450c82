"""A public model as transformers saves it: a small random LlamaForCausalLM, and a tokenizer that was trained on made-up text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from factory.ingest.tokenizer import train_tokenizer

CARD = "---\nlicense: apache-2.0\nlanguage: en\n---\n# A small model\n"
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


def save_public_model(
    folder: Path, texts: list[str], dtype: torch.dtype = torch.float32, vocab_size: int = 512, **changes: Any
) -> Any:
    """Save a model with tokenizer and card into ``folder``, and return it. ``changes``: other keys of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = train_tokenizer(iter(texts), vocab_size, folder)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=max(vocab_size, tokenizer.vocab_size), **SIZES | changes)).to(dtype)
    model.save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("Apache License\nVersion 2.0, January 2004\n")
    return model
