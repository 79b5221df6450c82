"""What two runs' files must share, told on single numbers and files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from factory.gates.patch.matrix import compare
from factory.gates.patch.matrix.compare import Discrepancy
from factory.gates.patch.matrix.runs import copy_libraries
from factory.runs.untrusted_files import UntrustedFileError


@pytest.mark.parametrize("told", [math.nan, math.inf, "2.0", None, 2])
def test_what_is_no_finite_number_is_no_small_difference(told: object) -> None:
    (found,) = compare._values("metrics.jsonl, line 1: loss", 2.0, told, ())
    assert found.share == math.inf
    assert max([Discrepancy("a", math.nan), Discrepancy("b", 1.0)], key=lambda part: part.share).what == "a"


def test_a_number_is_compared_by_its_size_and_a_clocked_one_by_its_type() -> None:
    (found,) = compare._values("line", {"loss": 2.0, "time": 5.0}, {"loss": 2.5, "time": 7.0}, {"time"})
    assert found.what == "line: loss" and found.share == pytest.approx(0.2)
    (found,) = compare._values("line", {"time": 5.0}, {"time": "fast"}, {"time"})
    assert found.share == math.inf


def test_a_ranks_part_of_a_tensor_is_measured_by_its_own_size() -> None:
    """The weights that the run began with are whole, the file of a rank holds some of their rows."""
    ours, start = torch.ones(2, 4), {"w": torch.zeros(4, 4)}
    apart, scale = compare._apart("w", ours, 1.5 * ours, start)
    assert (apart, scale) == pytest.approx((0.5 * 8**0.5, 8**0.5))
    assert compare._apart("w", torch.ones(4, 4), torch.ones(4, 4), {"w": torch.ones(4, 4)}) == (
        0.0,
        0.0,
    )  # it did not move


@pytest.mark.parametrize("files", [5, [1, "a"], {"model.safetensors": 3}, None])
def test_a_manifest_that_lists_no_files_is_a_difference(tmp_path: Path, files: object) -> None:
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text(json.dumps({"files": files}))
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(UntrustedFileError):
            compare._listed(folder, "step-00000001")
    finally:
        os.close(folder)


def test_libraries_are_copied_without_following_links_or_waiting_for_pipes(tmp_path: Path) -> None:
    source = tmp_path / "factory-kernels"
    source.mkdir()
    (tmp_path / "secret").write_text("mine")
    (source / "made.so").write_bytes(b"code")
    (source / "link.so").symlink_to(tmp_path / "secret")
    (source / "folder").symlink_to(tmp_path)
    os.mkfifo(source / "pipe.so")
    (source / "deep" / "deeper").mkdir(parents=True)
    copy_libraries(source, tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {"made.so": b"code"}
    (tmp_path / "elsewhere").symlink_to(source)
    with pytest.raises(OSError):
        copy_libraries(tmp_path / "elsewhere", tmp_path / "another")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("size", [(4,), (3, 5), (64, 64)])
def test_numbers_that_went_through_a_lower_precision_are_found_at_any_size_of_rounding(
    dtype: torch.dtype, size: tuple[int, ...]
) -> None:
    ours = torch.randn(size, generator=torch.Generator().manual_seed(1))
    assert compare.lost_bits(ours, ours.to(dtype).float())
    assert not compare.lost_bits(ours, ours * (1 + 1e-3)) and not compare.lost_bits(ours, ours)
    assert not compare.lost_bits(ours.to(dtype).float(), ours)  # more bits are no loss
    assert not compare.lost_bits(torch.ones(size), torch.ones(size))
