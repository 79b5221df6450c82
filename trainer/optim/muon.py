"""Muon updates a matrix by its momentum, orthogonalised by Newton–Schulz (Jordan 2024, kellerjordan.github.io/posts/muon).

An orthogonal update has spectral norm one. It is scaled by 0.2 · sqrt(max(rows, columns)). Its entries are then as large as those of AdamW's
updates, so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982 §2.2).

Matrices of one shape are stacked and orthogonalised together. That takes fifteen products of the stack instead of fifteen for each matrix, which
would not fill a GPU. The size of a stack is bounded, because several copies of its momentum and its products are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import newton_schulz
from trainer.contract.checkpoint.region import Region
from trainer.contract.recipe import MuonRecipe
from trainer.parallel.ranks import gather_whole_tensor, get_local_part

RMS = 0.2  # root mean square of AdamW's updates in long runs, arXiv 2502.16982 §2.2
TOGETHER = 64  # the most matrices in a stack
ELEMENTS = 1 << 27  # the most elements in a stack: 256 MiB of bf16, eight matrices of 4,096 x 4,096


def compute_adamw_like_scale(size: torch.Size) -> float:
    """The factor that gives an orthogonal update the root mean square of AdamW's updates."""
    return RMS * max(size[-2:]) ** 0.5


def group_parameters_for_stacking(shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    """Groups of parameters that are orthogonalised together. The matrices of a group have one shape [rows, columns], and a group has bounded
    size. A parameter that is itself a stack of matrices is never divided.

    >>> group_parameters_for_stacking({"a": (4, 2), "b": (2, 4), "c": (4, 2), "experts": (3, 4, 2)})
    [['a', 'c', 'experts'], ['b']]
    """
    found: list[list[str]] = []
    begun: dict[
        tuple[int, ...], tuple[list[str], int]
    ] = {}  # the group that is being filled, and its number of elements
    for name, shape in shapes.items():
        matrix, elements = tuple(shape[-2:]), math.prod(shape)
        names, held = begun.get(matrix, ([], 0))
        if not names or held + elements > min(ELEMENTS, TOGETHER * math.prod(matrix)):
            names, held = [], 0
            found.append(names)
        names.append(name)
        begun[matrix] = names, held + elements
    return found


class Muon:
    """Muon for parameters that are matrices [rows, columns] or stacks of matrices [E, rows, columns]. The state is one momentum for each parameter,
    split over ranks like the parameter.

    For a matrix the update equals that of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"``. torch's class supports no stacks, no
    split parameters and no skipping.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        recipe: MuonRecipe,
        newton_schulz: Callable[[Tensor, int], Tensor] = newton_schulz.reference,
    ) -> None:
        self.recipe, self.orthogonalise = recipe, newton_schulz
        self.parameters = parameters
        self.momentum = {name: torch.zeros_like(get_local_part(parameter)) for name, parameter in parameters.items()}
        self.stacks = group_parameters_for_stacking(
            {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        )

    @torch.no_grad()
    def step(
        self, lr: float, rate_shares: dict[str, float], decay: dict[str, float], divide_by: Tensor, skip: Tensor
    ) -> None:
        """Update each parameter with learning rate lr · its share in ``rate_shares``. Nothing changes if ``skip`` is one.

        ``torch.where`` discards a skipped update. A multiplication by zero would let its NaN reach the weights.
        """
        skipped = skip > 0
        for names in self.stacks:
            parameters = [self.parameters[name] for name in names]
            assert all(parameter.grad is not None for parameter in parameters), names
            momenta = [self.momentum[name] for name in names]
            means, orthogonal = self._directions(parameters, momenta, divide_by)
            held = [get_local_part(parameter) for parameter in parameters]
            rates = [lr * rate_shares[name] for name in names]
            moved = torch._foreach_mul(held, [1 - rate * decay[name] for name, rate in zip(names, rates)])
            for i, parameter in enumerate(parameters):
                update = Region.from_tensor(parameter).view_in_whole_tensor(orthogonal[i])
                moved[i].add_(update, alpha=-rates[i] * compute_adamw_like_scale(parameter.shape))
                torch.where(skipped, momenta[i], means[i], out=momenta[i])
                torch.where(skipped, held[i], moved[i], out=held[i])

    def _directions(
        self, parameters: list[Tensor], momenta: list[Tensor], divide_by: Tensor
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """(this rank's part of each new momentum, each whole orthogonal update), for parameters whose matrices have one shape."""
        recipe = self.recipe
        held = [get_local_part(parameter.grad) for parameter in parameters]  # type: ignore[arg-type]
        grads = torch._foreach_div(held, divide_by)
        means = torch._foreach_lerp(momenta, grads, 1 - recipe.momentum)
        updates = torch._foreach_lerp(grads, means, recipe.momentum) if recipe.nesterov else means
        wholes = [gather_whole_tensor(update.bfloat16(), parameter) for update, parameter in zip(updates, parameters)]
        if len(wholes) == 1:
            return means, [self.orthogonalise(wholes[0], recipe.steps)]
        matrices = [x.reshape(-1, *x.shape[-2:]) for x in wholes]
        together = self.orthogonalise(torch.cat(matrices), recipe.steps)
        parts = together.split([len(x) for x in matrices])
        return means, [part.view(x.shape) for part, x in zip(parts, wholes)]
