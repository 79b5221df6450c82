"""Published runs: the keys of each model's config.json that shape it, its tokens, GPUs and GPU hours. Sources stand beside each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def llama(width: int, layers: int, heads: int, kv: int, ff: int, vocab: int = 128_256, **more: Any) -> dict[str, Any]:
    """The keys that shape a model, as a Hugging Face config.json has them."""
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ff,
        "vocab_size": vocab,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    } | more


DEEPSEEK_V3 = llama(
    7168, 61, 128, 128, 18432, 129_280, model_type="deepseek_v3", n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, n_group=8, topk_group=4, routed_scaling_factor=2.5, rms_norm_eps=1e-6,
)  # fmt: skip
QWEN3_30B = llama(
    2048, 48, 32, 4, 6144, 151_936, model_type="qwen3_moe", head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, mlp_only_layers=[],
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    config: dict[str, Any]
    parameters: float  # as published
    context: int  # tokens of a row
    tokens: float
    gpus: int
    hours: float
    expert: int = 1
    fp8: bool = False


RUNS = {
    # GPU hours: the model card of Llama 3.1, H100-80GB, "15T+" tokens; GPUs and context: arXiv 2407.21783 §3.3.
    "Llama 3.1 8B": Run(llama(4096, 32, 32, 8, 14336), 8.03e9, 8192, 15e12, 1024, 1.46e6),
    "Llama 3.1 70B": Run(llama(8192, 80, 64, 8, 28672), 70.6e9, 8192, 15e12, 2048, 7.0e6),
    "Llama 3.1 405B": Run(llama(16384, 126, 128, 8, 53248), 405.9e9, 8192, 15.6e12, 16384, 30.84e6),
    # 131 MWh for 4.05 T tokens (arXiv 2501.00656 §6), at the 146 MWh / 234 k H100 hours that its successor's report gives.
    "OLMo 2 7B": Run(llama(4096, 32, 32, 32, 11008, 100_352, model_type="olmo2"), 7.30e9, 4096, 4.05e12, 1024, 210e3),
    # 384 H100 for 24 days (huggingface.co/blog/smollm3).
    "SmolLM3 3B": Run(
        llama(2048, 36, 16, 4, 11008, tie_word_embeddings=True, model_type="smollm3"),
        3.08e9,
        4096,
        11.2e12,
        384,
        384 * 24 * 24,
    ),
    # Pre-training alone, H800 (the peak of an H100), experts over 64 GPUs, fp8 (arXiv 2412.19437 Table 1, §3).
    "DeepSeek-V3": Run(DEEPSEEK_V3, 671e9, 4096, 14.8e12, 2048, 2.664e6, expert=64, fp8=True),
    # No hours of its 36 T tokens are published: at Megatron-Bridge's 5,275 tokens/s a GPU (16 H100, fp8; its performance summary).
    "Qwen3-30B-A3B": Run(QWEN3_30B, 30.5e9, 4096, 36e12, 16, 36e12 / 5275 / 3600, expert=16, fp8=True),
}
# Not looked at when the rule was made. OLMo 3: 234 k and 1.05 M H100 hours for 5.93 and 5.6 T tokens, restarts among them (its report).
HELD_OUT = {
    "OLMo 3 7B": Run(llama(4096, 32, 32, 32, 11008, 100_352), 7.30e9, 8192, 5.93e12, 1024, 234e3),
    "OLMo 3 32B": Run(llama(5120, 64, 40, 8, 27648, 100_352, head_dim=128), 32.2e9, 8192, 5.6e12, 1024, 1.05e6),
}
