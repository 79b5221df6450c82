"""The description of a decoder: every fact that decides what its weights compute. It is the section ``model`` of a recipe.

A block is attention and an MLP, each added to the residual stream. The defaults describe a decoder with RMSNorm before each half, QK-norm,
rotate-half RoPE, SwiGLU and a tied head. Each further key changes one of these facts.

    >>> spec = ModelSpec(vocab_size=64, d_model=32, layers=6, heads=4, kv_heads=2, head_dim=8, d_ff=64, context=128, windows=[16, 16, None])
    >>> [spec.layer(n).window for n in range(4)]
    [16, 16, None, 16]
    >>> spec.model_dump().get("tied")  # a key that recipes gained later is left out where it has its default
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from kernels.contract.message import Message
from kernels.contract.strict import StrictSchema

Positive = Annotated[int, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
GROUPED_MULTIPLE = 8  # torch's grouped_mm needs rows of 16 bytes, which are 8 values of bf16


class ExpertsSpec(StrictSchema):
    """Experts that replace the dense MLP: DeepSeek-V3 (arXiv 2412.19437) §2.1.2, or with ``scores: softmax`` Qwen3-MoE (arXiv 2505.09388) §2."""

    count: Annotated[int, Field(ge=2)]  # routed experts
    per_token: Positive  # experts that each token goes to
    d_ff: Annotated[int, Field(gt=0, multiple_of=GROUPED_MULTIPLE)]  # of one expert
    shared: Annotated[int, Field(ge=0)] = (
        1  # experts that every token goes to; computed as one expert of ``shared`` times the width
    )
    dense_layers: Annotated[int, Field(ge=0)] = 1  # first layers that keep the dense MLP of ``model.d_ff``
    bias_rate: Annotated[float, Field(ge=0)] = 1e-3  # a step's change of the bias that balances the load
    z_loss: Annotated[float, Field(ge=0)] = 1e-4  # weight of the router's logsumexp², ST-MoE (arXiv 2202.08906) §3.1
    scores: Literal["sigmoid", "softmax"] = "sigmoid"  # of a token's affinity to each expert
    normalise: bool = True  # the weights of a token's experts sum to one
    scale: PositiveNumber = 1.0  # by which the routed experts' sum is multiplied
    groups: Positive = 1  # experts are in this many groups, and a token goes to experts of few groups (DeepSeek-V3)
    groups_per_token: Positive = 1
    balance: Literal["bias", "loss"] = "bias"  # how the load is balanced: a bias of the choice, or an auxiliary loss
    loss_weight: Annotated[float, Field(ge=0)] = 1e-3  # of the auxiliary loss (Switch, arXiv 2101.03961 §2.2)
    bias: bool = False  # the router's scores and the matrices of each expert have biases (gpt-oss)
    # c: an expert computes g · sigmoid(clamp_alpha · g) · (u + 1), with g = min(gate, c) and u = up within ±c (gpt-oss); null: SwiGLU
    clamp: PositiveNumber | None = None
    clamp_alpha: PositiveNumber = 1.702


class RopeScaling(StrictSchema):
    """How RoPE's frequencies are changed for a longer context, as transformers' ``rope_parameters`` say it (``models.rope`` computes it).

    ``linear``: positions are divided by ``factor`` (arXiv 2306.15595). ``dynamic``: NTK-aware; beyond ``original_context`` it depends on the length
    of a text, so only contexts up to it can be trained. ``yarn``: arXiv 2309.00071. ``llama3``: arXiv 2407.21783 §3.4.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: PositiveNumber
    original_context: Positive | None = None  # positions of pre-training; required except for linear
    beta_fast: PositiveNumber = 32.0  # yarn: rotations above which a frequency is kept
    beta_slow: PositiveNumber = 1.0  # yarn: rotations below which a frequency is divided by ``factor``
    truncate: bool = True  # yarn: the bounds are rounded to whole dimensions
    attention_factor: PositiveNumber | None = None  # yarn: of cosines and sines; null: 0.1 ln(factor) + 1
    low_frequency_factor: PositiveNumber = 1.0  # llama3
    high_frequency_factor: PositiveNumber = 4.0  # llama3

    @model_validator(mode="after")
    def _possible(self) -> RopeScaling:
        if self.kind != "linear" and self.original_context is None:
            raise ValueError(
                Message("models.original_context", "'kind: {kind}' needs the key original_context", kind=self.kind)
            )
        if self.kind == "llama3" and self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                Message(
                    "models.frequency_factors",
                    "low_frequency_factor ({low}) must be less than high_frequency_factor ({high})",
                    low=self.low_frequency_factor,
                    high=self.high_frequency_factor,
                )
            )
        return self


class LatentAttention(StrictSchema):
    """Multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434) §2.1. ``heads`` heads have keys of ``head_dim`` = both parts together."""

    q_rank: Positive | None  # null: queries are projected in one step
    kv_rank: Positive
    nope_head_dim: Positive  # of a head's queries and keys, the part without position
    rope_head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    v_head_dim: Positive


@dataclass(frozen=True)
class LayerSpec:
    """What distinguishes one layer from another."""

    window: int | None  # positions that a query sees, its own included; None: all before it
    rope: Literal["none", "main", "window"]  # which RoPE; window: that of ``window_rope_theta``
    experts: ExpertsSpec | None  # None: a dense MLP


# Keys that change the function without changing a weight's shape, alone or together with a second key, or what an export says of the model. A recipe
# can accept such a change.
Acceptable = Literal[
    "max_positions",
    "family",
    "rope_theta",
    "norm_eps",
    "nope_every",
    "across_documents",
    "base_d_model",
    "heads",
    "kv_heads",
    "head_dim",
    "experts.per_token",
    "rope_share",
    "rope_scaling",
    "window_rope_theta",
    "windows",
    "position",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "activation",
    "norm_plus_one",
    "embedding_norm",
    "embedding_scale",
    "experts.scores",
    "experts.normalise",
    "experts.scale",
    "experts.groups",
    "experts.groups_per_token",
    "experts.clamp",
    "experts.clamp_alpha",
]
ACCEPTABLE: tuple[str, ...] = get_args(Acceptable)

# Keys that recipes had from the beginning. Any other key is written only where it differs from its default, so that older code can read the recipe
# of a model that older code can train, and so that its hash stays the same.
FIRST_KEYS = {
    "vocab_size", "d_model", "layers", "heads", "kv_heads", "head_dim", "d_ff", "context", "rope_theta", "norm_eps", "qk_norm", "nope_every",
    "across_documents", "experts", "base_d_model",
}  # fmt: skip
FIRST_KEYS_OF_EXPERTS = {"count", "per_token", "d_ff", "shared", "dense_layers", "bias_rate", "z_loss"}


class ModelSpec(StrictSchema):
    """A decoder. ``models.adapters`` names the class of ``transformers`` that computes the same."""

    vocab_size: Positive
    d_model: Positive
    layers: Positive
    heads: Positive  # query heads
    kv_heads: Positive  # key/value heads; each serves heads / kv_heads query heads
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)]
    d_ff: Positive
    context: Annotated[int, Field(ge=8)]  # positions in a row
    rope_theta: PositiveNumber = 10_000.0
    norm_eps: PositiveNumber = 1e-6
    # Queries and keys are normalised: true: each head (Qwen3); whole: all heads of a token together (OLMo 2).
    qk_norm: bool | Literal["whole"] = True
    nope_every: Annotated[int, Field(ge=2)] | None = None  # every n-th layer has no position embedding; null: all have
    across_documents: bool = False  # attention may see the earlier documents of the row
    experts: ExpertsSpec | None = None  # null: a dense model
    base_d_model: Positive | None = None  # the width for which the rates were found (muP); null: this width

    # Positions that the model allows, and config.json of an export says. null: as many as the model from which training continues, or ``context``
    max_positions: Positive | None = None
    family: str | None = None  # the family of ``models.adapters`` whose files an export has; null: the first that fits
    tied: bool = True  # the head is the embedding
    # Positions
    position: Literal["rope", "alibi"] = "rope"  # alibi: arXiv 2108.12409; no layer has RoPE then
    rope_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of each head, the first part that RoPE turns
    rope_scaling: RopeScaling | None = None  # of the layers without a window, or of all if window_rope_theta is null
    window_rope_theta: PositiveNumber | None = (
        None  # of layers with a window, which have no rope_scaling then (Gemma 3)
    )
    # Attention
    windows: list[Positive | None] | None = None  # of the layers in turn: how many positions a query sees; null: all
    attention_scale: PositiveNumber | None = None  # of the scores; null: head_dim^-0.5
    attention_softcap: PositiveNumber | None = (
        None  # c: scores become c · tanh(scores / c) (Gemma 2, arXiv 2408.00118 §2)
    )
    attention_sinks: bool = False  # each head has a learned score that takes a share of the attention (gpt-oss)
    qkv_bias: bool = False
    attention_out_bias: bool = False
    latent: LatentAttention | None = None
    # MLP
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"] = "silu"  # relu2: arXiv 2109.08668
    gated: bool = True  # false: down(activation(up x)) without a gate
    mlp_bias: bool = False
    # Norms and ends
    norms: Literal["pre", "post", "sandwich"] = "pre"  # of each half: before it, after it (OLMo 2), or both (Gemma 2)
    norm_plus_one: bool = False  # a norm multiplies by 1 + its weight (Gemma)
    norm_weights: bool = True  # false: norms have no weights and multiply by 1 (nanochat)
    embedding_norm: bool = False  # embedded tokens are normalised before the first layer, without a weight (nanochat)
    embedding_scale: PositiveNumber | None = None  # by which embedded tokens are multiplied; null: 1
    logit_softcap: PositiveNumber | None = None
    # Layers behind the others, of which number k predicts the token k places after the next one (DeepSeek-V3, arXiv 2412.19437 §2.2). They take no
    # part in the logits.
    multi_token_layers: Annotated[int, Field(ge=0, le=16)] = 0

    @model_validator(mode="after")
    def _possible(self) -> ModelSpec:
        if self.heads % self.kv_heads:
            raise ValueError(
                Message(
                    "models.heads",
                    "model.heads ({heads}) is not a multiple of model.kv_heads ({kv_heads})",
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                )
            )
        self._refuse_impossible_experts()
        self._refuse_impossible_positions()
        self._refuse_impossible_latent()
        if not self.norm_weights and (self.norm_plus_one or self.latent or self.mup_width_ratio != 1):
            raise ValueError(
                Message(
                    "models.norm_weights",
                    "'norm_weights: false' is not possible with norm_plus_one, latent or a base_d_model that is not d_model",
                )
            )
        return self

    def _refuse_impossible_experts(self) -> None:
        experts = self.experts
        if experts is None:
            return
        if self.d_model % GROUPED_MULTIPLE:
            raise ValueError(
                Message(
                    "models.experts_width",
                    "model.d_model ({d_model}) is not a multiple of {multiple}. A model with experts needs such a width",
                    d_model=self.d_model,
                    multiple=GROUPED_MULTIPLE,
                )
            )
        if experts.per_token > experts.count:
            raise ValueError(
                Message(
                    "models.experts_per_token",
                    "model.experts.per_token ({per_token}) is more than model.experts.count ({count})",
                    per_token=experts.per_token,
                    count=experts.count,
                )
            )
        if experts.dense_layers >= self.layers:
            raise ValueError(
                Message(
                    "models.dense_layers",
                    "model.experts.dense_layers ({dense_layers}) must be smaller than model.layers ({layers}), so that some "
                    "layer has experts",
                    dense_layers=experts.dense_layers,
                    layers=self.layers,
                )
            )
        a_group = experts.count // experts.groups
        if experts.count % experts.groups or (experts.groups > 1 and a_group < 2):
            raise ValueError(
                Message(
                    "models.expert_groups",
                    "model.experts.groups ({groups}) must divide model.experts.count ({count}) into groups of at least 2 experts",
                    groups=experts.groups,
                    count=experts.count,
                )
            )
        if experts.groups_per_token > experts.groups or experts.groups_per_token * a_group < experts.per_token:
            raise ValueError(
                Message(
                    "models.groups_per_token",
                    "model.experts.groups_per_token ({chosen}) must be at most model.experts.groups ({groups}), and the experts of so many "
                    "groups at least model.experts.per_token ({per_token})",
                    chosen=experts.groups_per_token,
                    groups=experts.groups,
                    per_token=experts.per_token,
                )
            )
        if experts.shared and (experts.bias or experts.clamp):
            raise ValueError(
                Message("models.shared_swiglu", "experts with bias or clamp cannot be shared. Write 'shared: 0'")
            )
        if self.activation != "silu" or not self.gated or self.mlp_bias:
            raise ValueError(
                Message("models.experts_swiglu", "a model with experts needs SwiGLU without biases as its MLP")
            )

    def _refuse_impossible_positions(self) -> None:
        if self.windows is not None and not self.windows:
            raise ValueError(
                Message("models.no_windows", "model.windows is an empty list. Remove the key, or give a window or null")
            )
        if self.rope_dim % 2 or not self.rope_dim:
            raise ValueError(
                Message(
                    "models.rope_share",
                    "model.rope_share ({share}) of a head of {head_dim} is {dims}, which must be an even number above 0",
                    share=self.rope_share,
                    head_dim=self.head_dim,
                    dims=self.rope_dim,
                )
            )
        if self.window_rope_theta is not None and not any(self.windows or []):
            raise ValueError(
                Message("models.window_rope", "model.window_rope_theta needs layers with a window (model.windows)")
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "dynamic" and self.context > (scaling.original_context or 0):
            raise ValueError(
                Message(
                    "models.dynamic_context",
                    "model.context ({context}) is more than rope_scaling.original_context ({original}). Beyond it, dynamic scaling depends on "
                    "the length of each text. Use a shorter context, or another kind",
                    context=self.context,
                    original=scaling.original_context,
                )
            )
        if scaling is not None and scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(
                Message(
                    "models.yarn_theta",
                    "rope_scaling of kind yarn needs a rope_theta above 1, but it is {theta}",
                    theta=self.rope_theta,
                )
            )
        if self.position == "alibi" and (self.nope_every or scaling or self.window_rope_theta or self.latent):
            raise ValueError(
                Message(
                    "models.alibi",
                    "'position: alibi' is not possible with nope_every, rope_scaling, window_rope_theta or latent",
                )
            )

    def _refuse_impossible_latent(self) -> None:
        latent = self.latent
        if latent is None:
            return
        keys = latent.nope_head_dim + latent.rope_head_dim
        if self.head_dim != keys or self.kv_heads != self.heads or latent.v_head_dim > keys:
            raise ValueError(
                Message(
                    "models.latent",
                    "with model.latent, model.head_dim must be nope_head_dim + rope_head_dim ({keys}), model.kv_heads must be model.heads "
                    "({heads}), and v_head_dim at most {keys}",
                    keys=keys,
                    heads=self.heads,
                )
            )
        if self.qk_norm or self.qkv_bias or self.rope_share != 1.0 or any(self.windows or []):
            raise ValueError(
                Message(
                    "models.latent_with",
                    "model.latent is not possible with qk_norm, qkv_bias, rope_share or windows. Write 'qk_norm: false'",
                )
            )

    @model_serializer(mode="wrap")
    def _without_later(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = dump(self)
        fields = type(self).model_fields
        found = {key: value for key, value in found.items() if key in FIRST_KEYS or value != fields[key].default}
        if found.get("experts"):
            fields = ExpertsSpec.model_fields
            found["experts"] = {
                key: value
                for key, value in found["experts"].items()
                if key in FIRST_KEYS_OF_EXPERTS or value != fields[key].default
            }
        return found

    # -- a layer -------------------------------------------------------------------------------------------------------
    def layer(self, number: int) -> LayerSpec:
        """What layer ``number`` is, counted from 0. The layers for multi-token prediction have the numbers from ``layers`` on."""
        window = self.windows[number % len(self.windows)] if self.windows else None
        rope: Literal["none", "main", "window"] = "main"
        if self.position != "rope" or (self.nope_every is not None and (number + 1) % self.nope_every == 0):
            rope = "none"
        elif window is not None and self.window_rope_theta is not None:
            rope = "window"
        return LayerSpec(window, rope, self.experts if self.is_expert_layer(number) else None)

    def is_expert_layer(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def without_multi_token(self) -> ModelSpec:
        """The part of the model that computes the logits."""
        return self.model_copy(update={"multi_token_layers": 0})

    @property
    def rope_dim(self) -> int:
        """Of each head's queries and keys, how many dimensions RoPE turns."""
        return self.latent.rope_head_dim if self.latent else int(self.head_dim * self.rope_share)

    @property
    def v_head_dim(self) -> int:
        """Dimensions of a head's values."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def mup_width_ratio(self) -> float:
        """The width at which the learning rates were found, divided by this model's width: 1/m of muP (arXiv 2203.03466)."""
        return self.base_d_model / self.d_model if self.base_d_model else 1.0

    @property
    def op_sizes(self) -> dict[str, int]:
        """The sizes on which the time of a kernel depends, by the names of ``kernels.contract.op.Shape``, without its ``batch``."""
        names = ("context", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size")
        return {name: getattr(self, name) for name in names}

    # -- counts --------------------------------------------------------------------------------------------------------
    @property
    def matmul_parameter_count(self) -> int:
        """Number of weights that a position is multiplied with, the output head included. Of the experts, only those that it goes to count. The
        layers for multi-token prediction do not count."""
        return self.vocab_size * self.d_model + self._matmul_parameters(
            range(self.layers), lambda experts: experts.per_token
        )

    @property
    def multi_token_numbers(self) -> range:
        """The numbers of the layers for multi-token prediction, as ``layer`` takes them."""
        return range(self.layers, self.layers + self.multi_token_layers)

    @property
    def parameters(self) -> int:
        """Number of all weights. A tied embedding counts once. Buffers, such as the bias of a router's choice, do not count."""
        halves = {"pre": 2, "post": 2, "sandwich": 4}[self.norms] * self.norm_weights
        a_layer = halves * self.d_model + self._small_attention_parameters
        every = range(self.layers + self.multi_token_layers)
        total = self.vocab_size * self.d_model + self._matmul_parameters(every, lambda experts: experts.count)
        total += len(every) * a_layer + self.d_model * self.norm_weights  # the latter: of the final norm
        total += self.multi_token_layers * (2 * self.d_model + 3) * self.d_model  # ``list_multi_token_shapes``
        dense = len(every) if self.experts is None else self.experts.dense_layers
        total += dense * ((2 if self.gated else 1) * self.d_ff + self.d_model) * self.mlp_bias
        if self.experts is not None and self.experts.bias:
            e = self.experts
            total += (len(every) - dense) * e.count * (1 + 2 * e.d_ff + self.d_model)
        return total + (0 if self.tied else self.vocab_size * self.d_model)

    @property
    def _small_attention_parameters(self) -> int:
        """Norms, biases and sinks of one layer's attention."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = {False: 0, True: 2 * self.head_dim, "whole": q + kv}[self.qk_norm] * self.norm_weights
        if self.latent is not None:
            norms = self.latent.kv_rank + (self.latent.q_rank or 0)
        biases = (q + 2 * kv) * self.qkv_bias + self.d_model * self.attention_out_bias
        return norms + biases + self.heads * self.attention_sinks

    @property
    def attention_parameters_per_layer(self) -> int:
        """Number of weights of one layer's attention projections."""
        if self.latent is None:
            return self.d_model * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        a, D, H = self.latent, self.d_model, self.heads
        queries = D * H * self.head_dim if a.q_rank is None else a.q_rank * (D + H * self.head_dim)
        return (
            queries
            + D * (a.kv_rank + a.rope_head_dim)
            + a.kv_rank * H * (a.nope_head_dim + a.v_head_dim)
            + H * a.v_head_dim * D
        )

    @property
    def mlp_matrices(self) -> int:
        """Matrices of a dense MLP."""
        return 3 if self.gated else 2

    @property
    def attention_width(self) -> float:
        """Width of attention for FLOPs: the mean of the widths of all keys and of all values."""
        return self.heads * (self.head_dim + self.v_head_dim) / 2

    def _matmul_parameters(self, layers: range, routed: Callable[[ExpertsSpec], int]) -> int:
        total = 0
        for layer in layers:
            total += self.attention_parameters_per_layer
            if self.experts is None or not self.is_expert_layer(layer):
                total += self.mlp_matrices * self.d_model * self.d_ff
            else:
                total += self.d_model * self.experts.count  # the router
                total += 3 * self.d_model * self.experts.d_ff * (routed(self.experts) + self.experts.shared)
        return total

    @property
    def positions_seen(self) -> float:
        """The positions that attention sees, over all layers, counted as twice the mean of a position: ``context`` for a layer without a window.

        With a window w < T a position sees w - w² / 2T others in the mean, because the first w positions see fewer.
        """
        return self._count_positions_seen(range(self.layers))

    def _count_positions_seen(self, layers: range) -> float:
        seen = 0.0
        for number in layers:
            window = min(self.context, self.layer(number).window or self.context)
            seen += window * (2 - window / self.context)
        return seen

    def count_flops_per_token(self, multi_token: bool = False) -> float:
        """FLOPs of one token, forward and backward: 6 N + 6 L H K T. A multiplication and an addition count as two FLOPs.

        This is PaLM's formula (arXiv 2204.02311, appendix B) without the masked half of attention, and without what windows hide. ``multi_token``:
        whether the layers for multi-token prediction are trained.
        """
        weights, seen = self.count_weights_and_positions_seen(multi_token)
        return 6.0 * weights + 6.0 * self.attention_width * seen

    def count_weights_and_positions_seen(self, multi_token: bool = False) -> tuple[int, float]:
        """(``matmul_parameter_count``, ``positions_seen``), with the layers for multi-token prediction if ``multi_token``."""
        weights, seen = self.matmul_parameter_count, self.positions_seen
        if multi_token:
            ends = (self.vocab_size + 2 * self.d_model) * self.d_model  # of each: the head, and the matrix that joins
            numbers = self.multi_token_numbers
            weights += len(numbers) * ends + self._matmul_parameters(numbers, lambda experts: experts.per_token)
            seen += self._count_positions_seen(numbers)
        return weights, seen

    def list_warnings(self) -> list[str]:
        """Warnings about settings that cost and do not help, one line each: sizes that matrix units pad, a router without a gradient."""
        sizes = {"vocab_size": 64, "d_model": 16, "head_dim": 16, "d_ff": 16}
        found = {f"model.{key}": (getattr(self, key), multiple) for key, multiple in sizes.items()}
        if self.experts is not None:
            found["model.experts.d_ff"] = (self.experts.d_ff, 16)
        lines: list[str] = []
        for key, (size, multiple) in found.items():
            padded = -(-size // multiple) * multiple
            if padded != size:
                lines.append(
                    Message(
                        "models.padded_size",
                        "{key} ({size}) is not a multiple of {multiple}. Matrix units pad this size to {padded}, so {share:.1%} "
                        "of the work is padding. A size of {padded} would cost the same time",
                        key=key,
                        size=size,
                        multiple=multiple,
                        padded=padded,
                        share=1 - size / padded,
                    )
                )
        if self.experts is not None and self.experts.per_token == 1 and self.experts.normalise:
            lines.append(
                Message(
                    "models.one_expert",
                    "model.experts.per_token is 1: the weight of a single expert is always 1, so the router gets no gradient "
                    "from the loss",
                )
            )
        return lines
