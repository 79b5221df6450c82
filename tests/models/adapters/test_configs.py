"""config.json files of published models, as their makers wrote them, and what each key means where it is missing, null or cannot be held."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from models.adapters import FAMILIES, find_family_for_config, find_family_for_export
from models.adapters.config_reader import ModelFilesError
from models.spec import ModelSpec
from models.tensors import is_multi_token, list_tensor_shapes

SHARED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def sizes(hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, context: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
    }


def without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


LLAMA_2 = (
    without(SHARED, "attention_bias", "attention_dropout")
    | sizes(4096, 11008, 32, 32, 32, 32_000, 4096)
    | {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "pretraining_tp": 1,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    }
)
LLAMA_3_1 = (
    SHARED
    | sizes(4096, 14336, 32, 32, 8, 128_256, 131_072)
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    }
)
SMOLLM_2 = (
    SHARED
    | sizes(576, 1536, 30, 9, 3, 49_152, 8192)
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "is_llama_config": True,
        "mlp_bias": False,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    }
)
QWEN_2_5 = (
    without(SHARED, "attention_bias")
    | sizes(896, 4864, 24, 14, 2, 151_936, 32_768)
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_window_layers": 21,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
    }
)
QWEN_3 = (
    SHARED
    | sizes(1024, 3072, 28, 16, 8, 151_936, 40_960)
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 128,
        "max_window_layers": 28,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    }
)
QWEN_3_MOE = (
    SHARED
    | sizes(2048, 6144, 48, 32, 4, 151_936, 40_960)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
)
SMOLLM_3 = (
    SHARED
    | sizes(2048, 11008, 36, 16, 4, 128_256, 65_536)
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "layer_types": ["full_attention"] * 36,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pad_token_id": 128004,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    }
)
OLMO_2 = (
    SHARED
    | sizes(4096, 11008, 32, 32, 32, 100_352, 4096)
    | {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "pad_token_id": 100277,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
    }
)
MISTRAL = (
    without(SHARED, "attention_bias")
    | sizes(4096, 14336, 32, 32, 8, 32_000, 32_768)
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    }
)
GEMMA_2 = (
    SHARED
    | sizes(2304, 9216, 26, 8, 4, 256_000, 8192)
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    }
)
GEMMA_3 = (
    without(SHARED, "hidden_act")
    | sizes(1152, 6912, 26, 4, 1, 262_144, 32_768)
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    }
)
GLM_4_5_AIR = (
    SHARED
    | sizes(4096, 10944, 46, 96, 8, 151_552, 131_072)
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
    }
)
DEEPSEEK_V3 = (
    SHARED
    | sizes(7168, 18432, 61, 128, 128, 129_280, 163_840)
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    }
)
OLMO_3 = (
    SHARED
    | sizes(4096, 11008, 32, 32, 32, 100_278, 65_536)
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8,
        "pad_token_id": 100277,
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
    }
)
EXAONE_SCALING = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
EXAONE_4 = (
    without(SHARED, "attention_bias")
    | sizes(5120, 27392, 64, 40, 8, 102_400, 131_072)
    | {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "head_dim": 128,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": EXAONE_SCALING,
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
    }
)
EXAONE_4_SMALL = (
    EXAONE_4
    | sizes(2048, 4096, 30, 32, 8, 102_400, 65_536)
    | {
        "head_dim": 64,
        "layer_types": ["full_attention"] * 30,
        "sliding_window": None,
        "sliding_window_pattern": None,
        "tie_word_embeddings": True,
    }
)
SEED_OSS = (
    SHARED
    | sizes(5120, 27648, 64, 80, 8, 155_136, 524_288)
    | {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 128,
        "mlp_bias": False,
        "residual_dropout": 0.1,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
    }
)
MIXTRAL = (
    without(SHARED, "attention_bias")
    | sizes(4096, 14336, 32, 32, 8, 32_000, 32_768)
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
)
OLMOE = (
    SHARED
    | sizes(2048, 1024, 16, 16, 16, 50_304, 4096)
    | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "clip_qkv": None,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
    }
)
NANOCHAT = (
    without(SHARED, "hidden_act")
    | sizes(2048, 8192, 32, 16, 16, 65_536, 2048)
    | {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "final_logit_softcapping": 15.0,
        "hidden_act": "relu2",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
)
PHI_4 = (
    SHARED
    | sizes(5120, 17920, 40, 40, 10, 100_352, 16_384)
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 16384,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
)
GPT_OSS = (
    SHARED
    | sizes(2880, 2880, 24, 64, 8, 201_088, 131_072)
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    }
)
GPT_OSS_120B = GPT_OSS | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
DEEPSEEK_SCALE = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
SIX = [512] * 5 + [None]

# (name, config.json, number of weights as published or by hand, facts)
PUBLISHED: list[tuple[str, dict[str, Any], float, dict[str, Any]]] = [
    ("Llama 2 7B", LLAMA_2, 6_738_415_616, {"rope_theta": 10_000.0, "tied": False, "rope_scaling": None}),
    ("Llama 3.1 8B", LLAMA_3_1, 8_030_261_248, {"rope_theta": 5e5, "tied": False, "context": 131_072}),
    ("SmolLM2 135M", SMOLLM_2, 134_515_008, {"rope_theta": 1e5, "tied": True}),
    ("Qwen2.5 0.5B", QWEN_2_5, 494_032_768, {"qkv_bias": True, "attention_out_bias": False, "windows": None}),
    ("Qwen3 0.6B", QWEN_3, 596_049_920, {"qk_norm": True, "head_dim": 128}),
    ("Qwen3 30B A3B", QWEN_3_MOE, 30_532_122_624, {"qk_norm": True, "windows": None}),
    ("OLMo 2 7B", OLMO_2, 7_298_617_344, {"norms": "post", "qk_norm": "whole"}),
    ("Mistral 7B v0.1", MISTRAL, 7_241_732_096, {"windows": [4096]}),
    (
        "Gemma 2 2B",
        GEMMA_2,
        2_614_341_888,
        {"attention_softcap": 50.0, "logit_softcap": 30.0, "embedding_scale": 48.0, "windows": [4096, None] * 13},
    ),
    (
        "Gemma 3 1B",
        GEMMA_3,
        999_885_952,
        {"window_rope_theta": 1e4, "rope_theta": 1e6, "windows": SIX * 4 + [512] * 2, "tied": True},
    ),
    ("DeepSeek-V3", DEEPSEEK_V3, 671_026_404_352, {"attention_scale": DEEPSEEK_SCALE, "head_dim": 192}),
    ("SmolLM3 3B", SMOLLM_3, 3_075_098_624, {"nope_every": 4, "tied": True}),
    ("GLM-4.5 Air", GLM_4_5_AIR, 106_852_245_504, {"rope_share": 0.5, "qkv_bias": True, "attention_out_bias": False}),
    (
        "OLMo 3 7B",
        OLMO_3,
        7_298_011_136,
        {"norms": "post", "qk_norm": "whole", "window_rope_theta": 5e5, "windows": [4096, 4096, 4096, None] * 8},
    ),
    ("EXAONE 4.0 32B", EXAONE_4, 32_003_216_384, {"nope_every": 4, "qk_norm": True, "norms": "post"}),
    ("EXAONE 4.0 1.2B", EXAONE_4_SMALL, 1_279_391_488, {"nope_every": None, "windows": None, "tied": True}),
    ("Seed-OSS 36B", SEED_OSS, 36_151_104_512, {"qkv_bias": True, "attention_out_bias": False, "head_dim": 128}),
    ("Mixtral 8x7B", MIXTRAL, 46_702_792_704, {"windows": None, "rope_theta": 1e6}),
    ("OLMoE 1B 7B", OLMOE, 6_919_161_856, {"qk_norm": "whole", "norms": "pre"}),
    (
        "nanochat d32",
        NANOCHAT,
        1_879_048_192,
        {"gated": False, "activation": "relu2", "norm_weights": False, "logit_softcap": 15.0},
    ),
    ("Phi-4", PHI_4, 14_659_507_200, {"rope_theta": 2.5e5, "rope_share": 1.0, "tied": False}),
    ("gpt-oss 20B", GPT_OSS, 20_914_757_184, {"attention_sinks": True, "windows": [128, None] * 12, "qkv_bias": True}),
    ("gpt-oss 120B", GPT_OSS_120B, 116_829_156_672, {"attention_sinks": True, "attention_out_bias": True}),
]


def read(config: Mapping[str, Any]) -> ModelSpec:
    return find_family_for_config(config, "config.json").read_config(config, "config.json")


def refusal(config: Mapping[str, Any]) -> ModelFilesError:
    with pytest.raises(ModelFilesError) as raised:
        read(config)
    return raised.value


@pytest.mark.parametrize(("name", "config", "parameters", "facts"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_a_published_config_is_read_and_written_back(
    name: str, config: dict[str, Any], parameters: float, facts: dict[str, Any]
) -> None:
    spec = read(config)
    assert {key: getattr(spec, key) for key in facts} == facts
    assert spec.without_multi_token.parameters == parameters
    assert find_family_for_export(spec).name == config["model_type"]
    family = FAMILIES[config["model_type"]]
    again = json.loads(json.dumps(family.write(family.as_stored(spec))))
    assert family.read_config(again, "again").model_dump() == family.as_stored(spec).model_dump() | {
        "family": family.name
    }


def test_the_layer_for_multi_token_prediction_has_the_published_number_of_weights() -> None:
    """DeepSeek-V3's README_WEIGHTS: 11.5 B of its own, without the shared embedding and head."""
    spec = read(DEEPSEEK_V3)
    own = spec.parameters - spec.without_multi_token.parameters
    every = sum(math.prod(shape) for name, shape in list_tensor_shapes(spec).items() if is_multi_token(name))
    assert own == every - 256, "the router's bias is no parameter"
    assert own == pytest.approx(11.5e9, rel=0.01)
    meets, seen = (
        a - b for a, b in zip(spec.count_weights_and_positions_seen(True), spec.count_weights_and_positions_seen())
    )
    width, experts = 7168, 9 * 3 * 2048
    assert meets == spec.attention_parameters_per_layer + width * (experts + 256 + 2 * width + 129_280)
    assert seen == spec.context
    assert spec.count_flops_per_token(True) > spec.count_flops_per_token()
    assert spec.count_flops_per_token() == spec.without_multi_token.count_flops_per_token(True)


MEANINGS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # a missing key, or null, means what transformers' class means by it
    (without(MISTRAL, "sliding_window"), {}, {"windows": [4096]}),
    (MISTRAL, {"sliding_window": None}, {"windows": None}),
    (
        without(GEMMA_2, "attn_logit_softcapping", "final_logit_softcapping"),
        {},
        {"attention_softcap": 50.0, "logit_softcap": 30.0},
    ),
    (
        GEMMA_2,
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        {"attention_softcap": None, "logit_softcap": None},
    ),
    (without(GEMMA_2, "head_dim", "hidden_activation"), {}, {"head_dim": 256, "activation": "gelu_tanh"}),
    (without(QWEN_3, "head_dim"), {}, {"head_dim": 128}),
    (QWEN_2_5, {"use_sliding_window": True}, {"windows": [None] * 21 + [32768] * 3}),
    (
        without(QWEN_2_5, "max_window_layers"),
        {"use_sliding_window": True, "num_hidden_layers": 30},
        {"windows": [None] * 28 + [32768] * 2},
    ),
    (without(QWEN_3_MOE, "norm_topk_prob", "tie_word_embeddings"), {}, {"tied": False}),
    (
        without(SMOLLM_3, "no_rope_layers", "tie_word_embeddings", "rope_theta"),
        {},
        {"nope_every": 4, "tied": True, "rope_theta": 2e6},
    ),
    (without(GLM_4_5_AIR, "partial_rotary_factor"), {}, {"rope_share": 0.5}),
    (
        without(GEMMA_3, "rope_theta", "rope_local_base_freq", "sliding_window_pattern"),
        {},
        {"rope_theta": 1e6, "window_rope_theta": 1e4, "windows": SIX * 4 + [512] * 2},
    ),
    (GEMMA_3, {"sliding_window_pattern": 1}, {"windows": None, "window_rope_theta": None}),
    # transformers 5 says RoPE in one mapping
    (
        without(LLAMA_2, "rope_scaling"),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
        {"rope_theta": 3e5},
    ),
    (
        without(GEMMA_3, "rope_theta", "rope_local_base_freq", "rope_scaling"),
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            }
        },
        {"rope_theta": 2e6, "window_rope_theta": 3e4},
    ),
    (without(DEEPSEEK_V3, "rope_scaling"), {}, {"attention_scale": None, "rope_scaling": None}),
    (without(OLMO_3, "layer_types", "rope_theta"), {}, {"windows": [4096, 4096, 4096, None] * 8, "rope_theta": 5e5}),
    (without(EXAONE_4, "layer_types"), {"sliding_window_pattern": 4}, {"nope_every": 4}),
    (without(EXAONE_4, "num_key_value_heads"), {"num_attention_heads": 64}, {"kv_heads": 32}),
    (EXAONE_4, {"num_key_value_heads": None}, {"kv_heads": 40}),
    (without(SEED_OSS, "attention_bias", "head_dim"), {}, {"qkv_bias": True, "head_dim": 128}),
    (SEED_OSS, {"head_dim": None}, {"head_dim": 64}),
    (
        without(MIXTRAL, "sliding_window", "rope_theta", "num_key_value_heads"),
        {},
        {"windows": None, "rope_theta": 1e6, "kv_heads": 8},
    ),
    (without(NANOCHAT, "final_logit_softcapping", "hidden_act"), {}, {"logit_softcap": 15.0, "activation": "relu2"}),
    (NANOCHAT, {"final_logit_softcapping": None}, {"logit_softcap": None}),
    (
        without(GPT_OSS, "layer_types", "sliding_window", "rope_theta", "attention_bias", "rope_scaling"),
        {},
        {
            "windows": [128, None] * 12,
            "rope_theta": 1.5e5,
            "qkv_bias": True,
            "rope_scaling": read(GPT_OSS).rope_scaling,
        },
    ),
    (without(GPT_OSS, "rope_scaling"), {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": None}),
    (without(MISTRAL, "num_key_value_heads"), {}, {"kv_heads": 8}),
]


@pytest.mark.parametrize(("config", "change", "facts"), MEANINGS)
def test_a_missing_key_means_what_it_means_in_transformers(
    config: dict[str, Any], change: dict[str, Any], facts: dict[str, Any]
) -> None:
    spec = read(config | change)
    assert {key: getattr(spec, key) for key in facts} == facts
    if spec.family == "qwen3_moe":
        assert spec.experts is not None and not spec.experts.normalise


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str | None]] = [
    (LLAMA_2, {"quantization_config": {"quant_method": "fp8"}}, "models.quantised", None),
    (DEEPSEEK_V3, {"auto_map": {"AutoModel": "modeling.Model"}}, "models.own_code", None),
    (LLAMA_2, {"clip_qkv": 8.0}, "models.unknown_key", "clip_qkv"),
    (LLAMA_2, {"is_causal": None}, "models.unknown_key", "is_causal"),  # a position would see later ones
    (LLAMA_2, {"is_causal": False}, "models.unknown_key", "is_causal"),
    (DEEPSEEK_V3, {"norm_topk_prob": None}, "models.other_value", "norm_topk_prob"),  # null is false there
    (DEEPSEEK_V3, {"rope_interleave": None}, "models.other_value", "rope_interleave"),
    (
        GLM_4_5_AIR,
        {"partial_rotary_factor": None},
        "models.other_value",
        "partial_rotary_factor",
    ),  # 1, where no key is 0.5
    (LLAMA_2, {"hidden_act": "gelu"}, "models.other_value", "hidden_act"),
    (LLAMA_2, {"pretraining_tp": 2}, "models.other_value", "pretraining_tp"),
    (LLAMA_2, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "models.other_value", "rope_type"),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "factor": 2.0, "more": 1}}, "models.unknown_key", "more"),
    (
        LLAMA_2,
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "rope_theta": 1e5}},
        "models.two_values",
        "rope_theta",
    ),
    (
        LLAMA_2,
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 2048}},
        "models.other_value",
        "original_max_position_embeddings",
    ),
    (LLAMA_2, {"partial_rotary_factor": 0.5}, "models.other_value", "partial_rotary_factor"),
    (LLAMA_2, {"sliding_window": 4096}, "models.other_value", "sliding_window"),
    (
        LLAMA_2,
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 64},
        "models.other_value",
        "num_attention_heads",
    ),
    (LLAMA_2, {"architectures": ["LlamaForSequenceClassification"]}, "models.other_class", None),
    (QWEN_2_5, {"head_dim": 128}, "models.other_value", "head_dim"),
    (QWEN_2_5, {"layer_types": ["sliding_attention"] * 24}, "models.other_value", "use_sliding_window"),
    (QWEN_2_5, {"use_sliding_window": True, "sliding_window": None}, "models.missing_key", "sliding_window"),
    (QWEN_3_MOE, {"decoder_sparse_step": 2}, "models.other_value", "decoder_sparse_step"),
    (QWEN_3_MOE, {"mlp_only_layers": [3]}, "models.other_value", "mlp_only_layers"),
    (MISTRAL, {"layer_types": ["full_attention"] * 32}, "models.other_value", "layer_types"),
    (SMOLLM_3, {"no_rope_layers": [1, 0, 0, 1] * 9}, "models.other_value", "no_rope_layers"),
    (GEMMA_2, {"hidden_activation": "gelu"}, "models.other_value", "hidden_activation"),
    (GEMMA_2, {"use_bidirectional_attention": True}, "models.other_value", "use_bidirectional_attention"),
    (GEMMA_3, {"attn_logit_softcapping": 50.0}, "models.other_value", "attn_logit_softcapping"),
    (GEMMA_3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "models.unknown_key", "rope_theta"),
    (
        GEMMA_3,
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
        "models.other_value",
        "truncate",
    ),
    (GLM_4_5_AIR, {"num_nextn_predict_layers": -1}, "models.other_value", "num_nextn_predict_layers"),
    (DEEPSEEK_V3, {"rms_norm_eps": 1e-5}, "models.other_value", "rms_norm_eps"),
    (DEEPSEEK_V3, {"rope_interleave": False}, "models.other_value", "rope_interleave"),
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, "models.other_value", "scoring_func"),
    (DEEPSEEK_V3, {"num_key_value_heads": 64}, "models.other_value", "num_key_value_heads"),
    ({"model_type": "gemma3", "text_config": GEMMA_3, "vision_config": {}}, {}, "models.multimodal", None),
    ({"model_type": "bloom"}, {}, "models.unknown_family", None),
    (OLMO_3, {"rope_theta": 1e4}, "models.other_value", "rope_theta"),  # of the layers without a window, or of all?
    (OLMO_3, {"clip_qkv": 8.0}, "models.other_value", "clip_qkv"),
    (EXAONE_4, {"layer_types": ["full_attention", "sliding_attention"] * 32}, "models.other_value", "layer_types"),
    (EXAONE_4, {"layer_types": None}, "models.other_value", "sliding_window_pattern"),
    (EXAONE_4_SMALL, {"layer_types": None}, "models.missing_key", "layer_types"),
    (SEED_OSS, {"attention_bias": None}, "models.other_value", "attention_bias"),
    (MIXTRAL, {"output_router_logits": True}, "models.other_value", "output_router_logits"),
    (OLMOE, {"clip_qkv": 8.0}, "models.other_value", "clip_qkv"),
    (NANOCHAT, {"hidden_act": "silu"}, "models.other_value", "hidden_act"),
    (NANOCHAT, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "models.other_value", "attention_factor"),
    (
        PHI_4,
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "models.other_value",
        "rope_type",
    ),
    (PHI_4, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "models.other_value", "rope_scaling"),
    (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4"}}, "models.quantised", None),
    (GPT_OSS, {"experts_per_token": 8}, "models.other_value", "experts_per_token"),
    ({}, {}, "models.unknown_family", None),
]


@pytest.mark.parametrize(("config", "change", "code", "key"), REFUSED)
def test_a_key_that_cannot_be_held_is_refused_by_name_and_value(
    config: dict[str, Any], change: dict[str, Any], code: str, key: str | None
) -> None:
    error = refusal(config | change)
    assert error.code == code and (key is None or error.data["key"] == key)


ODD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    1 << 70,
    0.5,
    -0.5,
    float("inf"),
    float("nan"),
    1e300,
    "",
    "x",
    [],
    [0],
    ["x"],
    [[]],
    {},
    {"x": 1},
    {"type": []},
]


@pytest.mark.parametrize("config", [row[1] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED])
def test_an_odd_value_of_any_key_is_read_or_refused_by_a_coded_error(config: dict[str, Any]) -> None:
    """A config.json is untrusted: no value may end in another error, or in a description that cannot be written."""
    refused = 0
    for key in [*config, "rope_parameters", "layer_types", "num_local_experts", "head_dim", "sliding_window"]:
        for value in ODD:
            try:
                spec = read(config | {key: value})
            except ModelFilesError as error:
                refused += 1
                assert len(str(error)) < 1000
            else:
                FAMILIES[config["model_type"]].find_differences(spec)
    assert refused > 10 * len(config) // 2
