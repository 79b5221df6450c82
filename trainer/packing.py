"""Packing: which pieces of documents share a row. Pure functions.

A row has ``context`` positions; a position is an (input, target) pair of neighbouring tokens of one document.
A document of L tokens therefore fills L - 1 positions: its last token is a target and never an input, its first an
input and never a target, and no pair spans two documents. With context 4:

    documents  a b c e | x y e | p q r s t u e          rows  (a b c)(.)   x y | p q r s | t u
    pairs      3         2       6 → pieces of 4 and 2        targets b c e     y e | q r s t | u e

A document that fits a row is never cut. A longer one is cut every ``context`` positions, and every pair stays in
exactly one piece. Best-fit (arXiv 2404.10830) puts each piece, longest first, into the fullest row that
can still hold it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cut:
    """A run of positions of one document: inputs [start, start + positions), targets one further on."""

    start: int
    positions: int


def pieces_in(tokens: int, context: int) -> int:
    """How many pieces a document of ``tokens`` tokens has. One token alone has no pair and so no piece."""
    return -(-(tokens - 1) // context) if tokens > 1 else 0


def cut(tokens: int, context: int, piece: int) -> Cut:
    """The ``piece``-th piece of a document of ``tokens`` tokens."""
    start = piece * context
    return Cut(start, min(context, tokens - 1 - start))


def best_fit(lengths: Sequence[int], context: int) -> list[list[int]]:
    """Rows of indices into ``lengths``; each row's lengths sum to at most ``context``.

    Every index appears exactly once. Ties are broken by index, so equal input gives equal rows.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted: the fullest first
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        assert 0 < length <= context, length
        at = bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
            rows[row].append(index)
        else:
            room, row = context, len(rows)
            rows.append([index])
        if room > length:
            insort(open_rows, (room - length, row))
    return rows


def choose_rows(
    lengths: Sequence[int], context: int, rows: int, take_oldest: bool
) -> tuple[list[list[int]], list[int]]:
    """Pack ``lengths`` (oldest first), take the fullest ``rows`` rows, give back the indices left over, in order.

    With ``take_oldest`` the row of the oldest piece is among them, however empty: asked for now and then, it keeps a
    piece from waiting for ever for a partner that never comes. Fewer rows are returned when there are no more.
    """
    packed = best_fit(lengths, context)
    fill = [sum(lengths[i] for i in row) for row in packed]
    order = sorted(range(len(packed)), key=lambda r: (not (take_oldest and 0 in packed[r]), -fill[r], min(packed[r])))
    taken = [packed[r] for r in order[:rows]]
    left = sorted(i for r in order[rows:] for i in packed[r])
    return taken, left
