"""A small model with every fact of a large one: the same norms, positions, windows, kinds of layers, experts and latent attention, in smaller sizes.

The preflight, the line profiler and the sweep compute such models, because a shape written by hand would compute other code than the real one does.

    >>> large = ModelSpec(vocab_size=512, d_model=4096, layers=48, heads=32, kv_heads=8, head_dim=128, d_ff=16384, context=8192,
    ...                   windows=[1024] * 5 + [None], window_rope_theta=1e4, rope_theta=1e6, norms="sandwich")
    >>> small = shrink_spec(large, layers=2, context=256, kv_heads=2)
    >>> small.layers, small.heads, small.d_model, small.d_ff, small.windows[4:], small.norms
    (6, 8, 1024, 4096, [32, None], 'sandwich')
"""

from __future__ import annotations

import math
from typing import Any

from models.spec import ExpertsSpec, LatentAttention, ModelSpec


def shrink_spec(
    spec: ModelSpec,
    *,
    layers: int | None = None,
    context: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    d_model: int | None = None,
    vocab_size: int | None = None,
    experts: int | None = None,
) -> ModelSpec:
    """The description with at most these sizes; None: as it is. Nothing else that decides which code runs changes.

    ``layers`` grows to as many as show every kind of layer. ``kv_heads`` narrows the model too: the query heads that a key serves stay as they are,
    and so does the width of a head, unless ``head_dim`` is given. ``d_ff`` follows the width. ``experts``: routed experts, but no fewer than a token
    goes to. Windows shrink with the context, so that they still hide something.
    """
    changes: dict[str, Any] = {
        "vocab_size": _at_most(spec.vocab_size, vocab_size),
        "context": _at_most(spec.context, context),
    }
    changes |= _narrow(spec, kv_heads, head_dim, d_model)
    if spec.windows is not None:
        share = changes["context"] / spec.context
        changes["windows"] = [None if window is None else max(1, round(window * share)) for window in spec.windows]
    if spec.experts is not None:
        changes["experts"] = _fewer_experts(
            spec.experts, experts, changes["d_model"] / spec.d_model, layers is not None
        )
    small = ModelSpec.model_validate(spec.model_dump() | changes)
    if layers is None:
        return small
    return small.model_copy(update={"layers": min(spec.layers, max(layers, count_layers_of_all_kinds(small)))})


def count_layers_of_all_kinds(spec: ModelSpec) -> int:
    """The number of first layers among which is a layer of each kind."""
    kinds = [
        (kind.window, kind.rope, kind.experts is None) for kind in (spec.layer(number) for number in range(spec.layers))
    ]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _at_most(size: int, most: int | None) -> int:
    return size if most is None else min(size, most)


def _narrow(spec: ModelSpec, kv_heads: int | None, head_dim: int | None, d_model: int | None) -> dict[str, Any]:
    """The keys of width and heads. A number that belongs to a width (the scale of the scores, and of embeddings if it is √width) follows it."""
    groups = spec.heads // spec.kv_heads
    kv, wide = _at_most(spec.kv_heads, kv_heads), _at_most(spec.head_dim, head_dim)
    width = spec.d_model
    if kv < spec.kv_heads or wide < spec.head_dim:
        width = min(width, kv * groups * wide)
    width = _at_most(width, d_model)
    share, narrower = width / spec.d_model, wide / spec.head_dim
    found: dict[str, Any] = {"kv_heads": kv, "heads": kv * groups, "head_dim": wide, "d_model": width}
    if share < 1:
        found["d_ff"] = _scaled(spec.d_ff, share)
        if spec.embedding_scale is not None:
            usual = math.isclose(
                spec.embedding_scale, math.sqrt(spec.d_model), rel_tol=1e-2
            )  # Gemma's, also as bf16 rounds it
            found["embedding_scale"] = math.sqrt(width) if usual else spec.embedding_scale
    if narrower < 1 and spec.attention_scale is not None:
        found["attention_scale"] = spec.attention_scale / math.sqrt(narrower)
    if spec.latent is not None:
        found["latent"] = _narrow_latent(spec.latent, wide, share, narrower).model_dump()
    return found


def _narrow_latent(latent: LatentAttention, head_dim: int, share: float, narrower: float) -> LatentAttention:
    turning = latent.rope_head_dim if narrower == 1 else max(2, round(latent.rope_head_dim * narrower / 2) * 2)
    return LatentAttention(
        q_rank=None if latent.q_rank is None else _scaled(latent.q_rank, share),
        kv_rank=_scaled(latent.kv_rank, share),
        nope_head_dim=head_dim - turning,
        rope_head_dim=turning,
        v_head_dim=latent.v_head_dim if narrower == 1 else max(1, round(latent.v_head_dim * narrower)),
    )


def _fewer_experts(experts: ExpertsSpec, count: int | None, share: float, few_layers: bool) -> dict[str, Any]:
    """As many groups as before, each with fewer experts."""
    least = max(experts.per_token, 2 * experts.groups if experts.groups > 1 else 2)
    # The experts of a token's groups must be enough for its choices.
    least = max(least, math.ceil(experts.per_token / experts.groups_per_token) * experts.groups)
    fewer = min(experts.count, max(least, experts.count if count is None else count))
    fewer = min(experts.count, math.ceil(fewer / experts.groups) * experts.groups)
    found = experts.model_dump() | {"count": fewer}
    if few_layers:
        found["dense_layers"] = min(experts.dense_layers, 1)
    if share < 1:
        found["d_ff"] = _scaled(experts.d_ff, share)
    return found


def _scaled(size: int, share: float) -> int:
    """A multiple of 16, as matrix units and grouped products want it."""
    return min(size, max(16, math.ceil(size * share / 16) * 16)) if share < 1 else size
