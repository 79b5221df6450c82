"""The decision is a table; what the daemon sees is read from a real ledger and a real inbox."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.daemon import Action, World, arrived, next_action, observe
from factory.ledger import (
    Ledger,
    candidates,
    checkpoints,
    data_plans,
    releases,
    segments,
    shards,
    token_shards,
    verdicts,
)
from factory.workspace import Workspace

SHARD = Path("inbox/a.jsonl")


@pytest.mark.parametrize(
    ("world", "action"),
    [
        (World(), None),
        (World(arrived=(SHARD,)), Action("ingest", SHARD)),
        (World(new_token_shards=2), Action("plan_trunk")),
        (World(new_token_shards=2, arrived=(SHARD,)), Action("ingest", SHARD)),
        (World(open_segment=3, arrived=(SHARD,)), Action("train", 3)),
        (World(unannealed_trunk=1, new_token_shards=2, arrived=(SHARD,)), Action("plan_anneal", 1)),
        (World(unexported_anneal=2, arrived=(SHARD,)), Action("export", 2)),
        (World(unjudged_candidate=1, new_token_shards=1), Action("judge", 1)),
        (World(unreleased_promotion=5, arrived=(SHARD,)), Action("release", 5)),
        (World(unfinished_release=1, open_segment=9), Action("finish_release", 1)),
        (World(failed_segment=4, new_token_shards=2), None),
        (World(failed_segment=4, new_token_shards=2, arrived=(SHARD,)), Action("ingest", SHARD)),
        (World(failed_segment=4, unannealed_trunk=1), None),
    ],
)
def test_next_action(world: World, action: Action | None) -> None:
    assert next_action(world) == action


@given(
    st.builds(
        World,
        *[st.none() | st.integers(1, 9)] * 3,
        st.just(()),
        *[st.none() | st.integers(1, 9)] * 4,
        st.integers(0, 3),
    )
)
def test_work_is_never_left_while_nothing_failed(world: World) -> None:
    """With no failure, the factory rests only when every field is at rest."""
    world = replace(world, failed_segment=None)
    assert (next_action(world) is None) == (world == World())


def test_inbox_takes_only_whole_regular_files(workspace: Workspace, tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", ".hidden", "c.jsonl.part"):
        (workspace.inbox / name).write_text("{}")
        os.utime(workspace.inbox / name, (time.time() - 60,) * 2)
    (workspace.inbox / "fresh.jsonl").write_text("{}")
    (workspace.inbox / "folder").mkdir()
    (workspace.inbox / "link.jsonl").symlink_to("/etc/passwd")
    assert [path.name for path in arrived(workspace)] == ["a.jsonl", "b.jsonl"]
    assert [path.name for path in arrived(workspace, settle=0)] == ["a.jsonl", "b.jsonl", "fresh.jsonl"]


def test_observe_walks_with_the_ledger(workspace: Workspace, ledger: Ledger) -> None:
    """Write what each action records, one at a time, and see the next action follow."""
    now = itertools.count(1.0)

    def put(table: object, **values: object) -> None:
        with ledger.begin() as tx:
            tx.execute(table.insert().values(**values))  # type: ignore[attr-defined]

    def seen() -> Action | None:
        return next_action(observe(workspace, ledger))

    def segment(number: int, kind: str, parent: int | None) -> None:
        put(
            segments, id=number, kind=kind, parent=parent, generation=1, recipe="r", recipe_json={}, recipe_sha256="r", data_plan="p",
            code_commit="c",            first_step=0, last_step=5, state="planned", folder="f", created_at=next(now),
        )  # fmt: skip
        assert seen() == Action("train", number)
        with ledger.begin() as tx:
            tx.execute(segments.update().where(segments.c.id == number).values(state="done"))

    assert seen() is None
    put(shards, sha256="s", name="s", path="s", bytes=1, state="ingested", ingested_at=next(now))
    put(
        token_shards,
        id="t",
        shard="s",
        path="t",
        tokenizer="k",
        documents=1,
        tokens=9,
        domains={},
        created_at=next(now),
    )
    assert seen() == Action("plan_trunk")
    put(data_plans, id="p", plan={"token_shards": [{"id": "t", "generation": 1}]}, created_at=next(now))
    segment(1, "trunk", None)
    assert seen() == Action("plan_anneal", 1)
    segment(2, "anneal", 1)
    assert seen() == Action("export", 2)
    put(checkpoints, id="c", segment=2, step=5, path="c", created_at=next(now))
    put(candidates, id=1, segment=2, checkpoint="c", export_path="e", export_sha256="e", created_at=next(now))
    assert seen() == Action("judge", 1)
    put(
        verdicts,
        id=1,
        gate="release",
        subject="candidate:1",
        policy_sha256="p",
        subject_sha256="e",
        outcome="promote",
        reasons=[],
        evidence={},
        created_at=next(now),
    )
    assert seen() == Action("release", 1)
    put(releases, number=1, candidate=1, verdict=1, state="decided", created_at=next(now))
    assert seen() == Action("finish_release", 1)
    with ledger.begin() as tx:
        tx.execute(releases.update().values(state="published"))
    assert seen() is None
    put(
        token_shards,
        id="u",
        shard="s",
        path="u",
        tokenizer="k",
        documents=1,
        tokens=9,
        domains={},
        created_at=next(now),
    )
    assert seen() == Action("plan_trunk"), "a shard the trunk has not seen starts the next generation"
