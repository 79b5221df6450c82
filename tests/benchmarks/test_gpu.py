"""Runs ``python -m benchmarks.gpu`` as a user does: small on a CPU, interrupted, with planted faults, without memory, pydantic or a device."""

from __future__ import annotations

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

from benchmarks.gpu import needs, page, records, shapes
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


IDLE = {"general_attention", "softcapped_cross_entropy"}  # ops that the measured models never call


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All of it, once for the tests of this file."""
    return run(tmp_path_factory.mktemp("dry"), "--minutes", "30")


@pytest.mark.slow("a whole dry run of the GPU's benchmark")
def test_every_part_runs_and_its_results_are_in_the_files(dry: Ran) -> None:
    document = dry.document
    assert dry.code == 0, dry.told
    assert {part["part"]: part["state"] for part in document["parts"]} == dict.fromkeys(NAMES, "done")
    assert document["label"].startswith("dry: ") and document["label"] in dry.report
    judged = document["judged"]
    count = sum(record["checks"] for record in judged)
    says = f"Right: {sum(record['right'] for record in judged):,} of {count:,} checks of {len(judged)} implementations; none run: "
    assert document["right"] is True and document["headline"].startswith(says) and document["headline"] in dry.report
    assert (
        document["none_run"] == ["attention/varlen", "attention/flex", "general_attention/flex"]
        and "| attention | flex | **none** |" in dry.report
    )
    assert {(record["item"], record["op"]) for record in document["computing"]} >= {
        ("1b bf16", op) for op in OPS.keys() - IDLE
    }
    assert "adamw: fused" in dry.report and "fallback" not in document["headline"]
    name = re.escape(document["facts"]["commit"]["value"][:7]) + "(-changed)?"
    assert sorted(path.suffix for path in dry.out.iterdir()) == [".json", ".jsonl", ".log", ".md"]
    assert all(re.fullmatch(f"dry-{name}", path.stem) for path in dry.out.iterdir()), "whole: no '-partial'"
    assert not [item for item in document["items"] if item["state"] != "done"]
    facts = document["facts"]
    assert facts["torch"]["value"] == torch.__version__ and re.match(r"[0-9a-f]{40}|unknown", facts["commit"]["value"])
    assert facts["copy bandwidth"]["unit"] == "bytes/s" and facts["bf16 product rate"]["value"] > 0
    assert dry.report == dry.said, "the report is what is printed"
    assert document == page.document(records.read(next(dry.out.glob("*.jsonl")))), "the lines hold all of it"
    assert [f"{part}: done" in dry.told for part in NAMES] == [True] * len(NAMES)


@pytest.mark.slow("a whole dry run of the GPU's benchmark")
def test_every_implementation_for_cuda_is_judged_or_named(dry: Ran) -> None:
    judged = {f"{record['op']}/{record['implementation']}": record for record in dry.document["judged"]}
    registered = {f"{op.name}/{implementation.name}" for op, implementation in on_cuda()}
    assert {name.partition("/")[0] for name in registered} == set(OPS), "every op has one beside its reference"
    lost = dry.lost(part="right")
    assert registered == judged.keys() | (lost.keys() & registered)
    assert not judged.keys() & lost.keys()
    assert all(record["right"] and not record["wrong"] and not record["not_reached"] for record in judged.values())
    assert "attention/flex" in lost and "GPU alone" in lost["attention/flex"]


@pytest.mark.slow("a whole dry run of the GPU's benchmark")
def test_the_table_compares_every_op_at_every_width_with_torch(dry: Ran) -> None:
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
    rows = [
        line for line in dry.report.partition("## Fast")[2].partition("\n## ")[0].splitlines() if line.startswith("| ")
    ]
    assert len(rows) == 1 + len(timed) and all(row.count(" | ") == rows[0].count(" | ") for row in rows[1:])
    assert not any("| **" in row for row in rows), "tiny sizes on a CPU: nothing wins"


@pytest.mark.slow("a whole dry run of the GPU's benchmark")
def test_only_the_report_of_a_real_run_has_comparisons(dry: Ran) -> None:
    assert dry.report.startswith("# DRY RUN: ") and dry.document["run"]["dry"]
    assert not dry.document["decisions"] and not dry.document["keep_or_replace"]
    assert "## Verdict" not in dry.report and "## Published marks" not in dry.report
    every = real(records.read(next(dry.out.glob("*.jsonl"))))
    document, report = page.document(every), page.markdown(every)
    assert "DRY RUN" not in report and "## Published marks" in report
    timed = {(row["op"], row["width"]) for row in document["timed"]}
    assert {(verdict["op"], verdict["width"]) for verdict in document["keep_or_replace"]} == timed
    assert [decision["op"] for decision in document["decisions"]] == list(
        dict.fromkeys(op for op, _ in timed_in(every))
    )
    assert {d["change"] for d in document["decisions"] if d["op"] in ("swiglu", "rms_norm")} == {"yes"}, "interpreted"
    table = report.partition("## Fast")[2].partition("\n## ")[0]
    assert sum("| **" in row for row in table.splitlines()) == len(timed), "one winner each"


def timed_in(every: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(record["op"], record["width"]) for record in every if record["kind"] == "timed"]


def real(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of a dry run, as if a GPU's."""
    return [
        record
        | ({"dry": False} if record["kind"] == "run" else {})
        | ({"value": "cuda-sm90-card"} if record.get("name") == "class" else {})
        for record in every
    ]


@pytest.mark.slow("a whole dry run of the GPU's benchmark")
def test_every_step_and_every_part_of_the_chain_has_a_number_or_a_reason(dry: Ran) -> None:
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


@pytest.mark.slow("a dry run that is cut")
def test_an_interrupted_run_leaves_its_results_so_far(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(tmp_path), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        waited(lambda: '"judged"' in "".join(path.read_text() for path in tmp_path.glob("*.jsonl")), process)
        (lines,) = tmp_path.glob("*-partial.jsonl")
        unfinished = page.markdown(records.read(lines))  # as kill -9 would leave it
        process.send_signal(signal.SIGTERM)
        said, told = process.communicate(timeout=PATIENCE_S)
    ran = Ran(process.returncode, said, told, tmp_path)
    assert ran.code == 128 + signal.SIGTERM, told
    document = ran.document
    states = {part["part"]: (part["state"], part["why"]) for part in document["parts"]}
    assert states.keys() == set(NAMES)
    assert (
        f"**Not finished; parts missing: {', '.join(NAMES[1:])}.**" in unfinished and "Not finished" not in ran.report
    )
    assert {path.stem for path in tmp_path.iterdir()} == {lines.stem}, "a cut run is a partial one"
    assert states["right"] == ("cut", "by SIGTERM") and states["facts"][0] == "done"
    assert all(states[name] == ("not run", "the run was cut by SIGTERM") for name in NAMES[2:])
    assert document["judged"] and "Cut by SIGTERM in" in ran.report


@pytest.mark.slow("parts that crash and hang, each in its process")
def test_wrong_crashing_and_hanging_items_are_named_and_the_others_run(tmp_path: Path) -> None:
    ran = run(tmp_path, "--parts", "right,fast", "--minutes", "3", FACTORY_BENCH_GPU_PLANT="tests.benchmarks.planted")
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
        "rms_norm/unchecked": "done",
    }
    assert "SIGABRT" in wrong["rms_norm/crashes"] and "(in: small bfloat16 normal)" in wrong["rms_norm/crashes"]
    assert "planted: it does not compile" in wrong["rms_norm/raises small bfloat16 normal"]
    assert "output 0: the rms error is 0.5" in wrong["rms_norm/wrong small float32 normal"]
    assert not any("hangs" in what or "sound" in what for what in wrong)
    assert "output 0: the rms error is 0.5" in next(
        text for name, text in wrong.items() if name.startswith("rms_norm/late,")
    ), "'right' has not judged it"
    hung = ran.lost(part="right")["rms_norm/hangs"]
    assert "killed after" in hung and re.search(r", at tests/benchmarks/planted\.py:\d+ hangs", hung), hung
    judged = {record["implementation"]: record for record in document["judged"]}
    assert judged["sound"]["right"] == 6 and judged["wrong"]["right"] == 1, "of no rows nothing is wrong"
    assert document["headline"].startswith("WRONG: rms_norm/crashes") and document["right"] is False
    assert document["none_run"] == ["rms_norm/hangs", "rms_norm/unchecked"] and "none run: " in document["headline"]
    assert "FAILED: rms_norm/raises at 32: " in document["headline"]
    assert ran.report.splitlines()[4] == f"**{document['headline']}**"
    assert "`tests.benchmarks.planted` was planted" in ran.report
    assert {path.stem[-8:] for path in tmp_path.iterdir()} == {"-partial"}, "not all parts"

    failed = {(record["by"], record["width"]): record["why"] for record in document["failed"]}
    assert failed.keys() == {("raises", 32), ("raises", 16), ("crashes", 16)} and "SIGABRT" in failed["crashes", 16]
    every = [
        r | {"both_s": 1e-9} if r.get("by") in ("wrong", "late") else r
        for r in records.read(next(tmp_path.glob("*.jsonl")))
    ]
    report = page.markdown(real(every))
    fast = report.partition("## Fast")[2].partition("\n## ")[0].splitlines()
    of = {
        by: next(line for line in fast if f"| {by} |" in line and "| 32 |" in line)
        for by in ("wrong", "late", "crashes")
    }
    assert all("**wrong: not compared**" in line for line in of.values()), "however fast, a wrong one does not win"
    verdict = next(v["says"] for v in page.document(real(every))["keep_or_replace"] if v["width"] == 32)
    assert "late is wrong: " in verdict and "wrong is wrong: " in verdict and "ours failed: raises: " in verdict
    assert not verdict.startswith(("keep wrong", "keep late"))
    assert "does not run" not in verdict and "ours failed: raises" in report.partition("## Verdict")[2]


@pytest.mark.slow("a dry run in little memory")
def test_items_that_need_too_much_memory_are_skipped_and_named(tmp_path: Path) -> None:
    ran = run(tmp_path, "--parts", "fast,step", "--memory", "1e-8")
    assert ran.code == 3 and ran.document["right"] is None and ran.document["headline"] == "nothing was judged."
    assert not ran.document["timed"] and not ran.document["numbers"]
    lost = ran.lost(part="fast") | ran.lost(part="step")
    for name in (*(f"{op} at width 32" for op in OPS), "1b bf16", "0.6b bf16"):
        assert lost[name].startswith("too little memory: "), name


@pytest.mark.slow("a dry run without some libraries")
def test_without_pydantic_the_missing_wheels_are_named_and_kernels_are_judged(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked" / "pydantic"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'pydantic'\", name='pydantic')\n")
    planted = tmp_path / "blocked" / "planted_few.py"  # of the ops that are judged, one
    planted.write_text("from benchmarks.gpu import right\nfew = right.on_cuda()[-2:]\nright.on_cuda = lambda: few\n")
    words = ("--parts", "right,step,chain", "--out", str(tmp_path / "out"))
    ran = run(tmp_path / "out", *words, PYTHONPATH=str(tmp_path / "blocked"), FACTORY_BENCH_GPU_PLANT="planted_few")
    assert ran.code == 0, ran.told
    (why,) = ran.lost(part="facts").values()
    assert why in ran.report.partition("## ")[0], "at the top"
    pins = (ROOT / "constraints.txt").read_text().replace("_", "-")
    assert len(needs.wheels()) == 4
    assert all(wheel in why and f"\n{wheel}\n" in pins for wheel in needs.wheels())
    assert "pip install --no-index" in why
    states = {part["part"]: part for part in ran.document["parts"]}
    assert states["right"]["state"] == "done" and ran.document["judged"]
    assert states["step"]["state"] == "not run" and "pydantic is missing" in states["step"]["why"]
    assert states["chain"]["state"] == "not run" and states["chain"]["why"].endswith(": 4 not run")
    assert all(why.startswith("pydantic is missing") for why in ran.lost(part="chain").values()) and ran.lost(
        part="chain"
    )


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
        (("--parts", "fst"), "--parts: there is no part 'fst'"),
        (("--parts", ","), "--parts: names no part"),
        (("--minutes", "0.1"), "--minutes: expected a number, at least 1; got '0.1'"),
        (("--minutes", "nan"), "--minutes: expected a number, at least 1; got 'nan'"),
        (("--memory", "0"), "--memory: expected a number, more than 0; got '0'"),
        (("--device", "cpu"), "--dry"),
        (("--device", "cuda:x"), "'cuda:x' is no CUDA device"),
        (("--render", "/none/such.jsonl"), "cannot be read"),
        (("--render", __file__), "is not the .jsonl of a run of benchmarks.gpu"),
        (("--dry", "--out", __file__), "--out: "),
    ],
)
def test_an_invalid_argument_is_refused_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu.__main__ import main

    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out


def test_planted_faults_are_refused_in_a_real_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from benchmarks.gpu.__main__ import main

    monkeypatch.setenv("FACTORY_BENCH_GPU_PLANT", "tests.benchmarks.planted")
    assert main(["--out", str(tmp_path)]) == 2
    assert "it is for --dry alone" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_named_parts_run_once_in_the_order_of_the_benchmark() -> None:
    from benchmarks.gpu.__main__ import parts_of

    assert parts_of("step, right,step") == ["right", "step"]


def waited(ready: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not ready():
        assert process.poll() is None and time.monotonic() < ends
        time.sleep(0.05)
