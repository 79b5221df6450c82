"""Models as their cards describe them: shape, and the number of parameters that was published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from models.spec import ExpertsSpec, ModelSpec


@dataclass(frozen=True)
class Published:
    name: str
    parameters: float
    model: ModelSpec
    tied: bool = False
    digits: float = 0.0  # relative: how exactly the number was published

    @property
    def parameters_here(self) -> int:
        """An output head of its own counts beside the embedding; ours is tied."""
        return self.model.parameters + (0 if self.tied else self.model.vocab_size * self.model.d_model)


def shape(vocab: int, d: int, layers: int, heads: int, kv: int, ff: int, context: int = 4096, **more: Any) -> ModelSpec:
    keys = {"head_dim": 128, "qk_norm": False} | more
    return ModelSpec(
        vocab_size=vocab, d_model=d, layers=layers, heads=heads, kv_heads=kv, d_ff=ff, context=context, **keys
    )


def qwen_3(d: int, layers: int, heads: int, kv: int, ff: int, **more: Any) -> ModelSpec:
    return shape(151_936, d, layers, heads, kv, ff, qk_norm=True, **more)


MODELS = [
    # Safetensors totals of the checkpoints on Hugging Face; shapes: arXiv 2307.09288, 2407.21783 Table 3, 2505.09388.
    Published("Llama 2 7B", 6_738_415_616, shape(32_000, 4096, 32, 32, 32, 11008)),
    Published("Llama 2 13B", 13_015_864_320, shape(32_000, 5120, 40, 40, 40, 13824)),
    Published("Llama 2 70B", 68_976_648_192, shape(32_000, 8192, 80, 64, 8, 28672)),
    Published("Llama 3 8B", 8_030_261_248, shape(128_256, 4096, 32, 32, 8, 14336, 8192)),
    Published("Llama 3 70B", 70_553_706_496, shape(128_256, 8192, 80, 64, 8, 28672, 8192)),
    Published("Llama 3 405B", 405_853_388_800, shape(128_256, 16384, 126, 128, 8, 53248, 8192)),
    Published("Qwen3-0.6B", 596_049_920, qwen_3(1024, 28, 16, 8, 3072), tied=True),
    Published("Qwen3-1.7B", 1_720_574_976, qwen_3(2048, 28, 16, 8, 6144), tied=True),
    Published("Qwen3-4B", 4_022_468_096, qwen_3(2560, 36, 32, 8, 9728), tied=True),
    # As their reports round them.
    Published(
        "Qwen3-30B-A3B",
        30.5e9,
        qwen_3(2048, 48, 32, 4, 6144, experts=ExpertsSpec(count=128, per_token=8, d_ff=768, shared=0, dense_layers=0)),
        digits=0.005,
    ),
    Published(
        "GLM-4.5-Air",  # its multi-token prediction layer left out
        106e9,
        shape(151_552, 4096, 46, 96, 8, 10944, experts=ExpertsSpec(count=128, per_token=8, d_ff=1408)),
        digits=0.01,
    ),
    # PaLM (arXiv 2204.02311 Table 1, appendix B): one key/value head, head dimension 256; "540.35B".
    Published(
        "PaLM 540B", 540.35e9, shape(256_000, 18432, 118, 48, 1, 73728, 2048, head_dim=256), tied=True, digits=1e-4
    ),
]


def model_of(name: str) -> ModelSpec:
    return next(published.model for published in MODELS if published.name == name)
