"""The tensors of a model: the names and shapes that a checkpoint holds and that the trainer's ``Decoder`` has.

D: d_model, H and G: heads and key/value heads, K: head_dim, F: d_ff, E: experts, V: vocab_size. A matrix [out, in] multiplies as x · matrixᵀ.

    >>> spec = ModelSpec(vocab_size=64, d_model=32, layers=1, heads=4, kv_heads=2, head_dim=8, d_ff=48, context=16, tied=False, qkv_bias=True)
    >>> shapes = list_tensor_shapes(spec)
    >>> shapes["head"], shapes["blocks.0.k"], shapes["blocks.0.k_bias"]
    ((64, 32), (16, 32), (16,))
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from models.spec import ExpertsSpec, ModelSpec

Shape = tuple[int, ...]
MULTI_TOKEN = "multi_token"  # how the names of the tensors of ``multi_token_layers`` begin
BUFFERS = ("router_bias",)  # held by a checkpoint, but not changed by the optimiser


def list_tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The name and shape of each tensor of the model, parameters and buffers, in the order in which the model uses them."""
    found: dict[str, Shape] = {"embedding": (spec.vocab_size, spec.d_model)}
    for number in range(spec.layers):
        found |= {f"blocks.{number}.{key}": shape for key, shape in list_block_shapes(spec, number).items()}
    if spec.norm_weights:
        found["final_norm"] = (spec.d_model,)
    if not spec.tied:
        found["head"] = (spec.vocab_size, spec.d_model)
    for depth in range(spec.multi_token_layers):
        found |= {f"{MULTI_TOKEN}.{depth}.{key}": shape for key, shape in list_multi_token_shapes(spec, depth).items()}
    return found


def count_values(spec: ModelSpec) -> int:
    """Number of values of all tensors: the parameters and the buffers."""
    return sum(map(math.prod, list_tensor_shapes(spec).values()))


def list_block_shapes(spec: ModelSpec, number: int) -> dict[str, Shape]:
    """The name and shape of each tensor of one layer."""
    found = _block(spec, number)
    return found if spec.norm_weights else {key: shape for key, shape in found.items() if not key.endswith("norm")}


def list_unit_norms(spec: ModelSpec, number: int) -> dict[str, Shape]:
    """The name and shape of each norm of one layer that has no weight, and so multiplies by one."""
    return (
        {} if spec.norm_weights else {key: shape for key, shape in _block(spec, number).items() if key.endswith("norm")}
    )


def _block(spec: ModelSpec, number: int) -> dict[str, Shape]:
    D = spec.d_model
    before, after = spec.norms in ("pre", "sandwich"), spec.norms in ("post", "sandwich")
    found: dict[str, Shape] = {}
    if before:
        found["attention_norm"] = (D,)
    found |= _attention(spec)
    if after:
        found["attention_post_norm"] = (D,)
    if before:
        found["mlp_norm"] = (D,)
    experts = spec.layer(number).experts
    found |= _dense(spec) if experts is None else _experts(spec, experts)
    if after:
        found["mlp_post_norm"] = (D,)
    return found


def list_multi_token_shapes(spec: ModelSpec, depth: int) -> dict[str, Shape]:
    """The name and shape of each tensor of one layer for multi-token prediction: a layer, whose input is join · [token; state], each after its norm.

    The halves of ``join`` stand in the order of published files, where equation 21 of DeepSeek-V3 (arXiv 2412.19437) has the state first. Embedding
    and head are those of the model.
    """
    D = spec.d_model
    before: dict[str, Shape] = {"token_norm": (D,), "state_norm": (D,), "join": (D, 2 * D)}
    return before | list_block_shapes(spec, spec.layers + depth) | {"output_norm": (D,)}


def is_multi_token(name: str) -> bool:
    """True if a tensor with this name belongs to a layer for multi-token prediction, which takes no part in the logits."""
    return name.startswith(f"{MULTI_TOKEN}.")


def _attention(spec: ModelSpec) -> dict[str, Shape]:
    D, q, kv, K = spec.d_model, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.head_dim
    latent = spec.latent
    found: dict[str, Shape]
    if latent is None:
        found = {"q": (q, D), "k": (kv, D), "v": (kv, D)}
        if spec.qkv_bias:
            found |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if spec.qk_norm:
            whole = spec.qk_norm == "whole"
            found |= {"q_norm": (q if whole else K,), "k_norm": (kv if whole else K,)}
    else:  # q: of the compressed queries if q_rank is given; a head's first part has no position, its last part turns
        rank = latent.q_rank
        if rank is not None:
            found = {"q_down": (rank, D), "q_down_norm": (rank,), "q": (q, rank)}
        else:
            found = {"q": (q, D)}
        found |= {
            "kv_down": (latent.kv_rank + latent.rope_head_dim, D),  # the last rows: keys with position, for all heads
            "kv_down_norm": (latent.kv_rank,),
            "kv_up": (spec.heads * (latent.nope_head_dim + latent.v_head_dim), latent.kv_rank),  # of each head: k, v
        }
    if spec.attention_sinks:
        found["sinks"] = (spec.heads,)
    found["attention_out"] = (D, spec.heads * spec.v_head_dim)
    if spec.attention_out_bias:
        found["attention_out_bias"] = (D,)
    return found


def _dense(spec: ModelSpec) -> dict[str, Shape]:
    D, F = spec.d_model, spec.d_ff
    found: dict[str, Shape] = {"gate": (F, D)} if spec.gated else {}
    found |= {"up": (F, D), "down": (D, F)}
    if spec.mlp_bias:
        found |= {f"{key}_bias": (found[key][0],) for key in list(found)}
    return found


def _experts(spec: ModelSpec, experts: ExpertsSpec) -> dict[str, Shape]:
    D, E, F = spec.d_model, experts.count, experts.d_ff
    found: dict[str, Shape] = {
        "router": (E, D),
        "experts_gate": (E, F, D),
        "experts_up": (E, F, D),
        "experts_down": (E, D, F),
    }
    if experts.bias:  # those of all experts one after another: no optimiser takes them for a matrix
        found |= {"router_logits_bias": (E,), "experts_gate_bias": (E * F,), "experts_up_bias": (E * F,)}
        found["experts_down_bias"] = (E * D,)
    if experts.balance == "bias":
        found["router_bias"] = (E,)
    if experts.shared:
        wide = experts.shared * F
        found |= {"shared_gate": (wide, D), "shared_up": (wide, D), "shared_down": (D, wide)}
    return found


def find_missing_layer(pattern: str, layers: int) -> int | None:
    """The last layer of a pattern's range, if a model of so many layers lacks it. None for any other pattern.

    >>> [find_missing_layer(pattern, 4) for pattern in ("blocks.2-3", "blocks.2-4.q", "embedding")]
    [None, 4, None]
    """
    found = _read_range(pattern)
    return found[1] if found is not None and found[1] >= layers else None


def _read_range(pattern: str) -> tuple[int, int, str] | None:
    """(first layer, last layer, the rest) of a pattern with a range of layers; None for any other pattern."""
    section, _, rest = pattern.partition(".")
    layers, _, key = rest.partition(".")
    first, dash, last = layers.partition("-")
    is_range = section == "blocks" and dash and first.isdecimal() and last.isdecimal()
    return (int(first), int(last), key) if is_range else None


def matches_pattern(name: str, pattern: str) -> bool:
    """True if a pattern names a tensor. A pattern is a name or its beginning (``embedding``, ``blocks.3``), a range of layers, or has wildcards.

    >>> [matches_pattern("blocks.10.q", one) for one in ("blocks.1", "blocks.10", "blocks.0-11", "blocks.*.q", "blocks.10.k")]
    [False, True, True, True, False]
    """
    if (found := _read_range(pattern)) is not None:
        first, last, key = found
        parts = name.split(".")
        inside = parts[0] == "blocks" and first <= int(parts[1]) <= last
        return inside and (not key or fnmatchcase(".".join(parts[2:]), key))
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
