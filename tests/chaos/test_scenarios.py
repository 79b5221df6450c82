"""A few random injections of ``make chaos``, different ones in each run. The seed is printed; FACTORY_CHAOS_SEED repeats the same ones."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import power
from tests.chaos.__main__ import WAYS, drawn, fault_of, faults, injections, shorter, states, table
from tests.chaos.campaign import AGAIN, END, KILLED, TEAR, Injection, Result, Site
from tests.chaos.shim import ERRORS, Effect, places

# Not here: diagnose, whose replays take half a minute; judge, which is most of release; approve, which makes judge first.
EACH = {
    "ingest": 3, "checkout": 3, "store": 1, "segment": 1, "release": 1, "merge": 3, "revert": 2, "rewind": 1,
    "reject": 1, "erase": 3, "backup": 3, "restore": 2, "replace": 1, "upgrade": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("chaos"))
    yield made
    made.close()


@pytest.mark.slow("whole runs of the factory, each killed and run again: two to three minutes")
@pytest.mark.parametrize("name", EACH)
def test_after_any_fault_a_scenario_ends_like_an_undisturbed_run(site: Site, name: str) -> None:
    seed = os.environ.get("FACTORY_CHAOS_SEED") or str(random.SystemRandom().randrange(10**6))
    print(f"FACTORY_CHAOS_SEED={seed}")
    chance = random.Random(f"{seed} {name}")
    effects = site.straight(name).effects
    results: list[Result] = []
    for injection in drawn(injections(effects, effects, WAYS, chance), effects, site.site, chance)[: EACH[name] + 3]:
        if sum(result.fired for result in results) < EACH[name]:
            results.append(site.inject(name, injection))
    assert sum(result.fired for result in results) == EACH[name]
    assert all(result.fired or result.effect == END for result in results)  # a recovery has fewer effects than a run
    assert not [result for result in results if result.wrong], told(results)


@pytest.mark.long("half a minute: a run that is held before each effect, and two runs for each of three faults")
def test_a_fault_is_injected_in_the_shortest_recovery(tmp_path: Path) -> None:
    """A second kill, a torn write and an error are injected into recoveries from the last crash states, not into whole runs."""
    site = Site(tmp_path, crashes=True)
    try:
        straight = site.straight("checkout")
        last = states(straight, None)[-12:]
        seconds = {injection.number: site.inject("checkout", injection).seconds for injection in last}
        shortest = site.shortest("checkout", seconds)
        every = injections(straight.effects, straight.effects, ("tear", "pair", "error"), random.Random(1))
        meant = {fault: shorter(fault, shortest) for fault in faults(every, straight.effects, site.site).values()}
        for mode in (TEAR, AGAIN, "EIO"):
            (_, place), injection = next((fault, found) for fault, found in meant.items() if found and fault[0] == mode)
            result = site.inject("checkout", injection)
            assert result.fired and (result.mode, result.effect) == (mode, place), told([result])
            assert injection.state in seconds and not result.wrong, told([result])
    finally:
        site.close()


@pytest.mark.slow("a release, a restore of its ledger, and one that is killed: half a minute")
def test_a_commit_that_only_sqlites_log_has_is_restored(site: Site) -> None:
    """This also holds after a restore that was killed between the renames of the old and the new ledger."""
    straight = site.straight("replace")
    assert straight.state["ledger"]["events"]["noted"] == 1
    renamed = [
        e.number
        for e in straight.effects
        if e.kind == "rename" and e.path.endswith(("ledger.db", "ledger.db-wal", ".restored"))
    ]
    assert len(renamed) >= 3
    results = [site.inject("replace", Injection(KILLED, number)) for number in renamed]
    assert not [result for result in results if result.wrong], told(results)


def test_a_second_kill_hits_a_recovery_and_not_a_run_from_the_start() -> None:
    shortest = {"rename plant/a (trainer)": [(1, 7), (4, 3), (9, 2)]}
    assert shorter((AGAIN, "rename plant/a (trainer)"), shortest) == Injection(AGAIN, 3, 4)
    assert shorter(("EIO", "rename plant/a (trainer)"), shortest) == Injection("EIO", 7, 1)
    assert shorter((TEAR, "write plant/a (trainer)"), shortest) is None
    assert shorter((power.LOSSES[0], "rename plant/a (trainer)"), shortest) is None


def told(results: list[Result]) -> str:
    wrong = [f"{r.mode} {r.number} {r.state}, {r.effect}: {r.wrong} {r.said}" for r in results if r.wrong]
    return "\n".join([*wrong, table([vars(r) for r in results], {}, {}, {})])


def test_each_fault_comes_once_before_any_comes_twice(tmp_path: Path) -> None:
    """Three lines of one file count as one place. A full disk does not stop a removal."""
    metrics = [
        Effect(number, "write", 0, 8, 1, 1, 0, str(tmp_path / f"plant/segments/000{number}-trunk/metrics.jsonl"), "", "trainer")
        for number in (1, 2, 3)
    ]  # fmt: skip
    effects = [*metrics, Effect(4, "unlink", 0, 0, 2, 1, 0, str(tmp_path / "plant/root"), "", "factory run")]
    chance = random.Random(1)
    every = injections(effects, effects, WAYS, chance)
    found = faults(every, effects, tmp_path)
    of_a_write = {KILLED, AGAIN, TEAR, *ERRORS}
    of_a_removal = (of_a_write | set(power.LOSSES)) - {TEAR, "ENOSPC"}
    at_the_end = 1
    assert len(set(found.values())) == len(of_a_write) + len(of_a_removal) + at_the_end == 15
    assert len(every) == 3 * len(of_a_write) + len(of_a_removal) + at_the_end
    first = drawn(every, effects, tmp_path, chance)[: len(set(found.values()))]
    assert {found[injection] for injection in first} == set(found.values())
    row = {
        "scenario": "a", "number": 3, "effect": places(metrics, tmp_path)[3], "fired": True, "wrong": [], "passes": 1, "seconds": 1.0,
        "steps": 0, "alike": 1,
    }  # fmt: skip
    rows = [row | {"mode": mode} for mode in ("tear", "tear", "EIO", "of a place that is not there")]
    rows.append(row | {"mode": KILLED, "alike": 3})
    line = table(rows, {"a": set(found.values())}, {"a": 4}, {"a": {fault_of(row) for row in rows}}).splitlines()[1]
    assert line.split()[:9] == ["a", "3", "of", "5", "3", "of", "15", "5", "5"]
