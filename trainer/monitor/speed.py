"""The speed of steps and segments, for records and results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.contract.plan.precision import DTYPES
from trainer.contract.plan.rates import data_sheet_peak, matmul_rate
from trainer.contract.recipe import Recipe
from trainer.parallel.ranks import Ranks


class SpeedMeter:
    """Model FLOP/s of steps, as shares of the GPUs' peak.

    ``flops_per_s`` is the model's: 6 FLOPs a weight and token, and attention's (PaLM, arXiv 2204.02311, appendix B). Recomputed work counts
    once. A row counts as one document, although attention computes less for several. ``mfu`` is its share of the data sheet's peak of all
    ranks' GPUs, assumed to be like the first rank's. Under load a GPU does not hold the sheet's clock; therefore the rate of large products is
    measured at the start. A CPU has neither: its rate shows how busy the machine is.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        """Measures for a second on a GPU. Every rank must make a ``SpeedMeter``, so that they heat the machine together, as training does."""
        device, dtype = ranks.device, DTYPES[recipe.precision]
        self.flops_per_token = recipe.model.flops_per_token()
        peak = data_sheet_peak(device, dtype)
        self.peak = peak and peak * ranks.size
        self.measured: float | None = None
        if device.type == "cuda":
            self.measured = matmul_rate(device, dtype) * ranks.size
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)  # a record's memory is that of steps
        self._first = True

    def record_fields(self, tokens: int, seconds: float) -> dict[str, float]:
        """The speed of a step, for its record. A process's first step also has its seconds, which include compiling."""
        rate = tokens / seconds
        found = {"tokens_per_s": rate} | self._of_rate(rate)
        if self._first:
            found["first_step_s"] = seconds
        self._first = False
        return found

    def segment_fields(self, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The speed of a segment, from its records: medians without each process's first step, and the seconds of the last process's first step."""
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
