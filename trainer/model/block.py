"""One layer of the decoder: attention and an MLP or experts, each added to the residual stream.

A block is composed when it is made: functions of ``trainer.model.attention`` and of this file, chosen by the description. The expensive
operations are ``ops`` of the kernel registry. Weights are fp32 and are cast to ``dtype`` where they are used; matrices that are not trained may be
held in ``dtype``. If *tensor* ranks split a row, each of them has S of its T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from kernels.contract.registry import Ops
from kernels.general_attention.visible_keys import VisibleKeys
from models.spec import ModelSpec
from models.tensors import BUFFERS, Shape, list_block_shapes, list_unit_norms
from trainer.contract.lora import A, AdaptRecipe, list_lora_shapes
from trainer.contract.recipe import is_trained
from trainer.model import fp8
from trainer.model.attention import choose_attention, choose_visibility, make_own_slopes
from trainer.model.lora import multiply_adapted
from trainer.parallel.tensor_ranks import TensorRanks

JOINED = (("q", "k", "v"), ("gate", "up"), ("shared_gate", "shared_up"), ("q_down", "kv_down"), ("q", "kv_down"))
OPTIONAL = (
    "attention_out_bias",
    "down_bias",
    "sinks",
    "router_bias",
    "router_logits_bias",
)  # None in a block that lacks them


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)²: So et al. 2021, arXiv 2109.08668."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh: Hendrycks & Gimpel 2016, arXiv 1606.08415 §2."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu_squared,
}


class NormPlacement(NamedTuple):
    """Where the norms of a block stand, as three functions of the block: the input of attention, from the residual stream; (the stream, the input of
    the MLP), from the stream and attention's output; the stream, from itself and the MLP's output."""

    start: Callable[[Block, Tensor], Tensor]
    meet: Callable[[Block, Tensor, Tensor], tuple[Tensor, Tensor]]
    end: Callable[[Block, Tensor, Tensor], Tensor]


def norm_input(block: Block, x_BSD: Tensor) -> Tensor:
    return block.ops.rms_norm(x_BSD, block.norm_weight(block.attention_norm), block.shape.norm_eps)


def add_and_norm(block: Block, x_BSD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
    return block.ops.add_rms_norm(x_BSD, y_BSD, block.norm_weight(block.mlp_norm), block.shape.norm_eps)


def add_output(block: Block, x_BSD: Tensor, y_BSD: Tensor) -> Tensor:
    return x_BSD + y_BSD


def take_input(block: Block, x_BSD: Tensor) -> Tensor:
    return x_BSD


def add_normed(block: Block, x_BSD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
    x_BSD = x_BSD + block.ops.rms_norm(y_BSD, block.norm_weight(block.attention_post_norm), block.shape.norm_eps)
    return x_BSD, x_BSD


def add_normed_and_norm(block: Block, x_BSD: Tensor, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
    y_BSD = block.ops.rms_norm(y_BSD, block.norm_weight(block.attention_post_norm), block.shape.norm_eps)
    return add_and_norm(block, x_BSD, y_BSD)


def add_normed_output(block: Block, x_BSD: Tensor, y_BSD: Tensor) -> Tensor:
    return x_BSD + block.ops.rms_norm(y_BSD, block.norm_weight(block.mlp_post_norm), block.shape.norm_eps)


NORM_PLACEMENTS: Mapping[str, NormPlacement] = {
    "pre": NormPlacement(norm_input, add_and_norm, add_output),
    "post": NormPlacement(take_input, add_normed, add_normed_output),  # OLMo 2, arXiv 2501.00656 §3.2
    "sandwich": NormPlacement(norm_input, add_normed_and_norm, add_normed_output),  # Gemma 2, arXiv 2408.00118 §2
}


class Trained(NamedTuple):
    """Which parameters of a module are trained. ``prefix``: of the module's names in the model."""

    prefix: str
    adapt: AdaptRecipe | None
    freeze: Sequence[str]
    frozen_dtype: torch.dtype  # of matrices that are not trained; vectors stay fp32, because some are used in it

    def make_parameter(self, name: str, shape: Shape) -> nn.Parameter:
        trained = is_trained(self.prefix + name, self.adapt, self.freeze)
        dtype = torch.float32 if trained or len(shape) < 2 else self.frozen_dtype
        return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=trained)


class Block(nn.Module):
    """One layer: x_BSD → (x_BSD, extras). Its tensors are those of ``list_block_shapes``.

    ``extras`` of an expert layer: [1 + E], the router's Σ z² and the number of tokens at each expert; with ``balance: loss`` [2 + E], the loss of
    the balance between them. None for a dense layer.
    """

    if TYPE_CHECKING:  # which tensors there are depends on the description

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        shape: ModelSpec,
        layer: int,
        ops: Ops,
        dtype: torch.dtype,
        tensor: TensorRanks,
        trained: Trained | None = None,
        adapt: AdaptRecipe | None = None,
    ) -> None:
        """``trained``: which of its parameters, by their names in the model; None: all. ``adapt``: of this layer's matrices; None: it has no LoRA."""
        super().__init__()
        self.shape, self.ops, self.dtype, self.tensor = shape, ops, dtype, tensor
        self.recompute = self.joined = self.fp8 = False
        self.multiply: Callable[[Tensor, Tensor], Tensor] = (
            F.linear
        )  # called by name: a profile has each product's own line
        described = shape.layer(layer)
        self.rope = described.rope
        self.has_rope = self.rope != "none"
        self.experts = described.experts
        shapes = list_block_shapes(shape, layer)
        trained = trained or Trained("", None, (), torch.float32)
        allocate_tensors(self, shapes | list_lora_shapes(shapes, adapt), trained)
        self.joined_frozen: dict[tuple[str, ...], Tensor] = {}  # matrices whose parameters are its rows
        self.adapted = frozenset(name.removesuffix(A) for name in list_lora_shapes(shapes, adapt) if name.endswith(A))
        self.adapt_scale = adapt.scale if adapt else 0.0
        for name in OPTIONAL:
            if name not in shapes:
                self.register_parameter(name, None)
        self.placement = NORM_PLACEMENTS[shape.norms]
        self.norm_weight: Callable[[Any], Tensor] = self.weight_plus_one if shape.norm_plus_one else self.weight
        if not shape.norm_weights:
            self.norm_weight = self.make_unit_weight
            for name, size in list_unit_norms(shape, layer).items():
                setattr(self, name, size)
        self.visibility, self.attention = choose_visibility(shape, described), choose_attention(shape, described)
        self.query_scale = 1.0 if shape.attention_scale is None else shape.attention_scale * shape.head_dim**0.5
        self.attention_products = self.biased_products if shape.qkv_bias else self.products
        self.mlp_products = self.biased_products if shape.mlp_bias else self.products
        self.activation = ACTIVATIONS[shape.activation]
        self.apply_mlp = self.apply_swiglu
        if not shape.gated:
            self.apply_mlp = self.apply_ungated
        elif shape.activation != "silu":
            self.apply_mlp = self.apply_gated
        if self.experts is not None:
            from trainer.model import experts as mixture  # it imports torch's compiler, which takes a second

            self.mixture = mixture

    def forward(
        self, x_BSD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, documents_BT: Tensor, prepared_documents: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """``prepared_documents``: the documents as prepared for attention (``Ops.prepare_attention``); None: the op prepares them itself."""
        if prepared_documents is None:
            prepared_documents = self.see(documents_BT)
        if self.recompute and torch.is_grad_enabled():
            return recompute(self.run, x_BSD, cos_BTK, sin_BTK, documents_BT, prepared_documents, use_reentrant=False)  # type: ignore[no-any-return]
        return self.run(x_BSD, cos_BTK, sin_BTK, documents_BT, prepared_documents)

    def see(self, documents_BT: Tensor) -> Any:
        """The documents as this layer's op takes them unprepared."""
        if self.visibility is None:
            return documents_BT
        slopes_H = make_own_slopes(self.shape, self.tensor, documents_BT.device) if self.visibility.has_slopes else None
        return VisibleKeys(documents_BT, self.visibility.window, slopes_H)

    def run(
        self, x_BSD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, documents_BT: Tensor, prepared_documents: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The computation of the layer. ``Decoder.compile`` compiles this method and not ``forward``, which FSDP's hooks surround."""
        tensor, (start, meet, end) = self.tensor, self.placement
        h_BTD = tensor.gather(start(self, x_BSD))
        y_BSD = tensor.scatter(self.attend(h_BTD, cos_BTK, sin_BTK, prepared_documents))
        if self.attention_out_bias is not None:
            y_BSD = y_BSD + self.weight(self.attention_out_bias)
        x_BSD, h_BSD = meet(self, x_BSD, y_BSD)
        h_BTD = tensor.gather(h_BSD)
        if self.experts is not None:
            y_BTD, extras = self.apply_experts(h_BTD, documents_BT)
            return end(self, x_BSD, tensor.scatter(y_BTD)), extras
        y_BSD = tensor.scatter(self.apply_mlp(h_BTD, "gate", "up", "down"))
        if self.down_bias is not None:
            y_BSD = y_BSD + self.weight(self.down_bias)
        return end(self, x_BSD, y_BSD), None

    def attend(self, h_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, prepared_documents: Any) -> Tensor:
        B, T, _ = h_BTD.shape
        q_BTHK, k_BTGK, v_BTGK = self.attention.project(self, h_BTD, cos_BTK, sin_BTK)
        o_BTHK = self.attention.mix(self, q_BTHK, k_BTGK, v_BTGK, prepared_documents)
        o_BTX, name = o_BTHK.reshape(B, T, -1), "attention_out"
        return self.adapt(o_BTX, name) if name in self.adapted else self.multiply(o_BTX, self.matrix(name))

    def apply_swiglu(self, h_BTD: Tensor, gate: str, up: str, down: str) -> Tensor:
        gate_BTF, up_BTF = self.mlp_products(h_BTD, (gate, up))
        h_BTF = self.ops.swiglu(gate_BTF, up_BTF)
        return self.adapt(h_BTF, down) if down in self.adapted else self.multiply(h_BTF, self.matrix(down))

    def apply_gated(self, h_BTD: Tensor, gate: str, up: str, down: str) -> Tensor:
        gate_BTF, up_BTF = self.mlp_products(h_BTD, (gate, up))
        h_BTF = self.activation(gate_BTF) * up_BTF
        return self.adapt(h_BTF, down) if down in self.adapted else self.multiply(h_BTF, self.matrix(down))

    def apply_ungated(self, h_BTD: Tensor, gate: str, up: str, down: str) -> Tensor:
        (up_BTF,) = self.mlp_products(h_BTD, (up,))
        h_BTF = self.activation(up_BTF)
        return self.adapt(h_BTF, down) if down in self.adapted else self.multiply(h_BTF, self.matrix(down))

    def apply_experts(self, h_BTD: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
        assert self.experts is not None
        weight = self.weight
        h_ND, holds_BT = h_BTD.flatten(0, 1), documents_BT >= 0
        logits_bias = None if self.router_logits_bias is None else weight(self.router_logits_bias)
        routing = self.mixture.route_tokens(h_ND, weight(self.router), self.router_bias, self.experts, logits_bias)
        gate, up, down = (weight(m) for m in (self.experts_gate, self.experts_up, self.experts_down))
        if self.experts.bias:
            biases = (weight(b) for b in (self.experts_gate_bias, self.experts_up_bias, self.experts_down_bias))
            gate, up, down = map(self.mixture.append_bias, (gate, up, down), biases)
        gate, up, down = (matrix.transpose(1, 2) for matrix in (gate, up, down))
        y_ND = self.mixture.compute_expert_outputs(h_ND, routing, gate, up, down, self.experts, self.ops)
        y_BTD = y_ND.view_as(h_BTD)
        if self.experts.shared:
            y_BTD = y_BTD + self.apply_mlp(h_BTD, "shared_gate", "shared_up", "shared_down")
        # every tensor rank routes every token; the division makes the sum over ranks count each token once
        return y_BTD, self.mixture.measure_routing(routing, holds_BT, self.experts) / self.tensor.size

    def adapt(self, x_BTD: Tensor, name: str) -> Tensor:
        """x matrixᵀ, with what LoRA adds to the matrix."""
        return multiply_adapted(self, x_BTD, (name,))[0]

    def matrix(self, name: str) -> Tensor:
        return self.weight(getattr(self, name))

    def products(self, h_BTD: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
        """x matrixᵀ for each of the matrices with these names, with what LoRA adds. With ``join_matrices`` it is one product."""
        if not self.adapted.isdisjoint(names):
            return multiply_adapted(self, h_BTD, names)
        weights = [self.matrix(name) for name in names]
        if self.joined:
            joined_XD = self.joined_frozen.get(tuple(names))
            joined_BTX = self.multiply(h_BTD, torch.cat(weights) if joined_XD is None else joined_XD)
            return joined_BTX.split([len(weight) for weight in weights], dim=-1)
        return (
            fp8.apply_several_fp8_linears(h_BTD, weights)
            if self.fp8
            else [F.linear(h_BTD, weight) for weight in weights]
        )

    def biased_products(self, h_BTD: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
        """The same as ``products``, with each matrix's bias added."""
        products = self.products(h_BTD, names)
        return [y_BTX + self.weight(getattr(self, f"{name}_bias")) for y_BTX, name in zip(products, names, strict=True)]

    def weight(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, in the dtype of the layer's products."""
        return self.tensor.weight(parameter).to(self.dtype)

    def join_frozen_matrices(self) -> None:
        """Give matrices that are multiplied together, and are never updated, one storage, so that no product joins copies of them."""
        joined: set[str] = set()
        for names in JOINED:
            found = [self._parameters.get(name) for name in names if name not in joined]
            held = [matrix for matrix in found if matrix is not None]
            if len(held) < len(names) or any(matrix.requires_grad or matrix.dtype != self.dtype for matrix in held):
                continue
            joined |= set(names)
            joined_XD = self.joined_frozen[names] = torch.cat([matrix.data for matrix in held])
            for matrix, rows in zip(held, joined_XD.split([len(matrix) for matrix in held]), strict=True):
                matrix.data = rows

    def weight_plus_one(self, parameter: Tensor) -> Tensor:
        """1 + a norm's weight, in fp32: in bf16 the sum would lose most of a small weight."""
        return 1 + self.tensor.weight(parameter).float()

    def make_unit_weight(self, size: Shape) -> Tensor:
        """The weight of a norm that has none. In its place, such a block has the weight's size."""
        return torch.ones(size, dtype=self.dtype, device=self.attention_out.device)


def allocate_tensors(module: nn.Module, shapes: Mapping[str, Shape], trained: Trained) -> None:
    """Give a module the parameters and buffers with these names, without values."""
    for name, shape in shapes.items():
        if name in BUFFERS:
            module.register_buffer(name, torch.zeros(shape))
        else:
            module.register_parameter(name, trained.make_parameter(name, shape))
