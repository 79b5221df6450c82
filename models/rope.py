"""RoPE (arXiv 2104.09864): the frequency of each pair of dimensions, with the scalings of ``spec.RopeScaling``.

The native layout is *rotate-half over whole heads*: dimension ``i`` of a head turns with dimension ``i + head_dim / 2``. Where RoPE turns only a part
of a head, the rest has frequency 0, so that no code has to split a head. Where the files of a family hold another order, its adapter reorders rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from models.spec import ModelSpec, RopeScaling

if TYPE_CHECKING:
    from torch import Tensor


def compute_rope_frequencies(spec: ModelSpec, kind: str) -> tuple[Tensor, float]:
    """(radians a position of each pair of dimensions, fp32 [head_dim / 2], on the CPU; the factor of cosines and sines).

    ``kind``: ``LayerSpec.rope``, "main" or "window". The pairs that RoPE does not turn come last, with 0. With latent attention only the part of a
    head that RoPE turns has frequencies, [rope_head_dim / 2].
    """
    import torch

    theta, scaling = spec.rope_theta, spec.rope_scaling
    if kind == "window":
        assert spec.window_rope_theta is not None
        theta, scaling = spec.window_rope_theta, None
    exponents = torch.arange(0, spec.rope_dim, 2).float() / spec.rope_dim
    turning, factor = theta**-exponents, 1.0
    if scaling is not None:
        turning, factor = _scaled(turning, scaling, theta, spec.rope_dim)
    width = spec.rope_dim if spec.latent else spec.head_dim
    return torch.cat((turning, turning.new_zeros(width // 2 - len(turning)))), factor


def _scaled(turning: Tensor, scaling: RopeScaling, theta: float, dims: int) -> tuple[Tensor, float]:
    if scaling.kind == "linear":
        return turning / scaling.factor, 1.0
    if scaling.kind == "dynamic":  # the context is at most the original one (ModelSpec)
        return turning, 1.0
    assert scaling.original_context is not None
    if scaling.kind == "yarn":
        return _yarn(turning, scaling, scaling.original_context, theta, dims)
    return _llama3(turning, scaling, scaling.original_context), 1.0


def _yarn(turning: Tensor, scaling: RopeScaling, original: int, theta: float, dims: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071 §3.2): fast pairs keep their frequency, slow ones are divided by ``factor``, with a ramp between them."""
    import torch

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    slow = ((torch.arange(dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    mixed = turning / scaling.factor * slow + turning * (1 - slow)
    usual = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return mixed, usual if scaling.attention_factor is None else scaling.attention_factor


def _llama3(turning: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Llama 3.1: waves longer than the original context are divided by ``factor``, short ones are kept, with a ramp between them."""
    import torch

    waves = 2 * math.pi / turning
    longest, shortest = original / scaling.low_frequency_factor, original / scaling.high_frequency_factor
    divided = torch.where(waves > longest, turning / scaling.factor, turning)
    share = (original / waves - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    between = (waves <= longest) & (waves >= shortest)
    return torch.where(between, (1 - share) * divided / scaling.factor + share * divided, divided)


def compute_alibi_slopes(heads: int) -> list[float]:
    """The slope of each head: 2^(-8/n), 2^(-16/n) …, with the odd ones of 2n heads added for a number that is no power of two (arXiv 2108.12409,
    the authors' code)."""

    def of_power(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    power = 1 << (heads.bit_length() - 1)
    return of_power(power) + of_power(2 * power)[0::2][: heads - power]
