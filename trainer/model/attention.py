"""The parts of which a block's attention is composed: how queries, keys and values are projected, where positions enter, and how values are mixed.

``choose_attention`` chooses the functions once, when the block is made. A block calls them with itself as the first argument. Functions of a module
are the same object in every layer, so layers of one kind share a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from kernels.qk_norm_rope import apply_rope
from models.spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from trainer.model.transformer import Block

Place = Callable[["Block", Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class AttentionParts(NamedTuple):
    """The functions of one kind of attention.

    project: block, h [B, T, D], cos, sin → q [B, T, H, K], k and v [B, T, G, K]
    place: block, q, k, cos, sin → q and k with their norm and position
    mix: block, q, k, v, prepared documents → [B, T, H, v_head_dim]
    """

    project: Callable[[Block, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    place: Place
    mix: Callable[[Block, Tensor, Tensor, Tensor, Any], Tensor]


def choose_attention(shape: ModelSpec, layer: LayerSpec) -> tuple[int | None, AttentionParts]:
    """(the window by which the layer's documents are prepared, its functions)."""
    place = PLACES[shape.qk_norm, layer.rope != "none"]
    return None, AttentionParts(project_heads, place, attend_to_document)


# -- projections -------------------------------------------------------------------------------------------------------
def project_heads(block: Block, h_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, T, _ = h_BTD.shape
    q_BTHK, k_BTGK, v_BTGK = (
        x_BTX.view(B, T, -1, block.shape.head_dim) for x_BTX in block.attention_products(h_BTD, ("q", "k", "v"))
    )
    q_BTHK, k_BTGK = block.attention.place(block, q_BTHK, k_BTGK, cos_BTK, sin_BTK)
    if block.query_scale != 1:
        q_BTHK = q_BTHK * block.query_scale
    return q_BTHK, k_BTGK, v_BTGK


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
    return block.ops.attention(q_BTHK, k_BTGK, v_BTGK, prepared)
