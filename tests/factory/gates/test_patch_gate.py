"""The patch gate: its order of stages, the static and the isolated stage, and the whole gate on real training steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agents.core.proposal import Edit, Proposal
from agents.core.yaml_edit import set_yaml_value
from factory.code_loop.submitting import submit_proposal
from factory.core.workspace import find_checkout_root
from factory.gates.patch import source_rules
from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.judge import STAGES
from factory.gates.patch.policy import IsolatedTimingPolicy
from factory.gates.patch.stages import gate as patch_gate
from factory.gates.patch.stages import isolated, training
from factory.gates.recipe import gate as recipe_gate
from factory.gates.recipe import judge as recipe_judge
from factory.git.scope import FileChange
from factory.ledger.ledger import proposals, segments, verdicts
from factory.ledger.plant import Plant
from factory.sandbox import sandbox
from factory.show.unshown_items import show_unshown_items
from kernels.contract.message import Message
from tests.support.factory.code_loop import Made, make
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.git import git


@pytest.mark.parametrize(("gate", "judge"), [(patch_gate, STAGES), (recipe_gate, recipe_judge.STAGES)])
def test_stages_have_the_names_of_their_files_and_the_order_of_the_judge(gate: Any, judge: tuple[str, ...]) -> None:
    assert tuple(Path(stage.__file__).stem for stage in gate.STAGES) == judge
    assert all(callable(stage.run) for stage in gate.STAGES)


# -- reading -----------------------------------------------------------------------------------------------------------
def test_no_file_of_this_checkout_has_problems_compared_with_itself() -> None:
    for folder in ("kernels", "models", "trainer"):
        for path in sorted((find_checkout_root() / folder).rglob("*.py")):
            content = path.read_bytes()
            assert source_rules.find_source_problems(FileChange(f"{folder}/{path.name}", content), content) == []


@pytest.mark.parametrize(
    "text", ["a: &x 1\nb: *x\n", "a: !!python/object:os.system {}\n", "a: 1\na: 2\n", "- 1\n", "a: [\n", "\0"]
)
def test_strange_yaml_is_refused(text: str) -> None:
    assert source_rules.find_source_problems(FileChange("policies/kernels.yaml", text.encode()), b"cpu: {}\n")


QUICK, LIKE_ITSELF, QUICKER_THAN_ITSELF = (2.0,) * 3, (1.0, 0.99, 1.01), (1.3,) * 3


@pytest.mark.parametrize(
    (
        "told",
        "state",
    ),  # (ratio, low, high) of the new implementation and of the old one against itself, as often as it is timed
    [
        ([QUICK, QUICKER_THAN_ITSELF, QUICK, LIKE_ITSELF], "passed"),  # timed again
        ([QUICK, QUICKER_THAN_ITSELF] * 3, "missing"),
        ([(1.3, 1.2, 1.4), LIKE_ITSELF], "passed"),
        ([(0.8, 0.7, 0.9), LIKE_ITSELF], "failed"),
        ([(0.95, 0.6, 1.3), LIKE_ITSELF], "passed"),  # busy: nothing is known, and the whole step decides
        ([(0.8, 0.7, 0.9), (0.85, 0.8, 0.9)] * 3, "missing"),  # slower than itself, too: a neighbour took its share
    ],
)
def test_an_op_fails_alone_only_if_it_is_slower_beyond_the_noise(
    told: list[tuple[float, ...]], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([json.dumps(dict(zip(("ratio", "ratio_low", "ratio_high"), one, strict=True))) for one in told])
    monkeypatch.setattr(
        sandbox, "run_in_sandbox", lambda command, **_: sandbox.SandboxResult(0, next(answers), "", 1.0, None, 0, 0)
    )
    op = ChangedOp("attention", "reference", "native")
    found = isolated.time_switched_ops(IsolatedTimingPolicy(), [op], {}, tmp_path, tmp_path / "work")
    assert found["state"] == state and found["ops"]["attention"]["ratio"] == told[0][0]
    assert next(answers, None) is None, "timed as often as is needed"


# -- the whole chain ---------------------------------------------------------------------------------------------------
def proposal(title: str, *edits: tuple[str, str]) -> Proposal:
    return Proposal("search", "kernel:test", title, "Because.", 1.1, tuple(Edit(path, text) for path, text in edits))


def judged(made: Made, drafted: Proposal) -> dict[str, Any]:
    number = submit_proposal(Plant(made.workspace, made.ledger), drafted, made.base)
    joined = sa.select(
        proposals, verdicts.c.outcome, verdicts.c.reasons, verdicts.c.evidence, verdicts.c.subject_sha256
    )
    row = made.ledger.select_first(
        joined.join(verdicts, verdicts.c.id == proposals.c.verdict).where(proposals.c.number == number)
    )
    assert row is not None and row["state"] == "judged"
    assert made.left_behind() == []
    return row


@pytest.mark.portable
@pytest.mark.slow("a whole gate run, training included: 40 seconds on AVX2")
def test_an_op_choice_is_judged_end_to_end() -> None:
    made = make()
    policy = (made.target / "policies" / "kernels.yaml").read_text()
    row = judged(
        made,
        proposal(
            "chunked loss",
            ("policies/kernels.yaml", set_yaml_value(policy, ("cpu", "linear_cross_entropy"), "chunked")),
        ),
    )
    stages = row["evidence"]["stages"]
    assert [stages[name]["state"] for name in ("scope", "static", "oracle")] == ["passed"] * 3, stages
    # Whether it is faster at this size, and whether it can be timed, is the machine's to say; that it computes the same
    # is not.
    training = stages.get("training", {})
    if training.get("out_of_time"):  # a limit stopped a session on a busy machine
        assert training["state"] == "missing" and row["outcome"] == "hold", training
    elif training:
        assert 0 < training["drift"] < training["control_drift"] / 2, training
        if training["state"] == "passed":
            assert len(training["baseline_seconds"]) == len(training["candidate_seconds"]) >= 4
            assert row["evidence"]["gain"]["noise"] >= 1
        else:  # too busy a machine
            assert training["state"] == "missing" and training["undecided"], training
            assert row["outcome"] == "hold"
    else:
        assert row["outcome"] == {"failed": "reject", "missing": "hold"}[stages["isolated"]["state"]]
        assert stages["isolated"]["ops"]["linear_cross_entropy"]["ratio"] > 0  # it was timed
    assert row["subject_sha256"] == row["patch_sha256"]
    message = git(made.target, "log", "-1", "--format=%B", row["branch"])
    assert f"Verdict: {row['outcome']}" in message and "Because." in message and "Oracle: passed" in message
    show_unshown_items(Plant(made.workspace, made.ledger))
    report = json.loads((made.workspace.reports / f"proposal-{row['number']}.json").read_text())
    assert report["outcome"] == row["outcome"] and "chunked" in report["patch"]


KERNELS, TINY, DEMO = "policies/kernels.yaml", "policies/recipes/tiny.yaml", "policies/recipes/demo.yaml"
BATCH = "  sequences: 8\n"


@pytest.mark.parametrize(
    ("path", "swap", "outcome", "expected"),
    [
        (
            KERNELS,
            ("cuda:\n  rms_norm: reference", "cuda:\n  rms_norm: triton"),
            "hold",
            expect("patch.other_device", section="cuda", here="cpu"),
        ),
        (KERNELS, ("cpu:\n", "fallback: reference\ncpu:\n"), "reject", expect("patch.fallback")),
        (
            KERNELS,
            ("swiglu:", "swiglo:"),
            "reject",
            expect("patch.unknown_op", file=KERNELS, device="cpu", op="swiglo", hint="core.nearest", nearest="swiglu"),
        ),
        (DEMO, ("compile: true", "compile: false"), "hold", expect("gates.unused_recipe", path=DEMO, used=TINY)),
    ],
)
def test_a_setting_that_no_run_measures_is_not_promoted(
    path: str, swap: tuple[str, str], outcome: str, expected: Expected
) -> None:
    """A gain elsewhere in the same patch would say nothing about it."""
    made = make()
    text = (made.target / path).read_text()
    assert swap[0] in text
    code = "trainer/optim/schedule.py", (made.target / "trainer" / "optim" / "schedule.py").read_text() + "# faster\n"
    row = judged(made, proposal("ride along", code, (path, text.replace(*swap, 1))))
    assert row["outcome"] == outcome and tells(row["reasons"][:1], expected), row["reasons"]
    assert "oracle" not in row["evidence"]["stages"]


def test_a_recipe_that_does_not_train_here_is_not_measured() -> None:
    made = make()
    own, text = made.workspace.own_recipe_path(), (made.target / TINY).read_text()
    own.parent.mkdir(parents=True)
    own.write_text(text)
    try:
        row = judged(made, proposal("rows", (TINY, text.replace(BATCH, f"{BATCH}  micro_sequences: 4\n"))))
    finally:
        own.unlink()
        own.parent.rmdir()
    assert row["outcome"] == "hold" and tells(row["reasons"][:1], expect("gates.own_recipe", used=TINY))


def test_a_gain_that_was_merged_is_not_credited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk trained one row at a time. The live recipe, merged later, takes all rows. The patch only repeats that setting."""
    made, sides = make(), []
    text = (made.target / TINY).read_text()
    stored = made.ledger.select_first(sa.select(segments.c.recipe_json).where(segments.c.id == 1))
    assert stored is not None and stored["recipe_json"]["batch"]["sequences"] == 8
    recipe = stored["recipe_json"]

    def trained_with(recipe: dict[str, Any]) -> None:
        with made.ledger.begin() as tx:
            tx.execute(segments.update().where(segments.c.id == 1).values(recipe_json=recipe))

    def seen(runs: Any, policy: Any, start: Any, baseline: Any, candidate: Any, *others: Any) -> Any:
        sides.extend([baseline.recipe, candidate.recipe])
        return {"state": "missing", "reasons": [Message("patch.test", "seen")]}, None

    monkeypatch.setattr(training, "compare_training", seen)
    trained_with(recipe | {"batch": recipe["batch"] | {"micro_sequences": 1}})
    try:
        judged(made, proposal("rows", (TINY, text.replace(BATCH, f"{BATCH}  micro_sequences: 8\n"))))
    finally:
        trained_with(recipe)
    assert [side["batch"]["micro_sequences"] for side in sides] == [None, 8]


def test_a_patch_is_held_while_the_trunk_has_no_checkpoint(workspace: Any, ledger: Any, tmp_path: Any) -> None:
    made = make()
    from factory.core.workspace import Workspace, WorkspaceConfig
    from factory.git import repository
    from factory.git.scope import AgentsPolicy

    empty = Workspace.create(tmp_path / "empty", WorkspaceConfig(repository=str(made.target)))
    text = (made.target / "trainer" / "optim" / "schedule.py").read_text() + "\n# more\n"
    applied = repository.apply_proposal(
        made.target, made.base, [("trainer/optim/schedule.py", text)], policy=AgentsPolicy.load(empty.policy_path("agents.yaml")),
        branch="factory/test/900-x", message="x", worktrees=empty.worktrees,
    )  # fmt: skip
    try:
        _, verdict, _ = patch_gate.make_patch_gate(empty).judge_proposal(
            Plant(empty, ledger), 900, applied, tries=1, patch_id=""
        )
    finally:
        repository.remove_worktree(made.target, applied.worktree)
        repository.remove_worktree(made.target, empty.worktrees / f"live-{made.base[:12]}")
        repository.remove_branch(made.target, applied.branch)
    assert verdict.outcome == "hold" and verdict.reasons[0].code == "gates.no_start"
