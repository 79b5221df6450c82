"""The optimiser: fused AdamW, or Muon for the matrices inside the layers and AdamW for the rest.

Which parameter is in which group is decided by one rule and is a table that can be printed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.muon import Muon
from trainer.parallel import local
from trainer.recipe import OptimizerRecipe


@dataclass(frozen=True)
class GroupRow:
    """One parameter's line in the table of groups."""

    parameter: str
    shape: tuple[int, ...]
    rule: str  # adamw · muon
    lr_share: float  # of the recipe's rate
    weight_decay: float


def group_table(model: nn.Module, recipe: OptimizerRecipe, width_share: float = 1.0) -> list[GroupRow]:
    """Every trainable parameter once, by one rule: matrices inside the layers, and everything else.

    Only those matrices decay and go to Muon. What sums over the width changes its rate with it (muP, arXiv 2203.03466
    table 8), which is those matrices and the router: AdamW's falls as 1 / width; Muon's scale grows as sqrt(width), its
    rate falls by that much, and its updates keep their spectral norm. Decay per step stays the same (arXiv 2405.13698
    §3). The embedding keeps its rate: where it is the head, ``Decoder`` divides its input.
    """
    rows = []
    for name, parameter in model.named_parameters():
        over_width = parameter.ndim >= 2 and "embedding" not in name
        matrix = over_width and "router" not in name
        rule = recipe.name if matrix else "adamw"
        share = 1.0 if not over_width else width_share**0.5 if rule == "muon" else width_share
        decay = recipe.weight_decay / share if matrix else 0.0
        rows.append(GroupRow(name, tuple(parameter.shape), rule, share, decay))
    return rows


def format_table(rows: list[GroupRow]) -> str:
    """For people."""
    width = max(len(row.parameter) for row in rows)
    lines = [
        f"{r.parameter:<{width}}  {str(list(r.shape)):<16}  {r.rule:<5}  {r.lr_share:<8.4g}  {r.weight_decay:g}"
        for r in rows
    ]
    return "\n".join([f"{'parameter':<{width}}  {'shape':<16}  rule   lr share  decay", *lines])


class Optimizer:
    """Works on what this rank holds of each parameter. ``step`` clips and skips inside the update."""

    def __init__(self, model: nn.Module, recipe: OptimizerRecipe, width_share: float = 1.0) -> None:
        self.recipe = recipe
        self.parameters = dict(model.named_parameters())
        self.table = group_table(model, recipe, width_share)
        muon: dict[str, Tensor] = {r.parameter: self.parameters[r.parameter] for r in self.table if r.rule == "muon"}
        self.muon = Muon(muon, recipe.muon) if muon else None
        self._held = {r.parameter: local(self.parameters[r.parameter]) for r in self.table if r.rule == "adamw"}
        by_group: dict[tuple[float, float], list[Tensor]] = {}
        for row in self.table:
            if row.rule == "adamw":
                by_group.setdefault((row.lr_share, row.weight_decay), []).append(self._held[row.parameter])
        groups = [
            {"params": held, "weight_decay": decay, "lr_share": share} for (share, decay), held in by_group.items()
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True
        )

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self.adamw.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        """By parameter, what this rank holds of each."""
        return {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def step(self, lr: float, divide_by: Tensor, skip: Tensor) -> None:
        """One update with gradients / ``divide_by``; nothing is changed where ``skip`` is one. Both fp32 scalars.

        These are the two inputs that torch's fused update takes from its gradient scaler: the kernel itself returns
        early, so that a NaN in the gradients is never multiplied into a weight.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["lr_share"]
        for name, held in self._held.items():
            grad = self.parameters[name].grad
            held.grad = None if grad is None else local(grad)
        self.adamw.grad_scale, self.adamw.found_inf = divide_by, skip  # type: ignore[attr-defined]
        self.adamw.step()
        if self.muon is not None:
            shares = {row.parameter: row.lr_share for row in self.table}
            decay = {row.parameter: row.weight_decay for row in self.table}
            self.muon.step(lr, shares, decay, divide_by, skip)

    def state_tensors(self) -> dict[str, Tensor]:
        """``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``, ``step.<parameter>``; ``momentum.<parameter>`` of Muon's.

        All but ``step`` are split as their parameter is.
        """
        tensors = {
            f"{key}.{name}": self.adamw.state[held][key]
            for name, held in self._held.items()
            if held in self.adamw.state
            for key in ("exp_avg", "exp_avg_sq", "step")
        }
        momentum = self.muon.momentum if self.muon is not None else {}
        return tensors | {f"momentum.{name}": value for name, value in momentum.items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what ``state_tensors`` gave. Raises: KeyError for what is missing, once a step was made."""
        if not any(key.startswith("step.") for key in tensors):
            return
        for name, held in self._held.items():
            self.adamw.state[held] = {
                key: tensors[f"{key}.{name}"].clone().to(held.device) for key in ("exp_avg", "exp_avg_sq", "step")
            }
        if self.muon is not None:
            for name, momentum in self.muon.momentum.items():
                momentum.copy_(tensors[f"momentum.{name}"])


def squares(gradients: dict[str, Tensor]) -> Tensor:
    """Σ gradient² of each, fp32 [parameters]; a rank's share of it where they are split."""
    return torch.stack(torch._foreach_norm(list(gradients.values()))).square()
