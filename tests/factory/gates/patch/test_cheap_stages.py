"""The stages before any training: their inputs, the requests that they make, and their evidence."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from factory.core import devices
from factory.core.progress import SILENT
from factory.gates.patch.changed_ops import (
    NO_OP,
    ChangedOp,
    find_changed_ops,
    find_changed_sections_of_kernels_file,
    find_sections_of_other_devices,
    find_unknown_ops,
)
from factory.gates.patch.policy import IsolatedTimingPolicy, OraclePolicy, PatchPolicy
from factory.gates.patch.stages import exploits, isolated, oracle, static
from factory.gates.stage_interface import NO_START, PatchCase
from factory.gates.training_start import TrainingStart
from factory.git.repository import AppliedPatch
from factory.git.scope import FileChange
from factory.sandbox import sandbox
from kernels.contract.message import Message
from kernels.contract.oracle import HOSTILE
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.messages import codes
from tests.support.paths import ROOT

KERNELS, TINY, CODE = "policies/kernels.yaml", "policies/recipes/tiny.yaml", "kernels/swiglu/__init__.py"
CPU = "cpu: {swiglu: reference, rms_norm: reference}\n"
RECIPE = (ROOT / TINY).read_text()
Files = dict[str, tuple[str | None, str | None]]  # path → before and after; None: it is not there


def case_of(folder: Path, files: Files, own_recipe: bool = False, **others: Any) -> PatchCase[PatchPolicy]:
    """A patch on disk."""
    for side, number in (("base", 0), ("patch", 1)):
        for path, texts in ({KERNELS: (CPU, CPU)} | files).items():
            if (text := texts[number]) is not None:
                (folder / side / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / side / path).write_bytes(text.encode("utf-8", "surrogateescape"))
    changes = [
        FileChange(path, None if after is None else after.encode("utf-8", "surrogateescape"))
        for path, (_, after) in files.items()
    ]
    own = folder / "own.yaml"
    if own_recipe:
        own.touch()
    workspace = SimpleNamespace(
        root=folder, config=SimpleNamespace(recipe="tiny"), own_recipe_path=lambda: own, recipe_path=lambda: ROOT / TINY
    )
    plant: Any = SimpleNamespace(workspace=workspace, progress=SILENT)
    applied = AppliedPatch("branch", "c" * 40, "b" * 40, "", folder / "patch")
    given: dict[str, Any] = {"policy": PatchPolicy(), "start": None, "tries": 1} | others
    subject: Any = None
    agents: Any = None
    return PatchCase(
        plant, subject, given.pop("policy"), agents, applied, changes, folder / "base", folder / "work", **given
    )


# -- static ------------------------------------------------------------------------------------------------------------
SLOWER = RECIPE.replace("lr: 3e-3", "lr: 1e-3")
IMPORTS_OS = expect("patch.imports", name="os")
STEPWISE = RECIPE.replace("  sequences: 8\n", "  sequences: 8\n  micro_sequences: 4\n")


@pytest.mark.parametrize(
    ("files", "own", "state", "expected"),
    [
        ({CODE: ("x = 1\n", "x = 2\n")}, False, "passed", []),
        ({CODE: (None, "import os\n" * 9)}, False, "failed", [IMPORTS_OS] * 8),
        ({CODE: ("import os\n", "import os\n")}, False, "passed", []),
        ({CODE: ("import os\n", None)}, False, "passed", []),
        ({KERNELS: (CPU, "cpu: {swiglu: native}\n")}, False, "passed", []),
        ({KERNELS: (CPU, CPU + "fallback: reference\n")}, False, "failed", [expect("patch.fallback")]),
        ({KERNELS: (CPU + "fallback: reference\n", CPU + "fallback: reference\n# x\n")}, False, "passed", []),
        ({KERNELS: (CPU, "cpu: {swiglo: native}\ncuda: {x: y}\n")}, False, "failed",
         [expect("patch.unknown_op", op="swiglo"), expect("patch.unknown_op", op="x")]),
        ({KERNELS: (CPU, CPU + "cuda: {swiglu: triton}\n")}, False, "missing", [expect("patch.other_device", section="cuda")]),
        ({KERNELS: (CPU, "cpu: {swiglo: native}\n"), CODE: (None, "import os\n")}, False, "failed", [IMPORTS_OS]),
        ({TINY: (RECIPE, STEPWISE)}, False, "passed", []),
        ({TINY: (RECIPE + "# \udcff\n", STEPWISE + "# \udcfe\n")}, False, "passed", []),
        ({CODE: ("# \udcff\nimport os\n", "# \udcfe\nimport os\n")}, False, "passed", []),
        ({TINY: (RECIPE, STEPWISE)}, True, "missing", [expect("gates.own_recipe", used=TINY)]),
        ({TINY: (RECIPE, SLOWER)}, False, "failed", [expect("patch.computes_other", key="optimizer.lr"), expect("patch.only_recipes")]),
        ({TINY: (RECIPE, "name: tiny\n")}, False, "failed", [expect("patch.wrong_recipe")]),
        ({TINY: (RECIPE, None)}, False, "failed", [expect("gates.recipe_deleted", path=TINY)]),
        ({TINY: (None, STEPWISE)}, False, "failed", [expect("patch.computes_other", path=TINY)] * 8),
        ({"policies/recipes/demo.yaml": (RECIPE, STEPWISE)}, False, "missing", [expect("gates.unused_recipe", used=TINY)]),
        ({f"policies/recipes/a{n}.yaml": (RECIPE, STEPWISE) for n in range(9)}, False, "missing", [expect("gates.unused_recipe", used=TINY)] * 8),
    ],
)  # fmt: skip
def test_the_static_stage_finds_the_problems_of_a_patch(
    tmp_path: Path, files: Files, own: bool, state: str, expected: list[Expected]
) -> None:
    found = static.run(case_of(tmp_path, files, own)).evidence
    assert found["state"] == state, found
    if state != "passed":
        assert len(found["reasons"]) == len(expected), found
        assert all(tells([one], said) for one, said in zip(found["reasons"], expected)), found


# -- which ops a patch changes -----------------------------------------------------------------------------------------
FAST = b"cpu: {swiglu: native, rms_norm: reference}\ncuda: {swiglu: triton}\n"


@pytest.mark.parametrize(
    ("before", "after", "sections", "others"),
    [
        (CPU.encode(), FAST, ["cpu", "cuda"], 1),
        (FAST, FAST, [], 0),
        (None, FAST, ["cpu", "cuda"], 1),
        (FAST, None, ["cpu", "cuda"], 1),
        (b"", b"fallback: reference\n", ["fallback"], 1),
        (b"- 1", b"- 2", [], 0),
    ],
)
def test_changed_sections_of_kernels_yaml_are_found(
    before: bytes | None, after: bytes | None, sections: list[str], others: int
) -> None:
    assert find_changed_sections_of_kernels_file(before, after) == sections
    told = find_sections_of_other_devices(before, after)
    assert len(told) == others and not any(one.data["section"] == devices.get_device_kind() for one in told)


@pytest.mark.parametrize(
    ("before", "after", "paths", "device", "tuned", "found"),
    [
        (CPU, "cpu: {swiglu: native}", [], "cpu", {}, [("swiglu", "reference", "native")]),
        (CPU, "cpu: {swiglu: native}", [], "cuda", {}, []),
        ("cpu: {swiglu: native}", "", [], "cpu", {}, [("swiglu", "native", "reference")]),
        ("cpu: {swiglu: 'native, reference'}", "cpu: {swiglu: native}", [], "cpu", {}, []),  # what runs first
        ("cpu: {swiglu: auto}", "cpu: {swiglu: native}", [], "cpu", {"swiglu": "native"}, []),
        ("cpu: {swiglu: auto}", "cpu: {swiglu: native}", [], "cpu", {}, [("swiglu", "reference", "native")]),
        (CPU, CPU, ["trainer/run.py", "docs/kernels/x"], "cpu", {}, []),
        (CPU, CPU, ["trainer/run.py", CODE], "cpu", {}, [(op, "reference", "reference") for op in ("rms_norm", "swiglu")]),
    ],
)  # fmt: skip
def test_changed_ops_are_found(
    before: str, after: str, paths: list[str], device: str, tuned: dict[str, str], found: list[tuple[str, str, str]]
) -> None:
    told = find_changed_ops(before.encode(), after.encode(), paths, device, tuned)
    assert told == [ChangedOp(*one) for one in found]


def test_unknown_ops_are_named_with_their_section() -> None:
    told = find_unknown_ops(b"cpu: {swiglu: a, swigul: b}\ncuda: {attentio: c}\ntpu: {x: y}\n")
    assert codes(told) == ["patch.unknown_op"] * 2 and find_unknown_ops(None) == []
    assert [(one.data["device"], one.data["op"]) for one in told] == [("cpu", "swigul"), ("cuda", "attentio")]
    assert "'swiglu'" in told[0].data["hint"]


# -- oracle ------------------------------------------------------------------------------------------------------------
class Told:
    """Answers whose evidence the test tells."""

    def __init__(self, state: str) -> None:
        self.state, self.jobs = state, list[dict[str, Any]]()

    def make_evidence(self, numbers: list[int], right: Message, *, last: bool) -> dict[str, Any]:
        return {"state": self.state, "reasons": [right], "checks": len(numbers), "last": last}


@pytest.mark.parametrize(
    ("files", "state", "changed", "again"),
    [
        ({KERNELS: (CPU, "cpu: {swiglu: native, rms_norm: reference}\n")}, "passed", ["swiglu"], False),
        ({CODE: (None, "x = 1\n"), "kernels/words.txt": (None, "x")}, "passed", ["rms_norm", "swiglu"], True),
        ({CODE: (None, "x = 1\n")}, "missing", ["rms_norm", "swiglu"], False),
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_the_oracle_asks_for_the_changed_ops(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: Files,
    state: str,
    changed: list[str],
    again: bool,
    started: bool,
) -> None:
    asked: list[Any] = []
    told = Told(state)

    @contextlib.contextmanager
    def answered(jobs: Any, *others: Any) -> Any:
        told.jobs = jobs
        asked.append(others)
        yield told
        asked.append("closed")

    def again_made(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {"state": "failed", "reasons": ["its tests"]}

    monkeypatch.setattr(oracle, "run_op_jobs", answered)
    monkeypatch.setattr(oracle, "check_tests_unchanged", again_made)
    recipe = yaml.safe_load(RECIPE) | {"precision": "bf16"}
    tuned = {"swiglu": "native"}
    case = case_of(tmp_path, files, start=TrainingStart(tmp_path, 6, recipe, {}, tuned) if started else None)
    found = oracle.run(case)
    policy, work = case.policy.oracle, tmp_path / "work" / "oracle"
    assert asked.pop(0) == (
        policy,
        tmp_path / "base",
        tmp_path / "patch",
        work,
        {path: [1] for path in files if path.endswith(".py")},
    )
    if again:
        assert asked.pop(0) == (told, policy.patience, tmp_path / "patch", work)
    assert found.evidence["state"] == ("failed" if again else state) and not asked and found.handed_on is told
    case.after_stages.close()
    assert asked == ["closed"]
    cases, calls = ([job for job in told.jobs if key in job] for key in ("case", "storage"))
    assert len(cases) + len(calls) == len(told.jobs) and found.evidence.get("checks", len(cases)) == len(cases)
    for jobs in (cases, calls):
        assert list(dict.fromkeys(job["op"] for job in jobs)) == changed
        assert {job["dtype"] for job in jobs} - {"fp64", "fp32"} == ({"bf16"} if started else set())
    for op in changed:
        count = len([job for job in calls if job["op"] == op])
        assert case.policy.exploits.calls <= count - 6 <= case.policy.exploits.calls * 5 // 4


def test_the_op_stages_check_nothing_without_changed_ops(tmp_path: Path) -> None:
    case = case_of(tmp_path, {"trainer/run.py": (None, "x = 1\n")}, handed_on={"oracle": None})
    assert oracle.run(case).evidence == exploits.run(case).evidence == NO_OP and oracle.run(case).handed_on is None


def test_the_exploits_stage_reads_what_the_oracle_handed_on(tmp_path: Path) -> None:
    told = Told("failed")
    told.jobs = [{"op": "swiglu", "storage": 0}]
    case = case_of(tmp_path, {CODE: (None, "x = 1\n")}, handed_on={"oracle": told})
    assert exploits.run(case).evidence["state"] == "failed"


def test_the_evidence_of_some_jobs_counts_an_early_end_as_theirs() -> None:
    told = Told("passed")
    told.jobs = [{"op": "swiglu", "case": "small"}, {"op": "rms_norm", "case": "small"}, {"op": "swiglu", "storage": 0}]
    found = [oracle.make_oracle_evidence(told, numbers) for numbers in (None, [1])]  # type: ignore[arg-type]
    assert [(one["checks"], one["last"]) for one in found] == [(2, False), (1, True)]


def test_hostile_values_are_those_that_the_driver_knows() -> None:
    assert set(oracle.HOSTILE) == HOSTILE.keys() - {"infinite"} and oracle.HOSTILE[0] == "normal"
    jobs = oracle.make_oracle_jobs(OraclePolicy(), [ChangedOp("swiglu", "a", "b")], "fp32")
    assert {job["values"] for job in jobs} == set(oracle.HOSTILE)


# -- isolated ----------------------------------------------------------------------------------------------------------
def clock(*told: Any) -> tuple[list[dict[str, Any]], Callable[..., sandbox.SandboxResult]]:
    """A sandbox that tells these timings, one after the other; text as it is."""
    asked: list[dict[str, Any]] = []

    def run(command: list[str], **how: Any) -> sandbox.SandboxResult:
        asked.append(how | {"command": command})
        said = told[len(asked) - 1]
        if isinstance(said, tuple):
            said = json.dumps(dict(zip(("ratio", "ratio_low", "ratio_high"), said, strict=True)))
        return sandbox.SandboxResult(0 if said else 1, said, "broken", 1.0, "wall" if said == "late" else None, 0, 0)

    return asked, run


OPS = [
    ChangedOp("rms_norm", "reference", "reference"),
    ChangedOp("swiglu", "reference", "native"),
    ChangedOp("adamw", "fused", "plain"),
]
SAME, QUICK = (1.0, 0.99, 1.01), (2.0, 1.9, 2.1)


@pytest.mark.parametrize("there", [False, True])
def test_switched_ops_are_timed_by_approved_code_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    asked, run = clock(QUICK, SAME, (1.5, 1.4, 1.6), SAME)
    monkeypatch.setattr(sandbox, "run_in_sandbox", run)
    work, recipe = tmp_path / "cache" / "bench", tmp_path / "cache" / "bench-recipe.yaml"
    if there:
        work.mkdir(parents=True)
    found = isolated.time_switched_ops(
        IsolatedTimingPolicy(pairs=5, wall_seconds=70.0), OPS, {"name": "tiny"}, tmp_path / "base", work
    )
    assert yaml.safe_load(recipe.read_text()) == {"name": "tiny"} and work.is_dir()
    for how, (op, against, name) in zip(
        asked,
        [(one.op, one.before, name) for one in OPS[1:] for name in (one.after, one.before)],
        strict=True,
    ):
        assert how.pop("limits").wall_seconds == 70.0
        command = f"-m kernels.contract.bench --op {op} --against {against} --recipe {recipe} --pairs 5 --device {devices.get_device_kind()}"
        assert how == {
            "command": [sys.executable, *command.split(), "--implementation", name],
            "output": work, "readonly": [tmp_path / "base", recipe], "cwd": tmp_path / "base",
        }  # fmt: skip
    assert found["state"] == "passed" and [reason.data["op"] for reason in found["reasons"]] == [
        "swiglu",
        "adamw",
    ]
    assert found["ops"] == {
        "swiglu": {"ratio": 2.0, "low": 1.9, "high": 2.1, "a_a": 1.0},
        "adamw": {"ratio": 1.5, "low": 1.4, "high": 1.6, "a_a": 1.0},
    }


@pytest.mark.parametrize(
    ("told", "tries", "state", "late", "expected"),
    [
        (["late"], 3, "missing", True, expect("gates.baseline_stopped", what="timing of swiglu", seconds=70.0, key="isolated.wall_seconds")),
        ([""], 3, "missing", False, expect("patch.not_timed_alone", op="swiglu", why="the command ended with code 1: broken")),
        ([QUICK, "{"], 3, "missing", False, expect("patch.not_timed_alone", op="swiglu")),
        ([QUICK, (1.1, 1.02, 1.2)], 1, "passed", False, expect("patch.alone")),
        ([QUICK, (1.1, 1.03, 1.2)], 1, "missing", False, expect("patch.unlike_itself", tries=1, slower="faster", ratio=1.1)),
        ([QUICK, (0.9, 0.8, 0.97)] * 2, 2, "missing", False, expect("patch.unlike_itself", tries=2, slower="slower", ratio=0.9)),
        ([QUICK, (0.9, 0.8, 1 / 1.02)], 1, "passed", False, expect("patch.alone")),
        ([(1.0, 0.9, 1.25), SAME], 1, "passed", False, expect("patch.alone")),
        ([(1.0, 0.9, 1.24), SAME], 1, "failed", False,
         expect("patch.slower_alone", after="native", before="reference", ratio=1.0, high=1.24, least=1.25)),
    ],
)  # fmt: skip
def test_the_evidence_of_the_isolated_stage_follows_from_the_timings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: list[Any],
    tries: int,
    state: str,
    late: bool,
    expected: Expected,
) -> None:
    asked, run = clock(*told)
    monkeypatch.setattr(sandbox, "run_in_sandbox", run)
    policy = IsolatedTimingPolicy(tries=tries, min_ratio=1.25, wall_seconds=70.0)
    found = isolated.time_switched_ops(policy, OPS[:2], {}, tmp_path, tmp_path / "bench")
    assert (found["state"], found.get("out_of_time", False)) == (state, late), found
    assert tells(found["reasons"][:1], expected), found
    assert ("ops" in found) == (told[-1] not in ("late", "", "{"))
    assert len(asked) == len(told)


def test_ops_are_timed_by_themselves_only_for_patches_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = TrainingStart(tmp_path, 6, yaml.safe_load(RECIPE), {})
    setting: Files = {KERNELS: (CPU, "cpu: {swiglu: native, rms_norm: reference}\n")}
    asked, run = clock(QUICK, SAME)
    monkeypatch.setattr(sandbox, "run_in_sandbox", run)
    monkeypatch.setattr(isolated, "make_gate_recipe", lambda case, start, code: {"name": f"{start.step} {code.name}"})
    told: list[tuple[str, Files, TrainingStart | None, str]] = [
        ("a", setting, None, NO_START["state"]), ("b", {**setting, CODE: (None, "x = 1\n")}, start, "not needed"),
        ("c", {KERNELS: (CPU, CPU + "\n")}, start, "not needed"), ("d", setting, start, "passed"),
    ]  # fmt: skip
    for name, files, begun, state in told:
        found = isolated.run(case_of(tmp_path / name, files, start=begun)).evidence
        assert found["state"] == state and len(asked) == 2 * (name == "d"), name
    folder = tmp_path / "d" / "cache"
    assert (
        asked[0]["output"] == folder / f"workbench{devices.get_device_folder_suffix()}"
        and asked[0]["cwd"] == tmp_path / "d" / "base"
    )
    assert yaml.safe_load(next(folder.glob("*-recipe.yaml")).read_text()) == {"name": "6 base"}
