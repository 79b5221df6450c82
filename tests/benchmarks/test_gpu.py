"""``python -m benchmarks.gpu`` as it is started: in miniature on a CPU, cut, with what breaks planted, without memory, pydantic or a device."""

from __future__ import annotations

import doctest
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import needs, page, pool, records, shapes, winners
from benchmarks.gpu.fast import floor
from benchmarks.gpu.parts import NAMES
from benchmarks.gpu.right import on_cuda
from benchmarks.gpu.step import ITEMS
from kernels.contract.registry import OPS
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

CHAIN = {"resume", "profiler", "sandbox", "gate"}


@dataclass
class Ran:
    code: int
    said: str  # standard output
    told: str  # standard error: progress
    out: Path

    @property
    def document(self) -> dict[str, Any]:
        (found,) = self.out.glob("*.json")
        return dict(json.loads(found.read_text()))

    @property
    def report(self) -> str:
        (found,) = self.out.glob("*.md")
        return found.read_text()

    def lost(self, *, part: str) -> dict[str, str]:
        return {record["what"]: record["why"] for record in self.document["not_run"] if record["part"] == part}


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(out), *words]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def run(out: Path, *words: str, **more: str) -> Ran:
    done = subprocess.run(
        command(out, *words), cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    return Ran(done.returncode, done.stdout, done.stderr, out)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All of it, once for the tests of this file."""
    return run(tmp_path_factory.mktemp("dry"), "--minutes", "30")


def test_every_part_runs_and_what_it_found_is_in_the_files(dry: Ran) -> None:
    document = dry.document
    assert dry.code == 0, dry.told
    assert {part["part"]: part["state"] for part in document["parts"]} == dict.fromkeys(NAMES, "done")
    assert document["label"] == "dry: tiny sizes on a CPU, tells nothing of speed" and document["label"] in dry.report
    assert document["right"] and document["headline"].startswith("Right: ") and document["headline"] in dry.report
    assert not [item for item in document["items"] if item["state"] != "done"]
    facts = document["facts"]
    assert facts["torch"]["value"] == torch.__version__ and re.match(r"[0-9a-f]{40}|unknown", facts["commit"]["value"])
    assert facts["copy bandwidth"]["unit"] == "bytes/s" and facts["bf16 product rate"]["value"] > 0
    assert dry.report == dry.said, "the report is what is printed"
    assert document == page.document(records.read(next(dry.out.glob("*.jsonl")))), "the lines hold all of it"
    assert [f"{part}: done" in dry.told for part in NAMES] == [True] * len(NAMES)


def test_every_implementation_for_cuda_is_judged_or_named(dry: Ran) -> None:
    judged = {f"{record['op']}/{record['implementation']}": record for record in dry.document["judged"]}
    registered = {f"{op.name}/{implementation.name}" for op, implementation in on_cuda()}
    assert {name.partition("/")[0] for name in registered} == set(OPS), "every op has one beside its reference"
    lost = dry.lost(part="right")
    assert registered == judged.keys() | (lost.keys() & registered)
    assert not judged.keys() & lost.keys()
    assert all(record["right"] and not record["wrong"] and not record["not_reached"] for record in judged.values())
    assert "attention/flex" in lost and "GPU alone" in lost["attention/flex"]


def test_the_table_has_every_op_at_every_width_beside_torch(dry: Ran) -> None:
    timed = dry.document["timed"]
    by: dict[tuple[str, int], set[str]] = {}
    for row in timed:
        by.setdefault((row["op"], row["width"]), set()).add(row["by"])
        assert row["both_s"] > 0 and row["forward_s"] > 0 and row["host_s"] > 0 and row["bytes"] > 0, row
        assert row["low_s"] <= row["both_s"] <= row["high_s"] and row["of"] in ("copy", "product") and row["share"] > 0
    widths = {shape.d_model for shape in shapes.DRY}
    assert by.keys() == {(op, width) for op in OPS for width in widths}
    assert all({"eager", "torch.compile"} <= names for names in by.values())
    assert all("triton" in names for (op, _), names in by.items() if "triton" in OPS[op].implementations)
    assert all("F.rms_norm" in by["rms_norm", width] and "optim.Muon" in by["newton_schulz", width] for width in widths)
    lost = " ".join(dry.lost(part="fast"))
    for rival in ("Liger-Kernel", "quack"):
        assert rival in lost or any(rival in name for names in by.values() for name in names), rival
    kept = dry.document["keep_or_replace"]
    assert {(verdict["op"], verdict["width"]) for verdict in kept} == by.keys()
    rows = [
        line for line in dry.report.partition("## Fast")[2].partition("\n## ")[0].splitlines() if line.startswith("| ")
    ]
    assert len(rows) == 1 + len(timed) and all(row.count(" | ") == rows[0].count(" | ") for row in rows[1:])
    assert sum("| **" in row for row in rows) == len(by), "one winner each"


def test_every_step_and_every_link_of_the_chain_says_something(dry: Ran) -> None:
    numbers = dry.document["numbers"]
    told = {(number["part"], number["item"]) for number in numbers}
    for part, names in (("step", {name for name, _ in ITEMS}), ("chain", CHAIN)):
        lost = dry.lost(part=part)
        assert all((part, name) in told or any(name in what for what in lost) for name in names), (part, lost)
    speeds = {n["item"]: n for n in numbers if n["name"] == "speed"}
    assert {"0.6b bf16", "1b bf16", "100m bf16"} <= speeds.keys()
    assert all(speed["value"] > 0 and speed["unit"] == "tokens/s" for speed in speeds.values())
    assert {"stall of the first save", "stall of the second save", "a blocking save"} <= {n["name"] for n in numbers}
    (equal,) = [n for n in numbers if n["name"] == "tensors equal to the bit"]
    assert equal["unit"] == f"of {equal['value']}", "on a CPU a run that was killed goes on to the bit"


def test_a_run_that_is_cut_leaves_what_there_was(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        waited(lambda: '"judged"' in "".join(path.read_text() for path in tmp_path.glob("*.jsonl")), process)
        process.send_signal(signal.SIGTERM)
        said, told = process.communicate(timeout=PATIENCE_S)
    ran = Ran(process.returncode, said, told, tmp_path)
    assert ran.code == 128 + signal.SIGTERM, told
    document = ran.document
    states = {part["part"]: (part["state"], part["why"]) for part in document["parts"]}
    assert states.keys() == set(NAMES)
    assert states["right"] == ("cut", "by SIGTERM") and states["facts"][0] == "done"
    assert all(states[name] == ("not run", "the run was cut by SIGTERM") for name in NAMES[2:])
    assert document["judged"] and "**Cut by SIGTERM in the part 'right'" in ran.report


def test_what_is_wrong_crashes_or_hangs_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    ran = run(tmp_path, "--parts", "right", "--minutes", "2", FACTORY_BENCH_GPU_PLANT="tests.benchmarks.planted")
    document = ran.document
    assert ran.code == 1, ran.told
    wrong = {record["what"]: record["why"] for record in document["wrong"]}
    states = {item["item"]: item["state"] for item in document["items"] if item["part"] == "right"}
    assert states == {
        "rms_norm/crashes": "crashed",
        "rms_norm/hangs": "hung",
        "rms_norm/raises": "done",
        "rms_norm/wrong": "done",
        "rms_norm/sound": "done",
    }
    assert "SIGABRT" in wrong["rms_norm/crashes"] and "(in: small bfloat16 normal)" in wrong["rms_norm/crashes"]
    assert "planted: it does not compile" in wrong["rms_norm/raises small bfloat16 normal"]
    assert "output 0: rms 0.5" in wrong["rms_norm/wrong small float32 normal"]
    assert not any("hangs" in what or "sound" in what for what in wrong)
    assert "killed after" in ran.lost(part="right")["rms_norm/hangs"]
    judged = {record["implementation"]: record for record in document["judged"]}
    assert judged["sound"]["right"] == 6 and judged["wrong"]["right"] == 1, "of no rows nothing is wrong"
    assert document["headline"].startswith("WRONG: rms_norm/crashes") and not document["right"]
    assert ran.report.splitlines()[4] == f"**{document['headline']}**"


def test_too_little_memory_skips_by_name(tmp_path: Path) -> None:
    ran = run(tmp_path, "--parts", "fast,step", "--memory", "1e-8")
    assert ran.code == 0 and not ran.document["timed"] and not ran.document["numbers"]
    lost = ran.lost(part="fast") | ran.lost(part="step")
    for name in (*(f"{op} at width 32" for op in OPS), "1b bf16", "0.6b bf16"):
        assert lost[name].startswith("too little memory: "), name


def test_without_pydantic_four_wheels_are_named_and_kernels_are_judged(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked" / "pydantic"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'pydantic'\", name='pydantic')\n")
    planted = tmp_path / "blocked" / "planted_few.py"  # of the ops that are judged, one
    planted.write_text("from benchmarks.gpu import right\nfew = right.on_cuda()[:2]\nright.on_cuda = lambda: few\n")
    words = ("--parts", "right,step,chain", "--out", str(tmp_path / "out"))
    ran = run(tmp_path / "out", *words, PYTHONPATH=str(tmp_path / "blocked"), FACTORY_BENCH_GPU_PLANT="planted_few")
    assert ran.code == 0, ran.told
    (why,) = ran.lost(part="facts").values()
    pins = (ROOT / "constraints.txt").read_text().replace("_", "-")
    assert len(needs.wheels()) == 4
    assert all(wheel in why and f"\n{wheel}\n" in pins for wheel in needs.wheels())
    assert "pip install --no-index" in why
    states = {part["part"]: part for part in ran.document["parts"]}
    assert states["right"]["state"] == "done" and ran.document["judged"]
    assert states["step"]["state"] == "not run" and "pydantic is missing" in states["step"]["why"]
    assert set(ran.lost(part="chain").values()) == {"pydantic is missing here: carry four wheels, as 'facts' says"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_without_a_device_one_line_says_what_to_do(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    (line,) = done.stderr.splitlines()
    assert line.startswith("no CUDA device: ") and "python -m benchmarks.gpu --dry" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parts", "fst"), "there is no part 'fst'"),
        (("--minutes", "0"), "0 is no time"),
        (("--device", "cpu"), "--dry"),
        (("--render", "/none/such.jsonl"), "cannot be read"),
    ],
)
def test_a_wrong_word_is_refused_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu.__main__ import main

    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


def waited(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not ready():
        assert process.poll() is None and time.monotonic() < ends
        time.sleep(0.05)


# -- what needs no process -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [page, pool, winners], ids=lambda module: module.__name__)
def test_examples_hold(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def row(by: str, side: str, low: float, median: float, high: float, comparable: bool = True) -> dict[str, Any]:
    times = {"low_s": low, "both_s": median, "high_s": high, "note": "" if comparable else "sees more"}
    return {"op": "swiglu", "width": 1024, "by": by, "side": side, "comparable": comparable} | times


@pytest.mark.parametrize(
    ("rows", "says", "keep"),
    [
        ([row("triton", "ours", 0.9, 1, 1.1), row("eager", "torch", 1.9, 2, 2.1)], "keep triton: 2.00", True),
        (
            [row("triton", "ours", 1.9, 2, 2.1), row("liger", "Liger", 0.9, 1, 1.1)],
            "replace triton by liger (Liger)",
            False,
        ),
        ([row("triton", "ours", 0.9, 1, 1.5), row("eager", "torch", 1.2, 1.3, 1.4)], "no clear winner: triton", False),
        ([row("triton", "ours", 1.2, 1.3, 1.4), row("eager", "torch", 0.9, 1, 1.5)], "within the spread", False),
        (
            [row("triton", "ours", 2, 2, 2), row("SDPA", "torch", 1, 1, 1, comparable=False)],
            "nothing else could be",
            True,
        ),
        (
            [row("triton", "ours", 2, 2, 2), row("SDPA", "torch", 1, 1, 1, False)],
            "SDPA (2.00 times as fast; sees more)",
            True,
        ),
        ([row("eager", "torch", 1, 1, 1)], "nothing of ours was timed; fastest: eager", False),
    ],
)
def test_ours_is_kept_where_it_wins_by_more_than_the_spread(rows: list[dict[str, Any]], says: str, keep: bool) -> None:
    (verdict,) = winners.verdicts(rows)
    assert says in str(verdict) and verdict.keep is keep


def test_the_floor_is_the_larger_of_moving_and_computing() -> None:
    norm, attention = OPS["rms_norm"], OPS["attention"]
    shape = shapes.WIDTHS[0].shape(4)
    cost = norm.cost(shape, 2)
    assert floor(norm, shape, 1e12, 1e18) == ((cost.forward_bytes + cost.backward_bytes) / 1e12, "copy")
    assert floor(attention, shape, 1e18, 1e12) == (3.5 * attention.cost(shape, 2).forward_flops / 1e12, "product")
    assert floor(norm, shape, None, 1e12) is None


def test_shapes_shrink_to_the_memory_before_they_are_refused() -> None:
    op = OPS["attention"]
    whole = shapes.shape_for(op, 0, 1e12)
    assert (whole.batch, whole.context, whole.d_model, whole.heads, whole.kv_heads) == (4, 4096, 4096, 32, 8)
    half = shapes.shape_for(op, 0, 0.6 * shapes.needs_bytes(op, whole))
    assert half.batch == 2
    with pytest.raises(shapes.TooLarge, match="too little memory"):
        shapes.shape_for(op, 0, 0.2 * shapes.needs_bytes(op, whole))
    assert shapes.shape_for(OPS["linear_cross_entropy"], 0, 1e12).tokens == 8192, "that of published marks"


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    whole = records.Records(tmp_path)
    whole.add("run", command="x", began="", limit_s=60, label="")
    whole.named("card")
    whole.add("wrong", part="right", item="a/b", what="a/b", why="off")
    whole.add("number", part="step", item="1b bf16", name="speed", value=float("nan"), unit="tokens/s")
    with open(whole.lines, "a") as torn:
        torn.write('{"kind": "number", "pa')
    found = records.read(whole.lines)
    assert found == whole.every and found[-1]["value"] is None
    busy = whole.add("number", part="facts", item="card", name="busy", value="9.0 GB of its memory are taken", unit="")
    assert "**The card was busy: 9.0 GB of its memory are taken." in page.markdown([*found, busy])
    assert page.document(found)["busy"] == ""
    assert page.headline(found) == "WRONG: a/b: off" and "not measured" in page.markdown(found)
    whole.close()
