"""Small models of transformers' classes with random weights, at least two of each family: together they switch on each fact that the family has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from models.adapters import FAMILIES

CONTEXT = 80  # of every case: longer than each window, and room for a prompt and 64 tokens
WINDOW = 9
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,  # greedy decoding must not end, and no token of it may be held back
    "pad_token_id": None,  # its embedding would get no gradient in transformers
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
WHOLE_HEADS = {"head_dim": 8}  # hidden_size / num_attention_heads


@dataclass(frozen=True)
class Case:
    """A small model. ``keys``: of its config.json, where they differ from ``SIZES``."""

    family: str
    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"

    @property
    def multi_token_layers(self) -> int:
        """How many layers for multi-token prediction are added to the files that transformers writes of the model (``multi_token``)."""
        return int(self.keys.get("num_nextn_predict_layers", 0))

    def make_config(self) -> Any:
        """The config of transformers."""
        from transformers import AutoConfig

        keys = {
            key: dict(value) if isinstance(value, dict) else value for key, value in (SIZES | dict(self.keys)).items()
        }
        return AutoConfig.for_model(self.family, **keys)

    def make_model(self, seed: int = 0) -> Any:
        """A model of transformers in fp32, in evaluation. No weight, bias or norm has the value that it has at initialisation."""
        import transformers

        config = self.make_config()
        config._attn_implementation = "eager"
        model = getattr(transformers, FAMILIES[self.family].class_name)(config)
        return randomise_weights(model, seed)


def randomise_weights(model: Any, seed: int = 0) -> Any:
    """Give a model of transformers random weights, for evaluation. No weight, bias or norm has the value that it has at initialisation."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
            elif "inv_freq" in name or "embed_scale" in name:
                continue
            elif "norm" in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
            elif tensor.ndim == 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
    return model.eval()


CASES = [
    Case("llama", "tied", {"tie_word_embeddings": True, "rope_theta": 5e5}),
    Case("llama", "scaled", {"rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    Case("llama", "linear", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    Case("llama", "dynamic", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    Case(
        "qwen2",
        "windows",
        WHOLE_HEADS
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    Case("qwen2", "yarn", WHOLE_HEADS | {"rope_scaling": YARN, "rope_theta": 1e6}),
    Case("qwen3", "plain", {"rope_theta": 1e6, "tie_word_embeddings": True}),
    Case(
        "qwen3",
        "windows",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
            "attention_bias": True,
            "rope_scaling": YARN,
        },
    ),
    Case(
        "qwen3_moe",
        "plain",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    Case(
        "qwen3_moe",
        "windows",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Case("smollm3", "plain", {"no_rope_layer_interval": 2}),
    Case(
        "smollm3",
        "windows",
        {
            "no_rope_layer_interval": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_scaling": YARN,
        },
    ),
    Case("olmo2", "plain", WHOLE_HEADS | {"rope_theta": 5e5}),
    Case("olmo2", "tied", WHOLE_HEADS | {"tie_word_embeddings": True, "attention_bias": True, "rope_scaling": LLAMA3}),
    Case("olmo3", "windows", WHOLE_HEADS | {"sliding_window": WINDOW, "attention_bias": True, "rope_scaling": YARN}),
    Case(
        "olmo3",
        "tied",
        WHOLE_HEADS
        | {
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 3e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    Case("mistral", "windows", {"sliding_window": WINDOW}),
    Case(
        "mistral",
        "tied",
        {"sliding_window": None, "tie_word_embeddings": True, "rope_theta": 1e6, "rope_scaling": YARN},
    ),
    Case(
        "gemma2",
        "plain",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    Case(
        "gemma2",
        "biases",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
            "attention_bias": True,
            "rope_theta": 3e4,
        },
    ),
    Case(
        "gemma3_text",
        "scaled",
        {
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 12,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_local_base_freq": 1e3,
        },
    ),
    Case(
        "gemma3_text",
        "biases",
        {
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    Case("glm4_moe", "plain", EXPERTS | {"attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0}),
    Case(
        "glm4_moe",
        "tied",
        EXPERTS
        | {
            "partial_rotary_factor": 0.25,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    Case("glm4_moe", "yarn", EXPERTS | {"partial_rotary_factor": 0.5, "rope_scaling": YARN}),
    Case("glm4_moe", "multi-token", EXPERTS | {"attention_bias": True, "num_nextn_predict_layers": 1}),
    Case("deepseek_v3", "plain", EXPERTS | LATENT | {"rope_scaling": MSCALE}),
    Case(
        "deepseek_v3",
        "queries",
        EXPERTS
        | LATENT
        | {"q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    ),
    Case("exaone4", "windows", {"sliding_window": WINDOW, "sliding_window_pattern": 2, "rope_theta": 1e6}),
    Case(
        "exaone4",
        "tied",
        {
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
            "tie_word_embeddings": True,
            "rope_scaling": LLAMA3,
        },
    ),
    Case("seed_oss", "plain", {"rope_theta": 1e7}),
    Case(
        "seed_oss",
        "biases",
        {
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_scaling": YARN,
        },
    ),
    Case("mixtral", "plain", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Case(
        "mixtral",
        "windows",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": WINDOW, "tie_word_embeddings": True},
    ),
    Case("olmoe", "plain", WHOLE_HEADS | {"num_experts": 8, "num_experts_per_tok": 3}),
    Case(
        "olmoe",
        "tied",
        WHOLE_HEADS
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_scaling": YARN,
        },
    ),
    Case("nanochat", "plain", {"final_logit_softcapping": 3.0}),
    Case(
        "nanochat",
        "biases",
        {
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    Case("phi3", "windows", {"sliding_window": WINDOW, "partial_rotary_factor": 0.5}),
    Case("phi3", "tied", {"tie_word_embeddings": True, "rope_theta": 2.5e5}),
    Case(
        "gpt_oss",
        "plain",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "swiglu_limit": 1.0,
            "rope_scaling": YARN | {"truncate": False},
        },
    ),
    Case(
        "gpt_oss",
        "tied",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
            "swiglu_limit": 2.0,
            "swiglu_alpha": 1.2,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    Case("deepseek_v3", "multi-token", EXPERTS | LATENT | {"num_nextn_predict_layers": 2}),
]


def save_model(model: Any, folder: Path, most_bytes: int | str = "50GB") -> Path:
    """Write a folder as transformers writes it."""
    model.save_pretrained(folder, max_shard_size=most_bytes)
    return folder


def make_tokens(rows: int = 2, length: int = CONTEXT, seed: int = 1) -> torch.Tensor:
    """Random tokens [rows, length]."""
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
