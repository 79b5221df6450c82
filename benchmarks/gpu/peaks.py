"""The data sheet's peak of dense bf16 products, by the name that the driver gives a card."""

from __future__ import annotations

import re

VARIANTS = {"nvl", "gh200", "mig"}  # cards of a known name with another peak


def peak_of(name: str) -> tuple[float, str] | None:
    """(FLOP/s, its source) of ``trainer.contract.plan.run_plan.GPUS``; None: no data sheet of that card is known.

    >>> peak_of("NVIDIA H100 80GB HBM3")
    (989400000000000.0, 'NVIDIA H100 SXM data sheet, bf16 dense')
    >>> peak_of("NVIDIA H100 NVL"), peak_of("NVIDIA Tegra")
    (None, None)
    """
    from trainer.contract.plan.run_plan import GPUS  # needs pydantic

    words = re.split(r"[^a-z0-9]+", name.lower())
    if VARIANTS & set(words):
        return None
    fitting = [key for key in GPUS if all(any(word.startswith(part) for word in words) for part in key.split("-"))]
    if not fitting:
        return None
    gpu = GPUS[max(fitting, key=len)]
    return gpu.peak_flops, gpu.source
