"""Sizes of a model: its shape for a number of parameters, and the memory of one GPU by part.

The module is arithmetic only (no torch). ``trainer.contract.plan.run_plan`` and ``factory plan`` use it. A GB is 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kernels.contract.message import Message
from models.spec import ModelSpec
from models.tensors import BUFFERS, list_block_shapes
from trainer.contract.errors import RecipeError
from trainer.contract.plan.adapting import TrainedParts

GB = 1e9
LOGIT_BYTES = 12  # for each logit of a row at the peak: rounded, in fp32, its gradient in fp32 and rounded
MOST_LOGITS = (
    2 << 30
)  # bytes at one time of a head that works in place on a GPU: GPU_BYTES in kernels/linear_cross_entropy/chunks.py
RESERVE = 0.10  # share of the memory
ASPECT = 128  # width / layers: Llama 3 8B has 4096 / 32, 405B 16384 / 126
D_FF = 3.5  # d_ff / d_model of Llama 3 8B and 70B

KORTHIKANTI = "arXiv 2205.05198 §4"
ZERO = "ZeRO, arXiv 1910.02054"


@dataclass(frozen=True)
class GpuLayout:
    """How GPUs divide the training of a model: the keys ``parallel`` and ``batch.micro_sequences`` of a recipe."""

    gpus: int
    tensor: int = 1
    micro_sequences: int = 1
    recompute: Literal["none", "block"] = "none"
    replicas: int = 1
    expert: int = 1  # GPUs that each keep other experts, to which tokens are sent; 1: every GPU gathers every expert

    @property
    def data(self) -> int:
        """Number of GPUs that split the batch."""
        return self.gpus // self.tensor

    @property
    def weight_parts(self) -> int:
        """The number of parts into which weights, gradients and optimiser are split."""
        return self.gpus // self.replicas

    @property
    def fsdp_shards(self) -> int:
        """Number of FSDP shards of one copy of the weights. Tensor-parallel GPUs, which split each matrix, do not count."""
        return self.data // self.replicas


@dataclass(frozen=True)
class MemoryPart:
    """One part of a GPU's memory, with the formula and source of the number."""

    name: str
    bytes: float
    formula: str
    source: str


def choose_model_shape(parameters: float, vocab_size: int, context: int) -> ModelSpec:
    """A dense model with about ``parameters`` parameters and Llama 3's proportions (arXiv 2407.21783 Table 3).

    Width / layers is kept near 128. The exact ratio matters little (Kaplan et al., arXiv 2001.08361 §3.1: a few per cent of loss
    over a factor of forty). Raises: RecipeError if the embedding leaves too few parameters for two layers.
    """

    def with_layers(d_model: int, layers: int) -> ModelSpec:
        head_dim = 128 if d_model >= 1024 else 64
        heads = d_model // head_dim
        return ModelSpec(
            vocab_size=vocab_size,
            d_model=d_model,
            layers=layers,
            heads=heads,
            kv_heads=math.gcd(heads, 8),
            head_dim=head_dim,
            d_ff=round(D_FF * d_model),
            context=context,
        )

    best: tuple[float, ModelSpec] | None = None
    for d_model in [*range(128, 1024, 128), *range(1024, 2048, 256), *range(2048, 32769, 1024)]:
        one, two = with_layers(d_model, 1).parameters, with_layers(d_model, 2).parameters
        layers = round(1 + (parameters - one) / (two - one))
        if layers < 2:
            break
        if layers > d_model / 8:
            continue  # sixteen times as deep as Llama's proportions
        shape = with_layers(d_model, layers)
        # A factor of two in the proportions weighs like 2 % of the parameters.
        badness = abs(math.log(shape.parameters / parameters)) + 0.03 * abs(math.log(d_model / layers / ASPECT))
        if best is None or badness < best[0]:
            best = badness, shape
    if best is None:
        raise RecipeError(
            "plan.too_few_parameters",
            "{parameters:,.0f} parameters are too few for two layers and an embedding of {vocab:,} tokens.",
            parameters=parameters,
            vocab=vocab_size,
        )
    return best[1]


def count_end_parameters(model: ModelSpec) -> int:
    """Number of parameters of the embedding and of the head, which are one matrix if the head is tied."""
    return (1 if model.tied else 2) * model.vocab_size * model.d_model


def count_largest_layer_parameters(model: ModelSpec, expert: int = 1) -> int:
    """Number of parameters of the largest layer, as one GPU gathers it: of the routed experts, one in ``expert``."""
    largest = 0
    for _, layer in list_layer_kinds(model):
        size = 0
        for key, shape in list_block_shapes(model, layer).items():
            whole = 0 if key in BUFFERS else math.prod(shape)
            size += whole // shape[0] * math.ceil(shape[0] / expert) if key.startswith("experts_") else whole
        largest = max(largest, size)
    return largest


def count_routed_expert_parameters(model: ModelSpec) -> int:
    """Parameters of all experts that tokens are routed to."""
    if model.experts is None:
        return 0
    layers = model.layers + model.multi_token_layers - model.experts.dense_layers
    return layers * model.experts.count * 3 * model.d_model * model.experts.d_ff


def count_activation_elements_per_token(model: ModelSpec, layer: int, tensor: int = 1) -> float:
    """Elements that ``layer`` keeps for each token until its backward pass, on one of ``tensor`` GPUs that split the layer.

    They are counted as in Korthikanti et al. (arXiv 2205.05198 §4.1), for flash attention (the scores are never kept) and no dropout. As in §4.2.2,
    ``tensor`` divides the inputs of the norms (each GPU has a part of the sequence) and all tensors between the matrix products. The inputs of the
    products are gathered and count whole, because torch keeps them (Megatron gathers them again).
    """
    D = model.d_model
    norms = 4 if model.norms == "sandwich" else 2
    split: float = norms * D + _attention_elements(model)
    whole = 2 * D  # the inputs of attention's products and of the MLP's
    if model.latent is not None:  # every GPU computes the compressed vectors, as they have no heads
        whole += 2 * (model.latent.kv_rank + (model.latent.q_rank or 0)) + model.latent.rope_head_dim
    if not model.is_expert_layer(layer):
        # A gate by SiLU is one op, which keeps what it reads; another activation also keeps what it gives to the product.
        hidden = model.mlp_matrices + (model.gated and model.activation != "silu")
        return (split + hidden * model.d_ff) / tensor + whole
    assert model.experts is not None
    experts = model.experts
    used = experts.per_token + experts.shared
    # Each routed copy of a token is kept as the expert's input and as its output, which the router's gradient needs.
    return (split + 3 * experts.d_ff * used) / tensor + whole + 2 * experts.per_token * D


def _attention_elements(model: ModelSpec) -> int:
    """Elements that attention keeps for each token between its products: queries, keys and values, as they are multiplied, and its output.

    A norm of queries and keys also keeps what it reads. RoPE keeps nothing: its gradient needs only cosines and sines.
    """
    H, G, K, V = model.heads, model.kv_heads, model.head_dim, model.v_head_dim
    if model.latent is not None:  # values are as wide as keys, by zeros that the output is cut off from
        return 4 * H * K + (H * V if V < K else 0)
    read = (H + G) * K if model.qk_norm else 0
    return read + (H + 2 * G) * K + H * K


def list_layer_kinds(model: ModelSpec) -> list[tuple[int, int]]:
    """(number of layers, index of the first of them) for each kind of layer, dense and with experts."""
    dense = model.layers if model.experts is None else model.experts.dense_layers
    return [(n, layer) for n, layer in ((dense, 0), (model.layers - dense, dense)) if n]


def estimate_activation_memory(
    model: ModelSpec, layout: GpuLayout, itemsize: int, trained: TrainedParts | None = None
) -> MemoryPart:
    """The memory of the activations of one micro-batch, which the forward pass keeps for the backward pass.

    ``trained``: None if all weights are, those for multi-token prediction too. Layers that no gradient reaches keep nothing. The other layers are
    counted as if all their weights were trained, which is a little too much for frozen ones.
    """
    tokens = layout.micro_sequences * model.context
    first, more = (trained.first_layer, trained.kept_by_adapters) if trained is not None else (0, 0)
    kept = [
        (min(n, max(0, n + start - first)), more + count_activation_elements_per_token(model, start, layout.tensor))
        for n, start in list_layer_kinds(model)
    ]
    if trained is None and model.multi_token_layers:  # each also keeps the inputs of three norms and of a product
        each = 5 * model.d_model + count_activation_elements_per_token(model, model.layers, layout.tensor)
        kept.append((model.multi_token_layers, each))
    layers_kept = sum(n for n, _ in kept)
    if layout.recompute == "block":
        most = max((each for n, each in kept if n), default=0.0)
        elements = layers_kept * model.d_model / layout.tensor + most
        how: str = Message(
            "plan.kept_recomputed",
            "{layers} layers × {width:,} elements of input / {tensor} (tensor parallel) + {layer:,.0f} elements of "
            "one whole layer",
            layers=layers_kept,
            width=model.d_model,
            tensor=layout.tensor,
            layer=most,
        )
    else:
        elements = sum(n * each for n, each in kept)
        layers = " + ".join(f"{n} layers × {each:,.0f}" for n, each in kept)
        how = Message("plan.kept", "{layers} elements kept for each token", layers=layers)
    return MemoryPart(
        "activations",
        itemsize * tokens * elements,
        Message(
            "plan.activations",
            "{itemsize} bytes × {tokens:,} tokens × ({how})",
            itemsize=itemsize,
            tokens=tokens,
            how=how,
        ),
        Message(
            "plan.activations_source",
            "counted as in {source}, for the layers of this model (trainer/contract/plan/sizing.py)",
            source=KORTHIKANTI,
        ),
    )


def estimate_memory_parts(
    model: ModelSpec,
    layout: GpuLayout,
    memory: float,
    *,
    optimizer: str = "adamw",
    itemsize: int = 2,
    logit_rows: int | None = 1024,
    trained: TrainedParts | None = None,
    in_place: bool = False,
) -> list[MemoryPart]:
    """The parts of the memory that training needs on one GPU. ``memory``: bytes of the GPU, of which a share is reserved.

    ``itemsize``: bytes of an element of the forward pass (2 for bf16). ``logit_rows``: number of tokens whose logits exist at one time
    (``kernels.linear_cross_entropy``); None: all tokens of the micro-batch. ``in_place``: the gradient overwrites the logits, in the precision of the
    products. ``trained``: None if all weights are. A frozen weight is held once, in the precision of the products.
    """
    P, t = model.parameters, layout.tensor
    pieces = layout.weight_parts
    one_end, ends = model.vocab_size * model.d_model, count_end_parameters(model)
    tokens = layout.micro_sequences * model.context
    # Trained parameters, and those of them that are in the layers; gradients of embedding and head at once: 4 bytes and 2 + 4.
    T, of_layers, end_gradients = P, P - ends, 10 * one_end
    if trained is not None:
        T, of_layers = trained.parameters, trained.layers
        end_gradients = 4 * trained.embedding + 6 * (trained.embedding if model.tied else trained.head)
    frozen = P - (T if trained is None else trained.weights)
    of_all = Message("plan.of_all", "{parameters:,} parameters / {pieces} GPUs", parameters=T, pieces=pieces)
    of_weights: str = Message("plan.fp32_weights", "4 bytes (fp32) × {of_all}", of_all=of_all)
    if frozen:
        of_weights = Message(
            "plan.frozen_weights",
            "(4 bytes (fp32) × {trained:,} trained + {itemsize} bytes × {frozen:,} frozen parameters) / {pieces} GPUs",
            trained=T,
            itemsize=itemsize,
            frozen=frozen,
            pieces=pieces,
        )
    inside = of_layers if optimizer == "muon" else 0  # Muon keeps one moment of the layers' matrices
    moments = 4 * inside + 8 * (T - inside)
    if layout.fsdp_shards > 1:
        block = count_largest_layer_parameters(model, layout.expert)
        with_gradient = block if trained is None else min(block, trained.largest_layer)
        copies = (2 * itemsize * block + (itemsize + 4) * with_gradient) / t + itemsize * ends
        how: str = Message(
            "plan.gathered_copies",
            "({block_bytes} bytes × {block:,} parameters of a layer + {gradient_bytes} bytes × {trained:,} trained ones) / {tensor} (tensor "
            "parallel) + {itemsize} bytes × {head:,} parameters of embedding and head",
            block_bytes=2 * itemsize,
            block=block,
            gradient_bytes=itemsize + 4,
            trained=with_gradient,
            tensor=t,
            itemsize=itemsize,
            head=ends,
        )
        what = Message(
            "plan.fsdp",
            "FSDP2 gathers two layers at a time. It keeps the gradient of one layer twice: rounded and in fp32",
        )
    else:
        copies = itemsize * T / t if itemsize < 4 else 0.0
        how = (
            Message(
                "plan.rounded_copies",
                "{itemsize} bytes × {parameters:,} parameters / {tensor} (tensor parallel)",
                itemsize=itemsize,
                parameters=T,
                tensor=t,
            )
            if itemsize < 4
            else Message("plan.no_copies", "no copies, because the computation is in fp32")
        )
        what = Message("plan.autograd_copies", "autograd keeps the rounded weights of the forward pass")
    rows = tokens if logit_rows is None else min(logit_rows, tokens)
    logit_bytes = LOGIT_BYTES
    if model.logit_softcap:
        logit_bytes += 4  # the cap keeps its tanh
    elif in_place:
        logit_bytes = itemsize
        rows = min(rows, max(1, MOST_LOGITS // (itemsize * model.vocab_size)))
    logits = logit_bytes * rows * model.vocab_size / t + end_gradients + 6 * tokens * model.d_model
    return [
        MemoryPart("weights", (4 * T + itemsize * frozen) / pieces, of_weights, f"{ZERO} §3.1, §5"),
        MemoryPart(
            "gradients",
            4 * T / pieces,
            Message("plan.fp32_gradients", "4 bytes (fp32) × {of_all}", of_all=of_all),
            Message(
                "plan.gradients_source",
                "{source} §3.1, §5 (the ranks sum their gradients after each micro-batch)",
                source=ZERO,
            ),
        ),
        MemoryPart(
            "optimiser",
            moments / pieces,
            Message(
                "plan.optimiser",
                "{bytes:.3g} bytes of moments ({optimizer}, fp32) × {of_all}",
                bytes=moments / T,
                optimizer="AdamW" if optimizer == "adamw" else "Muon and AdamW",
                of_all=of_all,
            ),
            f"{ZERO} §3.1, §5",
        ),
        MemoryPart("compute copies", copies, how, what),
        estimate_activation_memory(model, layout, itemsize, trained),
        MemoryPart(
            "logits, temporaries",
            logits,
            Message(
                "plan.logits",
                "{logit_bytes} bytes × {rows:,} rows × {vocab:,} logits / {tensor} (tensor parallel) + {gradients:,} bytes of "
                "gradients of embedding and head + 6 bytes × {tokens:,} tokens × {width:,} (width)",
                logit_bytes=logit_bytes,
                rows=rows,
                vocab=model.vocab_size,
                tensor=t,
                gradients=end_gradients,
                tokens=tokens,
                width=model.d_model,
            ),
            "kernels/linear_cross_entropy/__init__.py, counted",
        ),
        MemoryPart(
            "reserve",
            RESERVE * memory,
            Message("plan.reserve", "{share:.0%} of the memory", share=RESERVE),
            Message("plan.reserve_source", "our margin for CUDA, NCCL and fragmentation ({source} §3.2)", source=ZERO),
        ),
    ]


def sum_bytes(parts: Iterable[MemoryPart]) -> float:
    """The sum of the parts, in bytes."""
    return sum(part.bytes for part in parts)
