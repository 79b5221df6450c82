"""Reads a public model's ``config.json`` as a shape to plan with.

If ``models.adapters`` knows the family, the file is read as strictly as for an import, and the shape is that of the model that would be trained. For
any other family the sizes are read by the key names of Hugging Face's transformers. This holds for decoders whose blocks are attention and a gated
MLP, but says nothing of their norms and biases, and such a model cannot be imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.contract.strict import make_not_json_error, parse
from models.adapters import FAMILIES
from models.adapters.config_reader import ModelFilesError
from models.adapters.family import Family
from models.spec import ExpertsSpec, LatentAttention, ModelSpec
from trainer.contract.errors import RecipeError

MOST_BYTES = 1 << 20
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
# Without tie_word_embeddings, these model types have one matrix for embedding and head: the default of their classes in transformers 5.
TIED = ("cohere", "ernie4_5", "gemma", "starcoder2")
# A config.json with one of these keys has other blocks than attention with a gated MLP. No formula here holds for them.
OTHER_BLOCKS = (
    "n_embd",
    "d_inner",
    "ssm_cfg",
    "mamba_d_state",
    "linear_num_value_heads",
    "attn_layer_period",
    "is_encoder_decoder",
)


USUAL_CONTEXT = 4096  # tokens of a row, if no context is asked for


@dataclass(frozen=True)
class PublicModel:
    """A public model: its description, and how it was read."""

    spec: ModelSpec
    longest_context: int  # positions for which the model was made, also if ``spec`` has more
    model_type: str
    family: Family | None  # None: no adapter knows model_type, so the sizes were read by key names
    config: dict[str, Any]


def read_config(path: Path, context: int | None = None) -> PublicModel:
    """The model of a ``config.json``; ``path`` may also be its folder. ``context``: tokens of a row; None: the config's, at most 4,096.

    Raises: RecipeError that names the file and the key.

    A Qwen3-30B-A3B, whose config has hidden_size 2048, num_experts 128, num_experts_per_tok 8, moe_intermediate_size 768 …, has 30.5 B
    parameters, of which 3.0 B multiply a token.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > MOST_BYTES:
            raise RecipeError(
                "plan.large_config",
                "{file} has more than {mib} MiB. A model's config.json has a few kilobytes.",
                file=str(file),
                mib=MOST_BYTES >> 20,
            )
        raw = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(
            "plan.no_config", "{file} cannot be read: {problem}", file=str(file), problem=error.strerror
        ) from None
    except (ValueError, RecursionError) as error:
        raise make_not_json_error(file, error, RecipeError) from None
    if not isinstance(raw, dict):
        raise RecipeError("plan.not_a_mapping", "{file} must contain a JSON object.", file=str(file))
    return read_public_model(raw, str(file), context)


def read_public_model(config: dict[str, Any], where: str, context: int | None = None) -> PublicModel:
    """The model of a parsed config.json; see ``read_config``. Raises: RecipeError."""
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind)
    if family is None:  # also a model of images and text, whose part for text has keys of its own
        text = config.get("text_config")
        merged = config | text if isinstance(text, dict) else config
        shape = _read_shape_by_key_names(merged, where, context)
        longest = merged.get("max_position_embeddings")
        longest = longest if isinstance(longest, int) else shape.context
        return PublicModel(shape, longest, kind, None, config)
    try:
        spec = family.read_config(config, where)
    except ModelFilesError as error:
        raise RecipeError(error.message) from error
    rows = context or min(spec.context, USUAL_CONTEXT)
    described = spec.model_dump() | {"context": rows}
    return PublicModel(parse(ModelSpec, described, where, RecipeError), spec.context, kind, family, config)


def _read_shape_by_key_names(config: dict[str, Any], where: str, context: int | None) -> ModelSpec:
    if odd := next((key for key in OTHER_BLOCKS if config.get(key)), None):
        kind = config.get("model_type", "this model")
        raise RecipeError(
            "plan.other_blocks",
            "{where}: {kind} has the key {key!r}. Only decoders whose blocks are attention and a gated MLP can "
            "be planned.",
            where=where,
            kind=kind,
            key=odd,
        )
    if missing := [key for key in NEEDED if config.get(key) is None]:
        raise RecipeError(
            "plan.not_a_decoder",
            "{where}: key {key!r} is missing, so this is not the config.json of a decoder.",
            where=where,
            key=missing[0],
        )

    def number(key: str, otherwise: int | None = None) -> int:
        value = config.get(key)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RecipeError(
                "plan.not_a_whole_number",
                "{where}: the value of {key} must be a whole number, not {value!r}.",
                where=where,
                key=key,
                value=value,
            )
        return value

    layers, heads, width = number("num_hidden_layers"), number("num_attention_heads"), number("hidden_size")
    latent = None
    if config.get("kv_lora_rank"):
        parts = {name: number(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")}
        latent = LatentAttention(
            q_rank=number("q_lora_rank") if config.get("q_lora_rank") else None,
            kv_rank=parts["kv_lora_rank"],
            nope_head_dim=parts["qk_nope_head_dim"],
            rope_head_dim=parts["qk_rope_head_dim"],
            v_head_dim=parts["v_head_dim"],
        )
    head_dim = latent.nope_head_dim + latent.rope_head_dim if latent else number("head_dim", width // max(1, heads))
    counted = next((key for key in EXPERTS if config.get(key)), None)
    experts = None
    if counted:
        each = number("moe_intermediate_size", number("intermediate_size", 0))
        shared = number("n_shared_experts", 0)
        if wide := number("shared_expert_intermediate_size", 0):
            shared = round(wide / max(1, each))
        alone = config.get("mlp_only_layers") or []
        if not isinstance(alone, list):
            raise RecipeError(
                "plan.not_a_list",
                "{where}: the value of mlp_only_layers must be a list, not {value!r}.",
                where=where,
                value=alone,
            )
        dense = number("first_k_dense_replace", len(alone))
        groups = {}
        if number("n_group", 1) > 1 and config.get("topk_group"):
            groups = {"groups": number("n_group"), "groups_per_token": number("topk_group")}
        experts = parse(
            ExpertsSpec,
            {
                "count": number(counted),
                "per_token": number("num_experts_per_tok"),
                "d_ff": each,
                "shared": shared,
                "dense_layers": dense,
                **groups,
            },
            where,
            RecipeError,
        )
    tied = config.get("tie_word_embeddings")
    shape = {
        "vocab_size": number("vocab_size"),
        "d_model": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": number("num_key_value_heads", heads) or heads,
        "head_dim": head_dim,
        "d_ff": number("intermediate_size", 4 * width),
        "context": context or min(number("max_position_embeddings", USUAL_CONTEXT), USUAL_CONTEXT),
        "experts": experts.model_dump() if experts else None,
        "tied": str(config.get("model_type", "")).startswith(TIED) if tied is None else tied is True,
        "latent": latent.model_dump() if latent else None,
        "qk_norm": latent is None,
    }
    return parse(ModelSpec, shape, where, RecipeError)
