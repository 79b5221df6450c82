"""Divides rows among the programs of Triton kernels: the rows and warps of a tile, and the number of programs of a backward pass.

The speed of a memory-bound kernel depends on the number of bytes that it keeps in flight. At 3.35 TB/s and about 0.8 µs from a load
to its value, an H100 needs about 20 KB in flight on each of its 132 multiprocessors. These tiles keep about 64 KB in flight:

    forward    32 elements for each thread: 4,096 in a tile of 4 warps (8 KB of bf16, eight tiles on each multiprocessor). A row of
               1,024 shares its tile with three other rows. Their loads do not wait for one another
    backward   16 elements for each thread and 16 warps for each multiprocessor. Each program processes many tiles. It holds the sum of
               the weight's gradient in registers, while the next two tiles are copied to shared memory (``cp.async``)

A partial sum is in fp32. A program of RMSNorm's backward pass writes and reads 8 bytes for each column, and 6 for each row and
column. Thus 4 programs on each of 132 multiprocessors add 4 % to 16,384 rows, and 1 program, at width 8,192, adds 1 %.

Predicted for an H100 at 90 % of 3.35 TB/s, 16,384 rows of bf16, forward and backward, in MB and µs. An H200 copies 4.23 TB/s; at 90 %
of that, forward and backward together would take 0.79 of these times. Measured on it at width 4,096: 190, 287 and 216 µs, which is
1.07, 1.01 and 1.19 times the prediction:

    width    rms_norm                 add_rms_norm              qk_norm_rope (heads of 128)
    1,024      67   22    105   35      134   45    138   46       76   25    110   37
    4,096     268   89    411  136      537  178    545  181      279   93    414  137
    8,192     537  178    814  270    1,074  356  1,082  359      549  182    818  271

A call takes about 30 µs of the host's time forward and 70 µs backward (torch's registered ops, one core of a server CPU), besides
Triton's launch. Therefore an uncompiled model waits for Python below about 30,000 rows of width 1,024; inside torch.compile it does not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

WIDEST = (
    65536  # elements of a row that a program holds; from 16,384 on, a backward pass spills registers: correct but slow
)
FORWARD, BACKWARD = 32, 16  # elements for each thread
WARPS = 16  # of a multiprocessor in a backward pass; also the most that one program has
LEAST_ROWS = 16  # of a backward program: with fewer rows its partial sum would move about as many bytes as the rows
SHARED = 96 << 10  # bytes that a backward pass may keep in flight: every GPU since 2020 has 99 KiB for a block
MULTIPROCESSORS = 132  # assumed without a GPU: an H100's, so that the interpreter's sums are the same everywhere


@dataclass(frozen=True)
class BackwardLaunch:
    """The launch of a backward pass: the number of programs, the rows of each program (whole tiles), and the settings of the kernel."""

    programs: int
    rows_each: int
    settings: dict[str, int]


@functools.cache
def choose_tile_settings(columns: int, elements_per_thread: int = FORWARD) -> dict[str, int]:
    """The settings of a tile: ROWS, BLOCK (the length of a row, rounded up to a power of two) and num_warps.

    >>> choose_tile_settings(1000), choose_tile_settings(8192)
    ({'ROWS': 4, 'BLOCK': 1024, 'num_warps': 4}, {'ROWS': 1, 'BLOCK': 8192, 'num_warps': 8})
    """
    block = int(triton.next_power_of_2(columns))
    assert block <= WIDEST, columns
    warps = min(max(block // (32 * elements_per_thread), 4), WARPS)
    return {"ROWS": max(1, warps * 32 * elements_per_thread // block), "BLOCK": block, "num_warps": warps}


@functools.cache
def divide_rows_among_programs(rows: int, columns: int, row_bytes: int, device: torch.device) -> BackwardLaunch:
    """Divide the rows of a backward pass among programs. ``row_bytes``: bytes of one row in all tensors that the kernel reads.

    >>> divide_rows_among_programs(16384, 1024, 4096, torch.device("cpu"))
    BackwardLaunch(programs=512, rows_each=32, settings={'ROWS': 2, 'BLOCK': 1024, 'num_warps': 4, 'STAGES': 3})
    """
    settings = choose_tile_settings(columns, BACKWARD)
    at_most = count_multiprocessors(device) * (WARPS // settings["num_warps"])
    rows_each = max(LEAST_ROWS, -(-rows // at_most))
    rows_each += -rows_each % settings["ROWS"]
    ahead = min(2, SHARED // (settings["ROWS"] * row_bytes))
    return BackwardLaunch(-(-rows // rows_each), rows_each, settings | {"STAGES": 1 + ahead})


def count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS
