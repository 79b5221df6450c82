"""The order of the duties as a table, and the duties that are due according to a real ledger and a real inbox."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory.core.workspace import Workspace
from factory.duties.duty import Duty, DutyState, DutyTask
from factory.duties.patches import OVERDUE_AUDIT
from factory.duties.requests import ASKED
from factory.duties.runner import find_next_duty_tasks
from factory.duties.table import DUTIES
from factory.duties.training import TRAIN
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
from factory.retrying.daemon_requests import Pause
from factory.training.planning import load_recipe
from tests.support.factory.errands import next_due
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard

SHARD = Path("inbox/a.jsonl")
FREE = {"open": None, "stuck": None, "pause": "", "low": False, "resting": ()}


def chosen(due: dict[str, object], **state: object) -> str:
    """The first errand when each duty in ``due`` has one subject and the factory has this ``state``."""
    seen = FREE | state
    table = tuple(replace(duty, due=made_due(duty, due)) for duty in DUTIES if not duty.each)
    look = DutyState(None, None, table, low_on_disk=bool(seen["low"]), resting=frozenset(seen["resting"]))  # type: ignore[arg-type, call-overload]
    pause = Pause(str(seen["pause"]), "ada", 0.0, "") if seen["pause"] else None
    vars(look).update(pause=pause, unfinished_segment=seen["open"], stuck_segment=seen["stuck"])
    return str(next(iter(find_next_duty_tasks(look)), ""))


def made_due(duty: Duty, due: dict[str, object]) -> Callable[[DutyState], Iterable[object]]:
    name = "overdue_audit" if duty is OVERDUE_AUDIT else duty.name
    if duty is TRAIN or name not in due:
        return duty.due if duty is TRAIN else lambda look: ()
    if duty is ASKED:
        return lambda look: [DutyTask.parse(str(due["asked"]), look.duties)]
    return lambda look: [due[name]]


@pytest.mark.parametrize(
    ("due", "state", "errand"),
    [
        ({}, {}, ""),
        ({"ingest": SHARD}, {}, "ingest a.jsonl"),
        ({"plan_trunk": None}, {}, "plan_trunk"),
        ({"plan_trunk": None, "ingest": SHARD}, {}, "ingest a.jsonl"),
        ({"ingest": SHARD}, {"open": 3}, "ingest a.jsonl"),
        ({}, {"open": 3}, "train 3"),
        ({"plan_anneal": 1, "plan_trunk": None}, {}, "plan_anneal 1"),
        ({"export": 2, "plan_anneal": 1}, {}, "export 2"),
        ({"judge": 1, "plan_trunk": None}, {}, "judge 1"),
        ({"release": 5, "judge": 1}, {}, "release 5"),
        ({"diagnose": 4, "release": 5}, {}, "diagnose 4"),
        ({"export": 2, "diagnose": 4}, {}, "export 2"),
        ({"word": 6, "judge": 1}, {}, "judge 1"),
        ({"word": 6, "overdue_audit": 3, "plan_trunk": None}, {}, "word 6"),
        ({"finish_release": 1}, {"open": 9}, "finish_release 1"),
        ({"plan_trunk": None}, {"stuck": 4}, ""),
        ({"plan_trunk": None, "ingest": SHARD}, {"stuck": 4}, "ingest a.jsonl"),
        ({"plan_anneal": 1, "replicate": 2}, {"stuck": 4}, ""),
        ({"audit": 3}, {}, "audit 3"),
        ({"audit": 3}, {"stuck": 4}, "audit 3"),
        ({"audit": 3, "plan_trunk": None}, {}, "plan_trunk"),  # it never delays training …
        ({"audit": 3, "plan_anneal": 1}, {}, "plan_anneal 1"),
        ({"replicate": 2, "plan_trunk": None, "audit": 3}, {}, "replicate 2"),
        ({"replicate": 2, "plan_anneal": 1}, {}, "plan_anneal 1"),
        ({"replicate": 2, "judge": 1}, {}, "judge 1"),
        ({"replicate": 2}, {"open": 9}, "train 9"),
        ({"audit": 3, "overdue_audit": 3, "plan_trunk": None}, {}, "audit 3"),  # … unless too many wait
        ({"audit": 3, "overdue_audit": 3, "plan_anneal": 1}, {}, "audit 3"),
        ({"audit": 3, "overdue_audit": 3}, {"open": 9}, "train 9"),
        ({"audit": 3, "overdue_audit": 3, "judge": 1}, {}, "judge 1"),
        ({"improve": 1, "audit": 3}, {}, "audit 3"),  # last of all that trains
        ({"improve": 1, "judge_held_again": 4}, {}, "judge_held_again 4"),  # what is begun is finished first
        ({"judge_held_again": 4, "ingest": SHARD}, {}, "ingest a.jsonl"),
        ({"judge_held_again": 4}, {"open": 9}, "train 9"),
        ({"judge_held_again": 4}, {"pause": "training"}, ""),
        ({"improve": 1, "judge": 1}, {}, "judge 1"),
        ({"improve": 1}, {"stuck": 4}, ""),
        ({"improve": 1}, {"pause": "training"}, ""),
        ({"improve": 1}, {"low": True}, ""),
        ({"ingest": SHARD, "finish_release": 1, "judge": 1}, {"open": 3, "pause": "everything"}, ""),
        ({"ingest": SHARD}, {"open": 3, "pause": "training"}, "ingest a.jsonl"),
        ({"export": 2}, {"open": 3, "pause": "training"}, "export 2"),
        (
            {"plan_trunk": None, "plan_anneal": 1, "diagnose": 4, "overdue_audit": 5, "audit": 5, "replicate": 2},
            {"pause": "training"},
            "",
        ),
        ({"judge": 1, "diagnose": 4}, {"pause": "training"}, "judge 1"),
        ({"asked": "audit 5", "judge": 1}, {}, "judge 1"),
        ({"asked": "audit 5", "overdue_audit": 3, "plan_trunk": None}, {}, "audit 5"),
        ({"asked": "diagnose 5"}, {"pause": "training"}, ""),
        ({"asked": "judge 5"}, {"pause": "training"}, "judge 5"),
        ({"asked": "judge 5"}, {"low": True}, ""),
        ({"judge": 1}, {"open": 3, "resting": ["train 3"]}, "judge 1"),
        ({"plan_anneal": 1, "plan_trunk": None, "audit": 3}, {"open": 3, "resting": ["train 3"]}, ""),
        ({"plan_anneal": 2, "plan_trunk": None, "audit": 1, "export": 4}, {"open": 3, "low": True}, ""),
        ({"plan_trunk": None, "export": 4, "release": 7}, {"open": 3, "low": True}, "release 7"),
        ({"plan_trunk": None, "export": 4, "ingest": SHARD}, {"open": 3, "low": True}, "ingest a.jsonl"),
        ({"diagnose": 1, "replicate": 2, "overdue_audit": 3, "word": 6}, {"low": True}, "word 6"),
    ],
)
def test_the_first_due_duty_that_is_not_held_is_chosen(
    due: dict[str, object], state: dict[str, object], errand: str
) -> None:
    assert chosen(due, **state) == errand


NAMES = sorted(
    {duty.name for duty in DUTIES if not duty.each and not duty.in_background} - {"train", "asked", "ingest"}
)


@given(st.sets(st.sampled_from([*NAMES, "overdue_audit"])), st.none() | st.just(9))
def test_due_work_is_done_unless_it_is_held(names: set[str], segment: int | None) -> None:
    """Without a pause, a full disk or a stuck segment, the factory does all due duties, although the done ones rest."""
    due: dict[str, object] = dict.fromkeys(names, 1)
    done: list[str] = []
    while errand := chosen(due, open=segment, resting=done):
        assert errand not in done
        done.append(errand)
    held = {"plan_anneal", "plan_trunk", "replicate", "audit", "judge_held_again", "improve"} if segment else set()
    expected = {f"{name.removeprefix('overdue_')} 1" for name in names - held}
    assert set(done) == expected | ({"train 9"} if segment else set())


def test_every_duty_has_a_description_and_a_unique_name() -> None:
    """Each duty has a description, duties of each pass come first, and a name belongs to one ``do``."""
    assert all(duty.description and duty.name.isidentifier() for duty in DUTIES)
    kinds = ["in_background" if duty.in_background else duty.each for duty in DUTIES]
    assert (
        kinds[: kinds.index("look") - 1] == sorted(kinds[: kinds.index("look") - 1])
        and "pass" not in kinds[kinds.index("look") :]
    )
    assert len({(duty.name, duty.do) for duty in DUTIES}) == len({duty.name for duty in DUTIES})


def test_the_due_duty_follows_the_ledger(workspace: Workspace, ledger: Ledger, tmp_path: Path) -> None:
    """Write the records of each duty one after the other: each makes the next duty due."""
    now = itertools.count(1.0)

    def put(table: object, **values: object) -> None:
        with ledger.begin() as tx:
            tx.execute(table.insert().values(**values))  # type: ignore[attr-defined]

    def seen(endless: bool = False) -> str:
        return next_due(Plant(workspace, ledger), endless=endless)

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
        assert seen() == f"train {number}"
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

    assert seen() == ""
    recipe = load_recipe(workspace)
    enough = 600 * recipe.tokens_per_step // recipe.mixture.max_epochs
    first = shard(1, recipe.tokens_per_step)
    assert seen() == "", "too little data for one step and an anneal: wait for more"
    second = shard(1 + 1, enough) | {"generation": 1}
    assert seen() == "plan_trunk"
    listed = [(str(s["id"]), str(s["path"]), 1) for s in (first, second)]
    plan, left_out = DataPlan.make_for_segment(
        recipe.mixture, "trunk", listed, recipe.seed
    ).copy_without_missing_domains({"code"}, 0, 5)
    assert left_out == ["chat", "docs"]
    put(data_plans, id="p", plan=json.loads(plan.to_json()), created_at=next(now))
    segment(1, "trunk", None)
    order = DataOrder(plan, context=recipe.model.context, batch=recipe.batch, vocab_size=4096)
    (tmp_path / "checkpoint" / "state.json").write_text(json.dumps({"sampler": order.state_dict()}))
    assert seen() == "plan_anneal 1"
    segment(2, "anneal", 1)
    assert seen() == "export 2"
    put(candidates, id=1, segment=2, checkpoint="c2", export_path="e", export_sha256="e", created_at=next(now))
    assert seen() == "judge 1"
    put(
        verdicts, id=1, gate="release", subject="candidate:1", policy_sha256="p", subject_sha256="e", outcome="promote", reasons=[],
        evidence={}, created_at=next(now),
    )  # fmt: skip
    assert seen() == "release 1"
    put(releases, number=1, candidate=1, verdict=1, state="decided", created_at=next(now))
    assert seen() == "finish_release 1"
    with ledger.begin() as tx:
        tx.execute(releases.update().values(state="published"))
    assert seen() == ""
    assert seen(endless=True) == "plan_trunk", "the daemon goes on while epochs are left"
    shard(3, enough)
    assert seen() == "plan_trunk", "a shard the trunk has not seen starts the next generation"
