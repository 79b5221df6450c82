"""Defines an op: a reference, implementations, a cost model, and test inputs that follow from the sizes of a training step."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kernels.contract.message import CodedError


class KernelError(CodedError):
    """An op, an implementation or a file of the kernels is unknown, wrong or cannot be used on this machine."""


def make_unreadable_file_error(path: object, problem: Exception) -> KernelError:
    """The error for a file that cannot be read."""
    return KernelError(
        "kernels.unreadable_file", "{file} cannot be read: {problem}", file=str(path), problem=str(problem)
    )


@dataclass(frozen=True)
class Shape:
    """The sizes of a training step, from which the inputs of every op follow. The defaults are those of a small model."""

    batch: int = 4
    context: int = 256
    d_model: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    d_ff: int = 768
    vocab_size: int = 4096

    @property
    def tokens(self) -> int:
        return self.batch * self.context


@dataclass(frozen=True)
class OracleCase:
    """One set of test inputs: their sizes, and whether the tensors are contiguous."""

    name: str
    shape: Shape
    contiguous: bool = True


@dataclass(frozen=True)
class Cost:
    """The least work of one call: the bytes of its inputs, read once, and of its outputs, written once; and its FLOPs."""

    forward_bytes: float
    forward_flops: float
    backward_bytes: float
    backward_flops: float


Inputs = tuple[Any, ...]
LEAST_STRETCHES = 64


def round_up_document_runs(stretches: int) -> int:
    """An upper bound of the number of stretches (runs of one document) in a micro-batch. It is a power of two, so that few values are compiled.

    >>> round_up_document_runs(3), round_up_document_runs(64), round_up_document_runs(65)
    (64, 64, 128)
    """
    return max(LEAST_STRETCHES, 1 << max(0, stretches - 1).bit_length())


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op, and the device classes on which it runs. If it ``needs_triton``, it runs on every device in Triton's interpreter."""

    name: str
    function: Callable[..., Any]
    description: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs_triton: bool = False
    eager: Callable[..., Any] | None = (
        None  # the same computation without torch.compile; None: ``function`` does not compile
    )
    # For attention: turns the documents, or ``VisibleKeys`` with them, into the argument that ``function`` takes, once for each batch
    # (``Ops.prepare_attention``).
    prepare: Callable[[Any, int], Any] | None = None
    # Returns "NAME: reason" if another implementation computes instead on this machine, for this shape and dtype; else "".
    fallback: Callable[[Shape, torch.dtype], str] = lambda shape, dtype: ""

    def prepare_inputs(self, inputs: Inputs) -> Inputs:
        """The arguments as a layer of the model passes them, from an op's inputs. For attention, the documents are prepared."""
        if self.prepare is None:
            return inputs
        *others, documents = inputs
        document_BT = documents if isinstance(documents, Tensor) else documents[0]
        stretches = int((document_BT[:, 1:] != document_BT[:, :-1]).sum()) + len(document_BT)
        return *others, self.prepare(documents, round_up_document_runs(stretches))

    def can_run_on(self, device_class: str) -> bool:
        if self.needs_triton and importlib.util.find_spec("triton") is None:
            return False
        interpreted = self.needs_triton and os.environ.get("TRITON_INTERPRET") == "1"
        return interpreted or device_class in self.devices


@dataclass(frozen=True)
class Op:
    """An op. ``make_inputs(shape, generator, device, dtype)`` returns its positional arguments: tensors, lists of tensors, numbers.

    ``gradients``: positions of arguments that get a gradient; none for an op of the optimiser. ``writes``: positions of arguments that the op
    changes in place. They are its outputs, and it returns None. ``clobbers``: positions of arguments that the op may overwrite, because nothing
    reads them afterwards.
    """

    name: str
    reference: Callable[..., Any]
    cost: Callable[[Shape, int], Cost]  # (shape, bytes an element) → cost
    make_inputs: Callable[[Shape, torch.Generator, torch.device, torch.dtype], Inputs]
    gradients: tuple[int, ...]
    implementations: Mapping[str, Implementation] = field(default_factory=dict)
    in_block: bool = True  # part of a layer, and compiled with the layer if the recipe compiles its blocks
    hostile: tuple[
        int, ...
    ] = ()  # positions of arguments that the oracle replaces with extreme values (``oracle.HOSTILE``)
    writes: tuple[int, ...] = ()
    clobbers: tuple[int, ...] = ()

    @property
    def cases(self) -> tuple[OracleCase, ...]:
        return CASES

    def implementation(self, name: str) -> Implementation:
        """The implementation called ``name``. Raises: KernelError that lists the known implementations."""
        if name not in self.implementations:
            raise KernelError(
                "kernels.no_implementation",
                "Op {op!r} has no implementation {implementation!r}. Its implementations are: {known}.",
                op=self.name,
                implementation=name,
                known=sorted(self.implementations),
            )
        return self.implementations[name]

    def inputs(
        self, case: OracleCase, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> Inputs:
        """New arguments for a case. Arguments that get a gradient are leaf tensors that require one."""
        device = torch.device(device)
        generator = torch.Generator("cpu").manual_seed(seed)
        made = list(self.make_inputs(case.shape, generator, device, dtype))
        if not case.contiguous:
            made = tree_map_only(Tensor, make_strided_view, made)
        for position in self.gradients:
            made[position] = made[position].detach().requires_grad_()
        return tuple(made)


def make_strided_view(x: Tensor) -> Tensor:
    """The same values as a view that is not contiguous: its stride is two in the last dimension."""
    wide = x.new_zeros((*x.shape, 2))
    wide[..., 0] = x
    return wide[..., 0]


def draw_normal_tensor(
    generator: torch.Generator, size: tuple[int, ...], device: torch.device, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Normally distributed values, drawn on the CPU so that every device gets the same values."""
    return (torch.randn(size, generator=generator) * scale).to(device=device, dtype=dtype)


def compile_lazily(function: Callable[..., Any], dynamic: bool | None = False) -> Callable[..., Any]:
    """``function``, compiled by ``torch.compile`` at its first call. Loading the compiler takes a second, for which other runs need not wait.

    If code that calls the function is being compiled, the function becomes part of that code. With ``dynamic`` False the sizes are fixed. That
    gives the fastest code, and a training run has few sizes.
    """
    made: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*arguments, **named)
        if not made:
            made.append(torch.compile(function, dynamic=dynamic))
        return made[0](*arguments, **named)

    return call


class LazilyImportedFunction:
    """A function whose module is imported at its first call, because the import is slow.

    Code that is being compiled cannot import a module. Call ``registry.bind_ops`` or ``load`` before.
    """

    def __init__(self, module: str, function: str) -> None:
        self.module, self.name = module, function
        self.function: Callable[..., Any] | None = None

    def load(self) -> Callable[..., Any]:
        self.function = getattr(importlib.import_module(self.module), self.name)
        return self.function

    def __call__(self, *arguments: Any) -> Any:
        return (self.function or self.load())(*arguments)


def make_triton_implementation(module: str, function: str, about: str = "") -> Implementation:
    """The implementation called ``triton``: ``function`` of ``module``, on GPUs."""
    return Implementation(
        "triton",
        LazilyImportedFunction(module, function),
        description=about or "one Triton kernel forward, one backward",
        devices=("cuda",),
        needs_triton=True,
    )


def make_compiled_implementation(reference: Callable[..., Any]) -> Implementation:
    """The implementation called ``compiled``: the reference through torch.compile. If the block is compiled, the reference becomes part of it."""
    return Implementation(
        "compiled", compile_lazily(reference), description="the reference through torch.compile", eager=reference
    )


def make_op(
    name: str,
    reference: Callable[..., Any],
    *,
    cost: Callable[[Shape, int], Cost],
    make_inputs: Callable[[Shape, torch.Generator, torch.device, torch.dtype], Inputs],
    gradients: tuple[int, ...],
    implementations: tuple[Implementation, ...] = (),
    in_block: bool = True,
    hostile: tuple[int, ...] = (),
    writes: tuple[int, ...] = (),
    clobbers: tuple[int, ...] = (),
) -> Op:
    """An op with these implementations, and with its reference as the implementation called ``reference``."""
    everything = (Implementation("reference", reference, description="the plain eager expression"), *implementations)
    by_name = {i.name: i for i in everything}
    return Op(name, reference, cost, make_inputs, gradients, by_name, in_block, hostile or gradients, writes, clobbers)


_SMALL = Shape(batch=2, context=32, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=128, vocab_size=128)
CASES = (
    OracleCase("small", _SMALL),
    OracleCase("one", Shape(batch=1, context=1, d_model=2, heads=1, kv_heads=1, head_dim=2, d_ff=1, vocab_size=2)),
    OracleCase(
        "prime", Shape(batch=3, context=37, d_model=53, heads=6, kv_heads=2, head_dim=22, d_ff=97, vocab_size=131)
    ),
    OracleCase("strided", replace(_SMALL, batch=3, context=17), contiguous=False),
    OracleCase("empty", replace(_SMALL, batch=0)),
    OracleCase("recipe", Shape(batch=2, context=128)),
)
