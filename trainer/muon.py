"""Muon: the momentum of a matrix, orthogonalised by Newton–Schulz (Jordan 2024, kellerjordan.github.io/posts/muon).

An update of orthogonal rows has spectral norm one. It is scaled by 0.2 · sqrt(max(rows, columns)), so that its entries
are as large as AdamW's and one rate serves both (Liu et al. 2025, arXiv 2502.16982 §2.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.parallel import Region, local, whole
from trainer.recipe import MuonRecipe

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic; Jordan 2024
LEAST_NORM = 1e-7
RMS = 0.2  # of AdamW's updates in long runs, arXiv 2502.16982 §2.2


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """[rows, columns] or [E, rows, columns] → nearly U Vᵀ of each, in bf16.

    After five steps singular values of at least 0.3 % of the matrix's norm lie in about [0.68, 1.21]; a smaller one has
    grown 3.4445⁵ ≈ 485 times.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    multiply = torch.addmm if matrices.ndim == 2 else torch.baddbmm  # one rounding a product
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def adamw_like_scale(size: torch.Size) -> float:
    """What makes the root mean square of an orthogonal update that of AdamW's."""
    return RMS * max(size[-2:]) ** 0.5


class Muon:
    """Over matrices [rows, columns] or stacks of them [E, rows, columns]. State: one momentum a matrix, split as it is.

    On a matrix its numbers are those of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, which knows no
    stacks, no ranks and no skipping.
    """

    def __init__(self, parameters: dict[str, Tensor], recipe: MuonRecipe) -> None:
        self.recipe = recipe
        self.parameters = parameters
        self.momentum = {name: torch.zeros_like(local(parameter)) for name, parameter in parameters.items()}

    @torch.no_grad()
    def step(
        self, lr: float, rate_shares: dict[str, float], decay: dict[str, float], divide_by: Tensor, skip: Tensor
    ) -> None:
        """One update at lr · rate share of each; nothing is changed where ``skip`` is one.

        What a skipped update would write is chosen against, never multiplied by zero: its NaN stays where it is.
        """
        recipe = self.recipe
        skipped = skip > 0
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, name
            grad = local(parameter.grad) / divide_by
            momentum, held = self.momentum[name], local(parameter)
            mean = momentum.lerp(grad, 1 - recipe.momentum)
            update = grad.lerp(mean, recipe.momentum) if recipe.nesterov else mean
            orthogonal = Region.of(parameter).cut(orthogonalise(whole(update.bfloat16(), parameter), recipe.steps))
            rate = lr * rate_shares[name]
            moved = held * (1 - rate * decay[name])
            moved.add_(orthogonal, alpha=-rate * adamw_like_scale(parameter.shape))
            torch.where(skipped, momentum, mean, out=momentum)
            torch.where(skipped, held, moved, out=held)
