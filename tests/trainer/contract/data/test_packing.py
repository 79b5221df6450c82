from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.data.packing import (
    OLDEST_EVERY,
    SMALL_PIECES,
    STRATEGIES,
    Packed,
    RowPart,
    choose_best_fitting_pieces,
    count_pieces,
    cut_piece,
    fill_row_gaps,
    find_best_fit_rows,
)

CONTEXT = 64
lengths = st.lists(st.integers(1, CONTEXT), max_size=200)
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def pieces_of(documents: Sequence[int]) -> tuple[list[int], list[bool]]:
    """(lengths of the pieces, True for each piece of a document longer than a row) of documents with these numbers of positions."""
    cuts = [
        (cut_piece(n + 1, CONTEXT, i).positions, n > CONTEXT)
        for n in documents
        for i in range(count_pieces(n + 1, CONTEXT))
    ]
    return [positions for positions, _ in cuts], [long for _, long in cuts]


documents = st.lists(st.integers(1, 5 * CONTEXT) | st.integers(1, 12), max_size=80).map(pieces_of)


def all_parts(packed: Packed) -> list[tuple[int, int, int]]:
    rows, left = packed
    return sorted([tuple(part) for row in rows for part in row] + [tuple(part) for part in left])


@given(tokens=st.integers(1, 1000), context=st.integers(1, 100))
def test_pieces_cover_every_pair_once_and_cut_nothing_that_fits(tokens: int, context: int) -> None:
    parts = [cut_piece(tokens, context, i) for i in range(count_pieces(tokens, context))]
    covered = [p.start + i for p in parts for i in range(p.positions)]
    assert covered == list(range(tokens - 1))  # inputs; the target of input i is token i + 1
    assert all(1 <= p.positions <= context for p in parts)
    if tokens - 1 <= context:
        assert len(parts) <= 1


@every_strategy
@given(pieces=documents, rows=st.integers(1, 20), step=st.integers(0, 40))
def test_no_strategy_loses_or_repeats_a_position_or_overfills_a_row(
    name: str, pieces: tuple[list[int], list[bool]], rows: int, step: int
) -> None:
    sizes, long = pieces
    strategy = STRATEGIES[name]
    packed = strategy.pack(sizes, long, CONTEXT, rows, step)
    covered = [(piece, start + i) for piece, start, positions in all_parts(packed) for i in range(positions)]
    assert covered == [(piece, i) for piece, size in enumerate(sizes) for i in range(size)]
    assert len(packed[0]) <= rows
    assert all(0 < sum(part.positions for part in row) <= CONTEXT for row in packed[0])
    if strategy.enough(len(sizes), sum(sizes), CONTEXT, rows):
        assert len(packed[0]) == rows
    assert [part.piece for part in packed[1]] == sorted({part.piece for part in packed[1]})  # oldest first
    assert packed == strategy.pack(sizes, long, CONTEXT, rows, step)


@every_strategy
@given(pieces=documents, rows=st.integers(1, 20), step=st.integers(0, 40))
def test_only_a_cutting_strategy_cuts_pieces_that_fit_a_row(
    name: str, pieces: tuple[list[int], list[bool]], rows: int, step: int
) -> None:
    sizes, long = pieces
    found = STRATEGIES[name].pack(sizes, long, CONTEXT, rows, step)
    split = {piece for piece, _, positions in all_parts(found) if positions < sizes[piece]}
    if not STRATEGIES[name].cuts:
        assert all(long[piece] for piece in split)
        assert all(part.positions >= CONTEXT // SMALL_PIECES for row in found[0] for part in row if part.piece in split)


def test_each_strategy_packs_the_docstrings_example_as_shown() -> None:
    sizes = [3, 2, 4, 2]
    expected = {
        "document": ("aaa bb", "cccc dd"),
        "token-budget": ("aaa bb", "cccc dd"),
        "best-fit": ("bbdd cccc", "aaa"),
        "length-bucketed": ("aaa cccc", "bb dd"),
        "truncate-and-concatenate": ("aaab bccc", "c dd"),
    }
    shown = lambda parts: "".join("abcd"[part.piece] * part.positions for part in parts)
    for name, strategy in STRATEGIES.items():
        rows, left = strategy.pack(sizes, [False] * 4, 4, 2, 0)
        assert (" ".join(map(shown, rows)), " ".join(shown([part]) for part in left)) == expected[name]


@given(lengths)
def test_best_fit_places_every_piece_once_and_overfills_no_row(sizes: list[int]) -> None:
    rows = find_best_fit_rows(sizes, CONTEXT, sorted(range(len(sizes)), key=lambda i: -sizes[i]))
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in row) <= CONTEXT for row in rows)
    assert len(rows) <= max(1, 2 * -(-sum(sizes) // CONTEXT))  # never worse than twice the least possible


def test_best_fit_puts_a_piece_into_the_fullest_row_that_can_hold_it() -> None:
    # 60 and 50 open rows with 4 and 14 of room; 10 fits only the second, 4 fits the first exactly
    assert find_best_fit_rows([60, 50, 10, 4], 64, range(4)) == [[0, 3], [1, 2]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_choose_best_fitting_pieces_fills_a_row_as_far_as_possible(sizes: list[int]) -> None:
    row = choose_best_fitting_pieces(sizes, 40, 0, range(1, len(sizes)))
    every = itertools.chain.from_iterable(itertools.combinations(sizes[1:], n) for n in range(len(sizes)))
    assert row[0] == 0 and len(set(row)) == len(row)
    assert sum(sizes[i] for i in row) == max(s for s in (sizes[0] + sum(some) for some in every) if s <= 40)


@given(documents, st.integers(1, 20), st.integers(0, 15))
def test_best_fit_chooses_the_fullest_rows_or_the_oldest_piece_in_its_turn(
    pieces: tuple[list[int], list[bool]], rows: int, step: int
) -> None:
    sizes, _ = pieces
    found, _ = STRATEGIES["best-fit"].pack(sizes, [False] * len(sizes), CONTEXT, rows, step)
    if step % OLDEST_EVERY == OLDEST_EVERY - 1:
        assert not sizes or found[0][0].piece == 0  # the oldest's turn
    else:
        order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        fills = sorted((sum(sizes[i] for i in row) for row in find_best_fit_rows(sizes, CONTEXT, order)), reverse=True)
        assert [sum(part.positions for part in row) for row in found] == fills[:rows]


def test_best_fit_packs_a_piece_without_a_partner_only_in_its_turn() -> None:
    waiting = [40, *[64] * 8]  # fuller rows may come in for ever
    alone = lambda step: [(0, 0, 40)] in STRATEGIES["best-fit"].pack(waiting, [False] * 9, 64, 4, step)[0]
    assert [alone(step) for step in range(OLDEST_EVERY + 1)] == [False] * (OLDEST_EVERY - 1) + [True, False]


def test_best_fit_fills_the_gaps_between_short_documents_from_long_ones() -> None:
    # no two of 40 share a row of 64: without the long documents' pieces the rows would be 62.5 % full
    sizes, long = [40] * 6 + [64] * 2, [False] * 6 + [True] * 2
    rows, left = STRATEGIES["best-fit"].pack(sizes, long, 64, 6, 0)
    assert [sum(part.positions for part in row) for row in rows] == [64, 64, 64, 64, 64, 48]
    assert left == [] and sum(len(row) for row in rows) == 6 + 7  # 64 as 24, 24, 16 and as 8, 24, 24, 8
    rows, _ = STRATEGIES["best-fit"].pack(sizes, [False] * 8, 64, 6, 0)
    assert [sum(part.positions for part in row) for row in rows] == [64, 64, 40, 40, 40, 40]


@pytest.mark.parametrize(("crumb", "filled"), [(2, True), (3, False)])
def test_a_gap_smaller_than_a_crumb_is_not_filled(crumb: int, filled: bool) -> None:
    rows = [[RowPart(0, 0, 6)]]
    fill_row_gaps(rows, [6, 2], [1], context=8, least_part=crumb)
    assert rows == [[RowPart(0, 0, 6), *([RowPart(1, 0, 2)] if filled else [])]]


@given(st.lists(st.integers(0, CONTEXT), max_size=12), lengths, st.integers(1, 8))
def test_fill_gaps_cuts_no_part_smaller_than_a_crumb(gaps: list[int], sizes: list[int], crumb: int) -> None:
    held = [size for size in sizes if size >= 2 * crumb]
    solid = len(held)
    rows = [[RowPart(solid, 0, CONTEXT - gap)] if gap < CONTEXT else [] for gap in gaps]
    fill_row_gaps(rows, held, range(solid), CONTEXT, crumb)
    parts = [part for row in rows for part in row if part.piece < solid]
    assert all(part.positions >= crumb for part in parts)
    for piece in range(solid):
        placed = sorted(part for part in parts if part.piece == piece)
        at = 0
        for part in placed:
            assert part.start == at
            at += part.positions
        assert at == 0 or at == held[piece] or held[piece] - at >= crumb
    if parts and sum(part.positions for part in parts) < sum(held):  # something is left: no large gap is
        assert all(CONTEXT - sum(part.positions for part in row) < 2 * crumb for row in rows)


def walk(
    name: str, documents: Sequence[int], rows: int, steps: int, seed: int = 0
) -> list[list[list[tuple[int, int]]]]:
    """The rows of some steps as (piece, positions), with pieces drawn in random order."""
    sizes, long = pieces_of(documents)
    order = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    strategy = STRATEGIES[name]
    pending: list[tuple[int, int]] = []
    made = []
    for step in range(steps):
        while not strategy.enough(len(pending), sum(n for _, n in pending), CONTEXT, rows):
            pending.append((i := order.pop(), sizes[i]))
        found, left = strategy.pack([n for _, n in pending], [long[i] for i, _ in pending], CONTEXT, rows, step)
        made.append([[(pending[part.piece][0], part.positions) for part in row] for row in found])
        pending = [(pending[part.piece][0], part.positions) for part in left]
    return made


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("spread", [0.5, 0.8, 1.2])
@pytest.mark.parametrize("median", [0.25, 1, 4])
def test_best_fit_uses_99_percent_of_the_positions_from_the_first_batch_on(
    rows: int, spread: float, median: float
) -> None:
    """The lengths are log-normal, like those of texts, with a median of a quarter of a row, of one row and of four."""
    drawn = np.random.default_rng(1).lognormal(np.log(median * CONTEXT), spread, 20_000)
    made = walk("best-fit", np.maximum(1, drawn.astype(int)).tolist(), rows, 100)
    used = np.cumsum([sum(n for row in step for _, n in row) for step in made])
    assert (used >= 0.99 * rows * CONTEXT * np.arange(1, 101)).all()


def test_batches_of_length_buckets_vary_less_in_length_than_the_data() -> None:
    documents = np.random.default_rng(2).integers(4, CONTEXT, 8000).tolist()
    spread = lambda step: np.std([n for row in step for _, n in row]) / np.mean([n for row in step for _, n in row])
    mixed, alike = (
        np.mean([spread(s) for s in walk(name, documents, 8, 80)]) for name in ("token-budget", "length-bucketed")
    )
    assert alike < mixed / 2
    ages = walk("length-bucketed", documents, 8, 80)
    assert len({i for step in ages for row in step for i, _ in row}) == sum(len(row) for step in ages for row in step)
