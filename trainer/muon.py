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
    """[…, rows, columns] → nearly U Vᵀ of each, in bf16: singular values end up in about [0.7, 1.2]."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + LEAST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def adamw_like_scale(size: torch.Size) -> float:
    """What makes the root mean square of an orthogonal update that of AdamW's."""
    return RMS * max(size[-2:]) ** 0.5


class Muon:
    """Over matrices [rows, columns] or stacks of them [E, rows, columns]. State: one momentum a matrix, split as it is."""

    def __init__(self, parameters: dict[str, Tensor], recipe: MuonRecipe) -> None:
        self.recipe = recipe
        self.parameters = parameters
        self.momentum = {name: torch.zeros_like(local(parameter)) for name, parameter in parameters.items()}

    @torch.no_grad()
    def step(
        self, lr: float, rate_shares: dict[str, float], decay: dict[str, float], divide_by: Tensor, skip: Tensor
    ) -> None:
        """One update at lr · rate share of each; nothing is changed where ``skip`` is one.

        Gradients that must be skipped are replaced before anything is worked out from them.
        """
        recipe = self.recipe
        skipped = skip > 0
        moves = torch.where(skipped, 0.0, 1.0)
        pull = torch.where(skipped, 0.0, 1 - recipe.momentum)
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, name
            grad = torch.where(skipped, 0.0, local(parameter.grad) / divide_by)
            momentum, held = self.momentum[name], local(parameter)
            momentum.lerp_(grad, pull)
            update = grad.lerp(momentum, recipe.momentum) if recipe.nesterov else momentum
            orthogonal = Region.of(parameter).cut(orthogonalise(whole(update, parameter), recipe.steps))
            rate = lr * rate_shares[name]
            held.mul_(1 - moves * (rate * decay[name]))
            held.sub_(orthogonal.to(held.dtype) * (moves * (rate * adamw_like_scale(parameter.shape))))
