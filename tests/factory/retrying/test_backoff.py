"""Waits double, a changed date does not change them, and the same failure is not reported twice."""

from __future__ import annotations

from factory.retrying.failure_waits import FailureWaits


def test_waits_double_up_to_the_longest() -> None:
    now = [0.0]
    backoff = FailureWaits(10, 600, lambda: now[0])
    waits = []
    for _ in range(9):
        rest, _ = backoff.record_failure("export 2", "no")
        waits.append(rest.seconds)
        now[0] = rest.until - 1
        assert (
            backoff.is_waiting("export 2")
            and backoff.list_waiting_keys() == {"export 2"}
            and not backoff.is_waiting("judge 1")
        )
        now[0] = rest.until
        assert not backoff.list_waiting_keys()
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert backoff.record_failure("export 2", "no", longest_wait=60)[0].seconds == 60
    assert backoff.record_failure("train 3", "died", failures=2)[0].seconds == 20


def test_a_failure_that_differs_only_in_numbers_is_not_new() -> None:
    backoff = FailureWaits(10, 600)
    told = [
        backoff.record_failure("a pass", says)[1] for says in ("full: 12 bytes", "full: 7 bytes", "locked", "locked")
    ]
    assert told == [True, False, True, False]
    assert [backoff.record_failure("x", says, cause="disk")[1] for says in ("full (/a)", "full (/b)")] == [True, False]
    before = backoff.record_success("a pass")
    assert before and (before.failures, before.says) == (4, "locked") and backoff.record_success("a pass") is None
    assert backoff.record_failure("a pass", "locked")[1]


def test_ending_all_waits_keeps_the_number_of_failures() -> None:
    backoff = FailureWaits(1e6, 1e6)
    backoff.record_failure("export 2", "no")
    backoff.record_failure("export 2", "no")
    backoff.end_all_waits()
    assert not backoff.list_waiting_keys()
    assert backoff.record_failure("export 2", "no") == (backoff._rests["export 2"], False), "it is known, and no news"
    assert backoff._rests["export 2"].failures == 3
