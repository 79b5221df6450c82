"""How the native tensors of a model and the tensors of a family's files correspond, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from models.tensors import Shape

if TYPE_CHECKING:
    from torch import Tensor


class TensorMapping(Protocol):
    """Native tensors and the tensors of the family's files that hold them: either several native ones are in one, or one native one is in several."""

    @property
    def natives(self) -> tuple[str, ...]: ...
    @property
    def theirs(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> Shape:
        """Of each of ``theirs``."""

    @property
    def is_copy(self) -> bool:
        """Another mapping has the same native tensor, and the files may lack this one."""

    def to_native(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The native tensors by name. ``read`` returns a tensor of the files by its name. Memory holds one tensor more than the result."""

    def to_theirs(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the files by name. ``read`` returns a native one."""


@dataclass(frozen=True)
class OneNative:
    """One native tensor and the tensors of the family's files that hold it. If there are several, the native one has them stacked.

    ``rows``: the order of the rows: native row i is their row ``rows[i]``. None: the same order.
    """

    native: str
    theirs: tuple[str, ...]
    shape: Shape  # of each of ``theirs``
    rows: tuple[int, ...] | None = None
    is_copy: bool = False

    @property
    def natives(self) -> tuple[str, ...]:
        return (self.native,)

    def to_native(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        import torch

        if len(self.theirs) == 1:
            found = read(self.theirs[0])
        else:
            first = read(self.theirs[0])
            found = torch.empty((len(self.theirs), *first.shape), dtype=first.dtype)
            found[0] = first
            for number, name in enumerate(self.theirs[1:], start=1):
                found[number] = read(name)
        yield self.native, found if self.rows is None else found[torch.tensor(self.rows)]

    def to_theirs(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        import torch

        tensor = read(self.native)
        if self.rows is not None:
            tensor = tensor[torch.tensor(self.rows).argsort()]
        yield from zip(self.theirs, tensor.unbind() if len(self.theirs) > 1 else (tensor,), strict=True)


@dataclass(frozen=True)
class Join:
    """How one tensor of a family's files holds native tensors of a layer: with the rows of ``parts`` one after another.

    ``in_turn``: the first row of each part, then the second of each. ``transposed``: a matrix is stored [in, out]. Biases of experts, which natively
    are one vector, are stored [expert, out].
    """

    name: str  # below ``model.layers.N.``
    parts: tuple[str, ...]
    in_turn: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class OneOfTheirs:
    """One tensor of the family's files and the native tensors that are parts of it."""

    join: Join
    natives: tuple[str, ...]
    theirs: tuple[str, ...]
    shapes: tuple[Shape, ...]  # native, of biases of experts [expert, out]
    rows: tuple[tuple[int, ...] | None, ...]  # of each part, as in ``OneNative``

    @property
    def is_copy(self) -> bool:
        return False

    @property
    def shape(self) -> Shape:
        shape = list(self.shapes[0])
        shape[self._dim] = sum(one[self._dim] for one in self.shapes)
        if self.join.transposed:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)

    @property
    def _dim(self) -> int:
        """Of the rows."""
        return len(self.shapes[0]) - (1 if self.natives[0].endswith("bias") else 2)

    def to_native(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        import torch

        dim, tensor = self._dim, read(self.theirs[0])
        if self.join.transposed:
            tensor = tensor.transpose(-1, -2)
        if self.join.in_turn:
            parts = tensor.unflatten(dim, (-1, len(self.natives))).unbind(dim + 1)
        else:
            parts = tensor.split([shape[dim] for shape in self.shapes], dim)
        for name, part, rows in zip(self.natives, parts, self.rows, strict=True):
            found = part if rows is None else part[torch.tensor(rows)]
            yield name, (found.flatten() if name.endswith("bias") else found).contiguous()

    def to_theirs(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        import torch

        parts = [read(name).reshape(shape) for name, shape in zip(self.natives, self.shapes, strict=True)]
        parts = [
            part if rows is None else part[torch.tensor(rows).argsort()]
            for part, rows in zip(parts, self.rows, strict=True)
        ]
        dim = self._dim
        tensor = torch.stack(parts, dim + 1).flatten(dim, dim + 1) if self.join.in_turn else torch.cat(parts, dim)
        yield self.theirs[0], (tensor.transpose(-1, -2) if self.join.transposed else tensor).contiguous()
