"""Which ops there are, and which implementation of each the model runs: the choice in ``policies/kernels.yaml``, per
device class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import yaml
from torch import Tensor

from kernels import (
    adamw,
    add_rms_norm,
    attention,
    embedding,
    linear_cross_entropy,
    newton_schulz,
    qk_norm_rope,
    rms_norm,
    swiglu,
)
from kernels.op import Case, Cost, Implementation, KernelError, Op, Shape

__all__ = [
    "DEVICE_CLASSES",
    "OPS",
    "Case",
    "Choice",
    "Cost",
    "Implementation",
    "KernelError",
    "Op",
    "Ops",
    "Shape",
    "bind",
    "get",
    "load_choice",
]

OPS: Mapping[str, Op] = MappingProxyType(
    {
        o.name: o
        for o in (
            rms_norm.OP,
            add_rms_norm.OP,
            qk_norm_rope.OP,
            swiglu.OP,
            attention.OP,
            linear_cross_entropy.OP,
            embedding.OP,
            newton_schulz.OP,
            adamw.OP,
        )
    }
)
DEVICE_CLASSES = ("cpu", "cuda")
Choice = dict[str, str]  # op → implementation; an op that is not named runs its reference


@dataclass(frozen=True)
class Ops:
    """What the model calls; signatures and shapes stand at each op's ``reference``."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    embedding: Callable[[Tensor, Tensor], Tensor]
    newton_schulz: Callable[[Tensor, int], Tensor]
    adamw: Callable[..., None]


def get(name: str) -> Op:
    """The op of that name. Raises: KernelError that lists the ops."""
    if name not in OPS:
        raise KernelError(f"there is no op {name!r}; there are: {', '.join(OPS)}")
    return OPS[name]


def load_choice(path: Path | str, device: str = "cpu") -> Choice:
    """Read ``kernels.yaml``: for each device class a map op → implementation. Returns the one for ``device``, every
    op named.

    Raises: KernelError that names the file and the key, and lists what there is.
    """
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KernelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise KernelError(f"{path}: expected a map of device class → (op → implementation)")
    for device_class, choice in document.items():
        if device_class not in DEVICE_CLASSES:
            raise KernelError(f"{path}: unknown device class {device_class!r}; there are: {', '.join(DEVICE_CLASSES)}")
        if not isinstance(choice, dict):
            raise KernelError(f"{path}: {device_class}: expected a map op → implementation")
        for name, implementation in choice.items():
            try:
                check(str(name), str(implementation), device_class)
            except KernelError as error:
                raise KernelError(f"{path}: {device_class}: {error}") from error
    return dict.fromkeys(OPS, "reference") | document.get(torch.device(device).type, {})


def check(name: str, implementation: str, device_class: str) -> Implementation:
    """Raises: KernelError unless the op has the implementation and it runs on that device class."""
    found = get(name).implementation(implementation)
    if not found.runs_on(device_class):
        runs = sorted(i.name for i in OPS[name].implementations.values() if i.runs_on(device_class))
        raise KernelError(f"{name}: {implementation} does not run on {device_class}; those that do: {', '.join(runs)}")
    return found


def bind(
    choice: Mapping[str, str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    compile: bool = True,
) -> Ops:
    """The callables of a choice on a device; without ``compile`` none of them starts torch.compile.

    Raises: KernelError for what does not exist or does not run there.
    """
    if not dtype.is_floating_point:
        raise KernelError(f"{dtype} is no dtype to train in")
    device_class = torch.device(device).type
    if device_class not in DEVICE_CLASSES:
        raise KernelError(f"unknown device class {device_class!r}; there are: {', '.join(DEVICE_CLASSES)}")
    chosen = dict.fromkeys(OPS, "reference") | dict(choice)
    found = {name: check(name, implementation, device_class) for name, implementation in chosen.items()}
    return Ops(**{name: i.function if compile or i.eager is None else i.eager for name, i in found.items()})
