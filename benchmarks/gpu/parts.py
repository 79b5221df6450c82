"""The parts of a run, in the order of what they are worth in the first minutes, and how they share the time."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """``module`` of this package has ``items(settings)`` and ``run(item, context)``."""

    name: str
    about: str
    share: float  # of the time; what a part leaves over, those after it have
    workers: int = 1  # processes side by side: only where nothing is timed
    fresh: bool = False  # a new process for each item: whole models, whose memory must be gone
    module: str = ""


BESIDE = max(1, min(8, (os.cpu_count() or 1) // 2))
PARTS = (
    Part(
        "facts",
        "card, driver, versions, is it busy; the product rate and the copy bandwidth that all else is measured by",
        20,
    ),
    Part(
        "right",
        "every implementation against the fp64 oracle: forward, every gradient, hostile values, odd sizes",
        50,
        BESIDE,
    ),
    Part(
        "compile",
        "compiles what 'fast' times, side by side, so that its minutes are spent on timing",
        50,
        BESIDE,
        module="fast",
    ),
    Part("fast", "every op at three widths beside torch eager, torch.compile, torch's newer ops, Liger and quack", 75),
    Part("step", "whole training steps: tokens/s, MFU, memory, waits, checkpoint stall", 200, fresh=True),
    Part("chain", "line profiler, the gate's timed pairs, the sandbox, kill -9 and resume", 130, fresh=True),
)
NAMES = tuple(part.name for part in PARTS)
PLANT = "FACTORY_BENCH_GPU_PLANT"  # a module that breaks something on purpose, for tests: ``worker``


@dataclass(frozen=True)
class Settings:
    """What every process of a run is told."""

    device: str  # 'cuda' or 'cpu'
    dry: bool = False
    memory: float | None = None  # bytes that may be used of the device; None: what is free
    commit: str = ""
    free: float | None = None  # bytes of the device that were free when the run began, by 'facts'
    copy_rate: float | None = None  # bytes/s, read and written, measured by 'facts'
    product_rate: float | None = None  # FLOP/s of a bf16 product, measured by 'facts'
    scratch: str = ""  # a folder that is removed after the run
    right: tuple[str, ...] = ()  # 'op/implementation' that the part 'right' found right in this run
    wrong: tuple[str, ...] = ()  # and those that it found wrong, or that crashed in it
    hung: tuple[str, ...] = ()  # 'op/rival at width' of the part 'compile' that did not end in its time

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Item:
    """A piece of a part: what is lost where a process crashes or hangs."""

    name: str
    weight: float = 1.0  # of the part's time, beside the other items
