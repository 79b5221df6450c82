from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.data.permutation import Permutation


@given(n=st.integers(1, 700), key=st.text(max_size=10))
def test_a_permutation_has_every_value_once(n: int, key: str) -> None:
    assert sorted(Permutation(n, key).values_at(np.arange(n, dtype=np.uint64)).tolist()) == list(range(n))


def test_single_values_equal_the_values_computed_together() -> None:
    whole = Permutation(3000, "a").values_at(np.arange(3000, dtype=np.uint64)).tolist()
    single = Permutation(3000, "a")
    assert [single[i] for i in (2999, 0, 1024, 1023, 5)] == [whole[i] for i in (2999, 0, 1024, 1023, 5)]


def test_the_order_of_a_key_never_changes() -> None:
    """A change here would reorder the data of every run that is under way."""
    assert [Permutation(10, "key")[i] for i in range(10)] == [2, 5, 4, 8, 1, 7, 6, 9, 0, 3]


def test_keys_give_different_orders_and_neighbours_are_separated() -> None:
    a, b = (Permutation(10_000, key).values_at(np.arange(10_000, dtype=np.uint64)).astype(np.int64) for key in "ab")
    assert (a == b).mean() < 0.002
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(a, np.arange(10_000))[0, 1]) < 0.05
