"""How Triton kernels share out rows: how many a tile, how many warps a tile, how many programs of a backward pass.

A memory-bound kernel is as fast as the bytes that it keeps in flight. At 3.35 TB/s and some 0.8 µs from a load to its
value, an H100 needs about 20 KB in flight on each of its 132 multiprocessors; these tiles give it about 64:

    forward    32 elements a thread: 4,096 a tile of 4 warps (8 KB of bf16, eight tiles a multiprocessor). A row of 1,024
               shares its tile with three others, whose loads do not wait for one another
    backward   16 elements a thread and 16 warps a multiprocessor. Programs stay and take tile after tile: they hold the sum
               of the weight's gradient in registers, while the next two tiles are copied to shared memory (``cp.async``)

A partial sum is fp32: a program of RMSNorm's backward pass writes and reads 8 bytes a column beside 6 a row, so 4 programs
on each of 132 multiprocessors add 4 % to 16,384 rows, and 1 program, at width 8,192, adds 1 %.

Predicted for an H100 at 90 % of 3.35 TB/s, 16,384 rows of bf16, forward and backward, in MB and µs. An H200 copies 4.23 TB/s:
at 0.9 of that the sums of forward and backward would be 0.79 of these; measured at width 4,096: 190, 287 and 216 µs,
1.07, 1.01 and 1.19 times as long:

    width    rms_norm                 add_rms_norm              qk_norm_rope (heads of 128)
    1,024      67   22    105   35      134   45    138   46       76   25    110   37
    4,096     268   89    411  136      537  178    545  181      279   93    414  137
    8,192     537  178    814  270    1,074  356  1,082  359      549  182    818  271

A call costs the host about 30 µs forward and 70 backward (torch's registered ops, one core of a server CPU) beside Triton's
launch, so that below some 30,000 rows of width 1,024 an uncompiled model waits for Python; within torch.compile it does not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

WIDEST = (
    65536  # elements of one row held by a program; from 16,384 on a backward pass spills registers: right, but slow
)
FORWARD, BACKWARD = 32, 16  # elements a thread
WARPS = 16  # of a multiprocessor in a backward pass, and the most of one program
LEAST_ROWS = 16  # of a program of a backward pass: fewer would move as much for its partial sum as for its rows
SHARED = 96 << 10  # bytes that a backward pass may keep in flight: every GPU since 2020 has 99 KiB for a block
MULTIPROCESSORS = 132  # where there is no GPU: an H100's, so that the interpreter's sums are the same everywhere


@dataclass(frozen=True)
class Share:
    """The launch of a backward pass: ``programs`` of ``rows_each`` rows, whole tiles each, and its kernel's constants."""

    programs: int
    rows_each: int
    settings: dict[str, int]


@functools.cache
def tile(columns: int, a_thread: int = FORWARD) -> dict[str, int]:
    """ROWS and BLOCK (a row, filled up to a power of two) of a tile, and its ``num_warps``.

    >>> tile(1000), tile(8192)
    ({'ROWS': 4, 'BLOCK': 1024, 'num_warps': 4}, {'ROWS': 1, 'BLOCK': 8192, 'num_warps': 8})
    """
    block = int(triton.next_power_of_2(columns))
    assert block <= WIDEST, columns
    warps = min(max(block // (32 * a_thread), 4), WARPS)
    return {"ROWS": max(1, warps * 32 * a_thread // block), "BLOCK": block, "num_warps": warps}


@functools.cache
def share(rows: int, columns: int, row_bytes: int, device: torch.device) -> Share:
    """Shares the rows of a backward pass out. ``row_bytes``: of one row in all tensors that the kernel reads.

    >>> share(16384, 1024, 4096, torch.device("cpu"))
    Share(programs=512, rows_each=32, settings={'ROWS': 2, 'BLOCK': 1024, 'num_warps': 4, 'STAGES': 3})
    """
    settings = tile(columns, BACKWARD)
    at_most = multiprocessors(device) * (WARPS // settings["num_warps"])
    rows_each = max(LEAST_ROWS, -(-rows // at_most))
    rows_each += -rows_each % settings["ROWS"]
    ahead = min(2, SHARED // (settings["ROWS"] * row_bytes))
    return Share(-(-rows // rows_each), rows_each, settings | {"STAGES": 1 + ahead})


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS
