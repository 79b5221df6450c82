"""The driver of the oracle and the exploit checks computes every op: also with lists of tensors and results in place, and repeatedly in the same
tensors."""

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

from factory.gates.patch import op_driver as patch_driver
from factory.gates.patch.changed_ops import ChangedOp
from factory.gates.patch.execution_recorder import RECORDER_FILE
from factory.gates.patch.op_answers import compare_answer
from factory.gates.patch.policy import ExploitsPolicy
from factory.gates.patch.stages import exploits
from kernels.contract import op as ops
from kernels.contract.op import Cost, Implementation, Shape
from kernels.contract.registry import OPS
from tests.support.paths import ROOT
from trainer.contract.recipe import Recipe

RECIPE = Recipe.load(ROOT / "policies" / "recipes" / "tiny.yaml").model_dump()
CALLS = ExploitsPolicy(calls=4, recipe_calls=1)


def asked_and_answered(jobs: list[dict[str, Any]], folder: Path) -> tuple[Path, Path]:
    """What ``make_inputs_and_truth`` and ``write_job_answers`` leave, in this process."""
    given, answers = folder / "given", folder / "answers"
    for made in (given, answers):
        made.mkdir(parents=True)
    patch_driver.make_inputs_and_truth(jobs, given)
    patch_driver.write_job_answers(jobs, given / "inputs", answers)
    return given, answers


def test_the_reference_of_every_op_gives_the_right_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    chosen = [*((op, "reference") for op in OPS), ("adamw", "fused")]  # as shipped
    jobs: list[dict[str, Any]] = [
        {"op": op, "implementation": implementation, "case": case, "dtype": "fp32", "values": values, "seed": 3}
        for op, implementation in chosen
        for case, values in (("small", "outlier"), ("strided", "normal"))
    ]
    for op, implementation in chosen:
        jobs += exploits.make_exploit_calls(
            CALLS, [ChangedOp(op, "reference", implementation)], RECIPE, random.Random(7)
        )
    given, answers = asked_and_answered(jobs, tmp_path)
    folder = os.open(answers, os.O_RDONLY)
    for number, job in enumerate(jobs):
        eager = load_file(given / "truth" / f"eager-{number}.safetensors")
        exact = load_file(given / "truth" / f"exact-{number}.safetensors")
        found = load_file(answers / f"answer-{number}.safetensors")
        assert "raised" not in found, (job, bytes(found["raised"].tolist()))
        assert not len(found.pop("inputs changed")), job
        assert "launches" not in found
        again = {name.removeprefix("later "): found.pop(name) for name in list(found) if name.startswith("later ")}
        assert again.keys() == (found.keys() if "storage" in job and job["op"] != "adamw" else set())
        assert found.keys() == eager.keys() == exact.keys() and "output 0" in found
        assert len(found) > len(OPS[job["op"]].gradients)
        for name, value in found.items():
            assert exact[name].dtype in (torch.float64, torch.int64), (job, name)
            torch.testing.assert_close(value, eager[name], rtol=1e-4, atol=1e-4 * float(eager[name].abs().max()))
            assert name not in again or torch.equal(again[name], value), (job, name)
        assert compare_answer(given / "truth", folder, number)[0] == []
    os.close(folder)


def test_the_driver_records_executed_code_and_counts_launches(tmp_path: Path) -> None:
    """As the sandbox starts it."""
    job = {"op": "swiglu", "implementation": "triton", "case": "small", "dtype": "fp32", "values": "normal", "seed": 3}
    given, answers = tmp_path / "given", tmp_path / "answers"
    watched = {"kernels/swiglu/__init__.py": [*range(1, 99)], "kernels/swiglu/triton.py": [*range(1, 99)]}
    for folder in (given, answers):
        folder.mkdir()
    for verb, folders in (("make", (given,)), ("answer", (given / "inputs", answers))):
        request = tmp_path / "request.json"
        request.write_text(
            json.dumps({"device": "cpu", "jobs": [job, job], "recorder": str(RECORDER_FILE), "watched": watched})
        )
        command = [sys.executable, patch_driver.__file__, verb, str(request), *map(str, folders)]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
    for number in range(2):
        found = load_file(answers / f"answer-{number}.safetensors")
        assert found["launches"] == 2 and "raised" not in found  # forward and backward
    for left in (given / "truth", answers):
        noted = json.loads((left / "executed.json").read_text())
        assert noted["instructions"].keys() == noted["lines"].keys() <= watched.keys()
    assert json.loads((answers / "executed.json").read_text())["launched"]


# -- what an implementation may do wrong -----------------------------------------------------------------------------------
def made_of(shape: Shape, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Any:
    draw = lambda *size: torch.randn(size, generator=generator).to(dtype)
    return (
        draw(shape.batch, shape.d_model),
        [draw(shape.d_model), torch.arange(3)],
        2.0,
        torch.zeros(shape.d_model, dtype=dtype),
    )


def twice(x: Any, others: Any, factor: float, spoilt: Any) -> Any:
    return x * factor + others[0], (x * x).sum()


def changes(x: Any, others: Any, factor: float, spoilt: Any) -> Any:
    found = twice(x, others, factor, spoilt)
    others[1][0] += 1
    spoilt += 1  # which it may
    return found


KEPT: list[torch.Tensor] = []


class Kept(torch.autograd.Function):
    """Returns memory that it uses again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        KEPT.append(KEPT[0] if KEPT else torch.empty_like(x))
        return KEPT[0].copy_(x * 2 + other).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return 2 * gradient, None


def keeps(x: Any, others: Any, factor: float, spoilt: Any) -> Any:
    return Kept.apply(x, others[0]), (x * x).sum()


def raises(x: Any, others: Any, factor: float, spoilt: Any) -> Any:
    raise OverflowError("no " * 900)


def fewer(x: Any, others: Any, factor: float, spoilt: Any) -> Any:
    return x * factor + others[0], (x * x).sum().detach()


def odd(x: Any, others: Any, factor: float, spoilt: Any) -> Any:
    return torch.nn.Parameter(x.detach()), (x * x).sum()


def sparse(x: Any, others: Any, factor: float, spoilt: Any) -> Any:
    return x.detach().to_sparse(), (x * x).sum()


def launches(x: Any, others: Any, factor: float, spoilt: Any) -> Any:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    assert [kind.run("kernel", 1, warmup=warm, y=2) for kind, warm in ((JITFunction, True), (JITFunction, False), (InterpretedFunction, False))] == [
        ("kernel", (1,), {"warmup": warm, "y": 2}) for warm in (True, False, False)
    ]  # fmt: skip
    return twice(x, others, factor, spoilt)


def writes(x: Any, others: Any, factor: float, spoilt: Any) -> None:
    x.mul_(factor)
    others[0].add_(1)


WAYS = (twice, changes, keeps, raises, fewer, odd, sparse, launches)
NAMED = tuple(Implementation(way.__name__, way, "", needs_triton=way is launches) for way in WAYS)
COST = Cost(1.0, 2.0, 3.0, 4.0)
FAKES = {
    "twice": ops.make_op(
        "twice", twice, cost=lambda shape, size: Cost(shape.batch, size, 3.0, 4.0), make_inputs=made_of, gradients=(0,),
        implementations=NAMED, clobbers=(3,),
    ),
    "written": ops.make_op(
        "written", writes, cost=lambda shape, size: COST, make_inputs=made_of, gradients=(),
        implementations=(Implementation("writes", writes, ""),), writes=(0, 1),
    ),
}  # fmt: skip


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Ops of this file in place of the checkout's."""
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "kernels.yaml").write_text("cpu: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(patch_driver, "OPS", FAKES)
    monkeypatch.setattr(patch_driver, "find_op", FAKES.__getitem__)
    KEPT.clear()
    return tmp_path


SHAPE = {"batch": 2, "context": 1, "d_model": 4, "heads": 1, "kv_heads": 1, "head_dim": 1, "d_ff": 1, "vocab_size": 1}
FIRST: dict[str, Any] = {
    "op": "twice",
    "implementation": "twice",
    "dtype": "fp32",
    "values": "normal",
    "seed": 3,
    "shape": SHAPE,
}


def test_the_driver_writes_inputs_and_truth_to_files(fakes: Path) -> None:
    strided = FIRST | {"case": "strided", "dtype": "bf16", "values": "zero"}
    del strided["shape"]
    jobs = [
        FIRST,
        {"op": "gone"},
        FIRST | {"swap": 5},
        strided,
        FIRST | {"op": "written"},
        FIRST | {"dtype": "fp64", "values": "large"},
    ]
    for part in ("inputs", "truth"):
        (fakes / part).mkdir()  # as they may be
    patch_driver.make_inputs_and_truth(jobs, fakes)
    assert sorted(path.name for path in (fakes / "inputs").iterdir()) == sorted(
        f"given-{n}.{end}" for n in (0, 2, 3, 4, 5) for end in ("json", "safetensors")
    )
    words = {n: json.loads((fakes / "inputs" / f"given-{n}.json").read_text()) for n in (0, 3, 4)}
    given = {n: load_file(fakes / "inputs" / f"given-{n}.safetensors") for n in (0, 2, 3, 4, 5)}
    assert words[0] == {
        "inputs": [{"tensor": "input 0"}, [{"tensor": "input 1"}, {"tensor": "input 2"}], 2.0, {"tensor": "input 3"}],
        "upstream": 2, "gradients": [0], "writes": [], "clobbers": [3], "contiguous": True,
        "cost": {"forward_bytes": 2, "forward_flops": 2, "backward_bytes": 3.0, "backward_flops": 4.0},
    }  # fmt: skip
    assert not words[3]["contiguous"] and (words[4]["upstream"], words[4]["writes"], words[4]["gradients"]) == (
        0,
        [0, 1],
        [],
    )
    x, other, _, _ = made_of(Shape(**SHAPE), torch.Generator().manual_seed(3), torch.device("cpu"), torch.float32)
    assert torch.equal(given[0]["input 0"], x) and torch.equal(given[0]["input 1"], other[0])
    moved = given[2]["input 0"]
    assert (
        int((moved != x).sum()) == 2
        and torch.equal(moved, patch_driver._swapped(x, 5))
        and torch.equal(given[2]["input 1"], other[0])
    )
    assert given[3]["input 0"].dtype == torch.bfloat16 and not given[3]["input 0"].any() and given[3]["input 1"].any()
    assert given[5]["input 0"].dtype == torch.float64 and torch.allclose(
        given[5]["input 0"], 1e3 * x.double(), rtol=1e-6
    )
    ups = [given[0][f"upstream {number}"] for number in range(2)]
    draw = torch.Generator().manual_seed(4)
    assert torch.equal(ups[0], torch.randn((2, 4), generator=draw)) and float(ups[1]) == -0.5
    for kind, dtype in (("exact", torch.float64), ("eager", torch.float32)):
        found = load_file(fakes / "truth" / f"{kind}-0.safetensors")
        wide, u = x.to(dtype), ups[0].to(dtype)
        expected = {
            "output 0": wide * 2 + other[0].to(dtype),
            "output 1": (wide * wide).sum(),
            "gradient 0": 2 * u - wide,
        }
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
    written = load_file(fakes / "truth" / "eager-4.safetensors")
    assert written.keys() == {"output 0", "output 1", "output 2"} and torch.equal(
        written["output 0"], 2 * given[4]["input 0"]
    )
    assert torch.equal(written["output 1"], given[4]["input 1"] + 1) and torch.equal(
        written["output 2"], torch.arange(3)
    )


def answers_of(folder: Path, *jobs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    _, answers = asked_and_answered([*jobs], folder / "asked")
    return [load_file(answers / f"answer-{number}.safetensors") for number in range(len(jobs))]


def test_the_driver_reports_exceptions_changed_inputs_and_launches(
    fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for kind in (InterpretedFunction, JITFunction):  # put back afterwards
        monkeypatch.setattr(kind, "run", lambda function, *arguments, **settings: (function, arguments, settings))
    names = [way.__name__ for way in WAYS]
    *told, again = answers_of(fakes, *(FIRST | {"implementation": name} for name in (*names, names[-1])))
    found = dict(zip(names, told, strict=True))
    assert again["launches"] == 2, "of this call alone"
    words = {
        name: bytes(left.get("raised", torch.zeros(0)).to(torch.uint8).tolist()).decode()
        for name, left in found.items()
    }
    assert {name: left["inputs changed"].tolist() for name, left in found.items()} == {
        name: [1] if name == "changes" else [] for name in names
    }
    assert [name for name in names if words[name]] == ["raises", "fewer", "odd", "sparse"]
    assert words["raises"] == ("OverflowError: " + "no " * 900)[:1500], "a file outside the worktree is not named"
    assert "not a plain tensor: Parameter" in words["odd"] and "not a plain tensor" in words["sparse"]
    assert {name for name in names if "launches" in found[name]} == {"launches"} and found["launches"]["launches"] == 2
    assert not any(name.startswith("later") for left in found.values() for name in left)
    for name in ("twice", "changes", "launches"):
        assert found[name].keys() - {"launches"} == {"output 0", "output 1", "gradient 0", "inputs changed"}
        assert torch.equal(found[name]["gradient 0"], found["twice"]["gradient 0"])
    assert bytes(patch_driver._as_bytes(ValueError("\ud800")).tolist()) == b"ValueError: ?"
    (fakes / "part.py").write_text("\n\ndef fails():\n    raise KeyError('x')\n")
    try:
        exec(compile((fakes / "part.py").read_text() + "\nfails()", str(fakes / "part.py"), "exec"), {})
    except KeyError as error:
        assert bytes(patch_driver._as_bytes(error).tolist()) == b"KeyError: 'x' (part.py, line 4)"


def test_results_of_calls_in_the_same_tensors_are_read_again_after_the_last_call(fakes: Path) -> None:
    call = FIRST | {"implementation": "keeps", "storage": 0}
    jobs = [
        call,
        call | {"seed": 4},
        call | {"storage": 1},
        FIRST,
        FIRST | {"storage": 0},
        FIRST | {"storage": 0, "seed": 4},
    ]
    jobs += [FIRST | {"op": "written", "implementation": "writes", "storage": 0, "seed": seed} for seed in (3, 4)]
    found = answers_of(fakes, *jobs)
    for number, left in enumerate(found):
        again = {name for name in left if name.startswith("later ")}
        told = left.keys() - again - {"inputs changed"}
        assert again == ({f"later {name}" for name in told} if number in (0, 1, 2, 4, 5) else set()), number
        moved = {name for name in told if again and not torch.equal(left[name], left[f"later {name}"])}
        assert moved == ({"output 0"} if number == 1 else set()), (
            number
        )  # of the first the next call, of the same values, wrote it again
        assert left["inputs changed"].tolist() == []
    for number, seed in ((6, 3), (7, 4)):
        x = made_of(Shape(**SHAPE), torch.Generator().manual_seed(seed), torch.device("cpu"), torch.float32)[0]
        assert torch.equal(found[number]["output 0"], 2 * x)


def test_tensors_are_laid_out_as_the_case_says() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    wide, copy = patch_driver._strided(x), patch_driver._copy(x.T)
    assert torch.equal(wide, x) and wide.stride() == (6, 2) and copy.stride() == x.T.stride() and torch.equal(copy, x.T)
    assert copy.data_ptr() != x.data_ptr() and copy.dtype == x.dtype
    words = {"inputs": [{"tensor": "input 0"}, 3], "contiguous": False, "upstream": 1}
    for contiguous in (False, True):
        inputs, upstream = patch_driver._read(words | {"contiguous": contiguous}, {"input 0": x, "upstream 0": x + 1})
        assert torch.equal(inputs[0], x) and inputs[0].is_contiguous() == contiguous and inputs[1] == 3
        assert torch.equal(upstream[0], x + 1)
    assert patch_driver._same([x, 1], [x.clone(), 2]) and not patch_driver._same([x, x], [x, x + 1])
    assert torch.equal(patch_driver._swapped(x[:1, :1], 3), x[:1, :1])
    assert len({str(patch_driver._swapped(torch.arange(2.0), seed).tolist()) for seed in range(9)}) == 2


def test_some_exploit_calls_differ_only_by_two_exchanged_elements() -> None:
    op = ChangedOp("swiglu", "reference", "fast")
    jobs = exploits.make_exploit_calls(ExploitsPolicy(), [op], RECIPE, random.Random(1))
    assert 36 <= len(jobs) <= 44 and jobs != exploits.make_exploit_calls(
        ExploitsPolicy(), [op], RECIPE, random.Random(2)
    )
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
    shape = exploits.reduce_recipe_sizes(ExploitsPolicy(), recipe, exploits.FEWER_ROWS)
    assert exploits._multiplications(shape) <= 1e9
    assert all(shape[key] == recipe["model"][key] for key in ("heads", "kv_heads", "head_dim"))
    if name != "llama-100m":
        assert all(shape[key] == recipe["model"][key] for key in ("d_model", "d_ff", "vocab_size", "context"))


@pytest.mark.parametrize("name", ["tiny", "demo"])
def test_some_calls_have_the_recipes_number_of_tokens(name: str) -> None:
    recipe = Recipe.load(ROOT / "policies" / "recipes" / f"{name}.yaml").model_dump()
    shape = exploits.reduce_recipe_sizes(ExploitsPolicy(), recipe, exploits.NARROWER, heads=1, kv_heads=1)
    assert exploits._multiplications(shape) <= 1e9
    rows = recipe["batch"].get("micro_sequences") or recipe["batch"]["sequences"]
    assert (shape["batch"], shape["context"]) == (rows, recipe["model"]["context"])


SIZES = {
    "batch": (1, 3), "context": (9, 40), "d_model": (20, 90), "kv_heads": (1, 3), "head_dim": (8, 32), "d_ff": (20, 130), "vocab_size": (60, 300),
}  # fmt: skip


def test_small_sizes_are_drawn_from_their_whole_ranges() -> None:
    draw = random.Random(5)
    drawn = [exploits.draw_small_op_sizes(draw) for _ in range(5000)]
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
    given = exploits.reduce_recipe_sizes(ExploitsPolicy(multiplications=1e30), of, order, d_ff=7)
    assert given["batch"] == 8 and given["d_ff"] == 7 and given["vocab_size"] == RECIPE["model"]["vocab_size"]
    cost = exploits._multiplications(given)
    halved = [
        exploits.reduce_recipe_sizes(ExploitsPolicy(multiplications=most), of, order, d_ff=7)
        for most in (cost, cost - 1, 1)
    ]
    assert [shape["batch"] for shape in halved] == [8, 4, 1]
    assert 64 <= halved[2]["vocab_size"] < 128 and halved[1]["vocab_size"] == given["vocab_size"]


def test_no_size_is_halved_below_its_minimum() -> None:
    """Where no call is affordable every size ends there, in either order."""
    sizes = dict.fromkeys(("d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size", "context"), 1 << 14)
    of = {"model": sizes, "batch": {"sequences": 64, "micro_sequences": None}}
    policy, whole = ExploitsPolicy(multiplications=1e-9), sizes | {"batch": 64}
    for order in (exploits.FEWER_ROWS, exploits.NARROWER):
        assert exploits.reduce_recipe_sizes(policy, of, order) == whole | dict(order)
    assert exploits.reduce_recipe_sizes(policy, of, exploits.NARROWER, heads=1)["heads"] == 1


def test_calls_with_the_same_storage_share_their_tensors() -> None:
    storages: dict[Any, Any] = {}
    first = patch_driver._into(storages, 0, [1], [3, torch.zeros(2)], [torch.zeros(1)])
    again = patch_driver._into(storages, 0, [1], [3, torch.ones(2)], [torch.full((1,), 2.0)])
    other = patch_driver._into(storages, 1, [], [torch.zeros(2)], [])
    assert first[0][1] is again[0][1] and first[1][0] is again[1][0] and other[0][0] is not first[0][1]
    assert first[0][1].requires_grad and not other[0][0].requires_grad
    assert first[0][1].tolist() == [1, 1] and first[1][0].tolist() == [2]
    with pytest.raises(ValueError, match="zip"):
        patch_driver._into(storages, 0, [1], [3, torch.ones(2)], [])
