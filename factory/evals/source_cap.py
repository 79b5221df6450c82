"""How much of a domain one source may be, in bytes that are scored: documents of one source rise and fall together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate


def within(share: float, sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """How many documents each source gives, so that none gives more than ``share`` of the bytes of all. ``sizes``: by source, bytes of its
    documents in the order in which it gives them.

    Each gives its first one, whatever its size, and more up to one number of bytes, the same for all sources and the largest with which none of
    them is above the share. Where so few sources cannot, all.

    >>> within(0.25, {"a": [2000] * 9, "b": [300] * 9, "c": [300] * 9, "d": [300] * 9, "e": [300] * 9})
    {'a': 1, 'b': 9, 'c': 9, 'd': 9, 'e': 9}
    >>> within(0.25, {"a": [2000] * 9, "b": [300], "c": [300]})
    {'a': 9, 'b': 1, 'c': 1}
    """
    sums = {source: list(accumulate(ones)) for source, ones in sizes.items() if ones}
    if len(sums) * share <= 1:
        return {source: len(ones) for source, ones in sums.items()}

    def fits(given: Mapping[str, int]) -> bool:
        total = sum(sums[source][count - 1] for source, count in given.items())
        return all(count == 1 or sums[source][count - 1] <= share * total for source, count in given.items())

    limits = sorted({one for ones in sums.values() for one in ones}, reverse=True)
    each = ({source: max(1, bisect_right(ones, most)) for source, ones in sums.items()} for most in limits)
    return next(filter(fits, each), dict.fromkeys(sums, 1))
