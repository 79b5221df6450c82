"""What metric lines hold that is measured once."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.monitor import metrics


@pytest.mark.parametrize(("seconds", "sizes"), [(math.inf, {128, 1024}), (0.0, {128})])
def test_a_product_that_would_take_too_long_is_measured_on_smaller_matrices(
    seconds: float, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, draw = set(), torch.randn

    def noted(*size: int, generator: torch.Generator) -> torch.Tensor:
        seen.update(size)
        return draw(*size, generator=generator)

    monkeypatch.setattr(torch, "randn", noted)
    monkeypatch.setattr(metrics, "MATMUL_SECONDS", seconds)
    assert 0 < metrics.matmul_rate(torch.device("cpu"), torch.float32, tries=1) < math.inf
    assert seen == sizes
