"""Which ops there are, and which implementation of each the model runs: the choice in ``policies/kernels.yaml``, per
device class."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract import machine
from kernels.contract.choice import AUTO, Choice, names_in, resolve
from kernels.contract.op import CASES, Case, Cost, Implementation, KernelError, Op, Shape
from kernels.contract.oracle import judge, outcome
from kernels.contract.strict_yaml import read_yaml

__all__ = [
    "DEVICE_CLASSES",
    "FALLBACKS",
    "OPS",
    "Case",
    "Choice",
    "Computing",
    "Cost",
    "Implementation",
    "KernelError",
    "KernelWarning",
    "Op",
    "Ops",
    "Shape",
    "bind",
    "computing",
    "get",
    "load_choice",
    "load_fallback",
]

DEVICE_CLASSES = ("cpu", "cuda")
FALLBACKS = ("fail", "reference")  # what a chosen kernel that cannot be compiled or run does; the first is the default


def as_given(document_BT: Tensor, stretches: int) -> Any:
    """Of attention that takes the documents themselves."""
    return document_BT


@dataclass(frozen=True)
class Ops:
    """What the model calls; signatures and shapes stand at each op's ``reference``. An op of this name is ``OP`` in
    ``kernels/<name>/__init__.py``."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    embedding: Callable[[Tensor, Tensor], Tensor]
    newton_schulz: Callable[[Tensor, int], Tensor]
    adamw: Callable[..., None]
    # (documents [B, T], at most how many stretches of one document there are) → what ``attention`` takes as its documents: made once a
    # batch, and shared by all layers in their forward pass, backward pass and recomputation.
    prepare_attention: Callable[[Tensor, int], Any] = field(default=as_given)


class _Registered(Mapping[str, Op]):
    """The ops that ``Ops`` names, each imported from its folder at first use: importing this module runs no op's code."""

    def __init__(self) -> None:
        self._loaded: dict[str, Op] = {}

    def __getitem__(self, name: str) -> Op:
        if name not in _NAMES:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = importlib.import_module(f"kernels.{name}").OP
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


_NAMES = tuple(one.name for one in fields(Ops) if one.default is MISSING)
OPS: Mapping[str, Op] = _Registered()


class KernelWarning(UserWarning):
    """A chosen implementation does not work here, and ``fallback: reference`` replaces it with the reference."""


def get(name: str) -> Op:
    """The op of that name. Raises: KernelError that lists the ops."""
    if name not in OPS:
        raise KernelError(f"there is no op {name!r}; there are: {', '.join(OPS)}")
    return OPS[name]


def load_choice(path: Path | str, device: str = "cpu", tuned: Mapping[str, str] | None = None) -> Choice:
    """Read ``kernels.yaml``: for each device class a map op → implementation. Returns the one for ``device``, every
    op named; one that the file does not name runs its reference, and ``auto`` what ``tuned`` says, else what runs untuned.

    Raises: KernelError that names the file and the key, and lists what there is.
    """
    kind = torch.device(device).type
    name = machine.here(kind).name if kind == "cuda" and torch.cuda.is_available() else kind
    return dict.fromkeys(OPS, "reference") | resolve(_read(path).get(kind, {}), tuned, name)


def load_fallback(path: Path | str) -> str:
    """The key ``fallback`` of ``kernels.yaml``, one of FALLBACKS. Raises: KernelError, as ``load_choice``."""
    return str(_read(path).get("fallback", FALLBACKS[0]))


def _read(path: Path | str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KernelError(f"{path}: cannot be read: {error}") from error
    document = read_yaml(text, str(path), KernelError)
    if not isinstance(document, dict):
        raise KernelError(f"{path}: expected a map of device class → (op → implementation)")
    for key, value in document.items():
        if key == "fallback":
            if value not in FALLBACKS:
                raise KernelError(f"{path}: fallback: expected one of {', '.join(FALLBACKS)}, got {value!r}")
            continue
        if key not in DEVICE_CLASSES:
            raise KernelError(f"{path}: unknown device class {key!r}; there are: {', '.join(DEVICE_CLASSES)}")
        if not isinstance(value, dict):
            raise KernelError(f"{path}: {key}: expected a map op → implementation")
        for name, implementation in value.items():
            try:
                get(str(name))
                for one in names_in(str(implementation)) if implementation != AUTO else ():
                    check(str(name), one, key)
            except KernelError as error:
                raise KernelError(f"{path}: {key}: {error}") from error
    return document


def check(name: str | Op, implementation: str, device_class: str) -> Implementation:
    """Raises: KernelError unless the op has the implementation and it runs on that device class."""
    op = get(name) if isinstance(name, str) else name
    found = op.implementation(implementation)
    if not found.runs_on(device_class):
        runs = sorted(i.name for i in op.implementations.values() if i.runs_on(device_class))
        raise KernelError(
            f"{op.name}: {implementation} does not run on {device_class}; those that do: {', '.join(runs)}"
        )
    return found


@functools.cache
def failure(name: str, implementation: str, device_class: str, dtype: torch.dtype, compile: bool = True) -> str | None:
    """What goes wrong when an implementation runs once, forward and backward, on small sizes; None: nothing does.

    A kernel is compiled when it is first called: without a trial it would fail during a training step.
    """
    op = get(name)
    function = _function(op.implementation(implementation), compile)
    tried = replace(op, implementations={implementation: replace(op.implementation(implementation), function=function)})
    try:
        if (
            device_class == "cuda"
        ):  # code that was compiled for this device: what it computes is compared with fp64 once
            found = judge(tried, implementation, CASES[0], dtype=dtype, device=device_class)
            return None if found.ok else f"its results are wrong here: {found.failures()}"
        outcome(op, function, op.inputs(CASES[0], device=device_class, dtype=dtype), seed=0)
    except Exception as error:  # compilers raise what they like
        return f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return None


def _function(implementation: Implementation, compile: bool) -> Callable[..., Any]:
    return implementation.function if compile or implementation.eager is None else implementation.eager


def _working(
    name: str, chosen: str, device_class: str, dtype: torch.dtype, compile: bool
) -> tuple[Implementation | None, list[str]]:
    """The first implementation of a choice that works here, and what is wrong with each before it.

    Raises: KernelError for one that does not exist, and for a single one that is not for that device class.
    """
    names = names_in(chosen)
    problems: list[str] = []
    for one in names:
        found = get(name).implementation(one)
        if len(names) == 1:
            check(name, one, device_class)
        if not found.runs_on(device_class):
            problem: str | None = "it does not run there"
        elif one != names[-1] and (fallback := found.fallback(CASES[0].shape, dtype)):
            problem = fallback  # in its place another of the choice is better
        else:
            problem = None if one == "reference" else failure(name, one, device_class, dtype, compile)
        if problem is None:
            return found, problems
        problems.append(f"{one} fails on {device_class} in {dtype}: {problem}")
    return None, problems


@dataclass(frozen=True)
class Computing:
    """What computes an op here. ``by`` is ``chosen``, the first that works of several, a replacement, or empty where none is allowed."""

    op: str
    chosen: str
    by: str
    why: str = ""

    def __str__(self) -> str:
        if not self.by:
            return f"{self.op}: {self.chosen} cannot run here, and kernels.yaml allows nothing in its place: {self.why}"
        return f"{self.op}: {self.chosen}" + (f" → {self.by} computes instead: {self.why}" if self.why else "")


def computing(
    choice: Mapping[str, str],
    device: str | torch.device,
    dtype: torch.dtype,
    compile: bool,
    fallback: str,
    shape: Shape,
) -> list[Computing]:
    """What ``bind`` would have compute each op, for tensors of these sizes. Each choice is tried once, as there.

    Raises: KernelError for what does not exist, or is not for that device class.
    """
    device_class = torch.device(device).type
    found = []
    for name, chosen in (dict.fromkeys(OPS, "reference") | dict(choice)).items():
        implementation, problems = _working(name, chosen, device_class, dtype, compile)
        why = "; ".join(problems)
        if implementation is None:
            found.append(Computing(name, chosen, "reference" if fallback == "reference" else "", why))
            continue
        by, _, reason = implementation.fallback(shape, dtype).partition(": ")
        if not by and implementation.eager is not None and not compile:
            by, reason = f"{implementation.name}, uncompiled", "the recipe says compile: false"
        first = names_in(chosen)[0]
        if implementation.name == first and len(names_in(chosen)) > 1:
            chosen = first  # the others stand by
        found.append(Computing(name, chosen, by or implementation.name, reason or why))
    return found


def bind(
    choice: Mapping[str, str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    compile: bool = True,
    fallback: str = FALLBACKS[0],
) -> Ops:
    """The callables of a choice on a device, each tried once; without ``compile`` none of them starts torch.compile.

    Where one fails, ``fallback`` decides: "reference" warns (KernelWarning) and takes the op's reference.
    Raises: KernelError for what does not exist, does not run there, or fails.
    """
    if not dtype.is_floating_point:
        raise KernelError(f"{dtype} is no dtype to train in; there are: torch.float32, torch.bfloat16")
    device_class = torch.device(device).type
    if device_class not in DEVICE_CLASSES:
        raise KernelError(f"unknown device class {device_class!r}; there are: {', '.join(DEVICE_CLASSES)}")
    if fallback not in FALLBACKS:
        raise KernelError(f"unknown fallback {fallback!r}; there are: {', '.join(FALLBACKS)}")
    bound = {}
    for name, chosen in (dict.fromkeys(OPS, "reference") | dict(choice)).items():
        found, problems = _working(name, chosen, device_class, dtype, compile)
        if found is None and fallback == "fail":
            raise KernelError(
                f"{name}: {'; '.join(problems)}\n"
                f"Choose another ({', '.join(OPS[name].implementations)}), or set 'fallback: reference' in kernels.yaml"
            )
        if problems:
            taken = found.name if found is not None and found.name != "reference" else "the reference"
            warnings.warn(f"{name}: {'; '.join(problems)}; {taken} runs instead", KernelWarning, stacklevel=2)
        bound[name] = _function(found, compile) if found is not None else OPS[name].reference
        if name == "attention" and found is not None and found.prepare is not None:
            bound["prepare_attention"] = found.prepare
    return Ops(**bound)
