"""The optimiser: AdamW alone, or Muon for the matrices inside the layers and AdamW for the rest.

``make_update_rule_table`` lists for each parameter which of the two updates it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels import adamw, newton_schulz
from trainer.contract.recipe import OptimizerRecipe
from trainer.optim.muon import Muon
from trainer.parallel.ranks import get_local_part

MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, as torch names them


@dataclass(frozen=True)
class ParameterUpdateRule:
    """How one parameter is updated: its line in the table of ``make_update_rule_table``."""

    parameter: str
    shape: tuple[int, ...]
    rule: str  # adamw · muon
    lr_share: float  # of the recipe's rate
    weight_decay: float


def make_update_rule_table(
    model: nn.Module, recipe: OptimizerRecipe, width_share: float = 1.0
) -> list[ParameterUpdateRule]:
    """One row for each trainable parameter: the optimiser that updates it, its share of the learning rate, and its weight decay.

    Only the matrices inside the layers decay, and only they can be updated by Muon. For them and the router, whose products sum over the width, the
    rate changes with the width (muP, arXiv 2203.03466 table 8). AdamW's rate falls as 1 / width. Muon's scale grows as sqrt(width) and its rate
    falls by the same factor, so that its updates keep their spectral norm. The decay per step stays the same (arXiv 2405.13698 §3). The rates of
    the embedding and of a head of its own do not change: ``Decoder`` scales the input of the head instead.
    """
    rows = []
    for name, parameter in model.named_parameters():
        over_width = parameter.ndim >= 2 and name not in ("embedding", "head")
        matrix = over_width and "router" not in name
        rule = recipe.name if matrix else "adamw"
        share = 1.0 if not over_width else width_share**0.5 if rule == "muon" else width_share
        decay = recipe.weight_decay / share if matrix else 0.0
        rows.append(ParameterUpdateRule(name, tuple(parameter.shape), rule, share, decay))
    return rows


def format_update_rule_table(rows: list[ParameterUpdateRule]) -> str:
    """The table as text: a heading and one line for each parameter."""
    width = max(len(row.parameter) for row in rows)
    lines = [
        f"{r.parameter:<{width}}  {str(list(r.shape)):<16}  {r.rule:<5}  {r.lr_share:<8.4g}  {r.weight_decay:g}"
        for r in rows
    ]
    heading = f"{'parameter':<{width}}  {'shape':<16}  {'rule':<5}  {'lr share':<8}  {'decay'}"
    return "\n".join([heading, *lines])


class Optimizer:
    """Updates this rank's part of each parameter. ``step`` also applies clipping and skipping."""

    def __init__(
        self,
        model: nn.Module,
        recipe: OptimizerRecipe,
        width_share: float = 1.0,
        adamw: Callable[..., None] = adamw.fused_adamw,
        newton_schulz: Callable[[Tensor, int], Tensor] = newton_schulz.reference,
    ) -> None:
        self.recipe, self.adamw = recipe, adamw
        self.parameters = dict(model.named_parameters())
        self.table = make_update_rule_table(model, recipe, width_share)
        muon: dict[str, Tensor] = {r.parameter: self.parameters[r.parameter] for r in self.table if r.rule == "muon"}
        self.muon = Muon(muon, recipe.muon, newton_schulz) if muon else None
        self.groups: dict[tuple[float, float], list[str]] = {}  # AdamW's, by share of the rate and decay
        for row in self.table:
            if row.rule == "adamw":
                self.groups.setdefault((row.lr_share, row.weight_decay), []).append(row.parameter)
        self.gradients_stay = False  # True if gradients stay in their tensors from step to step
        self.state: dict[str, dict[str, Tensor]] = {}  # AdamW's, by parameter, from its first gradient on

    def allocate_lasting_gradients(self) -> list[Tensor]:
        """Allocate one gradient tensor for each parameter, kept for the whole run. ``zero_grad`` then zeroes it in place. Returns the tensors."""
        self.gradients_stay = True
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        return list(self.gradients().values())

    def zero_grad(self) -> None:
        if self.gradients_stay:
            torch._foreach_zero_(list(self.gradients().values()))
            return
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """This rank's part of each gradient, by parameter."""
        return {name: get_local_part(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def _state_of(self, name: str) -> dict[str, Tensor]:
        if name not in self.state:
            held = get_local_part(self.parameters[name])
            zeros = torch.zeros_like(held), torch.zeros_like(held), torch.zeros((), device=held.device)
            self.state[name] = dict(zip(MOMENTS, zeros))
        return self.state[name]

    @torch.no_grad()
    def step(self, lr: float, divide_by: Tensor, skip: Tensor) -> None:
        """Update the weights with gradients / ``divide_by``. Nothing changes if ``skip`` is one. Both are fp32 scalars on the device.

        A NaN in the gradients of a skipped update never reaches a weight.
        """
        recipe = self.recipe
        for (lr_share, weight_decay), group in self.groups.items():
            gradients = {
                name: get_local_part(grad) for name in group if (grad := self.parameters[name].grad) is not None
            }
            states = [self._state_of(name) for name in gradients]
            self.adamw(
                [get_local_part(self.parameters[name]) for name in gradients],
                list(gradients.values()),
                *([state[key] for state in states] for key in MOMENTS),
                divide_by,
                skip,
                lr * lr_share,
                recipe.beta1,
                recipe.beta2,
                recipe.eps,
                weight_decay,
            )
        if self.muon is not None:
            shares = {row.parameter: row.lr_share for row in self.table}
            decay = {row.parameter: row.weight_decay for row in self.table}
            self.muon.step(lr, shares, decay, divide_by, skip)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state by name: AdamW's ``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>`` and ``step.<parameter>``, Muon's ``momentum.<parameter>``.

        All but ``step`` are split over ranks like their parameter.
        """
        tensors = {f"{key}.{name}": state[key] for name, state in self.state.items() for key in MOMENTS}
        momentum = self.muon.momentum if self.muon is not None else {}
        return tensors | {f"momentum.{name}": value for name, value in momentum.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load a state that ``state_tensors`` returned. A state from before the first step is empty. Raises: KeyError for a missing tensor."""
        if not any(key.startswith("step.") for key in tensors):
            return
        for name in (name for group in self.groups.values() for name in group):
            device = get_local_part(self.parameters[name]).device
            self.state[name] = {key: tensors[f"{key}.{name}"].clone().to(device) for key in MOMENTS}
        if self.muon is not None:
            for name, momentum in self.muon.momentum.items():
                momentum.copy_(tensors[f"momentum.{name}"])


def compute_sums_of_squares(gradients: dict[str, Tensor]) -> Tensor:
    """Σ gradient² of each parameter, fp32 [parameters]. If a parameter is split over ranks, the sum covers only this rank's part."""
    return torch.stack(torch._foreach_norm(list(gradients.values()))).square()
