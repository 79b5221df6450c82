"""The work of a patch gate around its stages: evidence in the ledger, the scratch folder, the start of training, and changed recipes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from factory.core import devices
from factory.core.errors import FactoryError
from factory.core.policy_file import hash_policy
from factory.core.progress import SILENT
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.stages import scope
from factory.gates.recipe import gate as recipe_gate
from factory.gates.recipe import static as recipe_static
from factory.gates.recipe.policy import RecipePolicy
from factory.gates.recipe_changes import (
    find_unused_recipes,
    flatten_settings,
    get_used_recipe_path,
    read_recipe_changes,
    select_result_changing_keys,
)
from factory.gates.release.judge import Verdict
from factory.gates.stage_interface import (
    NO_START,
    NOTHING_HELD_OUT,
    PatchCase,
    StageResult,
    make_failed_evidence,
    make_missing_evidence,
    make_not_needed_evidence,
    make_passed_evidence,
    read_reasons,
)  # fmt: skip
from factory.gates.staged_gate import StagedGate, convert_to_stored_evidence, get_gate_folder
from factory.gates.training_start import TrainingStart, find_training_start
from factory.git import repository
from factory.git.repository import AppliedPatch
from factory.git.scope import AgentsPolicy, FileChange
from factory.ledger.ledger import Ledger, checkpoints, events, segments, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import Subject
from kernels.contract.message import Message
from tests.support.factory.code_loop import Made, make
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.messages import codes, refused
from tests.support.paths import ROOT
from trainer.contract.errors import RecipeError

SCHEDULE, TINY, DEMO = "trainer/optim/schedule.py", "policies/recipes/tiny.yaml", "policies/recipes/demo.yaml"
RECIPE = (ROOT / TINY).read_text()


# -- a gate's stages -----------------------------------------------------------------------------------------------------
@pytest.fixture
def applied() -> Iterator[tuple[Made, AppliedPatch]]:
    """A patch on a branch of its own, that no gate judged."""
    made = make()
    agents = AgentsPolicy.load(made.workspace.policy_path("agents.yaml"))
    found = repository.apply_proposal(
        made.target, made.base, [(SCHEDULE, (made.target / SCHEDULE).read_text() + "# x\n")], branch="factory/test/811-x",
        policy=agents, message="x", worktrees=made.workspace.worktrees,
    )  # fmt: skip
    yield made, found
    repository.remove_worktree(made.target, found.worktree)
    repository.remove_branch(made.target, found.branch)
    assert made.left_behind() == []


class Stage:
    """A stage's module."""

    def __init__(self, name: str, result: StageResult | Exception, closed: list[str]) -> None:
        self.__name__, self.result, self.closed = name, result, closed
        self.seen: list[PatchCase[Any]] = []

    def run(self, case: PatchCase[Any]) -> StageResult:
        self.seen.append(case)
        assert case.work.is_dir() and not list(case.work.iterdir())
        case.after_stages.callback(lambda: self.closed.append(f"{self.__name__[-6:]} {case.work.is_dir()}"))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Lines:
    def __init__(self) -> None:
        self.titles: list[str] = []
        self.lines: list[str] = []

    def task(self, title: str, total: float | None = None) -> Any:
        self.titles.append(title)
        return SILENT.task(title)

    def line(self, text: str) -> None:
        self.lines.append(text)


def stages(*results: StageResult | Exception) -> list[Stage]:
    closed: list[str] = []
    return [Stage(f"factory.gates.stage{number}", result, closed) for number, result in enumerate(results, 1)]


def say(text: str) -> Message:
    return Message("gates.test", "{text}", text=text)


def gate_of(of: list[Stage], judged: list[Any]) -> StagedGate[PatchPolicy]:
    def judge(policy: PatchPolicy, evidence: Any) -> Verdict:
        judged.append((policy, evidence))
        return Verdict("hold", (say("because"),))

    gain = lambda policy, found, tries: SimpleNamespace(to_json=lambda: {"tries": tries, "of": len(found)})
    return StagedGate("patch", PatchPolicy(judge_again=5), of, judge, gain)  # type: ignore[arg-type]


def test_a_gates_evidence_is_recorded_whole(applied: tuple[Made, AppliedPatch]) -> None:
    made, patch = applied
    lines, judged = Lines(), list[Any]()
    of = stages(
        StageResult(make_passed_evidence(say("a\n" + "b" * 2000), x=1.0), "handed"), StageResult(make_not_needed_evidence(say("c"))),
        StageResult(make_missing_evidence(say("d"), y=float("nan")), 7), StageResult(make_passed_evidence(say("never"))),
    )  # fmt: skip
    (get_gate_folder(patch.worktree) / "left").mkdir(parents=True)  # by a process that was killed
    before = time.time()
    gate = gate_of(of, judged)
    number, verdict, evidence = gate.judge_proposal(
        Plant(made.workspace, made.ledger, lines), 811, patch, tries=3, patch_id="p"
    )
    assert not get_gate_folder(patch.worktree).exists() and get_gate_folder(Path("/a/b")) == Path("/a/b-gate")
    assert of[0].closed == ["stage3 True", "stage2 True", "stage1 True"] and not of[3].seen
    case = of[2].seen[0]
    assert case.handed_on == {"stage1": "handed", "stage2": None} and of[0].seen[0].handed_on == {}
    assert (case.subject.number, str(case.subject), case.tries, case.policy) == (811, "proposal:811", 3, gate.policy)
    assert (
        case.candidate == patch.worktree
        and case.changed_paths == [SCHEDULE]
        and case.start == find_training_start(made.ledger)
    )
    assert case.baseline.name == f"live-{patch.base[:12]}" and case.work == get_gate_folder(patch.worktree)
    assert (case.read_base_file(SCHEDULE) or b"") + b"# x\n" == case.changes[0].content
    assert case.read_base_file("trainer/none.py") is None and case.read_base_file("trainer") is None
    assert lines.titles == ["gate: stage1", "gate: stage2", "gate: stage3"] and case.progress is lines
    assert lines.lines[1:] == ["  stage2    not needed c", "  stage3    missing    d"] and len(lines.lines[0]) == 183
    found = evidence["stages"]
    assert all(0 <= stage.pop("stage_seconds") < 60 for stage in found.values())
    said = found["stage1"].pop("reasons")[0]
    for text in (said["text"], said["data"]["text"]):  # both are bounded, and on one line
        assert text.startswith("a b") and 900 < len(text) <= 1000
    assert found == {
        "stage1": {"state": "passed", "x": 1.0}, "stage2": {"state": "not needed", "reasons": [say("c").to_json()]},
        "stage3": {"state": "missing", "reasons": [say("d").to_json()], "y": None},
    }  # fmt: skip
    assert {key: value for key, value in evidence.items() if key != "stages"} == {
        "base": patch.base, "patch_sha256": patch.patch_sha256, "tries": 3, "files": [SCHEDULE], "gain": {"tries": 3, "of": 3},
        "gate": "patch", "patch_id": "p",
    }  # fmt: skip
    assert judged == [(gate.policy, evidence)] and verdict.outcome == "hold"
    (row,) = made.ledger.select_rows(sa.select(verdicts).where(verdicts.c.id == number))
    assert (row["gate"], row["subject"], row["against"]) == ("patch", "proposal:811", patch.base)
    assert (row["policy_sha256"], row["subject_sha256"]) == (hash_policy(gate.policy), patch.patch_sha256)
    assert (row["outcome"], row["reasons"], row["created_at"] >= before) == ("hold", [say("because").to_json()], True)
    assert row["evidence"]["stages"].keys() == found.keys()
    (event,) = made.ledger.select_rows(sa.select(events).where(events.c.subject == "proposal:811"))
    assert (event["kind"], event["detail"]) == ("judged", {"outcome": "hold", "verdict": number})


@pytest.mark.parametrize("error", [FactoryError("the machine"), OverflowError("nobody thought of it")])
def test_only_faults_of_the_machine_end_a_gate(applied: tuple[Made, AppliedPatch], error: Exception) -> None:
    made, patch = applied
    of = stages(StageResult(make_passed_evidence(say("a"))), error, StageResult(make_passed_evidence(say("never"))))
    gate, plant = gate_of(of, []), Plant(made.workspace, made.ledger)
    if isinstance(error, FactoryError):
        with pytest.raises(FactoryError):
            gate.judge_proposal(plant, 812, patch, tries=1, patch_id="")
        assert not made.ledger.select_rows(sa.select(verdicts).where(verdicts.c.subject == "proposal:812"))
    else:
        found = gate.judge_proposal(plant, 812, patch, tries=1, patch_id="")[2]["stages"]["stage2"]
        assert found["state"] == "missing" and "in run" in found["log"]
        expected = expect("gates.stage_error", stage="stage2", kind="OverflowError", error="nobody thought of it")
        assert tells(found["reasons"], expected)
    assert (
        of[0].closed == ["stage2 True", "stage1 True"]
        and not get_gate_folder(patch.worktree).exists()
        and not of[2].seen
    )


def test_a_branch_that_differs_from_the_proposed_patch_fails_the_scope_stage(
    applied: tuple[Made, AppliedPatch],
) -> None:
    made, patch = applied
    other = AppliedPatch(patch.branch, patch.commit, patch.base, "0" * 64, patch.worktree)
    gate = gate_of(stages(StageResult(make_passed_evidence(say("a")))), [])
    plant = Plant(made.workspace, made.ledger)
    found = [
        gate.gather_evidence(plant, Subject("proposal", 813), of, 1)["stages"].get("scope") for of in (patch, other)
    ]
    assert found[0] is None and found[1]["state"] == "failed"
    case: Any = SimpleNamespace(
        workspace=made.workspace, applied=patch, agents=AgentsPolicy.load(made.workspace.policy_path("agents.yaml")),
        changes=repository.read_file_changes(made.target, patch.base, patch.commit),
    )  # fmt: skip
    assert scope.run(case).evidence["state"] == "passed"
    case.changes = [FileChange("README.md", b"x\n")]
    assert scope.run(case).evidence["state"] == "failed"


def test_evidence_has_a_state_and_reasons() -> None:
    for make_evidence, state in (
        (make_passed_evidence, "passed"),
        (make_failed_evidence, "failed"),
        (make_missing_evidence, "missing"),
    ):
        assert make_evidence(say("a"), say("b"), x=1) == {"state": state, "reasons": ["a", "b"], "x": 1}
    assert make_not_needed_evidence(say("a")) == {"state": "not needed", "reasons": ["a"]}
    assert (
        codes(read_reasons(convert_to_stored_evidence(make_passed_evidence(say("a"))))) == ["gates.test"]
        and read_reasons({}) == []
    )
    assert NO_START["state"] == NOTHING_HELD_OUT["state"] == "missing"


# -- where training starts -----------------------------------------------------------------------------------------------
def test_training_starts_at_the_trunks_last_checkpoint(workspace: Any, ledger: Ledger, tmp_path: Path) -> None:
    assert find_training_start(ledger) is None

    def segment(number: int, *steps: int, kind: str = "trunk", state: str = "done", computing: Any = None) -> None:
        with ledger.begin() as tx:
            if number == 1:
                tx.execute(
                    sa.text("INSERT INTO data_plans (id, plan, created_at) VALUES ('p', '{\"token_shards\": []}', 0)")
                )
            tx.execute(
                segments.insert().values(
                    id=number, kind=kind, generation=1, recipe="tiny", recipe_json={"n": number}, recipe_sha256="", data_plan="p",
                    code_commit=f"{number}" * 40, first_step=0, last_step=max(steps), state=state, folder=f"segments/{number}",
                    created_at=0.0, computing=computing,
                )
            )  # fmt: skip
            for step in steps:
                tx.execute(
                    checkpoints.insert().values(
                        id=f"{number} {step}", segment=number, step=step, path=f"at/{number}-{step}", created_at=0.0
                    )
                )

    segment(1, 6, state="running")
    assert find_training_start(ledger) is None
    segment(2, 3, 6, computing={"kernels": {"swiglu": "native"}})
    segment(3, 9, kind="anneal")
    found = find_training_start(ledger)
    assert found is not None and found.step == 6 and found.checkpoint.parts[-2:] == ("at", "2-6")
    assert (found.recipe, found.plan, found.kernels, found.commit) == (
        {"n": 2},
        {"token_shards": []},
        {"swiglu": "native"},
        "2" * 40,
    )
    segment(4, 6)
    newest = find_training_start(ledger)
    assert newest is not None and (newest.step, newest.recipe, newest.kernels) == (6, {"n": 4}, {})
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "kernels.yaml").write_text("cpu: {swiglu: auto, rms_norm: auto}\n")
    assert (
        devices.get_device_kind() != "cpu"
        or found.resolve_kernels(tmp_path) == "cpu:\n  swiglu: native\n  rms_norm: reference\n"
    )


# -- what a patch changes in recipes ---------------------------------------------------------------------------------------
def changed(old: str, new: str, path: str = TINY) -> FileChange:
    assert old in RECIPE
    return FileChange(path, RECIPE.replace(old, new).encode())


LR, BATCH = "lr: 3e-3", "  sequences: 8\n"


@pytest.mark.parametrize(
    ("change", "found", "learns"),
    [
        (changed(LR, LR), {}, []),
        (changed(LR, "lr: 1e-3"), {"optimizer.lr": (3e-3, 1e-3)}, ["optimizer.lr"]),
        (changed(BATCH, f"{BATCH}  micro_sequences: 4\n"), {"batch.micro_sequences": (None, 4)}, []),
        (changed("compile: false", "compile: true"), {"compile": (False, True)}, []),
        (changed(', "*": 0.1', ""), {"mixture.weights.*": (0.1, None)}, ["mixture.weights.*"]),
    ],
)
def test_changed_recipe_keys_are_read_with_their_old_and_new_values(
    change: FileChange, found: dict[str, Any], learns: list[str]
) -> None:
    told = read_recipe_changes(change, RECIPE)
    assert told == found and select_result_changing_keys(told) == learns


def test_a_new_recipe_changes_every_key_and_no_recipe_may_be_deleted() -> None:
    told = read_recipe_changes(FileChange(TINY, RECIPE.encode()), "")
    assert told["optimizer.lr"] == (None, 3e-3) and list(told) == sorted(told) and "batch.micro_sequences" not in told
    with refused("gates.recipe_deleted", RecipeError, path=TINY):
        read_recipe_changes(FileChange(TINY, None), RECIPE)
    for content in (b"name: [", b"lr: \xff"):
        with pytest.raises(RecipeError, match=TINY):
            read_recipe_changes(FileChange(TINY, content), RECIPE)
    with pytest.raises(RecipeError):
        read_recipe_changes(FileChange(TINY, RECIPE.encode()), "name: 3")
    assert flatten_settings({"a": {"b": {"c": 1}, "d": {}}, "e": []}) == {"a.b.c": 1, "a.d": {}, "e": []}


@pytest.mark.parametrize(
    ("paths", "own", "expected"),
    [
        ([TINY, SCHEDULE], False, []),
        ([TINY], True, ["gates.own_recipe"]),
        ([SCHEDULE], True, []),
        ([DEMO, SCHEDULE], True, ["gates.unused_recipe"]),
        ([DEMO, TINY], True, ["gates.unused_recipe", "gates.own_recipe"]),
    ],
)
def test_recipes_that_no_run_here_can_judge_are_reported(
    tmp_path: Path, paths: list[str], own: bool, expected: list[str]
) -> None:
    at = tmp_path / "own.yaml"
    if own:
        at.touch()
    workspace: Any = SimpleNamespace(config=SimpleNamespace(recipe="tiny"), own_recipe_path=lambda: at)
    told = find_unused_recipes(workspace, paths)
    assert get_used_recipe_path(workspace) == TINY and codes(told) == expected
    assert all(one.data["used"] == TINY and one.data.get("path", DEMO) == DEMO for one in told)


# -- the gate of recipes -------------------------------------------------------------------------------------------------
def tried(made: Made, *edits: tuple[str, str], also: Any = None) -> Any:
    """What ``also`` says of a patch that is on a branch for so long."""
    applied = repository.apply_proposal(
        made.target, made.base, list(edits), branch="factory/test/820-x", message="x",
        policy=AgentsPolicy.load(made.workspace.policy_path("agents.yaml")), worktrees=made.workspace.worktrees,
    )  # fmt: skip
    try:
        return also(applied)
    finally:
        repository.remove_worktree(made.target, applied.worktree)
        repository.remove_branch(made.target, applied.branch)


def test_the_recipe_gate_judges_only_recipe_patches_that_change_what_is_learnt() -> None:
    made = make()
    text, code = (made.target / TINY).read_text(), (made.target / SCHEDULE).read_text() + "# x\n"
    learns, computes = text.replace(LR, "lr: 1e-3"), text.replace(BATCH, f"{BATCH}  micro_sequences: 4\n")
    new = "policies/recipes/new.yaml"
    for edits, concerned in (
        ([(TINY, learns)], True), ([(TINY, computes)], False), ([(TINY, learns), (SCHEDULE, code)], False),
        ([(new, text)], True), ([(TINY, computes), (new, text)], True), ([(TINY, "name: [")], False),
    ):  # fmt: skip
        assert (
            tried(made, *edits, also=lambda patch: recipe_gate.is_recipe_patch(made.workspace, patch)) == concerned
        ), edits


def test_tries_on_a_key_are_counted_whatever_else_they_changed() -> None:
    made = make()
    text = (made.target / TINY).read_text()
    edits = [(TINY, text.replace(LR, "lr: 1e-3").replace("seed: 1", "seed: 2"))]
    count = lambda: tried(
        made, *edits, also=lambda patch: recipe_gate.count_tries_of_same_keys(Plant(made.workspace, made.ledger), patch)
    )
    before = count()
    keys = lambda *names: {"static": {"changes": dict.fromkeys(names, [1, 2])}}
    told: list[tuple[str, Any, int]] = [
        ("recipe", keys("optimizer.lr", "batch.sequences"), 1), ("recipe", keys("seed", "optimizer.lr"), 1), ("patch", keys("seed"), 0),
        ("recipe", keys("batch.sequences"), 0), ("recipe", {"static": {}}, 0), ("recipe", {"static": None}, 0), ("recipe", {}, 0),
        ("recipe", None, 0),
    ]  # fmt: skip
    added: list[int] = []
    try:
        for gate, stages_, _ in told:
            with made.ledger.begin() as tx:
                values = {
                    "gate": gate,
                    "subject": "proposal:821",
                    "policy_sha256": "",
                    "subject_sha256": "",
                    "outcome": "hold",
                    "reasons": [],
                }
                done = tx.execute(verdicts.insert().values(**values, evidence={"stages": stages_}, created_at=0.0))
                added += done.inserted_primary_key or ()
        assert count() - before == sum(counts for _, _, counts in told)
    finally:
        with made.ledger.begin() as tx:
            tx.execute(verdicts.delete().where(verdicts.c.id.in_(added)))


def test_the_recipe_gate_reads_the_workspaces_policy_and_reports_its_own_gain(workspace: Any) -> None:
    at = workspace.root / "policies" / "gates" / "recipe.yaml"
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text("changes: [seed]\nruns: {seeds: 7}\n")
    gate = recipe_gate.make_recipe_gate(workspace)
    assert (gate.name, gate.policy.changes, gate.policy.runs.seeds) == ("recipe", ["seed"], 7)
    runs: dict[str, Any] = {
        side: [{"code": 2.0 + n / 100 + more} for n in range(7)]
        for side, more in (("baseline", 0.5), ("candidate", 0.0))
    }
    runs |= {f"{side}_tokens_per_s": [1.0] * 7 for side in ("baseline", "candidate")} | {
        "baseline_memory": 1.0,
        "candidate_memory": 1.0,
    }
    shown = gate.gain(gate.policy, {"runs": runs}, 1)
    assert (
        shown is not None
        and shown.to_json()["bits_per_byte"] == pytest.approx(0.5)
        and gate.gain(gate.policy, {}, 1) is None
    )


WARMUP = "warmup_steps: 4"


@pytest.mark.parametrize(
    ("old", "new", "step", "state", "expected"),
    [
        (LR, "lr: 1e-3", 6, "passed", expect("recipe.change", key="optimizer.lr", old=0.003, new=0.001)),
        (LR, "lr: .inf", 6, "failed", expect("recipe.not_finite", key="optimizer.lr")),
        (WARMUP, "warmup_steps: 2", 4, "failed", expect("recipe.no_effect", step=4)),  # both are over
        (WARMUP, "warmup_steps: 2", 3, "passed", expect("recipe.change", old=4, new=2)),
        (WARMUP, "warmup_steps: 8", 7, "passed", expect("recipe.change", old=4, new=8)),
        (WARMUP, "warmup_steps: 8", 8, "failed", expect("recipe.no_effect", step=8)),
        (WARMUP, "warmup_steps: 8", None, "passed", expect("recipe.change", old=4, new=8)),
        (
            "seed: 1",
            "seed: 2",
            6,
            "failed",
            expect("recipe.wrong", path=TINY, problem="recipe.not_allowed", key="seed"),
        ),
        (LR, "lr: &a 1e-3", 6, "failed", expect("patch.yaml_tag")),
        (BATCH, "  sequences: 9\n", 6, "failed", expect("recipe.ranks")),
        (BATCH, "  sequences: 10\n", 6, "passed", expect("recipe.change", old=8, new=10)),
    ],
)
def test_the_static_stage_of_the_recipe_gate_finds_the_problems_of_a_recipe(
    tmp_path: Path, workspace: Any, old: str, new: str, step: int | None, state: str, expected: Expected
) -> None:
    policy = RecipePolicy(changes=["optimizer.lr", "schedule.warmup_steps", "batch.sequences"])
    change = changed(old, new)
    for side, content in (("base", RECIPE.encode()), ("patch", change.content or b"")):
        (tmp_path / side / "policies" / "recipes").mkdir(parents=True)
        (tmp_path / side / TINY).write_bytes(content)
    used = SimpleNamespace(
        config=SimpleNamespace(recipe="tiny", ranks=2), own_recipe_path=lambda: tmp_path / "own", root=workspace.root
    )
    start = None if step is None else TrainingStart(tmp_path, step, {}, {})
    subject: Any = None
    plant: Any = SimpleNamespace(workspace=used)
    case = PatchCase(
        plant,
        subject,
        policy,
        subject,
        AppliedPatch("", "", "", "", tmp_path / "patch"),
        [change],
        tmp_path / "base",
        tmp_path,
        start,
        1,
    )
    result = recipe_static.run(case)
    found = result.evidence
    assert found["state"] == state and tells(found["reasons"][:1], expected), found
    if state == "passed":
        assert result.handed_on == read_recipe_changes(change, RECIPE)
        assert found["changes"] == {key: list(values) for key, values in result.handed_on.items()}
