"""The speed of steps and segments, for records and results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.contract.plan.precision import DTYPES
from trainer.contract.plan.rates import look_up_data_sheet_flops, measure_matmul_rate
from trainer.contract.recipe import Recipe
from trainer.parallel.ranks import Ranks


class SpeedMeter:
    """Computes the speed of steps: tokens/s, FLOP/s, and their share of the peak of the GPUs.

    ``flops_per_s`` counts the model's FLOPs: 6 for each weight and token, and those of attention (PaLM, arXiv 2204.02311, appendix B). Recomputed
    work counts once. A row counts as one document, although attention computes less if it holds several. ``mfu`` is ``flops_per_s`` divided by
    the data sheet's peak of the GPUs of all ranks, which are assumed to be like this rank's. Under load a GPU does not reach the clock of its
    data sheet. Therefore the rate of large products is measured at the start. On a CPU there is no ``mfu`` and no such measurement: its rate would
    show how busy the machine is.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        """On a GPU this measures for about a second. Every rank must make a ``SpeedMeter``, so that all GPUs are under load, as in training."""
        device, dtype = ranks.device, DTYPES[recipe.precision]
        self.flops_per_token = recipe.model.count_flops_per_token(bool(recipe.trained_multi_token_layers))
        peak = look_up_data_sheet_flops(device, dtype)
        self.peak = peak and peak * ranks.size
        self.measured: float | None = None
        if device.type == "cuda":
            self.measured = measure_matmul_rate(device, dtype) * ranks.size
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # a record's memory is that of steps
        self._first = True

    def compute_step_fields(self, tokens: int, seconds: float) -> dict[str, float]:
        """The speed of a step, for its record. The first step of a process also has ``first_step_s``, its seconds, which include compiling."""
        rate = tokens / seconds
        found = {"tokens_per_s": rate} | self._of_rate(rate)
        if self._first:
            found["first_step_s"] = seconds
        self._first = False
        return found

    def compute_segment_fields(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The speed of a segment, from its records: the median rates without the first step of each process, and the last ``first_step_s``."""
        first = [line["first_step_s"] for line in lines if "first_step_s" in line]
        rates = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line and "first_step_s" not in line]
        found = {"first_step_s": first[-1]} if first else {}
        if not rates:
            return found
        rate = statistics.median(rates)
        found |= {"tokens_per_s": rate} | self._of_rate(rate)
        if self.measured:
            found |= {
                "matmul_flops_per_s": self.measured,
                "matmul_share": found["flops_per_s"] / self.measured,
            }
        return found

    def _of_rate(self, tokens_per_s: float) -> dict[str, float]:
        flops = tokens_per_s * self.flops_per_token
        return {"flops_per_s": flops} | ({"mfu": flops / self.peak} if self.peak else {})
