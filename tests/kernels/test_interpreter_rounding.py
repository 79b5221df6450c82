"""The tests of kernels give Triton's interpreter the rounding of torch, which is also the GPU's."""

import numpy as np
import torch

from tests.support.interpreter_rounding import to_bf16


def test_the_interpreter_rounds_to_bf16_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([bits, ties]).view(np.float32)
    theirs = torch.from_numpy(x).bfloat16()
    mine = torch.from_numpy(to_bf16(x).view(np.int16)).view(torch.bfloat16)
    assert theirs.isnan().any() and torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine[~mine.isnan()], theirs[~theirs.isnan()])
