"""The parts of which a block's attention is composed: how queries, keys and values are projected, where positions enter, and how values are mixed.

``choose_attention`` chooses the functions once, when the block is made. A block calls them with itself as the first argument. Functions of a module
are the same object in every layer, so layers of one kind share a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.qk_norm_rope import apply_rope
from models.rope import compute_alibi_slopes
from models.spec import LayerSpec, ModelSpec
from trainer.parallel.tensor_ranks import TensorRanks

Block = Any  # ``trainer.model.block`` has the class, and imports this file
Place = Callable[[Block, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Mix = Callable[[Block, Tensor, Tensor, Tensor, Any], Tensor]


class AttentionParts(NamedTuple):
    """The functions of one kind of attention.

    project: block, h [B, T, D], cos, sin → q [B, T, H, K], k and v [B, T, G, K]
    place: block, q, k, cos, sin → q and k with their norm and position
    mix: block, q, k, v, prepared documents → [B, T, H, v_head_dim]
    """

    project: Callable[[Block, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    place: Place
    mix: Mix


@dataclass(frozen=True)
class Visibility:
    """By what the documents of a batch are prepared for a layer's attention: its window, and whether distance costs. ``None`` in its place stands for
    a layer that calls the plain op."""

    window: int | None
    has_slopes: bool


def choose_visibility(shape: ModelSpec, layer: LayerSpec) -> Visibility | None:
    """The visibility of a layer that needs ``general_attention``. A window that covers the row is no window."""
    window = None if layer.window is None or layer.window >= shape.context else layer.window
    has_slopes = shape.position == "alibi"
    if window is None and not has_slopes and not shape.attention_sinks and shape.attention_softcap is None:
        return None
    return Visibility(window, has_slopes)


def make_own_slopes(shape: ModelSpec, tensor: TensorRanks, device: torch.device) -> Tensor:
    """ALiBi's slopes of this rank's heads, fp32."""
    slopes_1H = torch.tensor([compute_alibi_slopes(shape.heads)], device=device)
    return tensor.take_own_positions(slopes_1H)[0]


def choose_attention(shape: ModelSpec, layer: LayerSpec) -> AttentionParts:
    place = PLACES[shape.qk_norm, layer.rope != "none"]
    mix = attend_to_document if choose_visibility(shape, layer) is None else attend_to_visible_keys
    if shape.latent is None:
        return AttentionParts(project_heads, place, mix)
    return AttentionParts(project_latent, place, MIX_NARROW[mix])


# -- projections -------------------------------------------------------------------------------------------------------
def project_heads(block: Block, h_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, T, _ = h_BTD.shape
    q_BTHK, k_BTGK, v_BTGK = (
        x_BTX.view(B, T, -1, block.shape.head_dim) for x_BTX in block.attention_products(h_BTD, ("q", "k", "v"))
    )
    q_BTHK, k_BTGK = block.attention.place(block, q_BTHK, k_BTGK, cos_BTK, sin_BTK)
    return scale_queries(block, q_BTHK), k_BTGK, v_BTGK


def scale_queries(block: Block, q_BTHK: Tensor) -> Tensor:
    """Ops divide scores by √K. Queries are multiplied by what the model's scale is more."""
    return q_BTHK if block.query_scale == 1 else q_BTHK * block.query_scale


def project_latent(block: Block, h_BTD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434) §2.1.2 and §2.1.3. The values get zeros, because an op's values are as wide as
    its keys."""
    (B, T, _), latent, eps = h_BTD.shape, block.shape.latent, block.shape.norm_eps
    assert latent is not None
    q_BTX, kv_BTX = block.products(h_BTD, ("q" if latent.q_rank is None else "q_down", "kv_down"))
    if latent.q_rank is not None:
        q_BTX = block.ops.rms_norm(q_BTX, block.norm_weight(block.q_down_norm), eps)
        q_BTX = block.adapt(q_BTX, "q") if "q" in block.adapted else block.multiply(q_BTX, block.matrix("q"))
    latent_BTX, turning_BTR = kv_BTX.split((latent.kv_rank, latent.rope_head_dim), dim=-1)
    latent_BTX = block.ops.rms_norm(latent_BTX, block.norm_weight(block.kv_down_norm), eps)
    adapted = "kv_up" in block.adapted
    kv_BTX = block.adapt(latent_BTX, "kv_up") if adapted else block.multiply(latent_BTX, block.matrix("kv_up"))
    kv_BTHX = kv_BTX.view(B, T, -1, latent.nope_head_dim + latent.v_head_dim)
    k_BTHN, v_BTHV = kv_BTHX.split((latent.nope_head_dim, latent.v_head_dim), dim=-1)
    q_BTHN, q_BTHR = q_BTX.view(B, T, -1, block.shape.head_dim).split(
        (latent.nope_head_dim, latent.rope_head_dim), dim=-1
    )
    q_BTHR, k_BT1R = block.attention.place(block, q_BTHR, turning_BTR.unsqueeze(2), cos_BTR, sin_BTR)
    q_BTHK = torch.cat((q_BTHN, q_BTHR), dim=-1)
    k_BTHK = torch.cat((k_BTHN, k_BT1R.expand(*k_BTHN.shape[:3], -1)), dim=-1)
    v_BTHK = F.pad(v_BTHV, (0, block.shape.head_dim - latent.v_head_dim))
    return scale_queries(block, q_BTHK), k_BTHK, v_BTHK


# -- norm and position -------------------------------------------------------------------------------------------------
def norm_and_turn(
    block: Block, q_BTHK: Tensor, k_BTGK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor
) -> tuple[Tensor, Tensor]:
    eps = block.shape.norm_eps
    q_BTHK = block.ops.qk_norm_rope(q_BTHK, block.norm_weight(block.q_norm), cos_BTK, sin_BTK, eps)
    k_BTGK = block.ops.qk_norm_rope(k_BTGK, block.norm_weight(block.k_norm), cos_BTK, sin_BTK, eps)
    return q_BTHK, k_BTGK


def turn(block: Block, q_BTHK: Tensor, k_BTGK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rope(q_BTHK, cos_BTK, sin_BTK), apply_rope(k_BTGK, cos_BTK, sin_BTK)


def norm_heads(block: Block, q_BTHK: Tensor, k_BTGK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> tuple[Tensor, Tensor]:
    eps = block.shape.norm_eps
    q_BTHK = block.ops.rms_norm(q_BTHK, block.norm_weight(block.q_norm), eps)
    return q_BTHK, block.ops.rms_norm(k_BTGK, block.norm_weight(block.k_norm), eps)


def norm_all_heads(
    block: Block, q_BTHK: Tensor, k_BTGK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor
) -> tuple[Tensor, Tensor]:
    eps = block.shape.norm_eps
    q_BTX = block.ops.rms_norm(q_BTHK.flatten(2), block.norm_weight(block.q_norm), eps)
    k_BTX = block.ops.rms_norm(k_BTGK.flatten(2), block.norm_weight(block.k_norm), eps)
    return q_BTX.view(q_BTHK.shape), k_BTX.view(k_BTGK.shape)


def norm_all_heads_and_turn(
    block: Block, q_BTHK: Tensor, k_BTGK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor
) -> tuple[Tensor, Tensor]:
    return turn(block, *norm_all_heads(block, q_BTHK, k_BTGK, cos_BTK, sin_BTK), cos_BTK, sin_BTK)


def keep(block: Block, q_BTHK: Tensor, k_BTGK: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> tuple[Tensor, Tensor]:
    return q_BTHK, k_BTGK


PLACES: dict[tuple[bool | str, bool], Place] = {  # by (qk_norm, whether the layer has RoPE)
    (True, True): norm_and_turn,
    (True, False): norm_heads,
    ("whole", True): norm_all_heads_and_turn,
    ("whole", False): norm_all_heads,
    (False, True): turn,
    (False, False): keep,
}


# -- mixing ------------------------------------------------------------------------------------------------------------
def attend_to_document(block: Block, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, prepared: Any) -> Tensor:
    o_BTHK: Tensor = block.ops.attention(q_BTHK, k_BTGK, v_BTGK, prepared)
    return o_BTHK


def attend_to_visible_keys(block: Block, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, prepared: Any) -> Tensor:
    sinks_H = None if block.sinks is None else block.weight(block.sinks)
    return block.ops.general_attention(q_BTHK, k_BTGK, v_BTGK, sinks_H, block.shape.attention_softcap, prepared)


def attend_to_document_narrow(block: Block, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, prepared: Any) -> Tensor:
    """Without the zeros that ``project_latent`` added."""
    return attend_to_document(block, q_BTHK, k_BTGK, v_BTGK, prepared)[..., : block.shape.v_head_dim]


def attend_to_visible_keys_narrow(
    block: Block, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, prepared: Any
) -> Tensor:
    return attend_to_visible_keys(block, q_BTHK, k_BTGK, v_BTGK, prepared)[..., : block.shape.v_head_dim]


MIX_NARROW: dict[Mix, Mix] = {
    attend_to_document: attend_to_document_narrow,
    attend_to_visible_keys: attend_to_visible_keys_narrow,
}
