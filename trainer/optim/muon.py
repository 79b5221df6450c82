"""Muon: the momentum of a matrix, orthogonalised by Newton–Schulz (Jordan 2024, kellerjordan.github.io/posts/muon).

An update of orthogonal rows has spectral norm one. It is scaled by 0.2 · sqrt(max(rows, columns)), so that its entries
are as large as AdamW's and one rate serves both (Liu et al. 2025, arXiv 2502.16982 §2.2).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import newton_schulz
from trainer.contract.checkpoint.region import Region
from trainer.contract.recipe import MuonRecipe
from trainer.parallel.ranks import local, whole

RMS = 0.2  # of AdamW's updates in long runs, arXiv 2502.16982 §2.2


def adamw_like_scale(size: torch.Size) -> float:
    """What makes the root mean square of an orthogonal update that of AdamW's."""
    return RMS * max(size[-2:]) ** 0.5


class Muon:
    """Over matrices [rows, columns] or stacks of them [E, rows, columns]. State: one momentum a matrix, split as it is.

    On a matrix its numbers are those of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``, which knows no
    stacks, no ranks and no skipping.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        recipe: MuonRecipe,
        newton_schulz: Callable[[Tensor, int], Tensor] = newton_schulz.reference,
    ) -> None:
        self.recipe, self.orthogonalise = recipe, newton_schulz
        self.parameters = parameters
        self.momentum = {name: torch.zeros_like(local(parameter)) for name, parameter in parameters.items()}

    @torch.no_grad()
    def step(
        self, lr: float, rate_shares: dict[str, float], decay: dict[str, float], divide_by: Tensor, skip: Tensor
    ) -> None:
        """One update at lr · rate share of each; nothing changes if ``skip`` is one.

        A skipped update is discarded by ``torch.where``, not multiplied by zero, so that its NaN reaches no weight.
        """
        recipe = self.recipe
        skipped = skip > 0
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, name
            grad = local(parameter.grad) / divide_by
            momentum, held = self.momentum[name], local(parameter)
            mean = momentum.lerp(grad, 1 - recipe.momentum)
            update = grad.lerp(mean, recipe.momentum) if recipe.nesterov else mean
            orthogonal = Region.of(parameter).cut(self.orthogonalise(whole(update.bfloat16(), parameter), recipe.steps))
            rate = lr * rate_shares[name]
            moved = held * (1 - rate * decay[name])
            moved.add_(orthogonal, alpha=-rate * adamw_like_scale(parameter.shape))
            torch.where(skipped, momentum, mean, out=momentum)
            torch.where(skipped, held, moved, out=held)
