"""Models as their files and reports describe them: shape, and the number of parameters that was published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.spec import ExpertsSpec, LatentAttention, ModelSpec


@dataclass(frozen=True)
class Published:
    name: str
    parameters: float
    model: ModelSpec
    digits: float = 0.0  # relative: how exactly the number was published


def shape(vocab: int, d: int, layers: int, heads: int, kv: int, ff: int, context: int = 4096, **more: Any) -> ModelSpec:
    keys = {"head_dim": 128, "qk_norm": False, "tied": False} | more
    return ModelSpec(
        vocab_size=vocab, d_model=d, layers=layers, heads=heads, kv_heads=kv, d_ff=ff, context=context, **keys
    )


def qwen_3(d: int, layers: int, heads: int, kv: int, ff: int, **more: Any) -> ModelSpec:
    return shape(151_936, d, layers, heads, kv, ff, qk_norm=True, **more)


def qwen_2(d: int, layers: int, heads: int, kv: int, ff: int, vocab: int = 152_064, **more: Any) -> ModelSpec:
    return shape(vocab, d, layers, heads, kv, ff, qkv_bias=True, **more)


def olmo_2(d: int, layers: int, heads: int, kv: int, ff: int) -> ModelSpec:
    return shape(100_352, d, layers, heads, kv, ff, norms="post", qk_norm="whole", rope_theta=5e5)


def gemma(vocab: int, d: int, layers: int, heads: int, kv: int, ff: int, head_dim: int, **more: Any) -> ModelSpec:
    keys = {
        "norms": "sandwich",
        "norm_plus_one": True,
        "tied": True,
        "activation": "gelu_tanh",
        "embedding_scale": d**0.5,
    }
    return shape(vocab, d, layers, heads, kv, ff, 8192, head_dim=head_dim, **keys | more)


def gemma_2(*sizes: int) -> ModelSpec:
    return gemma(256_000, *sizes, windows=[4096, None], attention_softcap=50.0, logit_softcap=30.0)


def gemma_3(*sizes: int, vocab: int = 262_208, window: int = 1024) -> ModelSpec:
    more = {"windows": [window] * 5 + [None], "window_rope_theta": 1e4, "rope_theta": 1e6, "qk_norm": True}
    return gemma(vocab, *sizes, **more)


DEEPSEEK_EXPERTS = ExpertsSpec(
    count=256, per_token=8, d_ff=2048, shared=1, dense_layers=3, groups=8, groups_per_token=4, scale=2.5
)
DEEPSEEK_LATENT = LatentAttention(q_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)

MODELS = [
    # Totals of the safetensors files on Hugging Face. Shapes: the config.json beside the files, and the reports: Llama 2 and 3 (arXiv 2307.09288,
    # 2407.21783 Table 3), Qwen2.5 and 3 (2412.15115, 2505.09388), Mistral (2310.06825), OLMo 2 (2501.00656), Gemma 2 (2408.00118),
    # SmolLM2 (2502.02737).
    Published("Llama 2 7B", 6_738_415_616, shape(32_000, 4096, 32, 32, 32, 11008)),
    Published("Llama 2 13B", 13_015_864_320, shape(32_000, 5120, 40, 40, 40, 13824)),
    Published("Llama 2 70B", 68_976_648_192, shape(32_000, 8192, 80, 64, 8, 28672)),
    Published("Llama 3 8B", 8_030_261_248, shape(128_256, 4096, 32, 32, 8, 14336, 8192)),
    Published("Llama 3 70B", 70_553_706_496, shape(128_256, 8192, 80, 64, 8, 28672, 8192)),
    Published("Llama 3 405B", 405_853_388_800, shape(128_256, 16384, 126, 128, 8, 53248, 8192)),
    Published("Llama 3.2 1B", 1_235_814_400, shape(128_256, 2048, 16, 32, 8, 8192, head_dim=64, tied=True)),
    Published("Qwen2.5-0.5B", 494_032_768, qwen_2(896, 24, 14, 2, 4864, 151_936, head_dim=64, tied=True)),
    Published("Qwen2.5-1.5B", 1_543_714_304, qwen_2(1536, 28, 12, 2, 8960, 151_936, tied=True)),
    Published("Qwen2.5-3B", 3_085_938_688, qwen_2(2048, 36, 16, 2, 11008, 151_936, tied=True)),
    Published("Qwen2.5-7B", 7_615_616_512, qwen_2(3584, 28, 28, 4, 18944)),
    Published("Qwen2.5-14B", 14_770_033_664, qwen_2(5120, 48, 40, 8, 13824)),
    Published("Qwen2.5-32B", 32_763_876_352, qwen_2(5120, 64, 40, 8, 27648)),
    Published("Qwen2.5-72B", 72_706_203_648, qwen_2(8192, 80, 64, 8, 29568)),
    Published("Qwen3-0.6B", 596_049_920, qwen_3(1024, 28, 16, 8, 3072, tied=True)),
    Published("Qwen3-1.7B", 1_720_574_976, qwen_3(2048, 28, 16, 8, 6144, tied=True)),
    Published("Qwen3-4B", 4_022_468_096, qwen_3(2560, 36, 32, 8, 9728, tied=True)),
    Published("Mistral 7B v0.1", 7_241_732_096, shape(32_000, 4096, 32, 32, 8, 14336, windows=[4096])),
    Published("Mistral 7B v0.3", 7_248_023_552, shape(32_768, 4096, 32, 32, 8, 14336)),
    Published("OLMo 2 7B", 7_298_617_344, olmo_2(4096, 32, 32, 32, 11008)),
    Published("OLMo 2 13B", 13_716_198_400, olmo_2(5120, 40, 40, 40, 13824)),
    Published("OLMo 2 32B", 32_234_279_936, olmo_2(5120, 64, 40, 8, 27648)),
    Published("Gemma 2 2B", 2_614_341_888, gemma_2(2304, 26, 8, 4, 9216, 256)),
    Published("Gemma 2 9B", 9_241_705_984, gemma_2(3584, 42, 16, 8, 14336, 256)),
    Published("Gemma 2 27B", 27_227_128_320, gemma_2(4608, 46, 32, 16, 36864, 128)),
    Published("Gemma 3 1B", 999_885_952, gemma_3(1152, 26, 4, 1, 6912, 256, vocab=262_144, window=512)),
    Published("SmolLM2 135M", 134_515_008, shape(49_152, 576, 30, 9, 3, 1536, head_dim=64, tied=True)),
    Published("SmolLM2 360M", 361_821_120, shape(49_152, 960, 32, 15, 5, 2560, head_dim=64, tied=True)),
    Published("SmolLM2 1.7B", 1_711_376_384, shape(49_152, 2048, 24, 32, 32, 8192, head_dim=64, tied=True)),
    Published("SmolLM3 3B", 3_075_098_624, shape(128_256, 2048, 36, 16, 4, 11008, nope_every=4, tied=True)),
    # As their reports round them.
    # Gemma 3's text models alone: "embedding" and "non-embedding parameters" of arXiv 2503.19786 Table 1, without the vision encoder.
    Published("Gemma 3 4B", 675e6 + 3209e6, gemma_3(2560, 34, 8, 4, 10240, 256), digits=1e-3),
    Published("Gemma 3 12B", 1012e6 + 10759e6, gemma_3(3840, 48, 16, 8, 15360, 256), digits=1e-3),
    Published("Gemma 3 27B", 1416e6 + 25600e6, gemma_3(5376, 62, 32, 16, 21504, 128), digits=1e-3),
    Published(
        "Qwen3-30B-A3B",
        30.5e9,
        qwen_3(2048, 48, 32, 4, 6144, experts=ExpertsSpec(count=128, per_token=8, d_ff=768, shared=0, dense_layers=0)),
        digits=0.005,
    ),
    # GLM-4.5 (arXiv 2508.06471 Table 1) and DeepSeek-V3 (arXiv 2412.19437 §4.2) without their layer for predicting a second token.
    Published(
        "GLM-4.5-Air",
        106e9,
        shape(151_552, 4096, 46, 96, 8, 10944, qkv_bias=True, rope_share=0.5, experts=ExpertsSpec(count=128, per_token=8, d_ff=1408)),
        digits=0.01,
    ),
    Published(
        "GLM-4.5",
        355e9,
        shape(
            151_552, 5120, 92, 96, 8, 12288, qkv_bias=True, qk_norm=True, rope_share=0.5,
            experts=ExpertsSpec(count=160, per_token=8, d_ff=1536, dense_layers=3),
        ),
        digits=0.01,
    ),
    Published(
        "DeepSeek-V3",
        671e9,
        shape(129_280, 7168, 61, 128, 128, 18432, head_dim=192, latent=DEEPSEEK_LATENT, experts=DEEPSEEK_EXPERTS),
        digits=1e-3,
    ),
    # PaLM (arXiv 2204.02311 Table 1, appendix B): one key/value head, head dimension 256; "540.35B".
    Published(
        "PaLM 540B", 540.35e9, shape(256_000, 18432, 118, 48, 1, 73728, 2048, head_dim=256, tied=True), digits=1e-4
    ),
]  # fmt: skip


def model_of(name: str) -> ModelSpec:
    return next(published.model for published in MODELS if published.name == name)
