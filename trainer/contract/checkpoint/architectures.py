"""The architectures that an export may have: one entry each, for the code that writes config.json and for the code that reads it as hostile input.

To add one: an entry of ``ARCHITECTURES``, and its maths in ``trainer/model`` and in the judge's ``factory/evals/reference_model.py``. Tensor
names that only this architecture has go into ``export.NAMES`` and ``ExportConfig.shapes``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from models.spec import ModelSpec


@dataclass(frozen=True)
class Architecture:
    """A decoder class that transformers and vLLM both have."""

    class_name: str
    can_hold: Callable[
        [ModelSpec], bool
    ]  # True if it computes what the trainer's model of this shape computes; for each shape, of one entry only
    own_keys: Callable[[ModelSpec], dict[str, Any]] = lambda shape: {}  # keys of config.json besides the common ones
    tied_embeddings: bool = True  # as the trainer exports it
    # What config.json may say.
    only: dict[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # key → its allowed values; a missing key means the first value
    qk_norm: bool | None = False  # None: the key use_qk_norm decides
    has_nope: bool = False  # the key no_rope_layers says which layers have RoPE
    has_experts: bool = False
    rotary_share: float | None = 1.0  # that transformers assumes where rope_parameters has none; None: it must be given


def _nope_keys(shape: ModelSpec) -> dict[str, Any]:
    assert shape.nope_every is not None
    has_rope = [int((layer + 1) % shape.nope_every != 0) for layer in range(shape.layers)]
    return {"no_rope_layers": has_rope, "no_rope_layer_interval": shape.nope_every}


def _expert_keys(shape: ModelSpec) -> dict[str, Any]:
    assert shape.experts is not None
    experts = shape.experts
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta, "partial_rotary_factor": 1.0}
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.d_ff,
        "n_shared_experts": max(1, experts.shared),  # vLLM's class needs one: a shared expert of zeros is exported
        "first_k_dense_replace": experts.dense_layers,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": shape.qk_norm,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 1.0,
        "rope_parameters": rope,
    }


_WHOLE_HEAD: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (1.0,)}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(  # by model_type
    {
        "qwen3": Architecture(
            "Qwen3ForCausalLM",
            can_hold=lambda shape: shape.experts is None and bool(shape.qk_norm),
            only=_WHOLE_HEAD,
            qk_norm=True,
        ),
        "llama": Architecture(
            "LlamaForCausalLM",
            can_hold=lambda shape: not (shape.experts or shape.nope_every or shape.qk_norm),
            only=_WHOLE_HEAD | {"mlp_bias": (False,), "pretraining_tp": (1,)},
        ),
        "smollm3": Architecture(
            "SmolLM3ForCausalLM",
            can_hold=lambda shape: shape.nope_every is not None,
            own_keys=_nope_keys,
            only=_WHOLE_HEAD | {"mlp_bias": (False,)},
            has_nope=True,
        ),
        "glm4_moe": Architecture(
            "Glm4MoeForCausalLM",
            can_hold=lambda shape: shape.experts is not None,
            own_keys=_expert_keys,
            tied_embeddings=False,  # vLLM's class ties no embeddings
            only={
                "n_group": (1,),
                "topk_group": (1,),
                "norm_topk_prob": (True,),
                "routed_scaling_factor": (1.0,),
                "partial_rotary_factor": (
                    1.0,
                ),  # a missing key would mean a half, if rope_parameters did not require it
                "num_nextn_predict_layers": (0,),  # a missing key would mean one layer, for which there are no tensors
                "output_router_logits": (False,),
            },
            qk_norm=None,
            has_experts=True,
            rotary_share=None,
        ),
    }
)


def find_model_type(shape: ModelSpec) -> str:
    """The key in ``ARCHITECTURES`` of the architecture that computes what a model of this shape computes."""
    (found,) = (model_type for model_type, architecture in ARCHITECTURES.items() if architecture.can_hold(shape))
    return found
