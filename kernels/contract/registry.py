"""The registry of ops. It also reads ``policies/kernels.yaml``, which chooses the implementation of each op for each device class."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract import machine
from kernels.contract.choice import AUTO, Choice, replace_auto, split_implementation_names
from kernels.contract.message import Message
from kernels.contract.op import (
    CASES,
    Cost,
    Implementation,
    KernelError,
    Op,
    OracleCase,
    Shape,
    make_unreadable_file_error,
)
from kernels.contract.oracle import compare_with_fp64, compute_outputs_and_gradients
from kernels.contract.strict_yaml import read_yaml

__all__ = [
    "DEVICE_CLASSES",
    "FALLBACKS",
    "OPS",
    "OracleCase",
    "Choice",
    "ChosenImplementation",
    "Cost",
    "Implementation",
    "KernelError",
    "KernelReplacedWarning",
    "Op",
    "Ops",
    "Shape",
    "bind_ops",
    "find_implementations_in_use",
    "find_op",
    "list_idle_ops",
    "load_choice",
    "load_fallback",
]

DEVICE_CLASSES = ("cpu", "cuda")
FALLBACKS = ("fail", "reference")  # what happens if a chosen kernel cannot be compiled or run; the first is the default


def return_documents_unchanged(documents: Any, stretches: int) -> Any:
    """The ``prepare_attention`` of implementations of attention that take the documents themselves."""
    return documents


# Ops that only some models call: op → whether a model calls it, from the keys of its description.
CALLED_BY: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "general_attention": lambda model: (
        any(model.get("windows") or ())
        or bool(model.get("attention_softcap") or model.get("attention_sinks"))
        or model.get("position", "rope") == "alibi"
    ),
    "softcapped_cross_entropy": lambda model: bool(model.get("logit_softcap")),
}


def list_idle_ops(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The ops that a model never calls. ``model``: the section ``model`` of a recipe.

    >>> list_idle_ops({"d_model": 64}), list_idle_ops({"windows": [16, None], "logit_softcap": 30.0})
    (('general_attention', 'softcapped_cross_entropy'), ())
    """
    return tuple(name for name, calls in CALLED_BY.items() if not calls(model))


@dataclass(frozen=True)
class Ops:
    """The functions that the model calls, one for each op. Each op is ``OP`` of ``kernels/<name>/__init__.py``. Its ``reference`` there describes the
    arguments and shapes."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    # attention with a window, a soft-cap, sinks or slopes: (q, k, v, sinks, soft-cap, ``VisibleKeys``)
    general_attention: Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None, Any], Tensor]
    softcapped_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
    embedding: Callable[[Tensor, Tensor], Tensor]
    newton_schulz: Callable[[Tensor, int], Tensor]
    adamw: Callable[..., None]
    # (documents [B, T], upper bound of the number of stretches, see ``round_up_document_runs``) → the documents as ``attention`` takes them. It is
    # called once for each batch. All layers share the result in their forward pass, backward pass and recomputation.
    prepare_attention: Callable[[Tensor, int], Any] = field(default=return_documents_unchanged)
    # The same for ``general_attention``, from its ``VisibleKeys``. It is called once for each batch and window.
    prepare_general_attention: Callable[[Any, int], Any] = field(default=return_documents_unchanged)


class _Registered(Mapping[str, Op]):
    """The ops that ``Ops`` names. Each is imported from its folder at its first use, so that importing this module runs no code of an op."""

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


class KernelReplacedWarning(UserWarning):
    """A chosen implementation does not work on this machine, and another one replaces it."""


def find_op(name: str) -> Op:
    """The op called ``name``. Raises: KernelError that lists the known ops."""
    if name not in OPS:
        raise KernelError("kernels.no_op", "There is no op {op!r}. The ops are: {known}.", op=name, known=list(OPS))
    return OPS[name]


def load_choice(path: Path | str, device: str = "cpu", tuned: Mapping[str, str] | None = None) -> Choice:
    """Read ``kernels.yaml``, which has a map of ops to implementations for each device class. Returns the map for ``device``, with every op.

    An op that the file does not name gets its reference. ``auto`` becomes the op's entry in ``tuned``, else ``find_default_implementation``.
    Raises: KernelError that names the file and the key, and lists the allowed values.
    """
    kind = torch.device(device).type
    name = machine.describe_this_machine(kind).name if kind == "cuda" and torch.cuda.is_available() else kind
    return dict.fromkeys(OPS, "reference") | replace_auto(_read(path).get(kind, {}), tuned, name)


def load_fallback(path: Path | str) -> str:
    """The value of ``fallback`` in ``kernels.yaml``, one of ``FALLBACKS``. Raises: KernelError, as ``load_choice`` does."""
    return str(_read(path).get("fallback", FALLBACKS[0]))


def _read(path: Path | str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise make_unreadable_file_error(path, error) from error
    document = read_yaml(text, str(path), KernelError)
    if not isinstance(document, dict):
        raise KernelError(
            "kernels.not_a_map",
            "{file} must be a map whose keys are device classes. The value of each key is a map of ops to implementations.",
            file=str(path),
        )
    for key, value in document.items():
        try:
            if key == "fallback":
                _check_fallback(value)
                continue
            if key not in DEVICE_CLASSES:
                raise make_unknown_device_class_error(key)
            if not isinstance(value, dict):
                raise KernelError("kernels.not_a_section", "The value must be a map of ops to implementations.")
            for name, implementation in value.items():
                find_op(str(name))
                for one in split_implementation_names(str(implementation)) if implementation != AUTO else ():
                    find_implementation(str(name), one, key)
        except KernelError as error:
            raise KernelError(
                "kernels.wrong_key",
                "{file}, key {key!r}: {problem}",
                file=str(path),
                key=str(key),
                problem=error.message,
            ) from error
    return document


def make_unknown_device_class_error(name: object) -> KernelError:
    """The error for a device class that does not exist."""
    return KernelError(
        "kernels.no_device_class",
        "There is no device class {name!r}. The device classes are: {known}.",
        name=name,
        known=DEVICE_CLASSES,
    )


def _check_fallback(value: object) -> None:
    if value not in FALLBACKS:
        raise KernelError(
            "kernels.wrong_fallback",
            "fallback is {value!r}. The allowed values are: {allowed}.",
            value=value,
            allowed=FALLBACKS,
        )


def find_implementation(name: str | Op, implementation: str, device_class: str) -> Implementation:
    """The implementation of an op by its name. Raises: KernelError if the op does not have it or it does not run on ``device_class``."""
    op = find_op(name) if isinstance(name, str) else name
    found = op.implementation(implementation)
    if not found.can_run_on(device_class):
        runs = sorted(i.name for i in op.implementations.values() if i.can_run_on(device_class))
        raise KernelError(
            "kernels.wrong_device",
            "{op}: {implementation} does not run on {device}. Implementations that run on {device}: {known}.",
            op=op.name,
            implementation=implementation,
            device=device_class,
            known=runs,
        )
    return found


@functools.cache
def find_implementation_failure(
    name: str, implementation: str, device_class: str, dtype: torch.dtype, compile: bool = True
) -> str | None:
    """Run an implementation once, forward and backward, at small sizes. Returns the failure as text; None if it works.

    A kernel is compiled at its first call. Without this trial a failure would come in a training step.
    """
    op = find_op(name)
    function = _function(op.implementation(implementation), compile)
    tried = replace(op, implementations={implementation: replace(op.implementation(implementation), function=function)})
    try:
        if device_class == "cuda":  # the code was compiled for this device: compare its results with fp64 once
            found = compare_with_fp64(tried, implementation, CASES[0], dtype=dtype, device=device_class)
            if found.ok:
                return None
            return Message(
                "kernels.wrong_results",
                "its results on this machine are wrong ({tensors})",
                tensors=found.describe_failures(),
            )
        compute_outputs_and_gradients(op, function, op.inputs(CASES[0], device=device_class, dtype=dtype), seed=0)
    except Exception as error:  # compilers raise what they like
        return f"{type(error).__name__}: {str(error).strip() or 'no message'}"
    return None


def _function(implementation: Implementation, compile: bool) -> Callable[..., Any]:
    return implementation.function if compile or implementation.eager is None else implementation.eager


def _working(
    name: str, chosen: str, device_class: str, dtype: torch.dtype, compile: bool
) -> tuple[Implementation | None, list[str]]:
    """(the first implementation of a choice that works on this machine, or None; the failures of the implementations before it).

    Raises: KernelError for an implementation that does not exist. Also for one that is not for this device class, if it is the only choice.
    """
    names = split_implementation_names(chosen)
    problems: list[str] = []
    for one in names:
        found = find_op(name).implementation(one)
        if len(names) == 1:
            find_implementation(name, one, device_class)
        if not found.can_run_on(device_class):
            problem: str | None = Message(
                "kernels.not_here", "this implementation does not run on {device}", device=device_class
            )
        elif one != names[-1] and (fallback := found.fallback(CASES[0].shape, dtype)):
            problem = fallback.partition(": ")[2] or fallback  # a later name of the choice is the better replacement
        else:
            problem = (
                None if one == "reference" else find_implementation_failure(name, one, device_class, dtype, compile)
            )
        if problem is None:
            return found, problems
        problems.append(
            Message(
                "kernels.fails",
                "{implementation} fails on {device} in {dtype}: {problem}",
                implementation=one,
                device=device_class,
                dtype=str(dtype),
                problem=problem,
            )
        )
    return None, problems


@dataclass(frozen=True)
class ChosenImplementation:
    """The implementation that computes an op on this machine. ``by``: the chosen implementation, the first of several that works, or a replacement.
    It is empty if ``chosen`` does not work and no replacement is allowed. ``why``: the reason for a replacement."""

    op: str
    chosen: str
    by: str
    why: str = ""

    def __str__(self) -> str:
        data = {"op": self.op, "chosen": self.chosen, "by": self.by, "why": self.why}
        if not self.by:
            return Message(
                "kernels.not_replaced", "{op}: kernels.yaml allows no replacement for {chosen}. It cannot run on this machine: {why}", **data
            )  # fmt: skip
        if self.why:
            return Message("kernels.replaced", "{op}: {chosen} is replaced by {by}, because {why}", **data)
        return Message("kernels.computes", "{op}: {chosen} is used", **data)


def find_implementations_in_use(
    choice: Mapping[str, str],
    device: str | torch.device,
    dtype: torch.dtype,
    compile: bool,
    fallback: str,
    shape: Shape,
    idle: Collection[str] = (),
) -> list[ChosenImplementation]:
    """The implementations that compute the ops for tensors of these sizes, as ``bind_ops`` would choose them. Each choice is tried once.

    ``idle``: ops that are left out, because nothing calls them.
    Raises: KernelError for an implementation that does not exist or is not for this device class.
    """
    device_class = torch.device(device).type
    found = []
    for name, chosen in (dict.fromkeys(OPS, "reference") | dict(choice)).items():
        if name in idle:
            continue
        implementation, problems = _working(name, chosen, device_class, dtype, compile)
        why = "; ".join(problems)
        if implementation is None:
            found.append(ChosenImplementation(name, chosen, "reference" if fallback == "reference" else "", why))
            continue
        by, _, reason = implementation.fallback(shape, dtype).partition(": ")
        if not by and implementation.eager is not None and not compile:
            by = f"{implementation.name}, uncompiled"
            reason = Message("kernels.uncompiled", "the recipe sets 'compile: false'")
        first = split_implementation_names(chosen)[0]
        if implementation.name == first and len(split_implementation_names(chosen)) > 1:
            chosen = first  # the other names are not needed
        found.append(ChosenImplementation(name, chosen, by or implementation.name, reason or why))
    return found


def bind_ops(
    choice: Mapping[str, str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    compile: bool = True,
    fallback: str = FALLBACKS[0],
    idle: Collection[str] = (),
) -> Ops:
    """The functions of a choice on a device. Each is tried once. If ``compile`` is False, none of them uses torch.compile. ``idle``: ops that nothing
    calls (``list_idle_ops``). They are not tried, and are their references.

    If no implementation of an op works, ``fallback`` decides: "fail" raises KernelError, "reference" warns (KernelReplacedWarning) and uses
    the reference.
    Raises: KernelError also for an implementation that does not exist or does not run on the device.
    """
    if not dtype.is_floating_point:
        raise KernelError(
            "kernels.wrong_dtype",
            "The kernels do not support training in {dtype}. Use torch.float32 or torch.bfloat16.",
            dtype=str(dtype),
        )
    device_class = torch.device(device).type
    if device_class not in DEVICE_CLASSES:
        raise make_unknown_device_class_error(device_class)
    _check_fallback(fallback)
    bound = {}
    for name, chosen in (dict.fromkeys(OPS, "reference") | dict(choice)).items():
        if name in idle:
            bound[name] = OPS[name].reference
            continue
        found, problems = _working(name, chosen, device_class, dtype, compile)
        if found is None and fallback == "fail":
            raise KernelError(
                "kernels.none_works",
                "None of the implementations of {op} in kernels.yaml works: {problems}\n"
                "Choose another implementation ({known}), or set 'fallback: reference' in kernels.yaml.",
                op=name,
                problems=problems,
                known=list(OPS[name].implementations),
            )
        if problems:
            taken = found.name if found is not None and found.name != "reference" else "the reference"
            said = Message(
                "kernels.falls_back",
                "{op}: {taken} is used, because {problems}",
                op=name,
                problems=problems,
                taken=taken,
            )
            warnings.warn(said, KernelReplacedWarning, stacklevel=2)
        bound[name] = _function(found, compile) if found is not None else OPS[name].reference
        if found is not None and found.prepare is not None:
            bound[f"prepare_{name}"] = found.prepare
    return Ops(**bound)
