"""The driver of the op oracle and the exploit checks: every op there is can be asked and answered, lists of tensors and
writes in place too, once or again and again in the same tensors."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from factory.gates.patch import driver as patch_driver
from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.op_answers import compare
from factory.gates.patch.policy import ExploitsPolicy
from factory.gates.patch.stages import exploits
from kernels.contract.registry import OPS
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe

RECIPE = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_dump()
CALLS = ExploitsPolicy(calls=4, recipe_calls=1)


def test_every_ops_reference_answers_what_the_truth_says(tmp_path: Path) -> None:
    chosen = [*((op, "reference") for op in OPS), ("adamw", "fused")]  # as shipped
    jobs: list[dict[str, Any]] = [
        {"op": op, "implementation": implementation, "case": case, "dtype": "fp32", "values": values, "seed": 3}
        for op, implementation in [*chosen, ("swiglu", "triton")]
        for case, values in (("small", "outlier"), ("strided", "normal"))
    ]
    for op, implementation in chosen:
        jobs += exploits.calls(CALLS, [ChangedOp(op, "reference", implementation)], RECIPE, random.Random(7))
    request, given, answers = tmp_path / "request.json", tmp_path / "given", tmp_path / "answers"
    request.write_text(json.dumps({"device": "cpu", "jobs": jobs}))
    given.mkdir()
    answers.mkdir()
    for arguments in (("make", request, given), ("answer", request, given / "inputs", answers)):
        command = [sys.executable, patch_driver.__file__, *map(str, arguments)]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    folder = os.open(answers, os.O_RDONLY)
    for number, job in enumerate(jobs):
        eager = load_file(given / "truth" / f"eager-{number}.safetensors")
        exact = load_file(given / "truth" / f"exact-{number}.safetensors")
        found = load_file(answers / f"answer-{number}.safetensors")
        assert "raised" not in found, (job, bytes(found["raised"].tolist()))
        assert not len(found.pop("inputs changed")), job
        assert ("launches" in found) == (job["implementation"] == "triton")
        assert found.pop("launches", torch.tensor(2)) == 2  # forward and backward
        again = {name.removeprefix("later "): found.pop(name) for name in list(found) if name.startswith("later ")}
        assert again.keys() == (found.keys() if "storage" in job and job["op"] != "adamw" else set())
        assert found.keys() == eager.keys() == exact.keys() and "output 0" in found
        assert len(found) > len(OPS[job["op"]].gradients)
        for name, value in found.items():
            assert exact[name].dtype in (torch.float64, torch.int64), (job, name)
            torch.testing.assert_close(value, eager[name], rtol=1e-4, atol=1e-4 * float(eager[name].abs().max()))
            assert name not in again or torch.equal(again[name], value), (job, name)
        assert compare(given / "truth", folder, number)[0] == []
    os.close(folder)


def test_calls_are_drawn_and_some_differ_by_two_elements_alone() -> None:
    op = ChangedOp("swiglu", "reference", "fast")
    jobs = exploits.calls(ExploitsPolicy(), [op], RECIPE, random.Random(1))
    assert 36 <= len(jobs) <= 44 and jobs != exploits.calls(ExploitsPolicy(), [op], RECIPE, random.Random(2))
    recipe = [job for job in jobs if job["storage"] == 1]
    assert len(recipe) == 4 and all(job["shape"]["d_ff"] == RECIPE["model"]["d_ff"] for job in recipe)
    small = [job for job in jobs if job["storage"] == 0]
    for before, job in zip(small, small[1:]):
        assert (job["swap"] is not None) == (job["seed"] == before["seed"])
    assert len([job for job in small if job["swap"] is not None]) == len(small) // 4
    x = torch.randn(5, 7)
    swapped = patch_driver._swapped(x, 3)
    assert int((swapped != x).sum()) == 2 and torch.equal(swapped.flatten().sort()[0], x.flatten().sort()[0])


@pytest.mark.parametrize("name", ["tiny", "demo", "llama-100m"])
def test_a_call_at_the_recipes_sizes_is_affordable_and_keeps_its_widths_if_it_can(name: str) -> None:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / f"{name}.yaml").model_dump()
    shape = exploits.reduced(ExploitsPolicy(), recipe, exploits.FEWER_ROWS)
    assert exploits._multiplications(shape) <= 1e9
    assert all(shape[key] == recipe["model"][key] for key in ("heads", "kv_heads", "head_dim"))
    if name != "llama-100m":
        assert all(shape[key] == recipe["model"][key] for key in ("d_model", "d_ff", "vocab_size", "context"))


@pytest.mark.parametrize("name", ["tiny", "demo"])
def test_some_calls_have_the_recipes_number_of_tokens(name: str) -> None:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / f"{name}.yaml").model_dump()
    shape = exploits.reduced(ExploitsPolicy(), recipe, exploits.NARROWER, heads=1, kv_heads=1)
    assert exploits._multiplications(shape) <= 1e9
    rows = recipe["batch"].get("micro_sequences") or recipe["batch"]["sequences"]
    assert (shape["batch"], shape["context"]) == (rows, recipe["model"]["context"])


SIZES = {
    "batch": (1, 3), "context": (9, 40), "d_model": (20, 90), "kv_heads": (1, 3), "head_dim": (8, 32), "d_ff": (20, 130), "vocab_size": (60, 300),
}  # fmt: skip


def test_small_sizes_are_drawn_between_their_ends() -> None:
    draw = random.Random(5)
    drawn = [exploits.small_shape(draw) for _ in range(5000)]
    for name, (least, most) in SIZES.items():
        found = {shape[name] for shape in drawn}
        assert (min(found), max(found)) == (least, most) and found >= set(range(least, most, 2)), name
    assert {shape["heads"] // shape["kv_heads"] for shape in drawn} == {1, 2, 3}
    assert not any(shape["heads"] % shape["kv_heads"] or shape["head_dim"] % 2 for shape in drawn)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"vocab_size": 11}, 2 * 3 * 5 * 11),  # the loss's logits
        ({"context": 50}, 2 * 2 * 50 * 50 * 4 * 8),  # attention's scores and values
        ({"d_model": 20, "d_ff": 30}, 15 * 2 * 20 * 20 * 30),  # Newton–Schulz
        ({"d_model": 30, "d_ff": 20}, 15 * 2 * 20 * 20 * 30),
    ],
)
def test_a_call_costs_what_its_most_expensive_op_multiplies(sizes: dict[str, int], count: int) -> None:
    least = {
        "batch": 2,
        "context": 3,
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "d_model": 5,
        "d_ff": 1,
        "vocab_size": 1,
    }
    if "vocab_size" in sizes:
        least |= {"heads": 1, "head_dim": 1}
    assert exploits._multiplications(least | sizes) == count


def test_sizes_are_halved_in_order_until_a_call_is_affordable() -> None:
    order, of = (("batch", 1), ("vocab_size", 64)), RECIPE | {"batch": {"sequences": 12, "micro_sequences": 8}}
    given = exploits.reduced(ExploitsPolicy(multiplications=1e30), of, order, d_ff=7)
    assert given["batch"] == 8 and given["d_ff"] == 7 and given["vocab_size"] == RECIPE["model"]["vocab_size"]
    cost = exploits._multiplications(given)
    halved = [exploits.reduced(ExploitsPolicy(multiplications=most), of, order, d_ff=7) for most in (cost, cost - 1, 1)]
    assert [shape["batch"] for shape in halved] == [8, 4, 1]
    assert 64 <= halved[2]["vocab_size"] < 128 and halved[1]["vocab_size"] == given["vocab_size"]


def test_calls_of_one_storage_meet_the_same_tensors() -> None:
    storages: dict[Any, Any] = {}
    first = patch_driver._into(storages, 0, [1], [3, torch.zeros(2)], [torch.zeros(1)])
    again = patch_driver._into(storages, 0, [1], [3, torch.ones(2)], [torch.full((1,), 2.0)])
    other = patch_driver._into(storages, 1, [], [torch.zeros(2)], [])
    assert first[0][1] is again[0][1] and first[1][0] is again[1][0] and other[0][0] is not first[0][1]
    assert first[0][1].requires_grad and not other[0][0].requires_grad
    assert first[0][1].tolist() == [1, 1] and first[1][0].tolist() == [2]
    with pytest.raises(ValueError, match="zip"):
        patch_driver._into(storages, 0, [1], [3, torch.ones(2)], [])
