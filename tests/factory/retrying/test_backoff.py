"""Waits double, a changed date does not change them, and the same failure is not reported twice."""

from __future__ import annotations

from factory.retrying.failure_waits import FailureWaits


def test_waits_double_up_to_the_longest() -> None:
    now = [0.0]
    backoff = FailureWaits(10, 600, lambda: now[0])
    waits = []
    for _ in range(9):
        rest, _ = backoff.failed("export 2", "no")
        waits.append(rest.seconds)
        now[0] = rest.until - 1
        assert backoff.rests("export 2") and backoff.resting() == {"export 2"} and not backoff.rests("judge 1")
        now[0] = rest.until
        assert not backoff.resting()
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert backoff.failed("export 2", "no", longest=60)[0].seconds == 60
    assert backoff.failed("train 3", "died", failures=2)[0].seconds == 20


def test_news_is_what_changed_by_more_than_numbers() -> None:
    backoff = FailureWaits(10, 600)
    told = [backoff.failed("a pass", says)[1] for says in ("full: 12 bytes", "full: 7 bytes", "locked", "locked")]
    assert told == [True, False, True, False]
    assert [backoff.failed("x", says, about="disk")[1] for says in ("full (/a)", "full (/b)")] == [True, False]
    before = backoff.succeeded("a pass")
    assert before and (before.failures, before.says) == (4, "locked") and backoff.succeeded("a pass") is None
    assert backoff.failed("a pass", "locked")[1]


def test_a_person_ends_all_waits() -> None:
    backoff = FailureWaits(1e6, 1e6)
    backoff.failed("export 2", "no")
    backoff.failed("export 2", "no")
    backoff.try_all()
    assert not backoff.resting()
    assert backoff.failed("export 2", "no") == (backoff._rests["export 2"], False), "it is known, and no news"
    assert backoff._rests["export 2"].failures == 3
