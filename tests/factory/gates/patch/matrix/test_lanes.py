"""The division of tiny runs among processes, their requests, and the checks of their answers. No process is started."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from factory.gates.patch.execution_recorder import RECORDER_FILE, WATCH_FILE
from factory.gates.patch.matrix import runs as lanes
from factory.gates.patch.matrix.cases import MatrixCase, MatrixTool
from factory.gates.patch.matrix.runs import DRIVER, MatrixPlan, MatrixRuns, MatrixSide, run_cases
from factory.gates.patch.matrix.start_checkpoints import make_data_plans
from factory.sandbox import sandbox

ONE = MatrixCase("one", steps=2, stop_after=1, waits=True)
LONG = MatrixCase("long", steps=9, kernels="reference", slow_threads=True)
HALF = MatrixCase("half", "half", steps=5)
RANKS = MatrixCase("ranks", steps=3, ranks=2)
TOOL = MatrixTool("trainer.tools.documents", ("OUT/x", "FIRST", "5"), exit_code=2)
NOTES: dict[str, Any] = {name: {} for name in ("lines", "instructions", "traced", "launched", "conditions")}


class Process:
    """Stands for the sandbox; ``ends``: by the folder's name, exit codes and how it ended."""

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Any]] = {}
        self.ends: dict[str, dict[str, Any]] = {}

    def run(self, command: list[str], **how: Any) -> sandbox.SandboxResult:
        name = how["output"].name
        request = json.loads(Path(command[3]).read_text())
        self.asked[name] = how | {"command": command, "request": request}
        end = {"code": 0, "stopped": None, "stderr": "", "ranks": request["ranks"]} | self.ends.get(name, {})
        codes = end.get("codes", [0] * len(request["folders"]) + [2] * len(request["tools"]))
        for rank in range(end["ranks"]):
            told = {"executed": NOTES | {"lines": {f"{name}.py": [rank]}}, "codes": codes if rank == 0 else []}
            (Path(command[4]) / f"rank-{rank}.json").write_text(end.get("notes") or json.dumps(told))
        return sandbox.SandboxResult(end["code"], "", end["stderr"], 1.0, end["stopped"], 0, 0)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(sandbox, "run_in_sandbox", made.run)
    monkeypatch.setattr(lanes, "CONCURRENT_LANES", 2)
    return made


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    names = {case.name: f"0000{number}" for number, case in enumerate((ONE, LONG, HALF, RANKS))}
    steps = {case.name: case.steps for case in (ONE, LONG, HALF, RANKS)}
    half, made = tmp_path / "half", [tmp_path / name for name in ("trunk", "other", "annealed")]
    (half / "checkpoints").mkdir(parents=True)
    for folder in made:
        for step in ("step-00000002", "step-00000004"):
            (folder / "checkpoints" / step).mkdir(parents=True)
            (folder / "checkpoints" / step / "manifest.json").write_text("{}")
    plan = MatrixPlan(
        make_data_plans(tmp_path / "data"),
        {"half": half},
        names,
        steps,
        "c0ffee",
        5,
        "live",
        tmp_path / "plan",
        tuple(made),
    )
    kernels = {name: tmp_path / f"{name}.yaml" for name in ("reference", "chosen")}
    with ExitStack() as after:
        yield (
            plan,
            MatrixSide(
                tmp_path / "code", kernels, tmp_path / "runs", 70.0, after, watched={"trainer/a.py": [4]}, disturbed=3
            ),
        )


def test_long_runs_share_time_with_short_runs_and_ranks_come_last(
    process: Process, planned: Any, tmp_path: Path
) -> None:
    plan, side = planned
    found = run_cases(plan, side, [ONE, RANKS, LONG, HALF], [TOOL])
    assert not found.failed and 0 < found.seconds < 60 and list(process.asked)[-1] == "ranks"
    segments = {
        name: [Path(of["folder"]).name for of in how["request"]["folders"]] for name, how in process.asked.items()
    }
    assert segments == {"0": ["00001", "00000"], "1": ["00002"], "ranks": ["00003"]}
    assert [len(process.asked[name]["request"]["tools"]) for name in ("0", "1", "ranks")] == [0, 1, 0]
    assert found.executed.lines == {"0.py": {0}, "1.py": {0}, "ranks.py": {0, 1}}
    assert list(found.folders) == list(found.opened) == ["long", "one", "half", lanes.make_tool_name(TOOL), "ranks"]
    assert all(os.path.samestat(os.fstat(found.opened[name]), folder.stat()) for name, folder in found.folders.items())
    side.after.close()
    for held in found.opened.values():
        with pytest.raises(OSError):
            os.fstat(held)


def test_the_request_of_a_process_is_complete(process: Process, planned: Any, tmp_path: Path) -> None:
    plan, side = planned
    found = run_cases(plan, side, [ONE, LONG, RANKS], [TOOL])
    folder = tmp_path / "runs" / "0"
    how = process.asked["0"]
    assert how.pop("limits").wall_seconds == 70.0
    assert how == {
        "command": [sys.executable, str(DRIVER), str(RECORDER_FILE), str(folder / "request.json"), str(folder / "notes")],
        "output": folder, "cwd": side.code, "environment": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        "readonly": [side.code, DRIVER, RECORDER_FILE, WATCH_FILE, plan.folder, *side.kernels.values()],
        "request": {
            "folders": [{"folder": str(folder / "segments" / "00001"), "stop_after": 0, "waits": False, "slow_threads": True}],
            "tools": [], "watched": {"trainer/a.py": [4]}, "ranks": 1, "disturbed": 3,
        },
    }  # fmt: skip
    other, ranks = process.asked["1"]["request"], process.asked["ranks"]["request"]
    assert {key: other["folders"][0][key] for key in ("stop_after", "waits", "slow_threads")} == {
        "stop_after": 1,
        "waits": True,
        "slow_threads": False,
    }
    (tool,) = other["tools"]
    out = tmp_path / "runs" / "1" / "tools" / "0"
    first = tmp_path / "trunk" / "checkpoints" / "step-00000002"
    assert tool == {"folder": str(out), "module": TOOL.module, "arguments": [str(out / "x"), str(first), "5"]}
    assert (out / "checkpoints").is_dir() and found.folders[lanes.make_tool_name(TOOL)] == out
    assert (ranks["ranks"], ranks["tools"]) == (2, [])
    for case in (ONE, LONG, RANKS):
        spec = json.loads((found.folders[case.name] / "segment.json").read_text())
        assert spec["kernels"] == str(side.kernels[case.kernels]) and spec["last_step"] == case.steps


@pytest.mark.parametrize("fresh", [False, True])
def test_an_interrupted_run_resumes(process: Process, planned: Any, tmp_path: Path, fresh: bool) -> None:
    plan, side = planned
    found = run_cases(plan, side, [HALF], fresh=fresh)
    assert (found.folders["half"] / "checkpoints").is_dir() == (not fresh) and list(process.asked) == ["0"]
    compiled = tmp_path / "native"
    compiled.mkdir()
    (compiled / "a.so").write_bytes(b"code")
    for number, given in enumerate((None, compiled, tmp_path / "none")):
        run_cases(plan, replace(side, folder=tmp_path / f"more-{number}", compiled=given), [ONE], fresh=fresh)
        at = tmp_path / f"more-{number}" / "0" / "cache" / "inductor" / "native" / "a.so"
        assert at.is_file() == (given is compiled), number


@pytest.mark.parametrize(
    ("lane", "end", "late", "words"),
    [
        ("0", {"code": 1, "stderr": "x\nlast"}, False, "ended with code 1: last"),
        ("0", {"code": 137, "stopped": "wall"}, True, "exceeded its wall limit"),
        ("0", {"codes": [3], "stderr": " a\nb \n"}, False, "run 'long' ended with exit code 3 instead of 0: b"),
        (
            "0",
            {"codes": [3], "stderr": "e" * 900},
            False,
            "run 'long' ended with exit code 3 instead of 0: " + "e" * 400,
        ),
        ("0", {"codes": [3]}, False, "run 'long' ended with exit code 3 instead of 0: "),
        ("1", {"codes": [0, 0]}, False, f"run '{lanes.make_tool_name(TOOL)}' ended with exit code 0"),
        ("1", {"codes": [0]}, False, "cannot be read"),
        ("0", {"codes": [0, 0]}, False, "cannot be read"),
        ("0", {"notes": "{"}, False, "cannot be read"),
        ("0", {"notes": "[]"}, False, "cannot be read"),
        ("0", {"notes": '{"executed": {}}'}, False, "cannot be read"),
        ("0", {"notes": "[" * 100_000}, False, "cannot be read: it is nested"),
        ("ranks", {"ranks": 1}, False, "cannot be read: rank-1.json"),
        ("ranks", {"codes": [1]}, False, "run 'ranks' ended with exit code 1"),
    ],
)
def test_failures_are_reported(process: Process, planned: Any, lane: str, end: Any, late: bool, words: str) -> None:
    plan, side = planned
    process.ends = {lane: end}
    found = run_cases(plan, side, [ONE, LONG, RANKS], [TOOL])
    assert words in found.failed and found.out_of_time == late, found.failed
    assert not words.endswith("e") or found.failed.endswith(words)
    assert len(found.failed) < 450 and ("ranks" in process.asked) == (lane == "ranks")
    assert [
        name for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}").endswith("/notes")
    ] == []


@pytest.mark.parametrize(
    ("parts", "failed", "late"),
    [
        ([("", False), ("", False)], "", False),
        ([("a", False), ("b", False)], "a", False),
        ([("a", True), ("b", False)], "b", False),  # the code's fault is said first
        ([("a", False), ("b", True)], "a", False),
        ([("a", True), ("", False)], "a", True),
        ([("", False), ("b", True)], "b", True),
    ],
)
def test_errors_of_code_take_precedence_over_time_limits(
    parts: list[tuple[str, bool]], failed: str, late: bool
) -> None:
    whole = MatrixRuns()
    for said, out_of_time in parts:
        whole.add_runs(MatrixRuns(failed=said, out_of_time=out_of_time))
    assert (whole.failed, whole.out_of_time) == (failed, late)


def test_at_most_a_hundred_libraries_are_copied(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    for number in range(102):
        (tmp_path / "made" / f"{number:03d}").write_bytes(b"x")
    lanes.copy_compiled_libraries(tmp_path / "made", tmp_path / "a" / "copy")
    assert sorted(path.name for path in (tmp_path / "a" / "copy").iterdir()) == [
        f"{number:03d}" for number in range(100)
    ]
