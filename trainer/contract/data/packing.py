"""Packing: decides which pieces of documents share a row. Pure functions, one for each strategy, in one table: ``STRATEGIES``.

A row has ``context`` positions; a position is an (input, target) pair of neighbouring tokens of one document.
A document of L tokens therefore fills L - 1 positions: its last token is a target and never an input, its first an
input and never a target, and no pair spans two documents. With context 4:

    documents  a b c e | x y e | p q r s t u e          rows  (a b c)(.)   x y | p q r s | t u
    pairs      3         2       6 → pieces of 4 and 2        targets b c e     y e | q r s t | u e

A document longer than a row is cut every ``context`` positions, and every pair stays in exactly one piece. Pieces are
then drawn in random order, and a strategy makes rows of them. Pieces of 3, 2, 4 and 2, drawn in that order, rows
of 4, two rows wanted (``.`` is padding; the pieces that are left wait for the next step):

    document                  a a a . | b b . .          left  c c c c, d d    one piece a row
    token-budget              a a a . | b b . .          left  c c c c, d d    in the order drawn; here b and c do not fit into one row
    best-fit                  b b d d | c c c c          left  a a a           the fullest rows; the default
    length-bucketed           a a a . | c c c c          left  b b, d d        pieces of about the oldest one's length
    truncate-and-concatenate  a a a b | b c c c          left  c, d d          b and c are cut where their rows end

Only the last cuts a document that would fit a row; best-fit may cut pieces of longer ones once more, to fill gaps.
No strategy loses a position or uses it twice. The same example as calls:

    >>> cut_piece(4, context=4, piece=0), cut_piece(7, context=4, piece=0), cut_piece(7, context=4, piece=1)
    (DocumentPart(start=0, positions=3), DocumentPart(start=0, positions=4), DocumentPart(start=4, positions=2))
    >>> rows, left = STRATEGIES["truncate-and-concatenate"].pack([3, 2, 4, 2], [False] * 4, 4, 2, 0)
    >>> [[tuple(part) for part in row] for row in rows]  # (piece, first position of it, positions)
    [[(0, 0, 3), (1, 0, 1)], [(1, 1, 1), (2, 0, 3)]]
    >>> [tuple(part) for part in left]
    [(2, 3, 1), (3, 0, 2)]
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt

OLDEST_EVERY = 2  # every so many steps best-fit takes the piece that has waited longest, however full its row gets
SMALL_PIECES = 32  # a thirty-second of a row: too little context for a part of a piece, and cheap to pad
PARTNERS = 256  # number of pieces from which the oldest piece's row is completed: so many are enough to fill it
SPARE_ROWS = 16  # rows' worth of pieces to choose from beyond those that fill the rows
SPARE_PIECES = 256  # but never more than this many: of short pieces, fewer rows' worth are enough


class DocumentPart(NamedTuple):
    """A run of positions of one document: inputs [start, start + positions), targets one further on."""

    start: int
    positions: int


class RowPart(NamedTuple):
    """A run of positions of one of the pieces that a strategy was given; a whole piece, unless the strategy cuts."""

    piece: int  # its index
    start: int
    positions: int


Rows = list[list[RowPart]]
Packed = tuple[Rows, list[RowPart]]  # the rows, and what is left over, oldest first
Packer = Callable[[Sequence[int], Sequence[bool], int, int, int], Packed]


Count = TypeVar("Count", int, npt.NDArray[Any])


def count_pieces(tokens: Count, context: int) -> Count:
    """The number of pieces of a document of ``tokens`` tokens; 0 for a single token, which has no pair. ``tokens`` may be an array.

    >>> [count_pieces(tokens, context=4) for tokens in (1, 2, 5, 6)]
    [0, 1, 1, 2]
    """
    return -(-(tokens - 1) // context) * (tokens > 1)


def cut_piece(tokens: int, context: int, piece: int) -> DocumentPart:
    """The ``piece``-th piece (from 0) of a document of ``tokens`` tokens."""
    start = piece * context
    return DocumentPart(start, min(context, tokens - 1 - start))


# ---- strategies: (lengths of the pieces, oldest first; True for each piece of a document longer than a row; context; number of rows; step)
# → (rows, the pieces that are left). Given ``enough`` pieces (below), a strategy makes exactly the wanted rows, none of them empty.


def pack_one_per_row(
    lengths: Sequence[int], from_long_document: Sequence[bool], context: int, rows: int, step: int
) -> Packed:
    """Put each piece into a row of its own, in the order drawn."""
    return _whole(lengths, ([i] for i in range(min(rows, len(lengths)))))


def pack_next_fit(
    lengths: Sequence[int], from_long_document: Sequence[bool], context: int, rows: int, step: int
) -> Packed:
    """Put pieces into rows in the order drawn (next-fit). A piece that does not fit begins the next row."""
    found: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            if len(found) == rows:
                break
            found.append([])
            room = context
        found[-1].append(index)
        room -= length
    return _whole(lengths, found)


def pack_concatenated(
    lengths: Sequence[int], from_long_document: Sequence[bool], context: int, rows: int, step: int
) -> Packed:
    """Put pieces end to end in the order drawn. A piece that does not fit is cut, and its rest begins the next row."""
    found: Rows = [[] for _ in range(min(rows, -(-sum(lengths) // context)))]
    fill_row_gaps(found, lengths, range(len(lengths)), context)
    return found, _left(found, lengths)


def pack_length_bucketed(
    lengths: Sequence[int], from_long_document: Sequence[bool], context: int, rows: int, step: int
) -> Packed:
    """Put the oldest piece and those nearest to it in length into rows by best-fit, until a piece finds no room.

    As in Dataset Decomposition (arXiv 2405.13226 §3.2), a batch holds sequences of one length bucket. There, documents
    are cut into powers of two so that the buckets fill rows without padding; here nothing that fits is cut, and the bucket
    is centred on the oldest piece, so that every piece is packed at some step.
    """
    ratio = lambda i: max(lengths[i], lengths[0]) / min(lengths[i], lengths[0])
    nearest = sorted(range(len(lengths)), key=lambda i: (ratio(i), i))
    return _whole(lengths, find_best_fit_rows(lengths, context, nearest, rows))


def pack_best_fit(
    lengths: Sequence[int], from_long_document: Sequence[bool], context: int, rows: int, step: int
) -> Packed:
    """Choose the fullest rows of a best-fit-decreasing packing (arXiv 2404.10830), and fill their gaps from long documents.

    A piece of at least half a row may have no partner. If many pieces are so long, no packing of whole pieces fills the rows. But a document
    longer than a row is cut anyway, and it may be cut anywhere. Therefore, once there are no more full rows, such pieces are poured into
    the gaps. At the last of every ``OLDEST_EVERY`` steps one row is built around the oldest piece, which would otherwise wait as long as
    others fill rows better.
    """
    least_part = max(1, context // SMALL_PIECES)
    filled = lambda row: sum(lengths[i] for i in row)
    fullest_first = lambda row: (-filled(row), min(row))
    waiting = list(range(len(lengths)))
    chosen: list[list[int]] = []
    if step % OLDEST_EVERY == OLDEST_EVERY - 1 and waiting:
        chosen.append(choose_best_fitting_pieces(lengths, context, 0, waiting[1 : PARTNERS + 1]))
        taken = set(chosen[0])
        waiting = [i for i in waiting if i not in taken]
    liquid = [i for i in waiting if from_long_document[i] and 2 * lengths[i] >= context]
    solid = [i for i in waiting if not (from_long_document[i] and 2 * lengths[i] >= context)]
    packed = find_best_fit_rows(lengths, context, sorted(solid, key=lambda i: (-lengths[i], i)))
    packed.sort(key=fullest_first)
    full = [row for row in packed if filled(row) > context - least_part]
    whole = sorted([*full, *([i] for i in liquid if lengths[i] == context)], key=fullest_first)[: rows - len(chosen)]
    if len(chosen) + len(whole) == rows:
        chosen += whole
    else:
        chosen += full
        gappy = packed[len(full) :][: rows - len(chosen)]
        room = rows * context - sum(map(filled, chosen)) - sum(lengths[i] for i in liquid)
        for row in gappy:  # as few rows as needed to leave no more room than there is to pour
            if room <= 0:
                break
            chosen.append(row)
            room -= filled(row)
        chosen += [[i] for i in liquid if lengths[i] == context][: rows - len(chosen)]
    taken = {i for row in chosen for i in row}
    found = [[RowPart(i, 0, lengths[i]) for i in row] for row in chosen] + [[] for _ in range(rows - len(chosen))]
    shortest_first = sorted((i for i in liquid if i not in taken), key=lambda i: (lengths[i], i))
    fill_row_gaps(found, lengths, shortest_first, context, least_part)
    found = [row for row in found if row]
    return found, _left(found, lengths)


def fill_row_gaps(rows: Rows, lengths: Sequence[int], pieces: Sequence[int], context: int, least_part: int = 1) -> None:
    """Fill the gaps of ``rows`` in place with pieces, one after the other, each cut where its row ends.

    No gap of fewer than ``least_part`` positions is filled, and no part of a piece gets fewer.

    >>> rows = [[RowPart(0, 0, 6)], [RowPart(1, 0, 5)]]
    >>> fill_row_gaps(rows, [6, 5, 4], [2], context=8)
    >>> rows[0][1:], rows[1][1:]
    ([RowPart(piece=2, start=0, positions=2)], [RowPart(piece=2, start=2, positions=2)])
    """
    supply = [(piece, 0) for piece in reversed(pieces)]
    for row in rows:
        room = context - sum(part.positions for part in row)
        while room >= least_part and supply:
            piece, start = supply.pop()
            rest = lengths[piece] - start
            positions = rest if rest <= room else min(room, rest - least_part)
            if positions < min(rest, least_part):
                supply.append((piece, start))
                break
            row.append(RowPart(piece, start, positions))
            room -= positions
            if positions < rest:
                supply.append((piece, start + positions))


def find_best_fit_rows(
    lengths: Sequence[int], context: int, order: Iterable[int], rows: int | None = None
) -> list[list[int]]:
    """Rows of indices into ``lengths``, each piece in the fullest row that can still hold it, in the order given.

    Each row's lengths sum to at most ``context``. With ``rows``, packing ends before the first piece that would open
    one row more; without, every index of ``order`` appears exactly once.

    >>> find_best_fit_rows([60, 50, 10, 4], context=64, order=range(4))
    [[0, 3], [1, 2]]
    """
    found: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted: the fullest first
    for index in order:
        length = lengths[index]
        assert 0 < length <= context, length
        at = bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
            found[row].append(index)
        elif len(found) == rows:
            break
        else:
            room, row = context, len(found)
            found.append([index])
        if room > length:
            insort(open_rows, (room - length, row))
    return found


def choose_best_fitting_pieces(lengths: Sequence[int], context: int, first: int, others: Sequence[int]) -> list[int]:
    """``first`` and the pieces of ``others`` that together fill a row best; among equals, the longest pieces.

    >>> choose_best_fitting_pieces([5, 3, 2, 1], context=8, first=0, others=[1, 2, 3])
    [0, 1]
    """
    room = context - lengths[first]
    mask = (1 << (room + 1)) - 1
    longest_first = sorted(others, key=lambda i: (-lengths[i], i))
    reachable = [1]  # subset sums: bit s of an entry is set if some of the pieces so far sum to s
    for index in longest_first:
        reachable.append(reachable[-1] | reachable[-1] << lengths[index] & mask)
    total = reachable[-1].bit_length() - 1
    row = [first]
    for index, before in zip(reversed(longest_first), reversed(reachable[:-1])):
        if not before >> total & 1:  # without this piece the sum cannot be reached
            row.append(index)
            total -= lengths[index]
    assert total == 0
    return row


def _whole(lengths: Sequence[int], rows: Iterable[Sequence[int]]) -> Packed:
    """Rows of whole pieces."""
    found = [[RowPart(i, 0, lengths[i]) for i in row] for row in rows]
    return found, _left(found, lengths)


def _left(rows: Rows, lengths: Sequence[int]) -> list[RowPart]:
    """The parts of pieces that are in no row, in their order. A piece is used from its start."""
    used = [0] * len(lengths)
    for row in rows:
        for part in row:
            used[part.piece] += part.positions
    return [RowPart(i, used[i], length - used[i]) for i, length in enumerate(lengths) if used[i] < length]


# ---- how many pieces must wait before a strategy packs: (number of pieces, their positions, context, rows) → True if that is enough


def are_pieces_enough_for_rows(pieces: int, positions: int, context: int, rows: int) -> bool:
    return pieces >= rows


def are_positions_enough_for_rows(pieces: int, positions: int, context: int, rows: int) -> bool:
    return positions >= rows * context


def has_spare_row(pieces: int, positions: int, context: int, rows: int) -> bool:
    """True if the last row ends because the next piece does not fit, not because there is none."""
    return positions >= (rows + 1) * context


def has_spare_pieces(pieces: int, positions: int, context: int, rows: int) -> bool:
    """True if the pieces fill the rows, and ``SPARE_ROWS`` rows' worth or ``SPARE_PIECES`` pieces are left."""
    spare = positions - rows * context
    return spare >= SPARE_ROWS * context or spare * pieces >= SPARE_PIECES * positions > 0


@dataclass(frozen=True)
class PackingStrategy:
    """One way to make rows of drawn pieces."""

    pack: Packer
    enough: Callable[[int, int, int, int], bool]
    cuts: bool = False  # True if a document may be cut that would fit a row


STRATEGIES: Mapping[str, PackingStrategy] = MappingProxyType(  # by the recipe's batch.packing
    {
        "document": PackingStrategy(pack_one_per_row, are_pieces_enough_for_rows),
        "token-budget": PackingStrategy(pack_next_fit, has_spare_row),
        "truncate-and-concatenate": PackingStrategy(pack_concatenated, are_positions_enough_for_rows, cuts=True),
        "length-bucketed": PackingStrategy(pack_length_bucketed, has_spare_pieces),
        "best-fit": PackingStrategy(pack_best_fit, has_spare_pieces),
    }
)
