"""Odd contents of patches: the gate answers with a verdict, never with a crash."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agents.core.proposal import Edit, Proposal
from factory.code_loop.submitting import submit_proposal
from factory.gates.patch import op_answers, source_rules
from factory.gates.patch.changed_ops import find_changed_ops
from factory.gates.patch.stages import oracle, static
from factory.gates.stage_interface import PatchCase, StageResult
from factory.git.scope import FileChange
from factory.ledger.plant import Plant
from factory.show.unshown_items import show_unshown_items
from kernels.contract.message import Message
from kernels.contract.strict_yaml import read_yaml
from tests.support.factory.code_loop import make
from tests.support.gates.reasons import expect, tells
from tests.support.messages import codes
from trainer.contract.errors import RecipeError


@pytest.mark.parametrize("section", ["hello", "3", "[a, b]", "{1: a, b: c}", "{on: a, rms_norm: c}", "{~: x, a: b}"])
def test_an_odd_kernel_choice_is_read_without_a_crash(section: str) -> None:
    found = find_changed_ops(b"cpu: {swiglu: native}", f"cpu: {section}".encode(), [], "cpu", {})
    assert any(op.op == "swiglu" and op.after == "reference" for op in found)
    assert find_changed_ops(None, b"- cpu", [], "cpu", {}) == []


@pytest.mark.parametrize(
    "text", ["x = a" + ".b" * 1200, "x = " + "-" * 1200 + "1", "x = " + "(" * 150 + "1" + ")" * 150]
)
def test_deep_sources_are_read_or_refused(text: str) -> None:
    change = FileChange("kernels/a.py", None, "100644", text.encode())
    for problem in source_rules.find_source_problems(change, None):
        assert problem.startswith("kernels/a.py")


@pytest.mark.parametrize("text", ["? [a]\n: b\n", "a: " + "9" * 5000, "[" * 3000])
def test_yaml_that_python_cannot_represent_gives_one_clear_error(text: str) -> None:
    with pytest.raises(RecipeError, match="recipe cannot be read as YAML"):
        read_yaml(text, "recipe", RecipeError)


@pytest.mark.parametrize(
    ("forged", "code"),
    [
        ({"launches": torch.ones(1, dtype=torch.complex64)}, "patch.op_no_launch"),
        ({"launches": torch.ones(1, dtype=torch.uint16)}, "patch.op_no_launch"),
        ({"launches": torch.zeros(1, dtype=torch.int64)}, "patch.op_no_launch"),
        ({"later output 0": torch.ones(2).to(torch.float8_e5m2)}, "patch.op_late"),
        ({"output 0": torch.ones(2).to(torch.float8_e5m2)}, "patch.op_shape"),
    ],
)
def test_a_forged_answer_is_a_wrong_answer(tmp_path: Path, forged: dict[str, torch.Tensor], code: str) -> None:
    truth, answers = tmp_path / "truth", tmp_path / "answers"
    for folder in (truth, answers):
        folder.mkdir()
    save_file({"output 0": torch.ones(2, dtype=torch.float64)}, truth / "exact-0.safetensors")
    save_file({"output 0": torch.ones(2)}, truth / "eager-0.safetensors")
    right = {
        "output 0": torch.ones(2),
        "later output 0": torch.ones(2),
        "inputs changed": torch.zeros(0, dtype=torch.int64),
    }
    descriptor = os.open(answers, os.O_RDONLY)
    for found, expected in ((right, []), (right | forged, [code])):
        save_file(found, answers / "answer-0.safetensors")
        wrong, _ = op_answers.compare_answer(truth, descriptor, 0)
        assert codes(wrong) == expected, wrong
    os.close(descriptor)


def test_a_stage_that_raises_holds_and_infinite_numbers_stay_out_of_the_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make()

    def breaks(case: PatchCase[Any]) -> StageResult:
        raise OverflowError("nobody thought of this")

    endless = {
        "state": "passed",
        "reasons": [Message("patch.test", "fine")],
        "worst": math.inf,
        "inner": [{"a": -math.inf}, math.nan, 1.5],
    }
    monkeypatch.setattr(static, "run", lambda case: StageResult(endless))
    monkeypatch.setattr(oracle, "run", breaks)
    edit = Edit("trainer/optim/schedule.py", (made.target / "trainer" / "optim" / "schedule.py").read_text() + "# x\n")
    number = submit_proposal(
        Plant(made.workspace, made.ledger), Proposal("search", "x", "Odd", "Because.", 1.1, (edit,)), made.base
    )
    row = made.verdict_on(number)
    assert row["outcome"] == "hold"
    expected = expect("gates.stage_error", stage="oracle", kind="OverflowError", error="nobody thought of this")
    assert tells(row["reasons"], expected)
    found = row["evidence"]["stages"]["static"]
    assert (found["worst"], found["inner"]) == (None, [{"a": None}, None, 1.5])
    show_unshown_items(Plant(made.workspace, made.ledger))
    report = (made.workspace.reports / f"proposal-{number}.json").read_text()
    json.loads(report, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert made.left_behind() == []


def test_a_lone_surrogate_is_out_of_scope() -> None:
    made = make()
    for edit in (Edit("kernels/a.py", "x = '\ud800'\n"), Edit("kernels/\ud800.py", "x = 1\n")):
        number = submit_proposal(
            Plant(made.workspace, made.ledger), Proposal("x", "x", "Odd", "Because.", 1.1, (edit,)), made.base
        )
        row = made.verdict_on(number)
        assert row["outcome"] == "reject" and row["evidence"]["stages"]["scope"]["state"] == "failed"
        assert made.left_behind() == []


def test_the_same_edits_under_another_target_are_another_try() -> None:
    made = make()
    edit = Edit(
        "trainer/optim/schedule.py", (made.target / "trainer" / "optim" / "schedule.py").read_text() + "import os\n"
    )
    tries = []
    for target in ("kernel:one", "kernel:another", "trainer/optim/schedule.py:3"):
        drafted = Proposal("x", target, "Again", "Because.", 1.1, (edit,))
        number = submit_proposal(Plant(made.workspace, made.ledger), drafted, made.base)
        row = made.verdict_on(number)
        assert tells(row["reasons"][:1], expect("patch.imports", name="os"))
        tries.append(row["evidence"]["tries"])
    assert tries == [1, 2, 3]
