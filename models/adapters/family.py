"""A family of public models: how its ``config.json`` and its tensors correspond to a ``ModelSpec`` and to the native tensors, in both directions.

To add a family, write a file beside ``llama.py`` with one ``Family``, and add it to the table in ``models.adapters``. Most families share Llama's
names and keys: ``read_common``, ``write_common`` and ``NAMES`` hold these, and a family's file says only what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.contract.message import Message
from kernels.contract.strict import parse
from models.adapters.config_reader import ConfigReader, ModelFilesError, read_with
from models.adapters.tensor_mapping import Join, OneNative, OneOfTheirs, TensorMapping
from models.spec import ExpertsSpec, ModelSpec, RopeScaling
from models.tensors import MULTI_TOKEN, Shape, list_tensor_shapes

# native key of a layer → its name below ``model.layers.N.``; ``{}`` stands for the number of an expert
NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "attention_out": "self_attn.o_proj.weight",
    "attention_out_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.gate.e_score_correction_bias",
    "experts_gate": "mlp.experts.{}.gate_proj.weight",
    "experts_up": "mlp.experts.{}.up_proj.weight",
    "experts_down": "mlp.experts.{}.down_proj.weight",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}
# what a layer for multi-token prediction has more, as DeepSeek-V3's and GLM-4.5's files name it
NAMES_OF_MULTI_TOKEN: Mapping[str, str] = {
    "token_norm": "enorm.weight",
    "state_norm": "hnorm.weight",
    "join": "eh_proj.weight",
    "output_norm": "shared_head.norm.weight",
}
MOST_EXPERTS = 1 << 16  # in all layers; each expert has three tensors with names of their own
# keys of a model's training. They are in no config.json
OF_TRAINING = ("context", "max_positions", "across_documents", "base_d_model", "family")
OF_EXPERTS_TRAINING = ("bias_rate", "z_loss", "loss_weight")


@dataclass(frozen=True)
class Family:
    """A class of decoders of transformers and vLLM. ``read`` and ``write`` convert between the keys of config.json and those of ``ModelSpec``."""

    name: str  # model_type
    class_name: str
    read: Callable[[ConfigReader], dict[str, Any]]
    write: Callable[[ModelSpec], dict[str, Any]]
    names: Callable[[ModelSpec], Mapping[str, str]] = lambda spec: NAMES
    order_rows: Callable[[ModelSpec, str], tuple[int, ...] | None] = lambda spec, key: None
    joins: Collection[Join] = ()  # the tensors of the files that hold several native ones
    # The same function in the form that the family's files hold: for example with a head of its own, if the class cannot tie it.
    as_stored: Callable[[ModelSpec], ModelSpec] = lambda spec: spec
    idle: Collection[str] = ()  # further keys that change nothing

    def read_config(self, config: Mapping[str, Any], where: Path | str, context: int | None = None) -> ModelSpec:
        """The description of a parsed config.json. ``context``: positions in a row; None: as many as the file allows.

        Raises: ModelFilesError that names ``where`` and the key.
        """
        if config.get("architectures") not in (None, [self.class_name]):
            raise ModelFilesError(
                "models.other_class", "{file}: architectures is {given}, but a model of type {family} must have {expected}. If the model "
                                      "is of this class, correct the value. Else use another model: docs/MODELS.md lists the classes",
                file=where, given=str(config["architectures"])[:80], family=self.name, expected=[self.class_name],
            )  # fmt: skip
        values = read_with(self.read, config, where, self.idle) | {"family": self.name}
        if context is not None:
            values["context"] = context
        spec = parse(ModelSpec, values, str(where), ModelFilesError)
        layers = spec.layers + spec.multi_token_layers
        if spec.experts is not None and layers * spec.experts.count > MOST_EXPERTS:
            raise ModelFilesError(
                "models.too_many_experts", "{file}: {layers:,} layers with {experts:,} experts each have {total:,} experts in total. At most "
                                           "{limit:,} are allowed",
                file=where, layers=layers, experts=spec.experts.count, total=layers * spec.experts.count, limit=MOST_EXPERTS,
            )  # fmt: skip
        return spec

    def list_file_names(self, spec: ModelSpec) -> list[str]:
        """The names of all tensors of the family's files, in their order."""
        return [name for mapping in self.list_mappings(self.as_stored(spec)) for name in mapping.theirs]

    def find_differences(self, spec: ModelSpec) -> dict[str, tuple[Any, Any]]:
        """``{key: (in spec, in the family's files)}`` of what writing ``spec`` to a config.json and reading it back changes. Empty: the files can
        hold ``spec``. A value that the files cannot have stands under the key of config.json, or under the key "" with the reason."""
        stored = self.as_stored(spec)
        try:
            found = drop_training_keys(self.read_config(self.write(stored), self.name))
        except ModelFilesError as error:
            if error.code == "models.other_value":  # its advice concerns a file, and there is none
                return {error.data["key"]: (error.data["given"], error.data["expected"])}
            return {"": (str(error), "")}
        wanted = drop_training_keys(stored)
        keys = ModelSpec.model_fields
        return {
            key: (getattr(wanted, key), getattr(found, key))
            for key in keys
            if getattr(wanted, key) != getattr(found, key)
        }

    def fit_to_tensors(self, spec: ModelSpec, names: Iterable[str]) -> ModelSpec:
        """The description without layers for multi-token prediction, if the files (tensors ``names``) have none. transformers' classes drop these
        layers, but its config.json still counts them.

        >>> from models.adapters import FAMILIES
        >>> spec = ModelSpec(vocab_size=64, d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=64, context=128, multi_token_layers=1)
        >>> fit = FAMILIES["glm4_moe"].fit_to_tensors
        >>> [fit(spec, [f"model.layers.{n}.eh_proj.weight"]).multi_token_layers for n in range(4)]
        [0, 0, 1, 0]
        """
        begins = tuple(f"model.layers.{number}." for number in spec.multi_token_numbers)
        return spec if any(name.startswith(begins) for name in names) else spec.without_multi_token

    def list_mappings(self, spec: ModelSpec) -> list[TensorMapping]:
        """Each tensor of the files. ``spec`` is as the files hold it (``as_stored``)."""
        shapes = list_tensor_shapes(spec)
        joins = {join.parts[0]: join for join in self.joins}
        others = {key for join in self.joins for key in join.parts[1:]}
        found: list[TensorMapping] = []
        for name, shape in shapes.items():
            key = name.rpartition(".")[2]
            if key in joins:
                found.append(self._join(spec, joins[key], name, shapes))
            elif key not in others:
                found.append(self._mapping(spec, name, shape))
        copied = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "embedding" if spec.tied else "head"}
        for number in spec.multi_token_numbers:
            for theirs, native in copied.items():
                found.append(OneNative(native, (f"model.layers.{number}.{theirs}",), shapes[native], is_copy=True))
        return found

    def _mapping(self, spec: ModelSpec, name: str, shape: Shape) -> OneNative:
        ends = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
        if name in ends:
            return OneNative(name, (ends[name],), shape)
        section, layer, key = name.split(".")
        if section == MULTI_TOKEN:
            theirs = f"model.layers.{spec.layers + int(layer)}.{({**self.names(spec), **NAMES_OF_MULTI_TOKEN})[key]}"
        else:
            theirs = f"model.layers.{layer}.{self.names(spec)[key]}"
        if "{}" in theirs:
            return OneNative(name, tuple(theirs.format(number) for number in range(shape[0])), shape[1:])
        return OneNative(name, (theirs,), shape, self.order_rows(spec, key))

    def _join(self, spec: ModelSpec, join: Join, first: str, shapes: Mapping[str, Shape]) -> OneOfTheirs:
        layer = first.rpartition(".")[0]
        natives = tuple(f"{layer}.{key}" for key in join.parts)
        sizes = [shapes[name] for name in natives]
        if spec.experts is not None and join.parts[0].startswith("experts_") and len(sizes[0]) == 1:
            sizes = [(spec.experts.count, size // spec.experts.count) for (size,) in sizes]
        rows = tuple(self.order_rows(spec, key) for key in join.parts)
        return OneOfTheirs(
            join, natives, (f"model.{layer.replace('blocks', 'layers')}.{join.name}",), tuple(sizes), rows
        )


def drop_training_keys(spec: ModelSpec) -> ModelSpec:
    """The description without the keys that concern training alone, in one form, to compare what two compute.

    One form: ``windows`` lists all layers or is None, and a key that says its default in other words has the default.
    """
    usual = {key: ModelSpec.model_fields[key].default for key in OF_TRAINING if key != "context"} | {"context": 8}
    if spec.experts is not None:
        experts = {key: ExpertsSpec.model_fields[key].default for key in OF_EXPERTS_TRAINING}
        usual["experts"] = spec.experts.model_copy(update=experts)
    windows = [spec.layer(number).window for number in range(spec.layers)]
    usual["windows"] = windows if any(windows) else None
    if spec.attention_scale == spec.head_dim**-0.5:
        usual["attention_scale"] = None
    if not any(windows) or (spec.window_rope_theta == spec.rope_theta and spec.rope_scaling is None):
        usual["window_rope_theta"] = None
    if spec.embedding_scale == 1.0:
        usual["embedding_scale"] = None
    if spec.nope_every is not None and spec.nope_every > spec.layers:
        usual["nope_every"] = None
    return spec.model_copy(update=usual)


# -- keys that most families share -------------------------------------------------------------------------------------
def read_common(
    reader: ConfigReader, head_dim: int | None = None, kv_heads: int | None = None, rope: bool = True, **of_rope: Any
) -> dict[str, Any]:
    """The sizes, the norm's epsilon and the RoPE of a config.json with Llama's keys.

    ``head_dim``: what a missing key means; None: hidden_size / num_attention_heads. ``kv_heads``: the same of num_key_value_heads, of which null is
    num_attention_heads in every family. ``of_rope``: of ``read_rope``, which ``rope`` False leaves to the family.
    """
    d_model = reader.whole("hidden_size", 1, 1 << 16)
    heads = reader.whole("num_attention_heads", 1, 1024)
    context = reader.whole("max_position_embeddings", 8, 1 << 24)
    reader.only("rope_interleaved", False)
    usual_kv = heads if kv_heads is None or reader.is_null("num_key_value_heads") else kv_heads
    return {
        "vocab_size": reader.whole("vocab_size", 4, 1 << 20),
        "d_model": d_model,
        "layers": reader.whole("num_hidden_layers", 1, 512),
        "heads": heads,
        "kv_heads": reader.whole("num_key_value_heads", 1, 1024, usual_kv),
        "head_dim": reader.whole("head_dim", 2, 1024, head_dim or max(1, d_model // heads)),
        "d_ff": reader.whole("intermediate_size", 1, 1 << 18),
        "context": context,
        "norm_eps": reader.positive("rms_norm_eps"),
        "qk_norm": False,
        **(read_rope(reader, context, **of_rope) if rope else {}),
    }


def require_silu(reader: ConfigReader) -> None:
    """Refuse another activation than SiLU, which is the only one that vLLM's class of the family has."""
    reader.only("hidden_act", "silu")


def require_dividing_heads(reader: ConfigReader, found: Mapping[str, Any], whole_heads: bool = False) -> None:
    """Refuse heads that do not divide the width. ``whole_heads``: also another head_dim than their quotient, which the class does not read."""
    d_model, heads = found["d_model"], found["heads"]
    if d_model % heads:
        dividing = Message("models.dividing_heads", "a number that divides hidden_size ({width})", width=d_model)
        raise reader.unexpected("num_attention_heads", dividing, heads)
    if whole_heads and found["head_dim"] != d_model // heads:
        quotient = Message("models.head_dim", "hidden_size / num_attention_heads ({size})", size=d_model // heads)
        raise reader.unexpected("head_dim", quotient, found["head_dim"])


def require_no_window(reader: ConfigReader) -> None:
    """Refuse a sliding window, which the family's class does not have."""
    reader.only("use_sliding_window", False)
    reader.only("sliding_window", None)


def write_common(spec: ModelSpec) -> dict[str, Any]:
    """The keys of config.json that ``read_common`` reads, and those that concern no description."""
    # Dynamic scaling begins beyond this many positions, whatever was trained.
    dynamic = spec.rope_scaling is not None and spec.rope_scaling.kind == "dynamic"
    context = (
        spec.rope_scaling.original_context if dynamic and spec.rope_scaling else spec.max_positions or spec.context
    )
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.d_ff,
        "max_position_embeddings": context,
        **write_rope(spec),
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": spec.tied,
        "use_sliding_window": False,
        "use_cache": True,
    }


# key of rope_parameters → key of RopeScaling
_SCALING_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
}
_KEYS_OF: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def read_rope(
    reader: ConfigReader, context: int, theta: float = 10_000.0, share: float | None = None
) -> dict[str, Any]:
    """``rope_theta``, ``rope_share`` and ``rope_scaling`` of a file, which says them in ``rope_parameters`` (transformers 5) or in ``rope_theta``,
    ``partial_rotary_factor`` and ``rope_scaling`` (4). Two different values are refused.

    ``theta``, ``share``: what a missing key means in this family. ``share`` None: the family's class turns whole heads, whatever
    ``partial_rotary_factor`` says, so another value than 1 is refused.
    """
    new, old = reader.take("rope_parameters", None), reader.take("rope_scaling", None)
    if new is not None and old is not None and new != old:
        raise reader.unexpected(
            "rope_scaling",
            Message("models.same_rope", "the value of rope_parameters, {value}", value=str(new)[:80]),
            old,
        )
    inner = reader.within(
        "rope_parameters" if new is not None else "rope_scaling", new if new is not None else old or {}
    )
    if share not in (None, 1.0) and (reader.is_null("partial_rotary_factor") or inner.is_null("partial_rotary_factor")):
        raise reader.not_positive("partial_rotary_factor", None)
    found: dict[str, Any] = {"rope_theta": read_one_value(reader, "rope_theta", inner, "rope_theta", theta)}
    found["rope_share"] = read_one_value(reader, "partial_rotary_factor", inner, "partial_rotary_factor", share or 1.0)
    if share is None and found["rope_share"] != 1.0:
        whole = Message("models.whole_heads", "1.0, because the class of this family turns whole heads")
        raise reader.unexpected("partial_rotary_factor", whole, found["rope_share"])
    return found | read_scaling(inner, context)


def read_one_value(outer: ConfigReader, outer_key: str, inner: ConfigReader, key: str, usual: float) -> float:
    """A number that a file can say at two places. Two different values are refused; ``usual`` if there is none."""
    values = [one for one in (inner.positive(key, None), outer.positive(outer_key, None)) if one is not None]
    if len(set(values)) > 1:
        raise ModelFilesError(
            "models.two_values", "{file}: {key} has two values: {values}", file=outer.where, key=outer_key, values=list(map(str, values))
        )  # fmt: skip
    return values[0] if values else usual


def read_scaling(inner: ConfigReader, context: int) -> dict[str, Any]:
    """``rope_scaling`` of a mapping of RoPE's parameters, of which nothing may be left."""
    kind = inner.choice(
        "rope_type", {"default": None} | {kind: kind for kind in _KEYS_OF}, inner.take("type", "default")
    )
    if kind is None:
        inner.finish()
        return {}
    values: dict[str, Any] = {"kind": kind}
    for key in _KEYS_OF[kind]:
        if key.startswith("original"):
            values[_SCALING_KEYS[key]] = inner.whole(key, 1, 1 << 24, context)
        elif (value := inner.positive(key, None)) is not None:
            values[_SCALING_KEYS[key]] = value
    if kind == "dynamic":  # transformers reads max_position_embeddings alone
        inner.only("original_max_position_embeddings", context)
        values["original_context"] = context
    if kind == "yarn":
        values["truncate"] = inner.truth("truncate", True)
        part, whole = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
        if part and whole and "attention_factor" not in values and "factor" in values:
            values["attention_factor"] = find_mscale(values["factor"], part) / find_mscale(values["factor"], whole)
    inner.finish()
    return {"rope_scaling": parse(RopeScaling, values, str(inner.where), ModelFilesError).model_dump()}


def read_ropes_of_two_kinds(
    reader: ConfigReader, context: int, theta: float, window_theta: float, window_key: str | None = None
) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` and ``window_rope_theta`` of a class whose layers with a window have a RoPE of their own, without scaling.

    A file has a mapping for each kind of layers (transformers 5), or ``rope_theta`` and ``rope_scaling`` for layers without a window (4).
    ``theta``, ``window_theta``: what missing keys mean. ``window_key``: what transformers 4 calls the second.
    """
    new, old = reader.take("rope_parameters", None), reader.take("rope_scaling", None)
    kinds = reader.within("rope_parameters", new or {"full_attention": old, "sliding_attention": None})
    full = kinds.within("full_attention", kinds.take("full_attention", {}))
    window = kinds.within("sliding_attention", kinds.take("sliding_attention", {}))
    kinds.finish()
    if new is not None:
        reader.only("rope_scaling", None)
    found = {
        "rope_theta": read_one_value(reader, "rope_theta", full, "rope_theta", theta),
        "window_rope_theta": window.positive("rope_theta", window_theta)
        if window_key is None
        else read_one_value(reader, window_key, window, "rope_theta", window_theta),
    }
    full.only("truncate", True)  # the classes look for it at another place
    window.only("rope_type", "default")
    window.only("type", "default")
    window.finish()
    return found | read_scaling(full, context)


def write_ropes_of_two_kinds(spec: ModelSpec, window_theta: float) -> dict[str, Any]:
    """``rope_parameters`` as ``read_ropes_of_two_kinds`` reads it. ``window_theta``: what is written for windows that share a scaled RoPE, which
    such a class cannot hold."""
    local = spec.window_rope_theta
    if local is None:  # one RoPE for all layers, which windows have without scaling
        local = spec.rope_theta if spec.rope_scaling is None else window_theta
    return {
        "full_attention": make_rope_parameters(spec),
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def find_mscale(factor: float, mscale: float) -> float:
    """By how much YaRN's attention grows with the factor of the context (arXiv 2309.00071 §3.4, with DeepSeek-V2's ``mscale``)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_windows(
    reader: ConfigReader, layers: int, has_window: Callable[[int], bool], usual: int | None = None
) -> list[int | None] | None:
    """``ModelSpec.windows`` from ``layer_types`` and ``sliding_window``; None: no layer has a window.

    ``has_window``: of a layer's number, where the file has no ``layer_types``. ``usual``: the window that a missing key means, in a family whose
    windows are always in use. None: they are in use if ``use_sliding_window`` says so, and the window must be given.
    """
    used = reader.truth("use_sliding_window", False) if usual is None else True
    null = reader.is_null("sliding_window")
    window = reader.whole("sliding_window", 1, 1 << 24, None if null else usual)
    kinds = reader.take("layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if used and has_window(number) else "full_attention" for number in range(layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not set(map(str, kinds)) <= {"full_attention", "sliding_attention"}
    ):
        expected = Message("models.layer_types", "{layers} times full_attention or sliding_attention", layers=layers)
        raise reader.unexpected("layer_types", expected, kinds)
    if "sliding_attention" not in kinds:
        return None
    if not used:
        raise reader.unexpected("use_sliding_window", "True", False)
    if window is None:
        raise reader.missing("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def write_windows(spec: ModelSpec) -> dict[str, Any]:
    """The keys that ``read_windows`` reads. Empty without windows. A file has windows of one size."""
    windows = [spec.layer(number).window for number in range(spec.layers)]
    if not any(windows):
        return {}
    return {
        "use_sliding_window": True,
        "sliding_window": next(window for window in windows if window),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


def read_window_everywhere(reader: ConfigReader, window: int | None) -> list[int | None] | None:
    """``ModelSpec.windows`` of a class that has one window for all layers or none."""
    reader.only("layer_types", None)
    return None if window is None else [window]


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """The keys that ``read_rope`` reads, as both generations of transformers and vLLM read them."""
    return {"rope_theta": spec.rope_theta, "rope_parameters": make_rope_parameters(spec)}


def make_rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    """The mapping ``rope_parameters`` of config.json for the layers with the main RoPE."""
    scaling = spec.rope_scaling
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_share != 1.0:
        found["partial_rotary_factor"] = spec.rope_share
    if scaling is not None:
        found["rope_type"] = scaling.kind
        for key in _KEYS_OF[scaling.kind]:
            if (value := getattr(scaling, _SCALING_KEYS[key])) is not None:
                found[key] = value
        if not scaling.truncate:
            found["truncate"] = False
    return found


def list_partial_rope_rows(heads: int, head_dim: int, turning: int) -> tuple[int, ...] | None:
    """The order of rows that puts a head whose first ``turning`` dimensions turn among themselves into the native layout; None: it is that order.

    Their dimension i turns with i + turning / 2. Natively it turns with i + head_dim / 2, and the pairs that do not turn come last:

    >>> list_partial_rope_rows(1, 8, 4)
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    if turning == head_dim:
        return None
    half, rest = turning // 2, (head_dim - turning) // 2
    first = [*range(half), *range(turning, turning + rest)]
    second = [*range(half, turning), *range(turning + rest, head_dim)]
    return tuple(head * head_dim + row for head in range(heads) for row in (*first, *second))
