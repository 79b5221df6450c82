"""How Triton kernels that hold a row in registers share out rows and columns."""

from __future__ import annotations

import triton

WIDEST = 65536  # elements of one row held by a program
PROGRAMS = 256  # partial sums of a weight's gradient, about two a multiprocessor


def block_of(columns: int) -> int:
    """The least power of two that holds a row."""
    block = int(triton.next_power_of_2(columns))
    assert block <= WIDEST, columns
    return block


def shares(rows: int) -> tuple[int, int]:
    """(programs of a backward pass, rows each)."""
    rows_each = max(1, -(-rows // PROGRAMS))
    return -(-rows // rows_each), rows_each
