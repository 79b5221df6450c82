"""The optimiser: fused AdamW, decoupled decay; which parameter is in which group is a table that can be printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.recipe import OptimizerRecipe


@dataclass(frozen=True)
class GroupRow:
    """One parameter's line in the table of groups."""

    parameter: str
    shape: tuple[int, ...]
    group: str  # decayed: matrices · undecayed: embeddings, norms
    weight_decay: float


def group_table(model: nn.Module, recipe: OptimizerRecipe) -> list[GroupRow]:
    """Every trainable parameter once, by one rule: matrices decay, embeddings and vectors don't."""
    rows = []
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim >= 2 and "embedding" not in name
        group = "decayed" if decayed else "undecayed"
        rows.append(GroupRow(name, tuple(parameter.shape), group, recipe.weight_decay if decayed else 0.0))
    return rows


def format_table(rows: list[GroupRow]) -> str:
    """For people."""
    width = max(len(row.parameter) for row in rows)
    lines = [f"{r.parameter:<{width}}  {str(list(r.shape)):<14}  {r.group:<9}  {r.weight_decay:g}" for r in rows]
    return "\n".join([f"{'parameter':<{width}}  {'shape':<14}  {'group':<9}  decay", *lines])


class Optimizer:
    """AdamW over the groups. ``step`` clips and skips inside the fused update, without another pass over them."""

    def __init__(self, model: nn.Module, recipe: OptimizerRecipe) -> None:
        self.recipe = recipe
        self.parameters = dict(model.named_parameters())
        table = group_table(model, recipe)
        groups = [
            {"params": [self.parameters[r.parameter] for r in table if r.weight_decay == decay], "weight_decay": decay}
            for decay in sorted({r.weight_decay for r in table})
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=True
        )

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """In the order of the parameters' names in the model."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def step(self, lr: float, divide_by: Tensor, skip: Tensor) -> None:
        """One update with gradients / ``divide_by``; nothing is changed where ``skip`` is one. Both fp32 scalars.

        These are the two inputs that torch's fused update takes from its gradient scaler: the kernel itself returns
        early, so that a NaN in the gradients is never multiplied into a weight.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.grad_scale, self.adamw.found_inf = divide_by, skip  # type: ignore[attr-defined]
        self.adamw.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """``exp_avg.<parameter>``, ``exp_avg_sq.<parameter>``, ``step.<parameter>``."""
        return {
            f"{key}.{name}": self.adamw.state[parameter][key]
            for name, parameter in self.parameters.items()
            if parameter in self.adamw.state
            for key in ("exp_avg", "exp_avg_sq", "step")
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what ``state_tensors`` gave. A missing key is a bug: the model's shapes were checked."""
        for name, parameter in self.parameters.items():
            if f"step.{name}" not in tensors:
                continue
            state: dict[str, Any] = {key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq", "step")}
            self.adamw.state[parameter] = {key: value.clone().to(parameter.device) for key, value in state.items()}


def grad_norm(gradients: list[Tensor]) -> Tensor:
    """The global L2 norm, fp32 scalar."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
