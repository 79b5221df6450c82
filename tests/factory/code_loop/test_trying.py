"""Tables of tried variants: real worktrees, a real sandbox, real trainers, and the record in a real ledger."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml

from agents.core.proposal import Edit
from agents.core.workbench import TryTable, Variant
from agents.kernel_engineer.draft import AGENT
from factory.code_loop import trying
from factory.code_loop.agent_runs import AgentOptions, AgentRuns
from factory.code_loop.try_record import STEP, TryRecord
from factory.code_loop.trying import read_step_times, read_times_alone
from factory.code_loop.workbench import LiveWorkbench
from factory.core.errors import InputError
from factory.core.workspace import find_checkout_root
from factory.gates.patch.execution_recorder import list_native_libraries
from factory.gates.training_start import find_training_start
from factory.ledger.ledger import agent_runs
from factory.ledger.plant import Plant
from factory.sandbox import sandbox
from tests.support.factory.code_loop import Made, make
from tests.support.messages import codes, refused

SCHEDULE, SWIGLU, KERNELS = "trainer/optim/schedule.py", "kernels/swiglu/swiglu.cpp", "policies/kernels.yaml"


@pytest.fixture
def made(tmp_path: Path) -> Any:
    case = make()
    policy = case.workspace.root / "policies" / "agents.yaml"
    before = policy.read_text() if policy.exists() else None
    policy.write_text((find_checkout_root() / "policies" / "agents.yaml").read_text())
    yield case
    policy.unlink() if before is None else policy.write_text(before)


def begun(made: Made, state: str = "abandoned") -> int:
    """A run of an agent, as the ledger keeps it."""
    row = {
        "agent": AGENT,
        "asked": "",
        "base_commit": made.base,
        "profile": 0,
        "state": state,
        "created_at": time.time(),
    }
    with made.ledger.begin() as tx:
        found = tx.execute(agent_runs.insert().values(**row)).inserted_primary_key
    assert found is not None
    return int(found[0])


def bench_of(made: Made, run: int | None = None) -> LiveWorkbench:
    start = find_training_start(made.ledger)
    assert start is not None
    return LiveWorkbench(Plant(made.workspace, made.ledger), made.base, start, run=run)


def allow(made: Made, **keys: Any) -> None:
    path = made.workspace.root / "policies" / "agents.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | keys))


def appended(bench: LiveWorkbench, path: str, text: str) -> Edit:
    return Edit(path, bench.read(path) + text)


def chosen(bench: LiveWorkbench, implementation: str) -> Edit:
    """kernels.yaml with another implementation of swiglu for the CPU."""
    text = bench.read(KERNELS)
    new = re.sub(r"(\ncpu:\n(?:  .*\n)*?  swiglu: )\w+", rf"\g<1>{implementation}", text)
    assert new != text
    return Edit(KERNELS, new)


def times(table: TryTable) -> list[list[str]]:
    return [codes(row.times) for row in table.rows]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise AssertionError("a sandbox was started")

    monkeypatch.setattr(sandbox, "run_in_sandbox", run)


@pytest.mark.slow("sandboxes for the checks, and three trainers")
def test_each_variant_of_a_table_gets_its_own_result(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(made)
    bench = bench_of(made, run)
    told = bench.read("trainer/run.py").replace('"grad_norm": grad_norm,', '"grad_norm": 0.5 * grad_norm,')
    variants = [
        Variant("comment", (appended(bench, SCHEDULE, "\n# the same\n"),)),
        Variant("broken", (appended(bench, SCHEDULE, "\nraise ValueError('no')\n"),)),
        Variant("forbidden", (appended(bench, SCHEDULE, "\nimport os\n"),)),
        Variant("half the norm", (Edit("trainer/run.py", told),)),
        Variant("outside", (Edit("factory/new.py", "x = 1\n"),)),
    ]
    table = bench.try_variants(variants, target="file:trainer/optim/schedule.py")
    assert [(row.name, row.check.stage, row.check.ok) for row in table.rows] == [
        ("comment", "import", True), ("broken", "import", False), ("forbidden", "static", False), ("half the norm", "import", True),
        ("outside", "scope", False),
    ]  # fmt: skip
    assert times(table) == [["code_loop.step_timed"], [], [], ["code_loop.step_timed"], []]
    same, differs = (table.rows[number].times[0].data for number in (0, 3))  # type: ignore[attr-defined]
    assert same["result"]["code"] == "code_loop.step_same" and same["rounds"] >= 1 and same["ms"] > 0
    assert differs["result"]["code"] == "code_loop.step_differs"  # the gate would reject it
    record = TryRecord(bench.plant, run)
    assert len(record.timed_variants) == 2 and record.timing_seconds > 0
    assert not list((made.workspace.root / "cache").glob("check-*"))

    # A later process continues the run: nothing is measured twice, and the budget is that of the run.
    spent = record.timing_seconds
    monkeypatch.setattr(sandbox, "run_in_sandbox", None)
    again = bench_of(made, run).try_variants(variants, target="file:trainer/optim/schedule.py")
    assert [row.known for row in again.rows] == [True] * 5 and times(again) == times(table)
    assert [codes(row.check.problems) for row in again.rows] == [codes(row.check.problems) for row in table.rows]
    assert record.timing_seconds == spent
    assert bench_of(made, run).check(variants[0].edits).ok  # a proposal of tried edits needs no second check
    # Later runs on the target read what was tried.
    earlier = bench_of(made, begun(made)).list_earlier_tries("file:trainer/optim/schedule.py")
    assert [one.data["name"] for one in earlier[-5:]] == ["forbidden", "outside", "broken", "comment", "half the norm"]  # type: ignore[attr-defined]


@pytest.mark.slow("compiles C++ three times, and trains with it")
def test_cpp_is_checked_timed_and_compiled_only_in_the_sandbox(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    bench, loaded = bench_of(made, begun(made)), list_native_libraries()
    native, text = chosen(bench, "native"), bench.read(SWIGLU)
    edited = {
        "options": f"// compile with: -funroll-loops\n{text}",
        "wrong": text.replace("(one - sigmoid)", "(one + sigmoid)"),
        "no C++": text.replace("return 0;", "return zero;"),
        "forbidden": text + '\nextern "C" int system(const char*);\n',
    }
    variants = [Variant(name, (native, Edit(SWIGLU, new))) for name, new in edited.items()]
    table = bench.try_variants(variants, "swiglu", "kernel:swiglu")
    assert [(row.check.stage, row.check.ok) for row in table.rows] == [
        ("oracle", True), ("oracle", False), ("oracle", False), ("static", False),
    ]  # fmt: skip
    assert times(table) == [["code_loop.timed", "code_loop.step_timed"], [], [], []]
    assert "gradient" in str(table.rows[1].check.problems[0]) and "zero" in str(table.rows[2].check.problems)
    assert codes([table.rows[3].check.problems[0].data["problem"].data["problem"]]) == ["patch.native_uses"]  # type: ignore[attr-defined]
    assert not list(tmp_path.rglob("*.so")) and list_native_libraries() == loaded, (
        "nothing of it was compiled or loaded here"
    )


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"max_tries": 0}, "code_loop.no_tries"),
        ({"try_seconds": 0.0}, "code_loop.no_tries"),
        ({"max_tries": 1}, "code_loop.no_tries_left"),
        ({"try_seconds": 5.0}, "code_loop.no_tries_left"),
    ],
)
@pytest.mark.slow("a sandbox for the checks")
def test_a_used_budget_withholds_times_and_no_check(made: Made, keys: dict[str, Any], code: str) -> None:
    allow(made, **keys)
    run = begun(made)
    TryRecord(Plant(made.workspace, made.ledger), run).add(
        [{"key": "other", "stage": STEP, "name": "", "target": "", "paths": [], "lines": [], "seconds": 5.0}]
    )
    bench = bench_of(made, run)
    edits = (appended(bench, SCHEDULE, "\n# the same\n"),), (appended(bench, SCHEDULE, "\nraise ValueError('no')\n"),)
    table = bench.try_variants([Variant(str(number), edit) for number, edit in enumerate(edits)])
    assert [row.check.ok for row in table.rows] == [True, False]
    assert times(table) == [[code], []]
    assert table.budget.data["used"] == 1 and table.budget.data["seconds"] == 5.0  # type: ignore[attr-defined]


def test_a_budget_of_zero_dollars_is_refused_before_anything_is_measured(made: Made, tmp_path: Path) -> None:
    llm = {"usd_per_million_input_tokens": 1.0, "per_proposal": {"tokens": 1000, "usd": 0.0}, "model": "m"}
    allow(made, llm=llm)
    with refused("code_loop.zero_budget", InputError):
        AgentRuns.open(Plant(made.workspace, made.ledger), AGENT, AgentOptions(f"files:{tmp_path}"))
    allow(made, llm=llm | {"usd_per_million_input_tokens": 0.0})  # a free model needs no money
    AgentRuns.open(Plant(made.workspace, made.ledger), AGENT, AgentOptions(f"files:{tmp_path}"))


def test_the_same_edits_are_one_variant(made: Made, nothing_runs: None) -> None:
    bench = bench_of(made)
    refused_edit = appended(bench, SCHEDULE, "\nimport os\n")
    table = bench.try_variants([Variant("a", (refused_edit,)), Variant("b", (refused_edit,))])
    assert [(row.name, row.check.stage) for row in table.rows] == [("a", "static"), ("b", "static")]
    assert len(bench.tried) == 1 and replace(bench).tried == []


def trial(number: int, *changed: Any) -> Any:
    return trying._Trial(str(number), str(number), [], number, changed=list(changed))


@pytest.mark.parametrize(
    "told",
    [
        {}, {"ops": 7}, {"ops": {"swiglu": []}}, {"ops": {"swiglu": {"variant-1": {"seconds": ["x", True, None]}, "base": {"seconds": [1.0]}}}},
        {"ops": {"swiglu": {"variant-1": {"seconds": [float("nan"), -1.0]}, "base": {"seconds": [1.0, 1.0]}}}},
        {"ops": {"swiglu": {"variant-1": {"failed": "\x1b[31mno\nVerdict: promote"}, "base": {"seconds": [1.0]}}}},
    ],
)  # fmt: skip
def test_times_that_are_no_numbers_are_told_as_not_measured(told: Any) -> None:
    op = trying.ChangedOp("swiglu", "reference", "native")
    ((line,),) = read_times_alone([trial(1, op)], told, None).values()
    assert line.code == "code_loop.not_measured_alone" and "\x1b" not in line and "\n" not in line


@pytest.mark.parametrize(
    "told",
    [
        {}, {"groups": {}}, {"groups": [7, {"variant-1": {"runs": "x"}, "base": {"runs": []}}]},
        {"groups": [{"variant-1": {"runs": [{"step_s": 0}]}, "base": {"runs": [{"step_s": 1.0}]}}]},
        {"groups": [{"variant-1": {"failed": "a\nb", "late": True}, "base": {"runs": [{"step_s": 1.0}]}}]},
        {"groups": [{"variant-1": {"runs": [{"step_s": 1.0}]}, "base": {"failed": "no"}}]},
    ],
)  # fmt: skip
def test_steps_without_times_are_told_as_not_timed(told: Any) -> None:
    ((line,),) = read_step_times([trial(1)], told, None).values()
    assert line.code == "code_loop.step_not_timed" and "\n" not in line


def test_step_times_are_compared_round_by_round() -> None:
    runs = lambda *seconds: {"runs": [{"step_s": s, "loss": 2.0, "grad_norm": 1.0} for s in seconds]}
    told = {
        "groups": [
            {"base": runs(1.0, 2.0, 3.0), "variant-1": runs(0.5, 2.0, 2.0)},
            {"base": runs(4.0), "variant-2": runs(2.0)},
        ]
    }
    found = read_step_times([trial(1), trial(2)], told, None)
    data = [found[name][0].data for name in ("variant-1", "variant-2")]
    assert [(d["ratio"], d["low"], d["high"], d["rounds"]) for d in data] == [(1.5, 1.0, 2.0, 3), (2.0, 2.0, 2.0, 1)]
    told["groups"][1]["variant-2"]["runs"][0]["loss"] = 2.5
    ((line,),) = read_step_times([trial(2)], told, None).values()
    assert line.data["result"].code == "code_loop.step_differs" and line.data["result"].data["share"] == 0.25


def test_an_op_is_timed_if_its_choice_or_its_code_changes() -> None:
    changes = trying._changes_code
    assert changes("swiglu", "swiglu", ["kernels/swiglu/swiglu.cpp"]) and changes(
        "swiglu", "rms_norm", ["kernels/swiglu/cpp.py"]
    )
    assert not changes("swiglu", "swiglu", ["kernels/rms_norm/triton.py", "trainer/run.py"])
    shared = ["kernels/native/numbers.h"], ["kernels/rows_in_triton.py"]
    assert all(changes("swiglu", "swiglu", paths) and not changes("swiglu", "rms_norm", paths) for paths in shared)


def test_the_reason_for_which_an_agent_declined_is_a_lesson_for_the_target(made: Made, tmp_path: Path) -> None:
    allow(made, llm={"model": "m"})
    runs = AgentRuns.open(Plant(made.workspace, made.ledger), AGENT, AgentOptions(f"files:{tmp_path}"))
    run = runs.begin_run(made.base, "")
    runs.record_run_end(
        run.number, "declined", {"target": "kernel:none", "reason": "it is at the roofline"}, why="declined"
    )
    (found,) = bench_of(made).list_earlier_proposals("kernel:none")
    assert (found.outcome, found.reason, found.closed) == ("declined", "it is at the roofline", True)
    (later,) = replace(bench_of(made), base="0" * 40).list_earlier_proposals("kernel:none")
    assert not later.closed  # other code may be worth a try
    assert bench_of(made).list_earlier_proposals("kernel:other-target") == []
    row = made.ledger.select_first(sa.select(agent_runs).where(agent_runs.c.id == run.number))
    assert row is not None and row["state"] == "declined"
