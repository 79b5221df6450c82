"""The decision is a table; what the daemon sees is read from a real ledger and a real inbox."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.actions import Action
from factory.core.workspace import Workspace
from factory.daemon import World, next_action, observe
from factory.ingest.inbox import arrived
from factory.ledger.ledger import (
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
from factory.ledger.plant import Plant
from factory.training.planning import load_recipe
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard

SHARD = Path("inbox/a.jsonl")


@pytest.mark.parametrize(
    ("world", "action"),
    [
        (World(), None),
        (World(arrived=(SHARD,)), Action("ingest", SHARD)),
        (World(trunk_steps=2), Action("plan_trunk")),
        (World(trunk_steps=2, arrived=(SHARD,)), Action("ingest", SHARD)),
        (World(open_segment=3, arrived=(SHARD,)), Action("ingest", SHARD)),
        (World(open_segment=3), Action("train", 3)),
        (World(unannealed_trunk=1, trunk_steps=2), Action("plan_anneal", 1)),
        (World(unexported_anneal=2, unannealed_trunk=1), Action("export", 2)),
        (World(unjudged_candidate=1, trunk_steps=2), Action("judge", 1)),
        (World(unreleased_promotion=5, unjudged_candidate=1), Action("release", 5)),
        (World(unworded_diagnosis=6, unjudged_candidate=1), Action("judge", 1)),
        (World(unworded_diagnosis=6, overdue_audit=3, trunk_steps=2), Action("word", 6)),
        (World(unfinished_release=1, open_segment=9), Action("finish_release", 1)),
        (World(failed_segment=4, trunk_steps=2), None),
        (World(failed_segment=4, trunk_steps=2, arrived=(SHARD,)), Action("ingest", SHARD)),
        (World(failed_segment=4, unannealed_trunk=1), None),
        (World(waiting_audit=3), Action("audit", 3)),
        (World(waiting_audit=3, failed_segment=4), Action("audit", 3)),
        (World(waiting_audit=3, trunk_steps=2), Action("plan_trunk")),  # it never delays training …
        (World(waiting_audit=3, unannealed_trunk=1), Action("plan_anneal", 1)),
        (World(unmeasured_replicas=2, trunk_steps=2, waiting_audit=3), Action("replicate", 2)),
        (World(unmeasured_replicas=2, unannealed_trunk=1), Action("plan_anneal", 1)),
        (World(unmeasured_replicas=2, unjudged_candidate=1), Action("judge", 1)),
        (World(unmeasured_replicas=2, open_segment=9), Action("train", 9)),
        (World(waiting_audit=3, overdue_audit=3, trunk_steps=2), Action("audit", 3)),  # … unless too many wait
        (World(waiting_audit=3, overdue_audit=3, unannealed_trunk=1), Action("audit", 3)),
        (World(waiting_audit=3, overdue_audit=3, open_segment=9), Action("train", 9)),
        (World(waiting_audit=3, overdue_audit=3, unjudged_candidate=1), Action("judge", 1)),
        (World(paused="everything", arrived=(SHARD,), open_segment=3, unfinished_release=1), None),
        (World(paused="training", arrived=(SHARD,), open_segment=3), Action("ingest", SHARD)),
        (World(paused="training", unexported_anneal=2, open_segment=3), Action("export", 2)),
        (
            World(
                paused="training",
                open_segment=3,
                trunk_steps=2,
                unannealed_trunk=1,
                undiagnosed_anomaly=4,
                overdue_audit=5,
            ),
            None,
        ),
        (World(paused="training", unjudged_candidate=1, undiagnosed_anomaly=4), Action("judge", 1)),
        (World(asked=Action("audit", 5), unjudged_candidate=1), Action("judge", 1)),
        (World(asked=Action("audit", 5), overdue_audit=3, trunk_steps=2), Action("audit", 5)),
        (World(asked=Action("diagnose", 5), paused="training"), None),
        (World(asked=Action("judge", 5), paused="training"), Action("judge", 5)),
        (World(open_segment=3, segment_rests=True, unjudged_candidate=1), Action("judge", 1)),
        (World(open_segment=3, segment_rests=True, unannealed_trunk=1, trunk_steps=2, waiting_audit=3), None),
    ],
)
def test_next_action(world: World, action: Action | None) -> None:
    assert next_action(world) == action


@given(
    st.builds(
        World,
        *[st.none() | st.integers(1, 9)] * 3,
        st.just(()),
        *[st.none() | st.integers(1, 9)] * 6,
        st.integers(0, 3),
        asked=st.none() | st.just(Action("diagnose", 1)),
    )
)
def test_work_is_never_left_while_nothing_failed(world: World) -> None:
    """With no failure, the factory rests only when every field is at rest."""
    world = replace(world, failed_segment=None)
    assert (next_action(world) is None) == (world == World())


def test_inbox_takes_only_whole_regular_files(workspace: Workspace, ledger: Ledger) -> None:
    for name in ("b.jsonl", "a.jsonl", ".hidden", "c.jsonl.part"):
        (workspace.inbox / name).write_text("{}")
        os.utime(workspace.inbox / name, (time.time() - 60,) * 2)
    (workspace.inbox / "fresh.jsonl").write_text("{}")
    (workspace.inbox / "folder").mkdir()
    (workspace.inbox / "link.jsonl").symlink_to("/etc/passwd")
    assert [path.name for path in arrived(Plant(workspace, ledger))] == ["a.jsonl", "b.jsonl"]
    assert [path.name for path in arrived(Plant(workspace, ledger), settle=0)] == ["a.jsonl", "b.jsonl", "fresh.jsonl"]


def test_observe_walks_with_the_ledger(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    """Write what each action records, one at a time, and see the next action follow."""
    now = itertools.count(1.0)

    def put(table: object, **values: object) -> None:
        with ledger.begin() as tx:
            tx.execute(table.insert().values(**values))  # type: ignore[attr-defined]

    def seen(endless: bool = False) -> Action | None:
        return next_action(observe(Plant(workspace, ledger), endless=endless))

    def shard(number: int, tokens: int) -> dict[str, object]:
        ids = np.random.default_rng(number).integers(3, 4096, tokens, dtype=np.uint32)
        documents = [
            TokenizedDocument(f"{number}:{i}", f"{number}:{i}", "code", "s", "", part, np.ones(len(part), np.bool_))
            for i, part in enumerate(np.array_split(ids, 40))
        ]
        made = write_token_shard(tmp_path, documents, vocab_size=4096, tokenizer_sha256="k")
        at = next(now)
        put(shards, sha256=f"s{number}", name="s", path="s", bytes=1, state="ingested", ingested_at=at)
        put(
            token_shards,
            id=made.id,
            shard=f"s{number}",
            path=str(made.path),
            tokenizer="k",
            documents=40,
            tokens=tokens,
            domains={"code": {"documents": 40, "tokens": tokens, "supervised_tokens": tokens}},
            created_at=at,
        )
        return {"id": made.id, "path": str(made.path), "generation": number}

    def segment(number: int, kind: str, parent: int | None) -> None:
        put(
            segments, id=number, kind=kind, parent=parent, generation=1, recipe="r", recipe_json={}, recipe_sha256="r", data_plan="p",
            code_commit="c", first_step=0, last_step=5, state="planned", folder="f", created_at=next(now),
        )  # fmt: skip
        assert seen() == Action("train", number)
        with ledger.begin() as tx:
            tx.execute(segments.update().where(segments.c.id == number).values(state="done"))
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        put(
            checkpoints,
            id=f"c{number}",
            segment=number,
            step=5,
            path=str(tmp_path / "checkpoint"),
            created_at=next(now),
        )

    assert seen() is None
    recipe = load_recipe(workspace)
    enough = 600 * recipe.tokens_per_step // recipe.mixture.max_epochs
    first = shard(1, recipe.tokens_per_step)
    assert seen() is None, "too little data for one step and an anneal: wait for more"
    second = shard(1 + 1, enough) | {"generation": 1}
    assert seen() == Action("plan_trunk")
    listed = [(str(s["id"]), str(s["path"]), 1) for s in (first, second)]
    plan, left_out = DataPlan.make(recipe.mixture, "trunk", listed, recipe.seed).of_arrived({"code"}, 0, 5)
    assert left_out == ["chat", "docs"]
    put(data_plans, id="p", plan=json.loads(plan.to_json()), created_at=next(now))
    segment(1, "trunk", None)
    order = DataOrder(plan, context=recipe.model.context, batch=recipe.batch, vocab_size=4096)
    (tmp_path / "checkpoint" / "state.json").write_text(json.dumps({"sampler": order.state_dict()}))
    assert seen() == Action("plan_anneal", 1)
    segment(2, "anneal", 1)
    assert seen() == Action("export", 2)
    put(candidates, id=1, segment=2, checkpoint="c2", export_path="e", export_sha256="e", created_at=next(now))
    assert seen() == Action("judge", 1)
    put(
        verdicts, id=1, gate="release", subject="candidate:1", policy_sha256="p", subject_sha256="e", outcome="promote", reasons=[],
        evidence={}, created_at=next(now),
    )  # fmt: skip
    assert seen() == Action("release", 1)
    put(releases, number=1, candidate=1, verdict=1, state="decided", created_at=next(now))
    assert seen() == Action("finish_release", 1)
    with ledger.begin() as tx:
        tx.execute(releases.update().values(state="published"))
    assert seen() is None
    assert seen(endless=True) == Action("plan_trunk"), "the daemon goes on while epochs are left"
    shard(3, enough)
    assert seen() == Action("plan_trunk"), "a shard the trunk has not seen starts the next generation"
