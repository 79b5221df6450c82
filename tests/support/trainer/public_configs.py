"""The config.json of public models, with the keys that decide what their weights compute. Each stands beside the weights on Hugging Face, in the
repository that is named."""

from __future__ import annotations

from typing import Any

from tests.support.trainer.published_runs import DEEPSEEK_V3, QWEN3_30B

CONFIGS: dict[str, dict[str, Any]] = {
    # HuggingFaceTB/SmolLM2-135M
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 576,
        "intermediate_size": 1536, "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100_000,
        "tie_word_embeddings": True, "vocab_size": 49_152, "is_llama_config": True, "initializer_range": 0.041666666666666664,
    },
    # HuggingFaceTB/SmolLM3-3B-Base
    "SmolLM3 3B": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11_008, "max_position_embeddings": 65_536, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5_000_000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 128_256, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 36, "rope_scaling": None,
    },
    # Qwen/Qwen2.5-0.5B
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32_768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1_000_000.0, "sliding_window": 32_768, "tie_word_embeddings": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151_936,
    },
    # mistralai/Mistral-7B-v0.1
    "Mistral 7B v0.1": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336,
        "max_position_embeddings": 32_768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10_000.0, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32_000,
    },
    # allenai/OLMo-2-1124-7B
    "OLMo 2 7B": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 11_008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500_000, "tie_word_embeddings": False,
        "vocab_size": 100_352,
    },
    # google/gemma-2-2b
    "Gemma 2 2B": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10_000.0, "sliding_window": 4096,
        "vocab_size": 256_000,
    },
    # zai-org/GLM-4.5-Air
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "partial_rotary_factor": 0.5, "intermediate_size": 10_944, "max_position_embeddings": 131_072,
        "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 96, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1_000_000, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "use_qk_norm": False, "vocab_size": 151_552,
    },
    "Qwen3-30B-A3B": QWEN3_30B,
    "DeepSeek-V3": DEEPSEEK_V3 | {"num_nextn_predict_layers": 1},
}  # fmt: skip
