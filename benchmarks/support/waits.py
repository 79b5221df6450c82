"""Where a step makes the host wait for the GPU, as torch itself notices it (``torch.cuda.set_sync_debug_mode``)."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
NOTICE = "called a synchronizing CUDA operation"  # c10/cuda/CUDAFunctions.cpp


def waits(step: Callable[[], object]) -> list[str]:
    """One ``file:line function`` for each operation of ``step`` that waited for the device, in their order.

    The innermost line of this repository, or of torch where none of ours is on the stack. What a backward pass does is found at the line
    that called it. torch notices copies to the host, ``nonzero`` and the like; not ``synchronize``, events, or collectives.
    """
    found: list[str] = []
    usual = warnings.showwarning

    def show(message: Warning | str, *rest: object, **named: object) -> None:
        if NOTICE not in str(message):
            usual(message, *rest, **named)  # type: ignore[arg-type]
            return
        stack = traceback.extract_stack()[:-1]
        own = [f for f in stack if is_ours(Path(f.filename))] or stack
        name = Path(own[-1].filename)
        found.append(f"{name.relative_to(ROOT) if is_ours(name) else name}:{own[-1].lineno} {own[-1].name}")

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return found


def is_ours(path: Path) -> bool:
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__).resolve()
