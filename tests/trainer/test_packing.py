from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.packing import best_fit, choose_rows, cut, pieces_in

CONTEXT = 64
lengths = st.lists(st.integers(1, CONTEXT), max_size=200)


@given(tokens=st.integers(1, 1000), context=st.integers(1, 100))
def test_pieces_cover_every_pair_once_and_cut_nothing_that_fits(tokens: int, context: int) -> None:
    parts = [cut(tokens, context, i) for i in range(pieces_in(tokens, context))]
    covered = [p.start + i for p in parts for i in range(p.positions)]
    assert covered == list(range(tokens - 1))  # inputs; the target of input i is token i + 1
    assert all(1 <= p.positions <= context for p in parts)
    if tokens - 1 <= context:
        assert len(parts) <= 1


@given(lengths)
def test_best_fit_places_every_piece_once_and_overfills_no_row(sizes: list[int]) -> None:
    rows = best_fit(sizes, CONTEXT)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in row) <= CONTEXT for row in rows)
    assert len(rows) <= max(1, 2 * -(-sum(sizes) // CONTEXT))  # never worse than twice the least possible


def test_best_fit_takes_the_fullest_row_that_fits() -> None:
    # 60 and 50 open rows with 4 and 14 of room; 10 fits only the second, 4 fits the first exactly
    assert best_fit([60, 50, 10, 4], 64) == [[0, 3], [1, 2]]


@given(lengths, st.integers(1, 20), st.booleans())
def test_choose_rows_loses_nothing_and_takes_the_fullest(sizes: list[int], wanted: int, oldest: bool) -> None:
    rows, left = choose_rows(sizes, CONTEXT, wanted, take_oldest=oldest)
    assert sorted([i for row in rows for i in row] + left) == list(range(len(sizes)))
    assert len(rows) <= wanted
    if sizes and oldest:
        assert any(0 in row for row in rows)
    if not oldest:
        fills = sorted((sum(sizes[i] for i in row) for row in best_fit(sizes, CONTEXT)), reverse=True)
        assert [sum(sizes[i] for i in row) for row in rows] == fills[:wanted]


def test_a_piece_without_a_partner_goes_only_in_its_turn() -> None:
    waiting = [40, *[64] * 8]  # fuller rows may come in for ever
    assert [0] not in choose_rows(waiting, 64, 4, take_oldest=False)[0]
    assert [0] in choose_rows(waiting, 64, 4, take_oldest=True)[0]
