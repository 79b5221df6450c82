"""A family of public models: how its ``config.json`` and its tensors correspond to a ``ModelSpec`` and to the native tensors, in both directions.

To add a family, write a file beside ``llama.py`` with one ``Family``, and add it to the table in ``models.adapters``. Most families share Llama's
names and keys: ``read_common``, ``write_common`` and ``NAMES`` hold these, and a family's file says only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.contract.message import Message
from kernels.contract.strict import parse
from models.adapters.config_reader import ConfigReader, ModelFilesError, read_with
from models.spec import ExpertsSpec, ModelSpec, RopeScaling
from models.tensors import Shape, list_tensor_shapes

if TYPE_CHECKING:
    from torch import Tensor

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
# keys of a model's training. They are in no config.json
OF_TRAINING = ("context", "max_positions", "across_documents", "base_d_model", "family")
OF_EXPERTS_TRAINING = ("bias_rate", "z_loss", "loss_weight")


@dataclass(frozen=True)
class TensorMapping:
    """One native tensor and the tensors of the family's files that hold it. If there are several, the native one has them stacked.

    ``rows``: the order of the rows: native row i is their row ``rows[i]``. None: the same order.
    """

    native: str
    theirs: tuple[str, ...]
    shape: Shape  # of each of ``theirs``
    rows: tuple[int, ...] | None = None

    def to_native(self, tensors: list[Tensor]) -> Tensor:
        """The native tensor, from those of the files in the order of ``theirs``."""
        import torch

        found = torch.stack(tensors) if len(self.theirs) > 1 else tensors[0]
        return found if self.rows is None else found[torch.tensor(self.rows)]

    def to_theirs(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the files by name, from the native one."""
        import torch

        if self.rows is not None:
            tensor = tensor[torch.tensor(self.rows).argsort()]
        yield from zip(self.theirs, tensor.unbind() if len(self.theirs) > 1 else (tensor,), strict=True)


@dataclass(frozen=True)
class Family:
    """A class of decoders of transformers and vLLM. ``read`` and ``write`` convert between the keys of config.json and those of ``ModelSpec``."""

    name: str  # model_type
    class_name: str
    read: Callable[[ConfigReader], dict[str, Any]]
    write: Callable[[ModelSpec], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    order_rows: Callable[[ModelSpec, str], tuple[int, ...] | None] = lambda spec, key: None
    # The same function in the form that the family's files hold: for example with a head of its own, if the class cannot tie it.
    as_stored: Callable[[ModelSpec], ModelSpec] = lambda spec: spec
    idle: Collection[str] = ()  # further keys that change nothing

    def read_config(self, config: Mapping[str, Any], where: Path | str, context: int | None = None) -> ModelSpec:
        """The description of a parsed config.json. ``context``: positions in a row; None: as many as the file allows.

        Raises: ModelFilesError that names ``where`` and the key.
        """
        if config.get("architectures") not in (None, [self.class_name]):
            raise ModelFilesError(
                "models.other_class", "{file}: architectures is {given}, but a model of type {family} must have {expected}",
                file=where, given=str(config["architectures"])[:80], family=self.name, expected=[self.class_name],
            )  # fmt: skip
        values = read_with(self.read, config, where, self.idle) | {"family": self.name}
        if context is not None:
            values["context"] = context
        return parse(ModelSpec, values, str(where), ModelFilesError)

    def find_differences(self, spec: ModelSpec) -> dict[str, tuple[Any, Any]]:
        """``{key: (in spec, in the family's files)}`` of what writing ``spec`` to a config.json and reading it back changes. Empty: the files can
        hold ``spec``. The key "" stands for a value that the files cannot have, with the reason."""
        stored = self.as_stored(spec)
        try:
            found = drop_training_keys(self.read_config(self.write(stored), self.name))
        except ModelFilesError as error:
            return {"": (str(error), "")}
        wanted = drop_training_keys(stored)
        keys = ModelSpec.model_fields
        return {
            key: (getattr(wanted, key), getattr(found, key))
            for key in keys
            if getattr(wanted, key) != getattr(found, key)
        }

    def list_mappings(self, spec: ModelSpec) -> list[TensorMapping]:
        """Each tensor of the files. ``spec`` is as the files hold it (``as_stored``)."""
        return [self._mapping(spec, name, shape) for name, shape in list_tensor_shapes(spec).items()]

    def _mapping(self, spec: ModelSpec, name: str, shape: Shape) -> TensorMapping:
        ends = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
        if name in ends:
            return TensorMapping(name, (ends[name],), shape)
        _, layer, key = name.split(".")
        theirs = f"model.layers.{layer}.{self.names[key]}"
        if "{}" in theirs:
            return TensorMapping(name, tuple(theirs.format(number) for number in range(shape[0])), shape[1:])
        return TensorMapping(name, (theirs,), shape, self.order_rows(spec, key))


def drop_training_keys(spec: ModelSpec) -> ModelSpec:
    """The description with default values for the keys that concern training alone, to compare what two compute."""
    usual = {key: ModelSpec.model_fields[key].default for key in OF_TRAINING if key != "context"} | {"context": 8}
    if spec.experts is not None:
        experts = {key: ExpertsSpec.model_fields[key].default for key in OF_EXPERTS_TRAINING}
        usual["experts"] = spec.experts.model_copy(update=experts)
    return spec.model_copy(update=usual)


# -- keys that most families share -------------------------------------------------------------------------------------
def read_common(reader: ConfigReader) -> dict[str, Any]:
    """The sizes, the norm's epsilon and the RoPE of a config.json with Llama's keys."""
    d_model = reader.whole("hidden_size", 1, 1 << 16)
    heads = reader.whole("num_attention_heads", 1, 1024)
    context = reader.whole("max_position_embeddings", 8, 1 << 24)
    reader.only("rope_interleaved", False)
    return {
        "vocab_size": reader.whole("vocab_size", 4, 1 << 20),
        "d_model": d_model,
        "layers": reader.whole("num_hidden_layers", 1, 512),
        "heads": heads,
        "kv_heads": reader.whole("num_key_value_heads", 1, 1024, heads),
        "head_dim": reader.whole("head_dim", 2, 1024, max(1, d_model // heads)),
        "d_ff": reader.whole("intermediate_size", 1, 1 << 18),
        "context": context,
        "norm_eps": reader.positive("rms_norm_eps"),
        "qk_norm": False,
        **read_rope(reader, context),
    }


def write_common(spec: ModelSpec) -> dict[str, Any]:
    """The keys of config.json that ``read_common`` reads, and those that concern no description."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.d_ff,
        "max_position_embeddings": spec.max_positions or spec.context,
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
_KEYS_OF = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}


def read_rope(reader: ConfigReader, context: int, share: float = 1.0, theta: float | None = None) -> dict[str, Any]:
    """``rope_theta``, ``rope_share`` and ``rope_scaling`` of a file, which says them in ``rope_parameters`` (transformers 5) or in ``rope_theta``,
    ``partial_rotary_factor`` and ``rope_scaling`` (4). ``share``, ``theta``: what a missing key means in this family. Two different values are
    refused."""
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
    found: dict[str, Any] = {}
    for key, usual, ours in (("rope_theta", theta, "rope_theta"), ("partial_rotary_factor", share, "rope_share")):
        outer, own = reader.positive(key, None), inner.positive(key, None)
        if outer is not None and own is not None and outer != own:
            raise ModelFilesError(
                "models.two_values", "{file}: {key} has two values: {values}", file=reader.where, key=key, values=[str(outer), str(own)]
            )  # fmt: skip
        value = next((one for one in (own, outer, usual) if one is not None), None)
        if value is None:
            raise reader.missing(key)
        found[ours] = value
    kind = inner.choice(
        "rope_type", {"default": None} | {kind: kind for kind in _KEYS_OF}, inner.take("type", "default")
    )
    if kind is not None:
        values: dict[str, Any] = {"kind": kind}
        for key in _KEYS_OF[kind]:
            if key.startswith("original"):
                values[_SCALING_KEYS[key]] = inner.whole(key, 1, 1 << 24, context)
            elif (value := inner.positive(key, None)) is not None:
                values[_SCALING_KEYS[key]] = value
        if kind == "yarn":
            values["truncate"] = inner.truth("truncate", True)
        found["rope_scaling"] = parse(RopeScaling, values, str(inner.where), ModelFilesError).model_dump()
    inner.finish()
    return found


def read_layer_kinds(reader: ConfigReader, layers: int) -> list[int | None] | None:
    """``ModelSpec.windows`` from ``layer_types``, ``sliding_window`` and ``use_sliding_window``, as Qwen and SmolLM3 say them; None: no window."""
    used = reader.truth("use_sliding_window", False)
    window = reader.whole("sliding_window", 1, 1 << 24, None)
    kinds = reader.take("layer_types", None)
    first = reader.whole("max_window_layers", 0, 512, layers)  # layers without a window, where no list says it
    if kinds is None:
        kinds = ["sliding_attention" if used and number >= first else "full_attention" for number in range(layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not set(map(str, kinds)) <= {"full_attention", "sliding_attention"}
    ):
        expected = Message("models.layer_types", "{layers} times full_attention or sliding_attention", layers=layers)
        raise reader.unexpected("layer_types", expected, kinds)
    if "sliding_attention" not in kinds:
        return None
    if window is None:
        raise reader.missing("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]


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
