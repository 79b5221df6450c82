"""The gate of recipe changes on real runs: a null change has no gain, harm is rejected, a gain is promoted, merged and used in training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from agents.core.proposal import Edit, Proposal
from factory.code_loop import approvals, proposing, revalidating, submitting
from factory.code_loop.agent_runs import AgentOptions, needs_language_model
from factory.code_loop.workbench import LiveWorkbench
from factory.core.errors import InputError
from factory.core.workspace import find_checkout_root
from factory.gates.recipe.policy import RunsPolicy
from factory.gates.recipe.runs import RecipeSide, choose_run_lengths, lengthen_runs_in_policy, make_run_recipe
from factory.gates.training_start import find_training_start
from factory.git import repository
from factory.ledger.ledger import agent_runs, exchanges, proposals
from factory.ledger.plant import Plant
from factory.runs.arm_runner import list_runs
from factory.show.pages import proposal_report
from factory.training import planning
from factory.training.certificate_runs import list_changed_training_files
from kernels.contract.message import Message
from tests.support.factory.code_loop import Made, make
from tests.support.factory.engineer import recorded
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.git import git
from tests.support.replay_server import RecordedSession, ReplayServer
from trainer.contract.recipe import Recipe
from trainer.optim.schedule import compute_lr_share

TINY = "policies/recipes/tiny.yaml"
RATE, LOW = "lr: 3e-3", "lr: 3e-4"
RUNS = {"seeds": 3, "steps": 12, "tail_steps": 5, "held_out_documents": 2, "held_out_bytes": 1024, "domain_margin": 0.1}


@dataclass(frozen=True)
class Judged:
    """A proposal as the ledger has it."""

    number: int
    row: dict[str, Any]
    verdict: dict[str, Any]

    @property
    def runs(self) -> dict[str, Any]:
        return dict(self.verdict["evidence"]["stages"]["runs"])


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    made = make()
    policy = yaml.safe_load((find_checkout_root() / "policies" / "gates" / "recipe.yaml").read_text())
    own = made.workspace.root / "policies" / "gates" / "recipe.yaml"
    own.write_text(yaml.safe_dump(policy | {"runs": RUNS}))
    head = made.base
    yield made
    own.unlink()
    git(made.target, "reset", "-q", "--hard", head)
    for live in made.workspace.worktrees.glob("live-*"):
        if live.name != f"live-{head[:12]}":
            repository.remove_worktree(made.target, live)


def judged(made: Made, number: int) -> Judged:
    row = made.ledger.select_first(sa.select(proposals).where(proposals.c.number == number))
    assert row is not None
    return Judged(number, row, made.verdict_on(number))


def submitted(made: Made, *swaps: tuple[str, str], path: str = TINY, base: str = "") -> Judged:
    """The recipe with some of its text swapped, through the whole gate."""
    base = base or made.base
    text = git(made.target, "show", f"{base}:{path}") + "\n"
    for old, new in swaps:
        assert old in text
        text = text.replace(old, new)
    drafted = Proposal("recipe-scout", f"quality:{swaps}", "Try it", "h", 0.01, (Edit(path, text),))
    return judged(made, submitting.submit_proposal(Plant(made.workspace, made.ledger), drafted, base))


# -- without a run -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("swap", "outcome", "expected"),
    [
        (("seed: 1", "seed: 2"), "reject", expect("recipe.not_allowed", key="seed")),
        (("precision: fp32", "precision: bf16"), "reject", expect("recipe.not_allowed", key="precision")),
        (("d_ff: 64", "d_ff: 128"), "reject", expect("recipe.not_allowed", key="model.d_ff")),
        (("max_epochs: 4", "max_epochs: 9"), "reject", expect("recipe.not_allowed", key="mixture.max_epochs")),
        (("lr: 3e-3", "lr: 3e-3\n  name: muon"), "reject", expect("recipe.not_allowed", key="optimizer.name")),
        (("warmup_steps: 4", "warmup_steps: 2"), "reject", expect("recipe.no_effect", key="schedule.warmup_steps")),
        (("lr: 3e-3", "lr: -1"), "reject", None),
        (("lr: 3e-3", "lr: .inf"), "reject", expect("recipe.not_finite", key="optimizer.lr")),
        (("lr: 3e-3", "lr: &a 3e-4"), "reject", expect("patch.yaml_tag")),
        (
            ("sequences: 8", "sequences: 4096"),
            "hold",
            expect("recipe.cannot_run", error="recipe.batch_too_large"),
        ),
        (
            ("anneal_steps: 6", "anneal_steps: 1000000"),
            "hold",
            expect("recipe.cannot_run", error="recipe.anneal_too_long", steps=17),
        ),
    ],
)
def test_forbidden_changes_are_refused_before_any_run(
    made: Made, swap: tuple[str, str], outcome: str, expected: Expected | None
) -> None:
    found = submitted(made, swap)
    assert found.verdict["outcome"] == outcome
    reasons = found.verdict["reasons"][:1]
    assert tells(reasons, expected) if expected else "optimizer.lr" in Message.from_json(reasons[0])
    assert made.left_behind() == []


def test_a_computing_key_with_a_learnt_key_is_refused(made: Made) -> None:
    found = submitted(made, (RATE, "lr: 6e-3"), ("compile: false", "compile: true"))
    assert found.verdict["outcome"] == "reject" and tells(
        found.verdict["reasons"][:1], expect("recipe.not_allowed", key="compile")
    )


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (RATE, "lr: 6e-3", "optimizer.lr"),
        (', "*": 0.1', "", "mixture.weights.*"),
    ],  # a key that is gone is a change, too
)
def test_code_with_a_learnt_key_is_refused_by_the_patch_gate(made: Made, old: str, new: str, key: str) -> None:
    text = (made.target / TINY).read_text()
    assert old in text
    text = text.replace(old, new)
    code = (made.target / "trainer" / "tools" / "average.py").read_text() + "\n"
    edits = (Edit(TINY, text), Edit("trainer/tools/average.py", code))
    drafted = Proposal("x", "quality:x", "Both", "h", 0.01, edits)
    verdict = made.verdict_on(submitting.submit_proposal(Plant(made.workspace, made.ledger), drafted, made.base))
    assert (verdict["gate"], verdict["outcome"]) == ("patch", "reject")
    assert tells(verdict["reasons"][:1], expect("patch.computes_other", path=TINY, key=key))


def test_a_change_of_a_recipe_that_this_workspace_does_not_train_is_held(made: Made) -> None:
    found = submitted(made, ("lr: 4e-3", "lr: 5e-3"), path="policies/recipes/demo.yaml")
    assert found.verdict["outcome"] == "hold"
    assert tells(found.verdict["reasons"][:1], expect("gates.unused_recipe", used=TINY))
    own = made.workspace.own_recipe_path()
    own.parent.mkdir(parents=True)
    own.write_text((made.target / TINY).read_text())
    try:
        found = submitted(made, (RATE, "lr: 5e-3"))
        bench = LiveWorkbench(Plant(made.workspace, made.ledger), made.base, find_training_start(made.ledger))  # type: ignore[arg-type]
        assert proposing._scout(bench, AgentOptions(), 1, submitting.submit_proposal) == []
    finally:
        own.unlink()
        own.parent.rmdir()
    assert found.verdict["outcome"] == "hold"
    assert tells(found.verdict["reasons"][:1], expect("gates.own_recipe", used=TINY))


def test_a_model_as_scout_gets_two_drafts_refused_and_one_judged(made: Made) -> None:
    """Over a real server: two drafts that cannot be, and one that goes to a branch and to the gate."""
    bench = LiveWorkbench(Plant(made.workspace, made.ledger), made.base, find_training_start(made.ledger))  # type: ignore[arg-type]
    with ReplayServer(recorded("scout")) as server:
        options = AgentOptions(server.url, "replay")
        (number,) = proposing._scout(bench, options, 1, submitting.submit_proposal)
    told = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert "step 5, loss" in told[0] and "optimizer.lr" in told[1] and "sequences: 8" in told[2]
    assert "model.d_ff'" in told[3] and "optimizer.lr cannot be -0.001" in told[4]
    found = judged(made, number)
    assert found.row["target"] == "quality:optimizer.lr+schedule.warmup_steps" and found.row["agent"] == "recipe-scout"
    assert (found.verdict["gate"], found.verdict["outcome"]) == ("recipe", "reject")
    assert tells(found.verdict["reasons"][:1], expect("recipe.no_effect", key="schedule.warmup_steps"))
    diff = git(made.target, "diff", made.base, found.row["commit"]).splitlines()
    assert sorted(line for line in diff if re.match(r"[+] ", line)) == ["+  lr: 0.0022", "+  warmup_steps: 2"]
    run = made.ledger.select_first(sa.select(agent_runs).where(agent_runs.c.proposal == number))
    assert run is not None and (run["state"], run["agent"]) == ("proposed", "recipe-scout")
    spent = made.ledger.select_rows(sa.select(exchanges).where(exchanges.c.run == run["id"]))
    assert len(spent) == 4 and spent[-1]["tokens"] == 1000 and made.left_behind() == []


def test_an_unknown_target_key_is_refused_before_any_request(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = LiveWorkbench(Plant(made.workspace, made.ledger), made.base, find_training_start(made.ledger))  # type: ignore[arg-type]
    with ReplayServer(RecordedSession(turns=[])) as server:
        options = AgentOptions(server.url, "m", target="optimizer.rate")
        with pytest.raises(InputError, match="not a key of the recipe"):
            proposing._scout(bench, options, 1, submitting.submit_proposal)
    with pytest.raises(InputError, match="no endpoint"):
        proposing._scout(bench, AgentOptions(model="m"), 1, submitting.submit_proposal)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    assert needs_language_model(made.workspace, AgentOptions()) and not needs_language_model(
        made.workspace, AgentOptions("none")
    )
    with pytest.raises(InputError, match="--endpoint none cannot be used"):
        proposing._scout(bench, AgentOptions("none", model="m"), 1, submitting.submit_proposal)
    assert server.requests == [] and made.left_behind() == []


# -- what is run -----------------------------------------------------------------------------------------------------
def recipe(**parts: dict[str, Any]) -> Recipe:
    raw = Recipe.load(find_checkout_root() / TINY).model_dump()
    return Recipe.parse({key: value | parts.get(key, {}) if key in parts else value for key, value in raw.items()})


def test_a_candidate_never_gets_more_tokens_than_the_baseline() -> None:
    policy, base = RunsPolicy(seeds=3, steps=12, tail_steps=5), recipe()
    for sequences in (2, 3, 4, 7, 8, 16, 60):
        other = recipe(batch={"sequences": sequences})
        size = choose_run_lengths(policy, 6, base, other)["candidate"]
        tokens = other.count_tokens_between(6, 6 + size.trunk + size.tail)
        most = base.count_tokens_between(6, 6 + 17)
        assert tokens <= most < tokens + other.tokens_per_step and size.trunk >= 1 and size.tail >= 1
    longer = choose_run_lengths(policy, 6, base, recipe(schedule={"anneal_steps": 12}))
    assert (longer["baseline"].trunk, longer["baseline"].tail) == (12, 5)
    assert (longer["candidate"].trunk, longer["candidate"].tail) == (7, 10)


def test_changes_that_short_runs_favour_get_longer_runs() -> None:
    policy, base = RunsPolicy(seeds=3, steps=12, tail_steps=5, calmer_longer=3), recipe()
    for parts, times in (
        ({"optimizer": {"lr": 2e-3}}, 3),
        ({"batch": {"sequences": 16}}, 3),
        ({"schedule": {"warmup_steps": 20}}, 3),  # at step 6, a third of the rate
        ({"schedule": {"warmup_steps": 2}}, 1),
        ({"optimizer": {"lr": 4e-3}}, 1),
        ({"batch": {"sequences": 4}}, 1),
        ({"optimizer": {"weight_decay": 0.2}}, 1),
    ):
        size = choose_run_lengths(lengthen_runs_in_policy(policy, 6, base, recipe(**parts)), 6, base, base)["baseline"]
        assert (size.trunk, size.tail) == (12 * times, 5 * times)


def test_every_run_ends_in_an_anneal_to_zero_on_the_data_that_follows(made: Made) -> None:
    start = find_training_start(made.ledger)
    assert start is not None
    other = recipe(
        schedule={"final_lr_share": 0.5}, mixture={"weights": {"code": 1.0}, "anneal_weights": {"docs": 1.0}}
    )
    size = choose_run_lengths(RunsPolicy(seeds=3, steps=12, tail_steps=5), start.step, other, other)["candidate"]
    raw = make_run_recipe(other, keep_final_lr=False, precision="fp32")
    held = {"code", "docs", "chat"}
    side = RecipeSide("candidate", other, raw, size, held, "c" * 40, "")
    trunk, tail = (arm.make_spec() for arm in side.make_arms(start, 7, Path("/run")).values())
    assert (trunk["kind"], trunk["first_step"], trunk["last_step"], trunk["restart_data"]) == ("trunk", 6, 18, True)
    assert (tail["kind"], tail["first_step"], tail["last_step"], tail["restart_data"]) == ("anneal", 18, 23, False)
    assert tail["initial_checkpoint"] == "/run/trunk/checkpoints/step-00000018"
    assert trunk["data_plan"]["weights"] == {"code": 1.0} and tail["data_plan"]["weights"] == {"docs": 1.0}
    assert trunk["data_plan"]["seed"] == tail["data_plan"]["seed"] == 7
    floors = [make_run_recipe(other, own_floor, "fp32")["schedule"]["final_lr_share"] for own_floor in (False, True)]
    assert floors == [0.0, 0.5]  # the recipe's own only where that is what is proposed
    last = compute_lr_share(Recipe.parse(raw), "anneal", 22, 18, 23)
    assert 0 < last < compute_lr_share(Recipe.parse(raw), "anneal", 18, 18, 23) < 1


# -- real runs -------------------------------------------------------------------------------------------------------
def test_a_null_change_has_no_gain_and_both_sides_of_a_pair_share_their_data(made: Made) -> None:
    found = submitted(made, (RATE, "lr: 3.0003e-3"))
    assert found.verdict["outcome"] == "reject"
    assert tells(found.verdict["reasons"][:1], expect("recipe.no_gain"))
    runs = found.runs
    pairs = zip(runs["baseline"], runs["candidate"], strict=True)
    # the same data on both sides: on other data every domain is some thousandths away
    assert max(abs(before[domain] - after[domain]) for before, after in pairs for domain in before) < 5e-4
    assert len({json.dumps(run) for run in runs["baseline"]}) == 3
    assert runs["steps"] == {"baseline": [12, 5], "candidate": [12, 5]} and runs["same_cost"] is True
    assert found.verdict["gate"] == "recipe" and found.row["patch_sha256"] == found.verdict["subject_sha256"]
    assert made.left_behind() == []
    rows = [run for run in list_runs(made.ledger) if run["subject"] == f"proposal:{found.number}"]
    assert [(run["purpose"], run["state"], run["there"]) for run in rows] == [("recipe gate", "done", False)] * 12
    assert {run["arm"]["last"] - run["arm"]["first"] for run in rows} == {12, 5}


def test_a_harmful_change_is_rejected_and_the_report_shows_the_loss(made: Made) -> None:
    found = submitted(made, (RATE, "lr: 0.9"))
    assert found.verdict["outcome"] == "reject"
    assert tells(found.verdict["reasons"][:1], expect("recipe.worse"))
    proposal_report.write_proposal_report(Plant(made.workspace, made.ledger), found.number)
    page = Path(judged(made, found.number).row["report"]).read_text()
    measured = re.search(r"Measured</dt><dd>(-[0-9.]+) bits per byte", page)
    assert measured and float(measured[1]) == pytest.approx(
        found.verdict["evidence"]["gain"]["bits_per_byte"], abs=1e-4
    )
    assert "Predicted</dt><dd>0.0100 bits " in page
    assert "Predicted: 0.0100 bits " in git(made.target, "log", "-1", "--format=%B", found.row["branch"])


def test_a_candidate_whose_first_run_breaks_down_is_rejected_at_once(made: Made) -> None:
    found = submitted(made, (RATE, "lr: 1e39"))
    assert found.verdict["outcome"] == "reject"
    assert tells(found.verdict["reasons"][:1], expect("recipe.run_failed", side="candidate"))
    assert len(found.runs["baseline"]) == 1 and found.runs["candidate"] == []  # the others were not run


def test_an_error_of_the_judge_holds_the_change_and_leaves_no_files(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> dict[str, float]:
        raise OSError("no space left on device")

    monkeypatch.setattr("factory.gates.recipe.runs.measure_bits_per_byte", broken)
    verdict = submitted(made, (RATE, "lr: 4e-3")).verdict
    assert verdict["outcome"] == "hold" and made.left_behind() == []
    expected = expect("gates.stage_error", stage="runs", kind="OSError", error="no space left on device")
    assert tells(verdict["reasons"][:1], expected)


def test_a_rate_that_is_too_low_is_found_by_the_scout_and_its_change_is_merged(made: Made) -> None:
    """Proposed, judged, approved; the next segment is planned with the new recipe and needs no runs to be certified."""
    (made.target / TINY).write_text((made.target / TINY).read_text().replace(RATE, LOW))
    git(made.target, "commit", "-q", "-am", "a rate that is much too low")
    base = made.base
    bench = LiveWorkbench(Plant(made.workspace, made.ledger), base, find_training_start(made.ledger))  # type: ignore[arg-type]
    (number,) = proposing._scout(bench, AgentOptions(), 1, submitting.submit_proposal)
    assert number is not None
    found = judged(made, number)
    assert found.row["target"] == "quality:optimizer.lr" and found.row["title"].endswith("optimizer.lr 0.0003 → 0.0006")
    assert found.verdict["outcome"] == "promote", found.verdict["reasons"]
    diff = git(made.target, "diff", base, found.row["commit"]).splitlines()
    assert [line for line in diff if re.match(r"[+-] ", line)] == [f"-  {LOW}", "+  lr: 0.0006"]
    assert (
        approvals.merge_promoted_proposal(Plant(made.workspace, made.ledger), number, "ada")
        == made.base
        == found.row["commit"]
    )
    assert planning.load_recipe(made.workspace).optimizer.lr == 6e-4
    assert list_changed_training_files(made.target, base, made.base) == []  # nothing that training reads as code
    assert number not in [
        row["number"] for row in revalidating._merged(made.ledger)
    ]  # what it learns better does not hang on torch or the device
