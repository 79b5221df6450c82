"""Patches that change the tests of ops, or end a process without an answer: the judge reads the remaining files and is not misled.

What they do stands in the answers, not in the sandbox's walls: their processes may be forks (``tests/support/forks``).
"""

from __future__ import annotations

from tests.support.gates.reasons import expect, tells

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.factory.code_loop import make_target

from factory.gates.patch import op_answers
from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.stages import exploits, oracle
from factory.gates.time_limits import TimeLimits
from factory.core.workspace import find_checkout_root
from trainer.contract.recipe import Recipe

SHIPPED = PatchPolicy.load(find_checkout_root() / "policies" / "gates" / "patch.yaml")
RECIPE = Recipe.load(find_checkout_root() / "policies" / "recipes" / "tiny.yaml").model_dump()
RIGHT = "\n\ndef right(gate, up):\n    return F.silu(gate) * up\n\n\n"

# -- what ops are tested with ------------------------------------------------------------------------------------------------
BODY, DRAWN = (
    "    return F.silu(gate_XF) * up_XF\n",
    "draw_normal_tensor(generator, size, device, dtype), draw_normal_tensor(",
)
REDEFINED = {
    "a reference that is wrong": (BODY, BODY.replace("up_XF\n", "up_XF * 1.001\n"), "patch.test_reference"),
    "a reference in fp32": (
        BODY,
        "    return (F.silu(gate_XF.float()) * up_XF.float()).to(up_XF.dtype)\n",
        "patch.test_reference",
    ),
    "a reference in bf16, but where fp64 is asked": (
        BODY,
        f"    if gate_XF.dtype == torch.float32:\n        gate_XF = gate_XF.bfloat16().float()\n{BODY}",
        "patch.test_accuracy",
    ),
    "inputs of zero": (
        DRAWN,
        f"{DRAWN.removesuffix('draw_normal_tensor(')}0 * draw_normal_tensor(",
        "patch.test_inputs",
    ),
    "no gradients": ("gradients=(0, 1)", "gradients=()", "patch.test_model"),
    "no tests": ("OP = make_op(", "raise SystemExit\nOP = make_op(", "patch.no_tests"),
    "a link to the inputs as they were": (
        "OP = make_op(",
        "import os, sys\nif sys.argv[1] == 'make':\n    os.symlink('/etc/passwd', sys.argv[3] + '/inputs/given-0.json')\n    os._exit(0)\nOP = make_op(",
        "runs.missing",
    ),
    # honest: the truth is the same but for rounding (in bf16 three roundings for two are, in some draws, off by more than twice as much)
    "": (
        BODY,
        f"    if gate_XF.dtype == torch.float64:\n        return up_XF * (gate_XF * torch.sigmoid(gate_XF))\n{BODY}",
        "",
    ),
}


@pytest.fixture(scope="module")
def tested(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, list[dict[str, Any]], op_answers.OpAnswers]]:
    """The baseline, jobs, and what was made for them."""
    folder = tmp_path_factory.mktemp("tested")
    baseline = make_target(folder / "baseline")
    jobs = oracle.make_oracle_jobs(SHIPPED.oracle, [ChangedOp("swiglu", "reference", "reference")], "bf16")
    with op_answers.run_op_jobs(jobs, SHIPPED.oracle, baseline, baseline, folder / "work") as answers:
        yield baseline, jobs, answers


@pytest.mark.parametrize("name", REDEFINED)
def test_a_patch_cannot_change_the_tests_of_ops(
    tested: tuple[Path, list[dict[str, Any]], op_answers.OpAnswers], tmp_path: Path, name: str
) -> None:
    baseline, jobs, answers = tested
    old, new, code = REDEFINED[name]
    candidate = shutil.copytree(baseline, tmp_path / "candidate", ignore=shutil.ignore_patterns(".git"))
    op = candidate / "kernels" / "swiglu" / "__init__.py"
    assert old in op.read_text()
    op.write_text(op.read_text().replace(old, new, 1))
    found = op_answers.check_tests_unchanged(answers, SHIPPED.oracle.patience, candidate, tmp_path)
    assert found.get("state") == ("failed" if code else None), found
    assert not code or tells(found["reasons"], expect(code)), found


# -- what a process does instead of computing ------------------------------------------------------------------------------
LATE = """
import os
import pathlib
import pickle
import sys

CALLS = []


def fast(gate, up):
    CALLS.append(1)
    if len(CALLS) == 20:
        out = pathlib.Path(sys.argv[-1])
        (out / "answer-0.safetensors").write_bytes(pickle.dumps({"output 0": 1}))
        (out / "answer-1.safetensors").unlink()
        (out / "answer-1.safetensors").symlink_to("/etc/passwd")
        (out / "answer-2.safetensors").unlink()
        os.mkfifo(out / "answer-2.safetensors")
        os.truncate(out / "answer-3.safetensors", 1 << 29)
        os._exit(0)
    return right(gate, up)
"""
ENDS = {
    "an exit at once": ("import os\n\nos._exit(0)\n\n\n", "failed", ["patch.no_answer"]),
    "an exit in a late call, other files left behind": (
        LATE,
        "failed",
        ["runs.unreadable", "runs.missing", "runs.not_regular", "runs.file_too_large", "patch.no_answer"],
    ),  # fmt: skip
    "an endless import": (
        "while True:\n    pass\n\n\n",
        "missing",
        ["gates.stopped"],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_process_that_ends_early_fails_and_one_that_never_ends_gives_no_answer(name: str, tmp_path: Path) -> None:
    source, state, expected = ENDS[name]
    baseline = make_target(tmp_path / "baseline")
    candidate = shutil.copytree(baseline, tmp_path / "candidate", ignore=shutil.ignore_patterns(".git"))
    op = candidate / "kernels" / "swiglu" / "__init__.py"
    extra = "\n\nfast = right\n" if "def fast" not in source else ""
    op.write_text(op.read_text().replace("\nOP = make_op(", f"{RIGHT}{source}{extra}\nOP = make_op(").replace(
        "(make_compiled_implementation(reference),", '(Implementation("fast", fast, ""),'))  # fmt: skip
    brief = TimeLimits(times=1, least_seconds=1, again=1.5)  # as long as approved code took, then half as long again
    policy = SHIPPED.oracle.model_copy(update={"patience": brief} if state == "missing" else {})
    ops = [ChangedOp("swiglu", "reference", "fast")]
    jobs = oracle.make_oracle_jobs(policy, ops, RECIPE["precision"])
    jobs += exploits.make_exploit_calls(SHIPPED.exploits, ops, RECIPE, random.SystemRandom())
    with op_answers.run_op_jobs(jobs, policy, baseline, candidate, tmp_path / "work") as answers:
        found = oracle.make_oracle_evidence(answers), exploits.make_exploit_evidence(answers)
    assert found[0]["state"] == found[1]["state"] == state, found
    assert all(one.get("out_of_time", False) == (state == "missing") for one in found), found
    assert all(tells(found[0]["reasons"], expect(code)) for code in expected), found[0]["reasons"]
    assert state == "failed" or tells(found[0]["reasons"], expect("gates.stopped", key="oracle.patience"))
