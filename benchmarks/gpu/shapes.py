"""The sizes at which ops are timed: three widths of models, with as many tokens as fill a card and its memory holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.contract.op import Op, Shape

KEPT = (
    1.5  # memory of a call and its gradients, over its least traffic: inputs, outputs, upstream gradients, what is kept
)
HEAD_DIM = 128
ELEMENTS = 1 << 26  # of the residual stream: 134 MB in bf16, several times any L2
TOKENS = {
    "attention": 16_384,
    "linear_cross_entropy": 8_192,
}  # of ops bound by products; the loss head's is that of published marks
MATRICES = {1024: 8, 4096: 2, 8192: 1}  # newton_schulz: matrices [d_ff, d_model]
FP32 = ("adamw", "newton_schulz")  # the optimiser's: weights, moments and momentum are fp32


@dataclass(frozen=True)
class Width:
    d_model: int
    vocab_size: int
    context: int

    def shape(self, batch: int) -> Shape:
        heads = max(1, self.d_model // HEAD_DIM)
        kv_heads = min(8, heads)
        d_ff = self.d_model * 7 // 2
        return Shape(batch, self.context, self.d_model, heads, kv_heads, HEAD_DIM, d_ff, self.vocab_size)


WIDTHS = (Width(4096, 131_072, 4096), Width(1024, 32_768, 4096), Width(8192, 131_072, 16_384))  # the most telling first
DRY = tuple(
    Shape(1, context, width, 2, 1, 16, 2 * width, vocab_size)  # the interpreter takes milliseconds for a program
    for width, vocab_size, context in ((32, 128, 4), (16, 64, 4), (64, 128, 8))
)


class TooLarge(Exception):
    """No size of an op fits into the memory; the message says what it needs."""


def dtype_of(op: Op) -> torch.dtype:
    return torch.float32 if op.name in FP32 else torch.bfloat16


def needs_bytes(op: Op, shape: Shape) -> float:
    """About what a call and its gradients take, beyond what an implementation makes for itself."""
    cost = op.cost(shape, dtype_of(op).itemsize)
    return cost.forward_bytes if op.writes else KEPT * (cost.forward_bytes + cost.backward_bytes)


def shape_for(op: Op, width: int, free: float, dry: bool = False) -> Shape:
    """The shape of ``op`` at the n-th width: as many sequences as its tokens ask for and ``free`` bytes hold. Raises: TooLarge."""
    shape = DRY[width] if dry else WIDTHS[width].shape(sequences(op, WIDTHS[width]))
    while shape.batch > 1 and needs_bytes(op, shape) > free:
        shape = replace(shape, batch=shape.batch // 2)
    if (needed := needs_bytes(op, shape)) > free:
        raise TooLarge(f"too little memory: about {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are there")
    return shape


def sequences(op: Op, width: Width) -> int:
    if op.name == "newton_schulz":
        return MATRICES[width.d_model]
    if op.name == "adamw":
        return 1
    return max(1, TOKENS.get(op.name, ELEMENTS // width.d_model) // width.context)


def words(shape: Shape, op: Op) -> str:
    """What of a shape an op's work depends on."""
    if op.name in ("attention", "general_attention"):
        return f"{shape.batch} × {shape.context:,}, {shape.heads}/{shape.kv_heads} heads × {shape.head_dim}"
    if op.name == "newton_schulz":
        return f"{shape.batch} × [{shape.d_ff:,}, {shape.d_model:,}]"
    if op.name == "adamw":
        return f"3 × [{shape.d_ff:,}, {shape.d_model:,}], [{shape.vocab_size:,}, {shape.d_model:,}]"
    vocabulary = f", vocabulary {shape.vocab_size:,}" if op.name.endswith(("cross_entropy", "embedding")) else ""
    return f"{shape.tokens:,} tokens{vocabulary}"
