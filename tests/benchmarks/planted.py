"""Planted into a run of ``benchmarks.gpu`` by ``FACTORY_BENCH_GPU_PLANT``: ops with implementations that crash, hang, raise and are wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.gpu import right
from benchmarks.gpu.parts import Item
from kernels.contract.op import Implementation
from kernels.contract.registry import OPS

PLANTED = "rms_norm"
SOUND = OPS[PLANTED].reference


def crashes(*arguments: Any) -> Any:
    os.abort()


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
}
made = {name: Implementation(name, function, "planted") for name, function in FUNCTIONS.items()}
right.compile_every_shape()
op = replace(OPS[PLANTED], implementations={"reference": Implementation("reference", SOUND, "the reference")} | made)
OPS._loaded[PLANTED] = op  # type: ignore[attr-defined]
right.on_cuda = lambda: [(op, implementation) for implementation in made.values()]
# Little of the time is the hanging one's, so that a test need not wait for long.
right.items = lambda settings: [Item(f"{PLANTED}/{name}", 0.02 if name == "hangs" else 1.0) for name in made]
