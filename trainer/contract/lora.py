"""LoRA and DoRA: small matrices that are trained in place of a model's weights, and how they are merged into the weights.

LoRA (arXiv 2106.09685 §4.1): a matrix W [out, in] becomes W + s · B A with A [rank, in], B [out, rank] and s = alpha / rank. B begins at zero, so a
segment begins with the function of its checkpoint. DoRA (arXiv 2402.09353 §4.1) also trains the length m of each row:
W' = m · (W + s · B A) / ‖W + s · B A‖, and begins with m = ‖W‖.

A checkpoint holds the unchanged weights and, beside each adapted matrix, its A, B and m: tensors with the name of the matrix and the endings ``A``,
``B`` and ``LENGTH``. An export holds the merged weights only. So does a segment that starts with another key ``adapt``.

    >>> import torch
    >>> adapt = AdaptRecipe(rank=1, targets=["q"])
    >>> held = {"blocks.0.q": torch.eye(2), "blocks.0.q_lora_a": torch.ones(1, 2), "blocks.0.q_lora_b": torch.ones(2, 1)}
    >>> {name: tensor.tolist() for name, tensor in merge_lora(held, adapt).items()}
    {'blocks.0.q': [[2.0, 1.0], [1.0, 2.0]]}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from kernels.contract.message import Message
from kernels.contract.strict import StrictSchema, make_known_words_hint
from models.spec import ModelSpec
from models.tensors import BUFFERS, Shape, list_block_shapes, list_tensor_shapes, matches_pattern

if TYPE_CHECKING:
    from torch import Tensor

A, B, LENGTH = "_lora_a", "_lora_b", "_dora_length"
LEAST_NORM = 1e-30  # of a row in DoRA: a pruned row of zeros stays zero


class AdaptRecipe(StrictSchema):
    """Train small matrices in place of the weights, for a model whose gradients and optimiser state do not fit. All weights stay as they are."""

    kind: Literal["lora", "dora"] = "lora"
    rank: Annotated[int, Field(ge=1)]
    alpha: Annotated[float, Field(gt=0)] | None = None  # the change is scaled by alpha / rank; null: rank
    # Matrices, as checkpoints name them, such as q and down; null: all of attention and of dense MLPs (QLoRA, arXiv 2305.14314 §4).
    targets: list[str] | None = None

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


def list_adaptable_matrices(spec: ModelSpec) -> set[str]:
    """Keys of the matrices inside the layers. A router and stacked experts are none: their products do not take one matrix."""
    everything = AdaptRecipe(rank=1)
    return {
        key for number in range(spec.layers) for key in _choose_matrices(list_block_shapes(spec, number), everything)
    }


def refuse_impossible_targets(spec: ModelSpec, adapt: AdaptRecipe) -> None:
    """Raises: ValueError for a target that is no matrix of this model's layers, or twice in the list."""
    known = list_adaptable_matrices(spec)
    if adapt.targets == []:
        raise ValueError(Message("lora.no_target", "adapt.targets is empty, so nothing would be trained"))
    targets = adapt.targets or []
    for number, target in enumerate(targets):
        if target not in known:
            raise ValueError(
                Message(
                    "lora.target",
                    "adapt.targets: {target} is no matrix that can be adapted in this model{near}",
                    target=target,
                    near=make_known_words_hint(target, known),
                )
            )
        if target in targets[:number]:
            raise ValueError(Message("lora.target_twice", "adapt.targets names {target} twice", target=target))
    for number in range(spec.layers):
        for key, (rows, columns) in _choose_matrices(list_block_shapes(spec, number), adapt).items():
            if adapt.rank > find_largest_rank(rows, columns):
                raise ValueError(
                    Message(
                        "lora.rank_too_large",
                        "adapt.rank: {rank} gives as many parameters as the matrix {key} [{rows}, {columns}] has. Choose a smaller rank, or "
                        "train the weights",
                        rank=adapt.rank,
                        key=key,
                        rows=rows,
                        columns=columns,
                    )
                )


def find_largest_rank(rows: int, columns: int) -> int:
    """The largest rank at which the two small matrices have fewer parameters than the matrix.

    >>> find_largest_rank(32, 32), find_largest_rank(16, 48), find_largest_rank(2, 2)
    (15, 11, 0)
    """
    return (rows * columns - 1) // (rows + columns)


def fit_to_smaller_model(
    spec: ModelSpec, adapt: AdaptRecipe | None, freeze: list[str]
) -> tuple[AdaptRecipe | None, list[str]]:
    """``adapt`` and ``freeze`` for a small model in place of the recipe's: as far as its matrices and layers allow, so that the same code runs.

    The rank falls, with the same scale. Patterns of ``freeze`` that name no tensor of the small model are left out; all, if they name every tensor.
    """
    if adapt is not None:
        shapes = [
            shape for n in range(spec.layers) for shape in _choose_matrices(list_block_shapes(spec, n), adapt).values()
        ]
        rank = min([adapt.rank, *(find_largest_rank(*shape) for shape in shapes)])
        return (adapt.model_copy(update={"rank": rank, "alpha": adapt.scale * rank}) if rank else None), []
    names = [name for name in list_tensor_shapes(spec) if name.rpartition(".")[2] not in BUFFERS]
    kept = [pattern for pattern in freeze if any(matches_pattern(name, pattern) for name in names)]
    left = any(not any(matches_pattern(name, pattern) for pattern in kept) for name in names)
    return None, kept if left else []


def list_lora_shapes(block: Mapping[str, Shape], adapt: AdaptRecipe | None) -> dict[str, Shape]:
    """The tensors that one layer gains, by name. ``block``: the shapes of the layer's own tensors."""
    found: dict[str, Shape] = {}
    if adapt is not None:
        for key, (rows, columns) in _choose_matrices(block, adapt).items():
            found |= {f"{key}{A}": (adapt.rank, columns), f"{key}{B}": (rows, adapt.rank)}
            if adapt.kind == "dora":
                found[f"{key}{LENGTH}"] = (rows,)
    return found


def _choose_matrices(block: Mapping[str, Shape], adapt: AdaptRecipe) -> dict[str, tuple[int, int]]:
    """The matrices of a layer that are adapted, with their shapes."""
    found = {key: (shape[0], shape[1]) for key, shape in block.items() if len(shape) == 2 and key != "router"}
    return found if adapt.targets is None else {key: shape for key, shape in found.items() if key in adapt.targets}


def is_lora_tensor(name: str) -> bool:
    return name.endswith((A, B, LENGTH))


class MergedWeights(Mapping[str, "Tensor"]):
    """A checkpoint's tensors with LoRA's matrices merged into the weights, one tensor at a time. Without ``adapt``, the tensors as they are.

    The trainer's export and the judge must get the same bits in different processes. Therefore sums are in fp64 and in a fixed order: a product of
    two fp32 numbers is exact in fp64, so that neither fused operations nor the number of threads can change a bit.
    """

    def __init__(self, model: Mapping[str, Tensor], adapt: AdaptRecipe | None) -> None:
        self.model, self.adapt = model, adapt

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.model if not is_lora_tensor(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tensor:
        if self.adapt is None or f"{name}{A}" not in self.model:
            return self.model[name]
        weight, a, b = self.model[name], self.model[f"{name}{A}"].double(), self.model[f"{name}{B}"].double()
        change = a.new_zeros(weight.shape)
        for row, column in zip(a, b.t(), strict=True):
            change += column.unsqueeze(1) * row
        whole = weight.double() + self.adapt.scale * change
        if self.adapt.kind == "dora":
            norms = (
                whole.square().cumsum(1)[:, -1].sqrt().clamp_min(LEAST_NORM)
            )  # a running sum has one order; a sum may have several
            whole *= (self.model[f"{name}{LENGTH}"].double() / norms).unsqueeze(1)
        return whole.to(weight.dtype)


def merge_lora(model: Mapping[str, Tensor], adapt: AdaptRecipe | None) -> dict[str, Tensor]:
    """All tensors of ``MergedWeights``."""
    return dict(MergedWeights(model, adapt))
