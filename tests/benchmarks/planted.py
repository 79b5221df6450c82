"""Planted into a dry run of ``benchmarks.gpu`` by ``FACTORY_BENCH_GPU_PLANT``: an op with implementations that crash, hang, raise, are wrong, or
that no check is of. The part 'fast' has one more, which 'right' does not know."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.gpu import fast, right, shapes
from benchmarks.gpu.parts import Item
from kernels.contract.op import Implementation
from kernels.contract.registry import OPS

PLANTED = "rms_norm"
SOUND = OPS[PLANTED].reference
TIMES = sys.argv[1:2] == ["fast"]


def crashes(*arguments: Any) -> Any:
    """In 'fast' at the second width alone."""
    if not TIMES or arguments[0].shape[-1] == shapes.DRY[1].d_model:
        os.abort()
    return SOUND(*arguments)


def hangs(*arguments: Any) -> Any:
    time.sleep(3600)


def raises(*arguments: Any) -> Any:
    raise RuntimeError("planted: it does not compile")


def wrong(*arguments: Any) -> Any:
    return SOUND(*arguments) * 1.5


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "crashes": crashes,
    "hangs": hangs,
    "raises": raises,
    "wrong": wrong,
    "sound": SOUND,
    "unchecked": SOUND,
}
made = {name: Implementation(name, function, "planted") for name, function in FUNCTIONS.items()}
made["unchecked"] = replace(made["unchecked"], fallback=lambda shape, dtype: "sound: planted")
right.compile_every_shape()
if TIMES:
    del made["hangs"]
    last = {"crashes": made.pop("crashes")}
    made = {"late": Implementation("late", wrong, "planted")} | made | last
op = replace(OPS[PLANTED], implementations={"reference": Implementation("reference", SOUND, "the reference")} | made)
OPS._loaded[PLANTED] = op  # type: ignore[attr-defined]
right.on_cuda = lambda: [(op, implementation) for implementation in made.values()]
# Little of the time is the hanging one's, so that a test need not wait for long.
right.items = lambda settings: [Item(f"{PLANTED}/{name}", 0.02 if name == "hangs" else 1.0) for name in made]
fast.items = lambda settings: [Item(f"{PLANTED}/{number}") for number in range(2)]
