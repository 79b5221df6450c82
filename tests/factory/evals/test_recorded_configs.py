"""What ledgers recorded before ``ModelSpec``: the config.json of the exporter of then, which still parses and equals a new export's."""

from __future__ import annotations

from typing import Any

import pytest

from factory.evals.export_folder import parse_config
from factory.evals.export_parity import FIELDS
from factory.evals.probes.checks import OF_CHECKPOINT
from models.spec import ModelSpec
from trainer.contract.checkpoint.export import make_hf_config

SIZES: dict[str, Any] = {
    "vocab_size": 512, "d_model": 48, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 12, "d_ff": 96, "context": 64, "rope_theta": 5e3,
}  # fmt: skip
# as the exporter wrote them on 2026-11-27
COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "intermediate_size": 96, "max_position_embeddings": 64, "rope_theta": 5e3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "tie_word_embeddings": True, "use_sliding_window": False, "use_cache": True, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    "dtype": "float32", "torch_dtype": "float32",
}  # fmt: skip
RECORDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": ({"qk_norm": True}, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}),
    "llama": ({"qk_norm": False}, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
    "smollm3": (
        {"qk_norm": False, "nope_every": 2},
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "no_rope_layers": [1, 0, 1, 0],
            "no_rope_layer_interval": 2,
        },
    ),
    "glm4_moe": (
        {"qk_norm": True, "experts": {"count": 6, "per_token": 2, "d_ff": 32, "shared": 0}},
        {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "tie_word_embeddings": False, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_qk_norm": True, "num_nextn_predict_layers": 0,
            "partial_rotary_factor": 1.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", RECORDED)
def test_a_recorded_config_is_the_model_that_is_exported_today(family: str) -> None:
    changes, config = RECORDED[family]
    recorded = parse_config(COMMON | config, "recorded")
    today = parse_config(make_hf_config(ModelSpec.model_validate(SIZES | changes), "float32"), "today")
    assert recorded == today and recorded.family == family


def test_each_check_of_a_config_compares_keys_of_the_description() -> None:
    assert FIELDS.keys() <= ModelSpec.model_fields.keys()
    assert {*FIELDS.values(), "shape", "weights"} == set(OF_CHECKPOINT)
