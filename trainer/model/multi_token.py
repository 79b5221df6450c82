"""Multi-token prediction: layers behind the model's own that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437 §2.2).

Layer k, counted from 1, sees at position i the state of the layer before it (of the model itself for k = 1, after the final norm) and the token at
i + k, and predicts the token at i + k + 1. Nothing crosses a document: a position whose token or target would lie in another one has no loss. The
positions of RoPE are those of the states. A served model drafts tokens with these layers; they take no part in its logits.

Published weights join the token before the state, and hand on the state after the norm of the output, as the MTP class of transformers and vLLM do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.registry import Ops
from models.spec import ModelSpec
from models.tensors import MULTI_TOKEN, list_block_shapes, list_multi_token_shapes
from trainer.model.block import Block, Trained, allocate_tensors
from trainer.parallel.tensor_ranks import TensorRanks

PADDING = -1  # document number of empty positions, as in ``Batch``


class MultiTokenLayer(Block):
    """token_BSD, state_BSD → (state_BSD, extras). A ``Block`` whose input joins the two. The result is after ``output_norm``."""

    def __init__(
        self, shape: ModelSpec, depth: int, ops: Ops, dtype: torch.dtype, tensor: TensorRanks, trained: Trained
    ) -> None:
        """``depth``: counted from 0. ``trained``: which parameters of the model. LoRA adapts none of these."""
        number, trained = shape.layers + depth, trained._replace(prefix=f"{MULTI_TOKEN}.{depth}.")
        super().__init__(shape, number, ops, dtype, tensor, trained)
        of_block = list_block_shapes(shape, number)
        shapes = list_multi_token_shapes(shape, depth)
        allocate_tensors(self, {name: size for name, size in shapes.items() if name not in of_block}, trained)

    def forward(  # type: ignore[override]
        self,
        token_BSD: Tensor,
        state_BSD: Tensor,
        cos_BTK: Tensor,
        sin_BTK: Tensor,
        documents_BT: Tensor,
        prepared_documents: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``documents_BT``: of the shifted batch. ``prepared_documents``: of the batch itself, so that every layer shares them."""
        joined_BSX = torch.cat((self.norm(token_BSD, "token_norm"), self.norm(state_BSD, "state_norm")), dim=-1)
        x_BSD = F.linear(joined_BSX, self.weight(self.join))
        x_BSD, extras = super().forward(x_BSD, cos_BTK, sin_BTK, documents_BT, prepared_documents)
        return self.norm(x_BSD, "output_norm"), extras

    def norm(self, x_BSD: Tensor, name: str) -> Tensor:
        return self.ops.rms_norm(x_BSD, self.norm_weight(getattr(self, name)), self.shape.norm_eps)  # type: ignore[no-any-return]


class ShiftedBatch(NamedTuple):
    """What one layer reads, all [B, T]. Where a position has no token or no target within its document, the token is 0 and the weight is 0."""

    tokens_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    documents_BT: Tensor  # PADDING where the position has no token, so that routers do not count it


def shift_batch(targets_BT: Tensor, weights_BT: Tensor, documents_BT: Tensor, depth: int) -> ShiftedBatch:
    """The batch of layer ``depth``, counted from 1, from a ``Batch``'s tensors, whose targets are the tokens after the inputs.

    Two documents in a row of 8, the last target of the first one being 14:

    >>> targets, documents = torch.tensor([[12, 13, 14, 22, 23, 24, 25, 0]]), torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])
    >>> one = shift_batch(targets, (documents >= 0).float(), documents, depth=1)
    >>> one.tokens_BT.tolist(), one.targets_BT.tolist()
    ([[12, 13, 14, 22, 23, 24, 25, 0]], [[13, 14, 0, 23, 24, 25, 0, 0]])
    >>> one.weights_BT.tolist()
    [[1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    >>> shift_batch(targets, (documents >= 0).float(), documents, depth=2).tokens_BT.tolist()
    [[13, 14, 0, 23, 24, 25, 0, 0]]
    """

    def read_ahead(x_BT: Tensor, places: int) -> Tensor:
        """The value of the position ``places`` further on; 0 where that is another document or the end of the row."""
        same_BT = _shift(documents_BT, places, PADDING - 1) == documents_BT
        return torch.where(same_BT, _shift(x_BT, places, 0), 0)

    has_token_BT = _shift(documents_BT, depth - 1, PADDING - 1) == documents_BT
    return ShiftedBatch(
        read_ahead(targets_BT, depth - 1),
        read_ahead(targets_BT, depth),
        read_ahead(weights_BT, depth),
        torch.where(has_token_BT, documents_BT, PADDING),
    )


def _shift(x_BT: Tensor, places: int, end: int) -> Tensor:
    return F.pad(x_BT[:, places:], (0, min(places, x_BT.shape[1])), value=end)


@dataclass(frozen=True)
class MultiTokenObjective:
    """How the layers are trained: ``weight`` times the mean of their losses is added to the loss (DeepSeek-V3 §2.2, equation 25).

    A layer's loss is divided by the number of the batch's main targets, as in equation 24, and has the z-loss of the main one. ``sums``: fp32
    [1 + 2 layers], to which a micro-batch adds: what was added to the loss; by layer Σ nll; by layer the number of its targets.
    """

    weight: float
    sums: Tensor


def add_multi_token_sums(
    objective: MultiTokenObjective, losses: Sequence[Tensor], nlls: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    """The loss to add to the main one, an fp32 scalar. ``losses``: of each layer, as weighted by ``weights`` [N]; ``nlls``: fp32 [N], detached."""
    added = objective.weight / len(losses) * torch.stack(list(losses)).sum()
    with torch.no_grad():
        carries = [one_N > 0 for one_N in weights]
        parts = [added.detach()]
        parts += [torch.where(carry_N, nll_N, 0.0).sum() for carry_N, nll_N in zip(carries, nlls, strict=True)]
        parts += [carry_N.sum() for carry_N in carries]
        objective.sums.add_(torch.stack([part.float() for part in parts]))
    return added
