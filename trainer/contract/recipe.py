"""The recipe of a run: model, mixture, batch, optimiser, schedule. Its strict schema refuses impossible values and names their key."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from kernels.contract.message import Message
from kernels.contract.strict import StrictSchema, parse
from kernels.contract.strict_yaml import read_yaml
from models.adapters import find_family_for_export
from models.adapters.config_reader import ModelFilesError
from models.spec import GROUPED_MULTIPLE, Acceptable, ModelSpec
from models.tensors import BUFFERS, MULTI_TOKEN, find_missing_layer, list_tensor_shapes, matches_pattern
from trainer.contract.errors import RecipeError
from trainer.contract.lora import AdaptRecipe, is_lora_tensor, refuse_impossible_targets

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
FloatName = Literal["fp32", "bf16", "fp16"]
AUTO = "auto"


# Keys that older recipes lack, with their default values.
LATER: dict[str, Any] = {
    "accept_changes": [],
    "adapt": None,
    "cuda_graphs": "auto",
    "export_dtypes": {},
    "export_shard_bytes": 50_000_000_000,
    "freeze": [],
    "multi_token_weight": 0.0,
    "stability.read_every": 1,
}


def _must_rise(key: str, step: str) -> Message:
    return Message(
        "recipe.must_rise", "each {step} in {key} must be larger than the {step} of the entry before it", key=key, step=step
    )  # fmt: skip


def _only_with(key: str, kind: str) -> Message:
    return Message(
        "recipe.only_with",
        "{key} is required if schedule.kind is {kind}, and is not allowed with any other kind",
        key=key,
        kind=kind,
    )


def _describe_missing_layer(pattern: str, layers: int) -> Message | None:
    layer = find_missing_layer(pattern, layers)
    if layer is None:
        return None
    return Message(
        "recipe.freezes_missing_layer",
        "freeze: {pattern} names layer {layer}, but the last layer is {last}",
        pattern=pattern,
        layer=layer,
        last=layers - 1,
    )


class MixturePhase(StrictSchema):
    """The weights of a mixture from a step of the trunk on."""

    from_step: Annotated[int, Field(ge=0)]
    weights: dict[str, Annotated[float, Field(ge=0)]]


class MixtureRecipe(StrictSchema):
    """Shares of *supervised* tokens by domain. ``"*"`` stands for all domains that are not named, in proportion to their size."""

    weights: dict[str, Annotated[float, Field(ge=0)]]
    phases: list[MixturePhase] = []  # weights that take over from a step of the trunk on
    anneal_weights: dict[str, Annotated[float, Field(ge=0)]] | None = None  # for anneal branches; null: as the trunk
    replay: Share = 0.3  # share of a domain's tokens drawn from earlier generations while new data lasts
    max_epochs: Positive = 4  # no document is seen more often than this

    @model_validator(mode="after")
    def _possible(self) -> MixtureRecipe:
        named = [("weights", self.weights)] + [(f"phases.{i}.weights", p.weights) for i, p in enumerate(self.phases)]
        if self.anneal_weights is not None:
            named.append(("anneal_weights", self.anneal_weights))
        for key, weights in named:
            if sum(weights.values()) <= 0:
                raise ValueError(
                    Message("recipe.no_weight", "mixture.{key} gives no domain a weight above zero", key=key)
                )
        steps = [phase.from_step for phase in self.phases]
        if steps != sorted(set(steps)):
            raise ValueError(_must_rise("mixture.phases", "from_step"))
        return self


class WarmupBatch(StrictSchema):
    """A smaller batch at the beginning of a run: ``sequences`` rows before ``until_step``."""

    until_step: Positive
    sequences: Positive


class BatchRecipe(StrictSchema):
    """The batch of one optimiser step."""

    sequences: Positive  # rows of ``model.context`` positions, over all ranks
    warmup: list[
        WarmupBatch
    ] = []  # smaller batches at first; the learning rate scales with the square root of their share
    micro_sequences: Positive | None = None  # rows of one forward and backward on one rank; null: all at once
    packing: Literal["best-fit", "document", "token-budget", "truncate-and-concatenate", "length-bucketed"] = "best-fit"
    max_padding: Share | None = None  # the largest allowed share of empty positions; null: no limit

    @model_validator(mode="after")
    def _possible(self) -> BatchRecipe:
        steps = [smaller.until_step for smaller in self.warmup]
        if steps != sorted(set(steps)):
            raise ValueError(_must_rise("batch.warmup", "until_step"))
        return self

    def count_sequences_at(self, step: int) -> int:
        """Number of rows in the global batch of a step."""
        return next((smaller.sequences for smaller in self.warmup if step < smaller.until_step), self.sequences)

    def refuse_uneven_split(self, ranks: int) -> None:
        """Raises: RecipeError if a batch cannot be shared evenly among that many data-parallel ranks."""
        named = {"batch.sequences": self.sequences}
        named |= {f"batch.warmup.{i}.sequences": smaller.sequences for i, smaller in enumerate(self.warmup)}
        for key, sequences in named.items():
            if sequences % ranks:
                raise RecipeError(
                    "recipe.batch_ranks",
                    "{key} ({sequences}) is not a multiple of the number of ranks ({ranks})",
                    key=key,
                    sequences=sequences,
                    ranks=ranks,
                )
            if self.micro_sequences is not None and sequences // ranks % self.micro_sequences:
                raise RecipeError(
                    "recipe.micro_sequences",
                    "batch.micro_sequences ({micro}) does not divide {sequences}, the number of sequences that each rank gets "
                    "from {key}",
                    micro=self.micro_sequences,
                    sequences=sequences // ranks,
                    key=key,
                )


class MuonRecipe(StrictSchema):
    """Muon, for the matrices inside the layers (https://kellerjordan.github.io/posts/muon), scaled as in arXiv 2502.16982 §2.2."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    nesterov: bool = True
    steps: Annotated[int, Field(ge=1)] = 5  # of Newton–Schulz


class OptimizerRecipe(StrictSchema):
    """AdamW with decoupled decay (arXiv 1711.05101); embeddings, norms and vectors are never decayed.

    With ``name: muon`` the matrices inside the layers are updated by Muon and everything else by AdamW, at one rate.
    """

    name: Literal["adamw", "muon"] = "adamw"
    muon: MuonRecipe = MuonRecipe()
    lr: Annotated[float, Field(gt=0)]
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


class TrunkStepCounts(StrictSchema):
    """Number of steps of a trunk segment: of the first one, and of each later one."""

    first: Positive
    later: Positive


class LrMilestone(StrictSchema):
    """From ``from_step`` of the trunk on, the learning rate is ``share`` of the peak."""

    from_step: Positive
    share: Share


class ScheduleRecipe(StrictSchema):
    """The learning rate: that of the trunk, and that of the anneals, which branch off the trunk and decay.

    ``wsd``: the trunk's rate stays at the peak (arXiv 2405.18392). ``cosine``: the rate falls to ``final_lr_share`` over ``cosine_steps``
    and stays there. ``multi-step``: the rate falls at each of the ``milestones`` (DeepSeek, arXiv 2401.02954 §2.3).
    """

    kind: Literal["wsd", "cosine", "multi-step"] = "wsd"
    cosine_steps: Positive | None = None
    milestones: list[LrMilestone] = []
    continue_from: Literal["trunk", "anneal"] = (
        "trunk"  # anneal: WSD-S (arXiv 2410.05192), training continues with the decayed weights
    )
    rewarmup_steps: Annotated[int, Field(ge=0)] = 0  # of a trunk segment that continues from an annealed checkpoint
    warmup_steps: Annotated[int, Field(ge=0)]
    trunk_steps: TrunkStepCounts
    anneal_steps: Positive
    shape: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    final_lr_share: Share = 0.0  # the rate at the end of an anneal, as a share of the peak

    @model_validator(mode="after")
    def _possible(self) -> ScheduleRecipe:
        if self.warmup_steps > self.trunk_steps.first:
            raise ValueError(
                Message(
                    "recipe.warm_up_too_long",
                    "schedule.warmup_steps ({warmup}) is more than trunk_steps.first ({first})",
                    warmup=self.warmup_steps,
                    first=self.trunk_steps.first,
                )
            )
        if (self.kind == "cosine") != (self.cosine_steps is not None):
            raise ValueError(_only_with("schedule.cosine_steps", "cosine"))
        if self.cosine_steps is not None and self.cosine_steps <= self.warmup_steps:
            raise ValueError(
                Message(
                    "recipe.cosine_too_short",
                    "schedule.cosine_steps ({cosine}) is not more than warmup_steps ({warmup})",
                    cosine=self.cosine_steps,
                    warmup=self.warmup_steps,
                )
            )
        if (self.kind == "multi-step") != bool(self.milestones):
            raise ValueError(_only_with("schedule.milestones", "multi-step"))
        steps = [milestone.from_step for milestone in self.milestones]
        if steps != sorted(set(steps)):
            raise ValueError(_must_rise("schedule.milestones", "from_step"))
        return self


class StabilityRecipe(StrictSchema):
    """Clipping, skipping of updates, and the limits beyond which a value is an anomaly."""

    grad_clip: Annotated[float, Field(gt=0)] = 1.0  # largest global gradient norm
    z_loss: Annotated[float, Field(ge=0)] = 1e-5  # weight of logsumexp², PaLM §5
    window: Annotated[int, Field(ge=8)] = 64  # number of past steps in the robust statistics
    spike_deviations: Annotated[float, Field(gt=0)] = 8.0  # robust deviations above the median: an anomaly
    skip_deviations: Annotated[float, Field(gt=0)] = 40.0  # of the gradient norm: the update is skipped
    divergence: Annotated[float, Field(gt=1)] = 1.3  # the loss's recent median over the best one so far
    plateau_windows: Annotated[int, Field(ge=2)] = 8  # a plateau is judged over at least this many windows
    throughput_drop: Annotated[float, Field(gt=0, lt=1)] = 0.5  # recent tokens/s below this share of the usual
    noise_scale_every: Annotated[int, Field(ge=0)] = 32  # steps: a lone micro-batch is split to measure it; 0: never
    embedding_grad_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the input embedding; GLM-130B, 2210.02414 §3.3
    # The numbers of this many steps are read from the device together, so that the host can run ahead. This helps if a step takes a few
    # milliseconds on a GPU. They are also read before a checkpoint and after the last step. The limit of ``skip_deviations`` changes, and
    # several ranks stop, only when numbers are read.
    read_every: Annotated[int, Field(ge=1, le=100)] = 1


class ParallelRecipe(StrictSchema):
    """How the ranks that torchrun started share the work. A run with one rank uses none of these keys but ``recompute``.

    Groups of ``tensor`` neighbouring ranks split every matrix. The groups split the batch. Together they hold ``replicas`` copies of weights
    and optimiser, and each copy is split among its groups (FSDP2).
    """

    tensor: Positive = 1
    replicas: Positive = 1
    recompute: Literal["none", "block"] = "none"  # activation checkpointing: keep a block's input only

    def data_ranks(self, ranks: int, model: ModelSpec) -> int:
        """The number of parts into which ``ranks`` ranks split the batch. Raises: RecipeError that names the key that does not fit."""
        if ranks % self.tensor:
            raise RecipeError(
                "recipe.tensor_ranks",
                "parallel.tensor ({tensor}) does not divide the number of ranks ({ranks})",
                tensor=self.tensor,
                ranks=ranks,
            )
        if ranks // self.tensor % self.replicas:
            raise RecipeError(
                "recipe.replicas",
                "parallel.replicas ({replicas}) does not divide the number of ranks that split the batch ({ranks})",
                replicas=self.replicas,
                ranks=ranks // self.tensor,
            )
        if self.tensor > 1 and model.qk_norm == "whole":
            raise RecipeError(
                "recipe.tensor_whole_norm",
                "parallel.tensor ({tensor}) is not possible with 'model.qk_norm: whole', whose norm needs all heads of a token on one rank. "
                "Write 'parallel.tensor: 1'",
                tensor=self.tensor,
            )
        if self.tensor > 1 and model.experts is not None and model.experts.bias:
            raise RecipeError(
                "recipe.tensor_expert_bias",
                "parallel.tensor ({tensor}) is not possible with 'model.experts.bias: true', because each rank would add an expert's last bias. "
                "Write 'parallel.tensor: 1'",
                tensor=self.tensor,
            )
        sizes = {"kv_heads": model.kv_heads, "context": model.context, "d_ff": model.d_ff}
        if model.experts is not None:
            sizes |= {"experts.d_ff": model.experts.d_ff}
        for key, size in sizes.items():
            if size % self.tensor:
                raise RecipeError(
                    "recipe.tensor_size",
                    "parallel.tensor ({tensor}) does not divide model.{key} ({size})",
                    tensor=self.tensor,
                    key=key,
                    size=size,
                )
        if model.experts is not None and model.experts.d_ff // self.tensor % GROUPED_MULTIPLE:
            raise RecipeError(
                "recipe.tensor_experts",
                "parallel.tensor ({tensor}) splits model.experts.d_ff ({d_ff}) into shares that are not multiples of "
                "{multiple}",
                tensor=self.tensor,
                d_ff=model.experts.d_ff,
                multiple=GROUPED_MULTIPLE,
            )
        return ranks // self.tensor


def is_trained(name: str, adapt: object, freeze: Iterable[str]) -> bool:
    """True if a recipe with these values of ``adapt`` and ``freeze`` trains the parameter with this name."""
    return is_lora_tensor(name) if adapt else not any(matches_pattern(name, pattern) for pattern in freeze)


def list_frozen(freeze: Iterable[str], multi_token_weight: float) -> list[str]:
    """The patterns of all tensors that a recipe with these values does not train: layers for multi-token prediction without a weight are frozen."""
    return [*freeze, *([] if multi_token_weight else [MULTI_TOKEN])]


class Recipe(StrictSchema):
    """All settings of a run. Recipe, data, code and first checkpoint together determine the run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    seed: Annotated[int, Field(ge=0)] = 1
    # The precision of forward and backward; weights and optimiser are fp32. auto: the fastest on this machine, measured when a segment is
    # planned. fp8: as bf16, but the products of attention and of dense MLPs have operands of eight bits (``trainer/model/fp8.py``). It needs
    # compute capability 8.9, and auto never chooses it. docs/GPU.md says how exact it is and on which GPUs it has run.
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    compile: bool = True  # torch.compile each block
    # Replay the kernel launches of a micro-batch's forward and backward pass, on one GPU. This helps small models, whose GPU waits for its
    # host. auto: if launches should take longer than kernels (``trainer.cuda_graphs.is_launch_bound``). on: at any size. Not possible with
    # experts or recomputation.
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    checkpoint_every: Positive = 200  # steps
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2  # newest ones kept in a segment's folder
    export_dtype: FloatName = "fp32"
    # Tensors of an export with another dtype, by their names in its files, with wildcards. The first that matches counts.
    export_dtypes: dict[str, FloatName] = {}
    export_shard_bytes: Positive = (
        50_000_000_000  # of a file of an export, as in transformers 5; a larger model has several files
    )
    model: ModelSpec
    mixture: MixtureRecipe
    batch: BatchRecipe
    optimizer: OptimizerRecipe
    schedule: ScheduleRecipe
    stability: StabilityRecipe = StabilityRecipe()
    parallel: ParallelRecipe = ParallelRecipe()
    # Keys of ``model`` that may differ from the checkpoint from which training continues. The same weights then compute another function, or an
    # export says something else of them.
    # A change of any other key is allowed only if it keeps the function.
    accept_changes: list[Acceptable] = []
    adapt: AdaptRecipe | None = None  # train LoRA's matrices in place of the weights; null: train the weights
    # Weights that are not trained: embedding, blocks.3, blocks.0-11, "blocks.*.q" and so on (``models.tensors.matches_pattern``).
    freeze: list[str] = []
    # Of the layers for multi-token prediction (``model.multi_token_layers``): the share of their mean loss that is added to the loss. DeepSeek-V3
    # (arXiv 2412.19437 §4.2) had 0.3, and 0.1 in the last third of its tokens. 0: the layers are carried along unchanged, and cost no time.
    multi_token_weight: Annotated[float, Field(ge=0, le=10)] = 0.0

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        recomputes = self.parallel.recompute != "none"
        for key, there in (("model.experts", self.model.experts), ("parallel.recompute", recomputes)):
            if self.cuda_graphs == "on" and there:
                raise ValueError(
                    Message(
                        "recipe.graphs",
                        "'cuda_graphs: on' is not possible with {key}. Write 'cuda_graphs: auto' or 'cuda_graphs: off'",
                        key=key,
                    )
                )
        return self

    @model_validator(mode="after")
    def _trains_something(self) -> Recipe:
        names = [name for name in list_tensor_shapes(self.model) if name.rpartition(".")[2] not in BUFFERS]
        for pattern in self.freeze:
            if not any(matches_pattern(name, pattern) for name in names):
                if (missing := _describe_missing_layer(pattern, self.model.layers)) is not None:
                    raise ValueError(missing)
                raise ValueError(
                    Message("recipe.freezes_nothing", "freeze: no tensor is named {pattern}. Tensors are named like {names}",
                        pattern=pattern, names=names[:3])
                )  # fmt: skip
        if self.multi_token_weight and (not self.model.multi_token_layers or self.adapt is not None):
            raise ValueError(
                Message(
                    "recipe.multi_token_weight",
                    "multi_token_weight needs layers for multi-token prediction (model.multi_token_layers) that are trained. The key adapt trains "
                    "none of them. Remove the key multi_token_weight",
                )
            )
        if self.adapt is None:
            if not any(is_trained(name, None, self.frozen) for name in names):
                raise ValueError(Message("recipe.all_frozen", "freeze names every tensor, so nothing would be trained"))
            return self
        refuse_impossible_targets(self.model, self.adapt)
        if self.freeze:
            raise ValueError(
                Message("recipe.freeze_and_adapt", "with the key adapt, no weight is trained. Remove the key freeze")
            )
        if self.parallel.tensor > 1:
            raise ValueError(
                Message("recipe.adapt_tensor", "the key adapt is not possible with parallel.tensor above 1")
            )
        return self

    @model_validator(mode="after")
    def _can_be_exported(self) -> Recipe:
        try:
            family = find_family_for_export(self.model)
        except ModelFilesError as error:
            raise ValueError(error.message) from None
        names = family.list_file_names(self.model) if self.export_dtypes else []
        for pattern in self.export_dtypes:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    Message("recipe.exports_nothing", "export_dtypes: an export has no tensor named {pattern}. Its tensors are named like {names}",
                        pattern=pattern, names=names[:3])
                )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _sizes_of_fp8(self) -> Recipe:
        """Refuse sizes that fp8 products cannot have: each side must be a multiple of 16 (``torch._scaled_mm``)."""
        if self.precision != "fp8":
            return self
        model, split = self.model, self.parallel.tensor
        sizes = {"context": model.context, "d_model": model.d_model}
        sizes |= {
            "heads · head_dim": model.heads * model.head_dim,
            "kv_heads · head_dim": model.kv_heads * model.head_dim,
        }
        experts, latent = model.experts, model.latent
        if latent is not None:
            sizes |= {
                "latent.kv_rank": latent.kv_rank,
                "latent.rope_head_dim": latent.rope_head_dim,
                "latent.q_rank": latent.q_rank or 16,
                "heads · latent.nope_head_dim": model.heads * latent.nope_head_dim,
                "heads · latent.v_head_dim": model.heads * latent.v_head_dim,
            }
        if experts is None or experts.dense_layers:
            sizes["d_ff"] = model.d_ff
        if experts is not None and experts.shared:
            sizes["experts.shared · experts.d_ff"] = experts.shared * experts.d_ff
        for key, size in sizes.items():
            ranks = 1 if key in ("context", "d_model") or key.startswith("latent.") else split
            if size % (16 * ranks):
                share = (
                    Message("recipe.split_over", " parallel.tensor splits this size over {ranks} ranks, and each part must also be a multiple of 16.",
                        ranks=ranks)
                    if ranks > 1
                    else ""
                )  # fmt: skip
                raise ValueError(
                    Message("recipe.fp8_size", "'precision: fp8' needs sizes that are multiples of 16, but model.{key} is {size}.{share} "
                        "Change the size, or write 'precision: bf16'", key=key, size=size, share=share)
                )  # fmt: skip
        return self

    @model_serializer(mode="wrap")
    def _without_later(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The recipe without those keys of ``LATER`` that have their default. Older code can read such a recipe, and its hash stays the same."""
        found: dict[str, Any] = dump(self)
        for path, usual in LATER.items():
            section, _, key = path.rpartition(".")
            within = found.get(section, {}) if section else found
            if within.get(key, usual) == usual:
                within.pop(key, None)
        return found

    @classmethod
    def load(cls, path: Path | str) -> Recipe:
        """The recipe in a YAML file, with the check of ``refuse_beyond_model``. Raises: RecipeError that names the file and the key."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(
                "recipe.unreadable", "{file} cannot be read: {problem}", file=str(path), problem=str(error)
            ) from None
        recipe = cls.parse(read_yaml(text, str(path), RecipeError), str(path))
        recipe.refuse_beyond_model(str(path))
        return recipe

    def refuse_beyond_model(self, where: str) -> None:
        """Refuse a context or a layer that the model does not have.

        The schema allows both, because earlier factories trained with such recipes, and their checkpoints must stay readable.

        Raises: RecipeError that names ``where``, the key and what the model has.
        """
        allowed = self.model.max_positions
        if allowed is not None and self.model.context > allowed:
            raise RecipeError(
                "recipe.context_beyond_model",
                "{file}: model.context is {context:,}, but the model allows {allowed:,} positions (model.max_positions). Lower model.context. Or "
                "raise model.max_positions, add model.rope_scaling if it is needed, and list both keys under accept_changes.",
                file=where, context=self.model.context, allowed=allowed,
            )  # fmt: skip
        for pattern in self.freeze:
            if (missing := _describe_missing_layer(pattern, self.model.layers)) is not None:
                raise RecipeError("recipe.missing_layer", "{file}: {problem}.", file=where, problem=missing)

    @classmethod
    def parse(cls, raw: object, where: str = "recipe") -> Recipe:
        """The recipe in parsed YAML or JSON. Raises: RecipeError that names ``where`` and the key."""
        return parse(cls, raw, where, RecipeError)

    @property
    def frozen(self) -> list[str]:
        """The patterns of all tensors that are not trained, if ``adapt`` is null."""
        return list_frozen(self.freeze, self.multi_token_weight)

    @property
    def trained_multi_token_layers(self) -> int:
        """How many layers for multi-token prediction are computed and trained."""
        return self.model.multi_token_layers if self.multi_token_weight else 0

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.model_dump(), sort_keys=True).encode()).hexdigest()

    @property
    def tokens_per_step(self) -> int:
        """Number of positions in a full batch, after the batch's warm-up."""
        return self.batch.sequences * self.model.context

    def count_tokens_between(self, first: int, last: int) -> int:
        """Number of positions in the steps [first, last)."""
        smaller = [s.until_step for s in self.batch.warmup]
        edges = sorted({first, last, *(step for step in smaller if first < step < last)})
        return sum(
            (stop - start) * self.batch.count_sequences_at(start) * self.model.context
            for start, stop in zip(edges, edges[1:])
        )


def copy_with_changed_keys(recipe: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe (as JSON) with some keys changed. The parts of a key are separated by dots.

    >>> copy_with_changed_keys({"batch": {"sequences": 8}, "compile": False}, {"batch.sequences": 2, "optimizer.lr": 0.1})
    {'batch': {'sequences': 2}, 'compile': False, 'optimizer': {'lr': 0.1}}
    """
    changed = copy.deepcopy(dict(recipe))
    for path, value in keys.items():
        *outer, last = path.split(".")
        reduce(lambda inner, part: inner.setdefault(part, {}), outer, changed)[last] = value
    return changed
