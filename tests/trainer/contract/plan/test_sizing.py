"""Compares sizes with published ones (model cards, the tables of ZeRO and Korthikanti, torchtitan's measured peaks), and with what torch keeps for
the backward pass of a real block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from kernels.contract.registry import bind_ops
from models.spec import ModelSpec
from tests.support.messages import refused
from tests.support.trainer.published import MODELS, Published, model_of
from trainer.contract.errors import RecipeError
from trainer.contract.plan.sizing import (
    GB,
    GpuLayout,
    MemoryPart,
    choose_model_shape,
    count_activation_elements_per_token,
    estimate_activation_memory,
    estimate_memory_parts,
    sum_bytes,
)
from trainer.model.transformer import Decoder

GIB = 2**30


def by_name(parts: list[MemoryPart]) -> dict[str, float]:
    return {part.name: part.bytes for part in parts}


def states(model: ModelSpec, layout: GpuLayout) -> float:
    """Bytes of weights, gradients and optimiser."""
    parts = by_name(estimate_memory_parts(model, layout, 80 * GB))
    return parts["weights"] + parts["gradients"] + parts["optimiser"]


# -- shapes --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("published", MODELS, ids=lambda m: m.name)
def test_parameters_are_those_of_the_model_card(published: Published) -> None:
    """The counts are equal if the card has every digit. Otherwise they are equal to the digits of the card."""
    assert published.model.parameters == pytest.approx(published.parameters, rel=published.digits, abs=0)


def test_active_parameters_of_mixtures_are_those_of_the_model_cards() -> None:
    """The cards say: Qwen3-30B-A3B 3.3 B with the embedding; GLM-4.5-Air 12 B and GLM-4.5 32 B without it; DeepSeek-V3 37 B."""
    for name, active, embedded in (
        ("Qwen3-30B-A3B", 3.3e9, 1),
        ("GLM-4.5-Air", 12e9, 0),
        ("GLM-4.5", 32e9, 0),
        ("DeepSeek-V3", 37e9, 0),
    ):
        model = model_of(name)
        here = model.matmul_parameter_count + embedded * model.vocab_size * model.d_model
        assert here == pytest.approx(active, rel=0.07)


@pytest.mark.parametrize(
    ("name", "layers", "d_model"), [("Llama 3 8B", 32, 4096), ("Llama 3 70B", 80, 8192), ("Llama 3 405B", 126, 16384)]
)
def test_shapes_for_llama_3s_parameter_counts_are_near_llama_3s(name: str, layers: int, d_model: int) -> None:
    found = choose_model_shape(model_of(name).parameters, 128_256, 8192)
    assert found.d_model == pytest.approx(d_model, rel=0.13) and found.layers == pytest.approx(layers, rel=0.21)


@given(st.floats(2e7, 1e12), st.sampled_from([512, 32_000, 128_256]))
@settings(deadline=None, max_examples=60)
def test_the_shape_for_any_parameter_count_has_about_that_many_parameters(parameters: float, vocab_size: int) -> None:
    found = choose_model_shape(parameters, vocab_size, 4096)
    assert found.parameters == pytest.approx(parameters, rel=0.05)
    assert found.list_warnings() == [], "nothing that matrix units pad"


def test_a_parameter_count_too_small_for_the_embedding_is_refused() -> None:
    with refused("plan.too_few_parameters", RecipeError, parameters=3e6, vocab=128_256):
        choose_model_shape(3e6, 128_256, 4096)


# -- states --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("gpus", "gigabytes"), [(1, 120), (64, 1.9)])
def test_bytes_of_states_are_those_of_figure_1_of_the_zero_paper(gpus: int, gigabytes: float) -> None:
    """7.5 B parameters, 64-way: 120 GB falls to 1.9 GB (arXiv 1910.02054 Fig. 1); 16 bytes a parameter, cut otherwise.

    ZeRO's 16 are 2 + 2 + 12; ours are 4 fp32 weights + 4 fp32 gradients + 8 moments, the bf16 copies counted apart.
    """
    model = choose_model_shape(7.5e9, 32_000, 4096)
    assert states(model, GpuLayout(gpus)) * 7.5e9 / model.parameters / GB == pytest.approx(gigabytes, rel=0.02)


def test_states_of_a_trillion_parameters_on_1024_gpus_are_16_gb() -> None:
    """'16TB divided by 1024 is 16GB' (arXiv 1910.02054 §1), for any layout of the GPUs."""
    model = choose_model_shape(1e12, 32_000, 4096)
    for tensor in (1, 8):
        assert states(model, GpuLayout(1024, tensor)) / GB == pytest.approx(16, rel=0.05)


def test_bytes_of_states_are_those_that_torchtitan_measured() -> None:
    """Llama 3.1 8B, FSDP2, local batch 2: 77.0 GiB on 8 H100, 62.0 on 128, compiled; 82.4 and 67.0 otherwise.

    benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: all else equal, the difference is the shards of states.
    """
    model = model_of("Llama 3 8B")
    difference = (states(model, GpuLayout(8)) - states(model, GpuLayout(128))) / GIB
    assert difference == pytest.approx(77.0 - 62.0, rel=0.08)
    assert difference == pytest.approx(82.4 - 67.0, rel=0.10)


def test_muon_needs_memory_for_one_moment_of_the_layers_matrices() -> None:
    model = model_of("Llama 3 8B")
    adamw, muon = (
        by_name(estimate_memory_parts(model, GpuLayout(1), 80 * GB, optimizer=o))["optimiser"]
        for o in ("adamw", "muon")
    )
    ends = 2 * model.vocab_size * model.d_model  # a head of its own
    assert adamw == 8 * model.parameters and muon == 8 * ends + 4 * (model.parameters - ends)


# -- activations ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hidden", "heads", "layers"), [(6144, 64, 48), (12288, 96, 96), (20480, 128, 105), (25600, 160, 128)]
)
def test_activation_bytes_follow_the_formulas_of_korthikanti(hidden: int, heads: int, layers: int) -> None:
    """34 s b h bytes a layer with the scores recomputed, 2 s b h with everything (arXiv 2205.05198 eq. 6, §5, Table 3).

    For a block as theirs (as many keys as queries, a SwiGLU as wide as their MLP has weights), ours has no dropout masks
    (−2) and keeps q and k on both sides of their rotation (+4).
    """
    head_dim = hidden // heads
    model = ModelSpec(
        vocab_size=51200, d_model=hidden, layers=layers, heads=heads, kv_heads=heads, head_dim=head_dim,
        d_ff=round(8 / 3 * hidden), context=2048,
    )  # fmt: skip
    assert 2 * count_activation_elements_per_token(model, 0) == pytest.approx((34 - 2 + 4) * hidden, rel=1e-4)
    assert 2 * count_activation_elements_per_token(model, 0, tensor=8) == pytest.approx(
        32 * hidden / 8 + 4 * hidden, rel=1e-3
    )
    whole = estimate_activation_memory(model, GpuLayout(8, 1, 4, "block"), 2).bytes
    assert whole == pytest.approx(2 * 4 * 2048 * hidden * layers + 36 * 4 * 2048 * hidden, rel=1e-4)


class Keeping(torch.autograd.Function):
    """Stands for a fused kernel: out of inputs it makes ``outputs``, and keeps the inputs (and outputs) named."""

    @staticmethod
    def forward(ctx: Any, keep_output: bool, out: Tensor, *inputs: Tensor) -> Tensor:
        made = out.clone()
        ctx.shapes = [x.shape for x in inputs]
        ctx.save_for_backward(*inputs, *([made] if keep_output else []))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *[torch.zeros(shape) for shape in ctx.shapes]


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, FUSED["rms_norm"](total, weight, eps)


FUSED: dict[str, Any] = {
    "rms_norm": lambda x, weight, eps: Keeping.apply(False, x.detach(), x),
    "add_rms_norm": add_rms_norm,
    "qk_norm_rope": lambda x, weight, cos, sin, eps: Keeping.apply(False, x.detach(), x),
    "swiglu": lambda gate, up: Keeping.apply(False, gate.detach(), gate, up),
    "attention": lambda q, k, v, documents, *rest: Keeping.apply(True, q.detach(), q, k, v),
    "general_attention": lambda q, k, v, *rest: Keeping.apply(True, q.detach(), q, k, v),
}


def kept_by_torch(model: ModelSpec, tokens: int) -> int:
    """Elements of the distinct storages that autograd keeps for the blocks, weights left out."""
    decoder = Decoder(model, replace(bind_ops({}), **FUSED), torch.float32)
    decoder.initialise(0)
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    ids = torch.zeros((1, tokens), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, *_ = decoder(ids, ids, ids)
    assert out.requires_grad
    return sum(x.untyped_storage().nbytes() // 4 for x in kept.values())


SMALL: dict[str, Any] = {
    "vocab_size": 64, "d_model": 48, "heads": 6, "kv_heads": 2, "head_dim": 8, "d_ff": 112, "context": 16,
}  # fmt: skip
LATENT = {"q_rank": 24, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6}
KINDS: dict[str, dict[str, Any]] = {
    "QK-norm of each head": {},
    "no QK-norm": {"qk_norm": False},
    "QK-norm of all heads, norms behind the halves": {"qk_norm": "whole", "norms": "post"},
    "norms before and behind, GELU gates, biases": {
        "norms": "sandwich", "norm_plus_one": True, "activation": "gelu_tanh", "qkv_bias": True, "mlp_bias": True, "attention_out_bias": True,
    },
    "no gate": {"gated": False, "activation": "relu2", "tied": False},
    "no gate, GELU, no position": {"gated": False, "activation": "gelu", "nope_every": 2, "qk_norm": False},
    "norms without weights": {"norm_weights": False, "gated": False, "activation": "relu2"},
    "windows, a part of each head turns": {"windows": [4], "rope_share": 0.5, "qk_norm": False},
    "latent attention": {"latent": LATENT, "kv_heads": 6, "head_dim": 12, "qk_norm": False},
    "latent attention without a rank of queries": {"latent": LATENT | {"q_rank": None}, "kv_heads": 6, "head_dim": 12, "qk_norm": False},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_activations_equal_those_that_a_real_block_keeps(name: str) -> None:
    """Kernels stand in that keep what flash attention and the fused norms keep. A further layer then keeps exactly the counted elements."""
    two, three = (ModelSpec(**SMALL | KINDS[name], layers=layers) for layers in (2, 3))
    assert kept_by_torch(three, 16) - kept_by_torch(two, 16) == 16 * count_activation_elements_per_token(two, 0)


@pytest.mark.parametrize("name", [*KINDS, "experts"])
def test_flops_equal_those_that_torch_counts_in_the_real_model(name: str) -> None:
    """Torch counts the whole square of the scores, of which the formula leaves out the masked half and what a window hides."""
    experts = {"experts": {"count": 8, "per_token": 3, "d_ff": 24, "shared": 1, "dense_layers": 1}}
    model = ModelSpec(**SMALL | KINDS.get(name, experts), layers=3)
    decoder = Decoder(model, bind_ops({}), torch.float32)
    decoder.initialise(0)
    ids = torch.zeros((2, 16), dtype=torch.long)
    positions = torch.arange(16).expand(2, 16)
    # On a CPU torch has no count for flash attention, which math attention avoids, and for experts.
    counted = {torch.ops.aten._grouped_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=counted) as counter:
        loss, *_ = decoder.loss(ids, ids, torch.ones(2, 16), positions, ids.int(), 0.0)
        loss.backward()
    width = model.heads * model.head_dim  # values are made as wide as keys, by zeros that torch multiplies too
    square = 12 * width * model.layers * model.context
    ours = model.count_flops_per_token() - 6 * model.attention_width * model.positions_seen + square
    assert counter.get_total_flops() == pytest.approx(2 * 16 * ours, rel=1e-9)


@given(st.integers(1, 400), st.integers(8, 300))
@settings(deadline=None, max_examples=50)
def test_the_positions_seen_through_a_window_are_those_of_its_mask(window: int, context: int) -> None:
    model = ModelSpec(**SMALL | {"context": context, "windows": [window, None]}, layers=2)
    seen = sum(min(position, window) for position in range(1, context + 1)) / context
    assert model.positions_seen == pytest.approx(2 * seen + context, abs=1), "a position sees itself too"


def test_a_head_that_overwrites_its_logits_needs_them_once() -> None:
    """Twelve bytes for each logit of 1,024 tokens, or two for each of 8,192, but no more than 2 GiB; a soft-capped head keeps more."""
    model, layout = model_of("Llama 3 70B"), GpuLayout(8, micro_sequences=2)
    logits = lambda model, **head: estimate_memory_parts(model, layout, 80 * GB, **head)[5].bytes
    V = model.vocab_size
    assert logits(model, logit_rows=1024) - logits(model, logit_rows=512, in_place=True) == V * (12 * 1024 - 2 * 512)
    wide = model.model_copy(update={"vocab_size": 256_000})
    assert logits(wide, logit_rows=8192, in_place=True) - logits(wide, logit_rows=1, in_place=True) == 512_000 * (
        4194 - 1
    )
    capped = model.model_copy(update={"logit_softcap": 30.0})
    assert logits(capped, logit_rows=512, in_place=True) == logits(capped, logit_rows=512)


def test_planned_memory_is_that_measured_by_torchtitan() -> None:
    """Llama 3.1 70B, FSDP2 32 × TP 8, local batch 16, whole blocks recomputed: 71.9 GiB (table 4 of the same file).

    Their logits are whole and split by TP; that float8 products change no stored size, and that what their allocator
    holds beyond tensors is about our reserve (8 GB of 80; their cards have 96), is assumed.
    """
    model = model_of("Llama 3 70B")
    parts = estimate_memory_parts(model, GpuLayout(256, 8, 16, "block"), 80 * GB, logit_rows=None)
    # They split embedding and head by TP as well; our tensor ranks split the tokens of the head, and each holds both whole.
    theirs = sum_bytes(parts) - (2 * 2 + 10) * model.vocab_size * model.d_model * (1 - 1 / 8)
    assert theirs / GIB == pytest.approx(71.9, rel=0.05)


def test_torchtitans_memory_lies_between_that_of_full_and_no_recomputation() -> None:
    """Table 3, compiled: 62.0 GiB on 128 GPUs with every second product recomputed."""
    model = model_of("Llama 3 8B")
    all_of_it, none = (
        sum_bytes(estimate_memory_parts(model, GpuLayout(128, 1, 2, recompute), 80 * GB, logit_rows=None)) / GIB  # type: ignore[arg-type]
        for recompute in ("block", "none")
    )
    assert all_of_it < 62.0 < none


def test_activations_of_experts_include_each_routed_copy_of_a_token() -> None:
    """By hand, for one layer: 2 norms' inputs and outputs, q, k, v and attention's output, and 3 d_ff of 2 + 1 experts with 2 copies twice."""
    model = model_of("GLM-4.5-Air").model_copy(update={"d_model": 64, "heads": 4, "kv_heads": 2, "head_dim": 16})
    assert model.experts is not None
    model = model.model_copy(update={"experts": model.experts.model_copy(update={"per_token": 2, "d_ff": 32})})
    attention = (4 + 2 * 2) * 16 + 4 * 16
    assert count_activation_elements_per_token(model, 5) == 4 * 64 + attention + 3 * 32 * 3 + 2 * 2 * 64
    assert count_activation_elements_per_token(model, 0) == 4 * 64 + attention + 3 * model.d_ff
