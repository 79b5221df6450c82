"""The model shapes that a sweep goes over, and one layer of each as a slice.

``7b`` is Mistral 7B (arXiv 2310.06825 table 1); ``29b`` continues its proportions; ``375b`` is GLM-4.5 (arXiv 2508.06471
table 1) with 98 layers; ``1t`` is Kimi K2 (arXiv 2507.20534 table 2) with grouped-query attention in place of its MLA.
"""

from __future__ import annotations

from models.spec import ExpertsSpec, ModelSpec

SHAPES: dict[str, ModelSpec] = {
    "7b": ModelSpec(
        vocab_size=32_000, d_model=4096, layers=32, heads=32, kv_heads=8, head_dim=128, d_ff=14_336, context=8192
    ),
    "29b": ModelSpec(
        vocab_size=128_256, d_model=6144, layers=60, heads=48, kv_heads=8, head_dim=128, d_ff=20_480, context=8192
    ),
    "375b": ModelSpec(
        vocab_size=151_552, d_model=5120, layers=98, heads=96, kv_heads=8, head_dim=128, d_ff=12_288, context=8192,
        experts=ExpertsSpec(count=160, per_token=8, d_ff=1536, shared=1, dense_layers=3),
    ),
    "1t": ModelSpec(
        vocab_size=163_840, d_model=7168, layers=61, heads=64, kv_heads=8, head_dim=128, d_ff=18_432, context=8192,
        experts=ExpertsSpec(count=384, per_token=8, d_ff=2048, shared=1, dense_layers=1),
    ),
}  # fmt: skip


def make_one_layer_model(model: ModelSpec, sequence: int) -> ModelSpec:
    """The model with only one layer (with experts, if the model has any) and rows of ``sequence`` positions."""
    experts = model.experts and model.experts.model_copy(update={"dense_layers": 0})
    return model.model_copy(update={"layers": 1, "context": sequence, "experts": experts})
