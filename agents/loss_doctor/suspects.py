"""Finds the documents that cause an anomaly. Documents that stand out are masked; then those whose mask is not needed are released."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from agents.loss_doctor.arms import DocumentScore
from agents.loss_doctor.curves import UsualValue

STANDS_OUT = 3.5  # robust deviations of the logarithm: Iglewicz and Hoaglin 1993
ABOUT = 0.75  # share of a document's distance from the usual (a logarithm): a document beyond it is about as odd
LIKE_IT = (
    0.01  # if this share of the earlier documents, and at least two, are as odd as a document, it is rare but not bad
)

POWERS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# If this share of a sample of the shards that joined, and at least five, are alike, this is the kind of these shards.
MANY, LEAST_MANY = 0.05, 5
LEARNT = 0.75  # share of the odd documents that must have been learnt
FAR_BETTER = 0.8  # of the loss of a predictor that knows only the tokens' frequencies


def find_suspect_documents(
    scores: Sequence[DocumentScore], most_share: float = 0.5, skip_familiar: bool = True
) -> list[str]:
    """Keys of the window's documents that stand out, the worst first; at most the share ``most_share`` of the window.

    A document is compared with the window and the earlier samples. It stands out if its loss, or the norm of its own gradient, is too high or
    too low: a leaked or repeated document is too easy.
    With ``skip_familiar``, a document that is as odd as some earlier ones is left out: it is hard, not bad.

    >>> calm = [DocumentScore(f"d{n}", 2.0 + n / 100, 1.0 + n / 100) for n in range(9)]
    >>> find_suspect_documents([*calm, DocumentScore("bad", 9.0, 30.0)])
    ['bad']
    """
    window = [score for score in scores if score.in_window]
    gone = {score.key: find_largest_deviation(score, [*window, *select_earlier_samples(scores)]) for score in window}
    before = select_earlier_samples(scores)
    excused = {score.key for score in window if skip_familiar and has_similar_documents(score, before)}
    ranked = sorted(
        (key for key in gone if gone[key] > STANDS_OUT and key not in excused), key=lambda key: (-gone[key], key)
    )
    return ranked[: max(1, int(most_share * len(window)))]


def rank_documents(scores: Sequence[DocumentScore]) -> list[str]:
    """Keys of all of the window's documents, those that stand out most first.

    >>> rank_documents([DocumentScore("fair", 2.0, 1.0), DocumentScore("calm", 2.0, 1.0), DocumentScore("bad", 9.0, 30.0)])
    ['bad', 'calm', 'fair']
    """
    window = [score for score in scores if score.in_window]
    return [
        score.key for score in sorted(window, key=lambda score: (-find_largest_deviation(score, window), score.key))
    ]


def find_odd_documents(scores: Sequence[DocumentScore]) -> list[str]:
    """Keys of all of the window's documents that stand out among the earlier documents, by the rule of ``find_suspect_documents``.

    In a window that is mostly bad, a comparison within the window fails. Without earlier documents, every document counts as odd.

    >>> before = [DocumentScore(f"d{n}", 2.0 + n / 100, 1.0 + n / 100, in_window=False) for n in range(9)]
    >>> window = [DocumentScore("fair", 2.0, 1.0), *(DocumentScore(f"bad{n}", 9.0, 30.0) for n in range(20))]
    >>> len(find_odd_documents([*before, *window]))
    20
    """
    before = select_earlier_samples(scores)
    return [score.key for score in scores if score.in_window and _strange(score, before)]


def _strange(score: DocumentScore, before: Sequence[DocumentScore]) -> bool:
    return not before or (
        find_largest_deviation(score, before) > STANDS_OUT and not has_similar_documents(score, before)
    )


def select_earlier_samples(scores: Sequence[DocumentScore]) -> list[DocumentScore]:
    """The sampled documents of the earlier shards."""
    return [score for score in scores if not score.in_window and not score.joined]


def select_new_shard_samples(scores: Sequence[DocumentScore]) -> list[DocumentScore]:
    """The sampled documents of the shards that joined last, without the window's."""
    return [score for score in scores if not score.in_window and score.joined]


def find_documents_typical_of_shards(scores: Sequence[DocumentScore]) -> set[str]:
    """Keys of the window's odd documents that are like many others of the shards that joined.

    The oddity belongs to the kind of the shards. The shards have a new form, or are mostly bad. Single documents are not at fault in either case.

    >>> window = [DocumentScore("odd", 6.0, 60.0, joined=True), DocumentScore("fair", 2.0, 20.0)]
    >>> before = [DocumentScore(f"d{n}", 2.0, 20.0, in_window=False) for n in range(90)]
    >>> joined = [DocumentScore(f"n{n}", 6.0 if n < 30 else 2.0, 60.0 if n < 30 else 20.0, 1, False, True) for n in range(90)]
    >>> find_documents_typical_of_shards([*window, *before, *joined]), find_documents_typical_of_shards([*window, *before, *joined[28:]])
    ({'odd'}, set())
    """
    before, joined = select_earlier_samples(scores), select_new_shard_samples(scores)
    odd = [
        score
        for score in scores
        if score.in_window and score.joined and before and find_largest_deviation(score, before) > STANDS_OUT
    ]
    return {score.key for score in odd if joined and has_similar_documents(score, joined, before, MANY, LEAST_MANY)}


def has_learnt_odd_documents(newest: Sequence[DocumentScore], end: Sequence[DocumentScore]) -> bool:
    """True if the model learnt the odd documents of the new shards between two checkpoints, whose scores are given.

    Most odd documents of the sample must be predicted better than before, and far better than by token frequency alone (all that can be
    learnt of garbage). They must not be so easy that they were learnt by heart.

    >>> before = [DocumentScore(f"d{n}", 2.0, 20.0, in_window=False) for n in range(90)]
    >>> joined = lambda loss: [DocumentScore(f"n{n}", loss, 20.0, 1, False, True, 5.5) for n in range(90)]
    >>> [has_learnt_odd_documents([*before, *joined(6.0)], [*before, *joined(loss)]) for loss in (3.5, 5.2, 0.1)]
    [True, False, False]
    """
    then, now = select_earlier_samples(newest), select_earlier_samples(end)
    if not then or not now:
        return False
    usual = median(score.loss for score in now)
    odd = {score.key: score.loss for score in select_new_shard_samples(newest) if _strange(score, then)}
    better = [
        s for s in select_new_shard_samples(end) if s.loss < min(odd.get(s.key, 0.0), FAR_BETTER * s.by_frequency)
    ]
    return bool(odd) and sum(s.loss >= usual or not _strange(s, now) for s in better) >= LEARNT * len(odd)


def has_similar_documents(
    score: DocumentScore,
    among: Sequence[DocumentScore],
    before: Sequence[DocumentScore] | None = None,
    least_share: float = LIKE_IT,
    least_number: int = 2,
) -> bool:
    """True if a ``least_share`` of ``among``, and at least ``least_number``, are about as odd in the same direction, by loss and by gradient.

    The oddity is the distance from the usual values of ``before``, or of ``among`` if ``before`` is None.

    >>> before = [DocumentScore(f"d{n}", 2.0, 20.0, 16, in_window=False) for n in range(150)]
    >>> before += [DocumentScore(f"hard{n}", 6.0, 60.0, 16, in_window=False) for n in range(3)]
    >>> [has_similar_documents(DocumentScore("new", loss, gradient, 16), before) for loss, gradient in ((6.5, 60.0), (12.0, 60.0), (6.5, 200.0))]
    [True, False, False]
    """
    if not among or not (math.isfinite(score.loss) and math.isfinite(score.gradient)):
        return False
    usual = among if before is None else before
    # The norm of a sum of n gradients grows as n if they are alike, as √n if they are not, and mostly in between.
    return any(_peers(score, among, usual, power) >= max(least_number, least_share * len(among)) for power in POWERS)


def _peers(score: DocumentScore, among: Sequence[DocumentScore], before: Sequence[DocumentScore], power: float) -> int:
    """The number of documents about as far from the usual, in the same direction, by loss and by gradient / tokens^``power``."""
    peers = list(among)
    measures: tuple[Callable[[DocumentScore], float], ...] = (lambda s: s.loss, lambda s: s.gradient / s.tokens**power)
    for of in measures:
        usual = median(of(other) for other in before)
        distance = {s.key: math.log(max(of(s), 1e-12) / max(usual, 1e-12)) for s in (score, *peers)}
        peers = [other for other in peers if distance[other.key] / (distance[score.key] or 1e-12) >= ABOUT]
    return len(peers)


def find_largest_deviation(score: DocumentScore, among: Sequence[DocumentScore]) -> float:
    """The larger of the robust deviations of a document's loss and gradient from the others'; infinite if one is not finite."""
    if not (math.isfinite(score.loss) and math.isfinite(score.gradient)):
        return math.inf
    logs = lambda values: [math.log(max(value, 1e-12)) for value in values if math.isfinite(value)]
    found = []
    for mine, others in ((score.loss, [o.loss for o in among]), (score.gradient, [o.gradient for o in among])):
        usual = UsualValue.from_values(logs(others))
        deviation = max(usual.deviation, 0.05)  # of a logarithm: five per cent
        found.append(abs(logs([mine])[0] - usual.center) / deviation)
    return max(found)


def find_smallest_masked_set(ranked: Sequence[str], is_gone: Callable[[tuple[str, ...]], bool]) -> list[str]:
    """A smallest set of documents whose masking clears the anomaly: if any one of them is not masked, the anomaly stays.

    First a search by halves finds the shortest beginning of the ranking that is enough: more masked documents cannot bring the anomaly
    back. Then QuickXplain (Junker, AAAI 2004) runs within it. ``is_gone`` tells whether masking a set clears the anomaly, and is true of all
    of ``ranked``. It is called O(log n + g log(n / g)) times for g guilty of n.

    >>> asked = []
    >>> def gone(masked): asked.append(masked); return {"b", "e"} <= set(masked)
    >>> sorted(find_smallest_masked_set(list("abcdefgh"), gone)), len(asked) < 12
    (['b', 'e'], True)
    """
    low, high = 1, len(ranked)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_gone(tuple(ranked[:middle])) else (middle + 1, high)
    return _needed([], False, list(ranked[:high]), is_gone)


def _needed(kept: list[str], added: bool, group: list[str], gone: Callable[[tuple[str, ...]], bool]) -> list[str]:
    """The part of ``group`` that is needed in addition to ``kept``; both together are enough. ``added``: ``kept`` alone may be enough."""
    if added and gone(tuple(kept)):
        return []
    if len(group) == 1:
        return group
    first, second = group[: len(group) // 2], group[len(group) // 2 :]
    of_second = _needed(kept + first, True, second, gone)
    of_first = _needed(kept + of_second, bool(of_second), first, gone)
    return of_first + of_second
