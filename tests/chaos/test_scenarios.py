"""A few of the injections of ``make chaos``, drawn anew at each run. The seed is printed; FACTORY_CHAOS_SEED draws the same again."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from tests.chaos.__main__ import WAYS, drawn, injections, table
from tests.chaos.campaign import Result, Site

# Not here: diagnose, whose replays take half a minute; judge, which is most of release; approve, which makes judge first.
EACH = {
    "ingest": 4, "checkout": 3, "store": 1, "segment": 1, "release": 1, "merge": 5, "revert": 4, "rewind": 1,
    "reject": 1, "erase": 4, "backup": 3, "restore": 2, "upgrade": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("chaos"))
    yield made
    made.close()


@pytest.mark.slow("whole runs of the factory, each killed and run again: two to three minutes")
@pytest.mark.parametrize("name", EACH)
def test_killed_torn_failed_or_without_power_it_ends_as_if_nothing_had_been(site: Site, name: str) -> None:
    seed = os.environ.get("FACTORY_CHAOS_SEED") or str(random.SystemRandom().randrange(10**6))
    print(f"FACTORY_CHAOS_SEED={seed}")
    chance = random.Random(f"{seed} {name}")
    effects, _ = site.straight(name)
    chosen = drawn(injections(effects, effects, WAYS, chance), effects, site.site, chance)[: EACH[name]]
    results = [site.inject(name, injection) for injection in chosen]
    assert all(result.fired for result in results)
    assert not [result for result in results if result.wrong], told(results)


def told(results: list[Result]) -> str:
    wrong = [f"{r.mode} {r.number} {r.again}, {r.effect}: {r.wrong} {r.said}" for r in results if r.wrong]
    return "\n".join([*wrong, table([vars(r) for r in results])])
