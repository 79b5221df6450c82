"""Records one layer of a model, forward and backward, as operations, on torch's meta device, where nothing is computed.

Attention is one op with its cost model, not a list of operations, because its operations depend on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from agents.line_profiler.capture import OperationRecorder, RecordedOperation
from agents.line_profiler.sweep.shapes import SHAPES, make_one_layer_model
from kernels.contract.op import Cost, Shape
from kernels.contract.registry import OPS, bind_ops
from trainer.model.block import Block
from trainer.model.transformer import make_rope_tables
from trainer.parallel.tensor_ranks import TensorRanks

ATTENTION = "attention"
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class LayerSlice:
    """One layer of a named model on ``batch`` rows of ``sequence`` positions."""

    model: str
    batch: int
    sequence: int

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, **make_one_layer_model(SHAPES[self.model], self.sequence).op_sizes)

    @property
    def attention_cost(self) -> Cost:
        return OPS[ATTENTION].cost(self.shape, DTYPE.itemsize)

    def __str__(self) -> str:
        return f"{self.model} {self.batch}×{self.sequence}"


@cache
def record_slice_operations(layer_slice: LayerSlice) -> tuple[RecordedOperation, ...]:
    """The operations of the layer, without those of attention. An operation of the backward pass has the line that caused it.

    The times mean nothing. The signatures, bytes and FLOPs are real.
    """
    shape = make_one_layer_model(SHAPES[layer_slice.model], layer_slice.sequence)
    recorder = OperationRecorder()
    with torch.device("meta"):
        block = Block(shape, 0, recorder.wrap_ops(bind_ops({}, "cpu", DTYPE, compile=False)), DTYPE, TensorRanks())
        block.joined = True
        x_BTD = torch.empty(layer_slice.batch, layer_slice.sequence, shape.d_model, dtype=DTYPE, requires_grad=True)
        positions_BT = torch.zeros(layer_slice.batch, layer_slice.sequence, dtype=torch.int64)
        documents_BT = torch.zeros(layer_slice.batch, layer_slice.sequence, dtype=torch.int32)
        cos_BTK, sin_BTK = make_rope_tables(positions_BT, shape, DTYPE)
        with recorder:
            y_BTD, extras = block(x_BTD, cos_BTK, sin_BTK, documents_BT)
        outputs = [y_BTD] if extras is None else [y_BTD, extras]
        gradients = [torch.empty_like(output) for output in outputs]
        with recorder:
            torch.autograd.backward(outputs, gradients)
    return tuple(event for event in recorder.events if event.line[2] != ATTENTION)
