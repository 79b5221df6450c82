"""The tiny runs without patches: their starts, their exit codes, and the comparison of their files."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from factory.gates.patch.matrix.cases import CASES, DOMAINS, TOOLS, VOCABULARY, MatrixCase, make_tool_name
from factory.gates.patch.matrix.compare import compare_runs, find_discrepancies
from factory.gates.patch.matrix.runs import INTERRUPTED, MatrixRuns
from factory.gates.patch.matrix.start_checkpoints import damage_checkpoint
from factory.gates.patch.matrix.train_cases import run_tool, train_segment_folder
from tests.support.factory.matrix import Prepared
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import CheckpointError
from trainer.contract.json_lines import read_json_lines

# Those of a tenth of a second: one rank, few steps, nothing compiled.
QUICK = [case for case in CASES if case.ranks == 1 and case.steps < 20 and not case.changes.get("compile")]


def begun(prepared: Prepared, case: MatrixCase, folder: Path) -> Path:
    """A case's folder before its run."""
    folder.mkdir(exist_ok=True)
    if case.begin in INTERRUPTED:
        shutil.copytree(prepared.plan.starts[case.begin], folder, dirs_exist_ok=True)
    spec = prepared.plan.make_arm(case).make_spec(prepared.side.kernels[case.kernels])
    (folder / "segment.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize("number", range(len(QUICK)))  # not by name: that is of what is tested
def test_a_case_ends_with_its_exit_code(prepared: Prepared, tmp_path: Path, number: int) -> None:
    case = QUICK[number]
    folder = begun(prepared, case, tmp_path)
    assert train_segment_folder(folder, case.stop_after, waits=False, slow_threads=case.slow_threads) == case.exit_code
    if case.exit_code:
        assert not (folder / "result.json").exists()
        return
    arm = prepared.plan.make_arm(case)
    steps = [line["step"] for line in read_json_lines(folder / "metrics.jsonl")]
    assert steps[-1] == arm.last_step - 1 == checkpoints.list_checkpoints(folder / "checkpoints")[-1][0] - 1
    if case.begin not in INTERRUPTED:
        assert steps == list(range(arm.first_step, arm.last_step)) and len(steps) == case.steps
    result = json.loads((folder / "result.json").read_text())
    assert bool(result["skipped_checkpoints"]) == (case.begin == "damaged")
    losses = [line["loss"] for line in read_json_lines(folder / "metrics.jsonl")]
    odd = [value for value in losses if value is None or not math.isfinite(value)]
    assert case.begin == "poisoned" or not odd, losses


@pytest.mark.parametrize("number", range(len(TOOLS)))
def test_a_tool_ends_with_its_exit_code(prepared: Prepared, tmp_path: Path, number: int) -> None:
    tool = TOOLS[number]
    (tmp_path / "checkpoints").mkdir()
    assert run_tool(tmp_path, tool.module, prepared.plan.make_tool_arguments(tool, tmp_path)) == tool.exit_code
    left = bool((tmp_path / "printed.txt").read_text()) + len(list((tmp_path / "checkpoints").iterdir()))
    assert bool(left) == (not tool.exit_code)


def test_refusals_of_tools_are_distinct(prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And each word in capitals stands for a path that is there."""
    said = []
    for number, tool in enumerate(TOOLS):
        arguments = prepared.plan.make_tool_arguments(tool, tmp_path / str(number))
        assert not any(word.isupper() for word in arguments), arguments
        if tool.exit_code:
            (tmp_path / str(number)).mkdir()
            run_tool(tmp_path / str(number), tool.module, arguments)
            said.append(capsys.readouterr().err.strip().splitlines()[-1])
    assert len(set(said)) == len(said) == 11 and not any("unrecognized" in words for words in said), said


def test_a_stopped_run_resumes_where_it_stopped(prepared: Prepared, tmp_path: Path) -> None:
    left = []
    for stop_after in (0, 3):
        folder = begun(prepared, CASES[0], tmp_path / str(stop_after))
        assert train_segment_folder(folder, stop_after, waits=False, slow_threads=False) == 0
        left.append(dict(checkpoints.list_checkpoints(folder / "checkpoints")))
    assert [list(steps) for steps in left] == [[2, 4, 6], [3, 4, 6]]
    straight, stopped = (checkpoints.load_checkpoint(steps[6]).model for steps in left)
    assert all(torch.equal(weights, stopped[name]) for name, weights in straight.items())


def test_runs_begin_with_the_derived_checkpoints(prepared: Prepared) -> None:
    plan = prepared.plan
    trunk = checkpoints.load_checkpoint(plan.starts["trunk"])
    found = {
        name: checkpoints.load_checkpoint(plan.starts[name])
        for name in ("late", "outliers", "quiet", "poisoned", "annealed")
    }
    assert trunk.state["step"] == 8 and found["annealed"].state["step"] == 14
    assert (trunk.state["kind"], found["annealed"].state["kind"]) == ("trunk", "anneal")
    late = found["late"].state
    assert late["step"] == late["sampler"]["step"] and 100_000 <= late["step"] < 900_000
    assert found["outliers"].state == trunk.state | {"detector": trunk.state["detector"] | {"grad_norm": [1e-6] * 8}}
    quiet = found["quiet"].state
    assert quiet["detector"]["grad_norm"] == [1e-6] * 8 and quiet["detector"]["course"]["blocks"] == [1e-6] * 4
    turns = quiet["signals"]["turns"].values()
    assert turns and all(turn["past"].keys() == {"blocks.0", "blocks.1"} for turn in turns)
    for name, checkpoint in found.items():
        differ = {k for k, v in checkpoint.model.items() if not torch.equal(v, trunk.model[k])}
        assert len(differ) == {"poisoned": 1, "annealed": len(trunk.model)}.get(name, 0), name
    (odd,) = (v for k, v in found["poisoned"].model.items() if not torch.equal(v, trunk.model[k]))
    assert len(odd) == VOCABULARY and int(odd.isnan().any(1).sum()) == 1 and bool(odd[7].isnan().all())
    for name in ("trunk", "late"):
        assert checkpoints.load_checkpoint(plan.starts[name]).optimizer.keys() == trunk.optimizer.keys()
    with pytest.raises(CheckpointError):
        checkpoints.load_checkpoint(plan.starts["broken"])
    _, other, _ = plan.made
    assert checkpoints.list_checkpoints(other / "checkpoints")[-1][0] == 2


def test_an_interrupted_copy_looks_like_a_killed_run(prepared: Prepared) -> None:
    plan = prepared.plan
    left = {name: dict(checkpoints.list_checkpoints(plan.starts[name] / "checkpoints")) for name in INTERRUPTED}
    assert [max(left[name]) for name in ("half", "damaged")] == [4, 6]
    assert not any((plan.starts[name] / "result.json").exists() for name in INTERRUPTED)
    with pytest.raises(CheckpointError):
        checkpoints.load_checkpoint(left["damaged"][6])
    (far,) = (case for case in CASES if case.begin == "far")
    reached = plan.steps[far.name] - far.steps
    assert (
        20_000 <= reached < 90_000
        and checkpoints.load_checkpoint(left["far"][reached]).state["sampler"]["step"] == reached
    )
    (finished,) = plan.folder.glob(f"trunk/*/segments/{plan.names['resumed']}/checkpoints/step-00000004")
    half, whole = (checkpoints.load_checkpoint(path).model for path in (left["half"][4], finished))
    assert all(torch.equal(weights, 0.9 * whole[name]) for name, weights in half.items())


def test_each_verdict_draws_its_own_data(prepared: Prepared) -> None:
    plan = prepared.plan
    assert len(set(plan.names.values())) == len(plan.names) and all(len(name) == 5 for name in plan.names.values())
    (long,) = (case.name for case in CASES if case.steps > 500)
    assert 530 <= plan.steps[long] < 580
    shards = [[(shard["path"], shard["generation"]) for shard in plan.data[count]["token_shards"]] for count in (1, 2)]
    assert shards[0] == shards[1][:1] and [generation for _, generation in shards[1]] == [0, 1]
    for path, _ in shards[1]:
        shard = TokenShard(path)
        rows = shard.documents.to_pylist()
        assert len(rows) == 90 and {row["domain"] for row in rows} == set(DOMAINS)
        assert all(3 <= row["length"] < 40 for row in rows) and len({row["length"] for row in rows}) > 20
        counts = {row["domain"]: row["supervised_tokens"] / row["length"] for row in rows if row["length"] > 20}
        assert counts["chat"] < 0.6 < counts["docs"] == counts["code"]


# -- what two sides left -----------------------------------------------------------------------------------------------
def text(name: str, old: str, new: str) -> Callable[[Path], object]:
    """Writes one thing for another, the first time that it stands in a file."""

    def change(folder: Path) -> None:
        path = folder / name
        before = path.read_text()
        after = re.sub(old, new, before, count=1)
        assert after != before
        path.write_text(after)

    return change


def anomaly(line: str) -> Callable[[Path], object]:
    def told(folder: Path) -> None:
        path = folder / "anomalies.jsonl"
        path.write_text(path.read_text() + line)

    return told


def saved(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> Callable[[Path], object]:
    """Saves the last checkpoint anew, with its weights and state changed; the result names it as the trainer would have."""

    def again(folder: Path) -> None:
        _, last = checkpoints.list_checkpoints(folder / "checkpoints")[-1]
        whole = checkpoints.load_checkpoint(last)
        shutil.rmtree(last)
        change(whole.model, whole.state)
        checkpoints.save_checkpoint(folder / "checkpoints", whole)
        told = hashlib.sha256((last / "manifest.json").read_bytes()).hexdigest()
        text("result.json", '"manifest_sha256": "[^"]*"', f'"manifest_sha256": "{told}"')(folder)

    return again


def times(share: float) -> Callable[[Path], object]:
    def change(model: dict[str, torch.Tensor], state: object) -> None:
        model["embedding"].mul_(share)

    return saved(change)


ALIKE: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: None, ""),
    (saved(lambda model, state: None), ""),
    (text("metrics.jsonl", '"tokens_per_s": ', '"tokens_per_s": 1'), ""),  # a clock
    (anomaly('{"kind": "throughput_drop", "step": 1}\n'), ""),
    (anomaly('{"kind": "loss_drop", "step": 1}\n'), "anomalies.jsonl has"),
    (text("metrics.jsonl", "^.*\n", ""), "metrics.jsonl has 5 lines in the candidate's run, and 6"),
    (text("metrics.jsonl", '"loss": [0-9]', '"loss": 9'), "metrics.jsonl, line 1: loss differs from the baseline's by"),
    (text("metrics.jsonl", '"lr"', '"rate"'), "metrics.jsonl, line 1: "),
    (text("result.json", '"last_step": 6', '"last_step": 7'), "result.json: last_step"),
    (text("result.json", '"skipped_checkpoints": \\[', '"skipped_checkpoints": ["x"'), "number of skipped checkpoints"),
    (text("result.json", '"manifest_sha256": "', '"manifest_sha256": "0'), "the SHA-256 in result.json"),
    (text("parameters.txt", "embedding", "embeddings"), "parameters.txt differs"),
    (lambda folder: (folder / "parameters.txt").unlink(), "parameters.txt"),
    (lambda folder: shutil.rmtree(folder / "checkpoints" / "step-00000004"), "checkpoints [step-00000002, step-00000006]"),
    (lambda folder: shutil.rmtree(folder / "checkpoints"), "manifest.json is missing"),
    (lambda folder: damage_checkpoint(folder / "checkpoints" / "step-00000004"), "model.safetensors does not have the SHA-256"),
    (times(1 + 1e-6), "rounds"),
    (times(1.01), "step-00000006: embedding differs from the baseline's by"),
    (saved(lambda model, state: model.update(embedding=model["embedding"].bfloat16().float())), "has numbers of a lower precision"),
    (saved(lambda model, state: model.update(embedding=model["embedding"].double())), "embedding has the shape [64, 16] and the dtype torch.float64"),
    (saved(lambda model, state: model.update(embedding=model["embedding"].T.contiguous())), "embedding has the shape [16, 64]"),
    (saved(lambda model, state: model.update(more=torch.zeros(1))), "Only one of the two has more"),
    (saved(lambda model, state: model["embedding"][0].fill_(math.nan)), "step-00000006: embedding"),
    (saved(lambda model, state: state["sampler"].update(step=7)), "state.json: sampler: step"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), ALIKE, ids=range(len(ALIKE)))
def test_all_files_of_a_run_are_compared_except_clocks(
    prepared: Prepared, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    case = CASES[0]
    folder = shutil.copytree(prepared.baseline.folders[case.name], tmp_path / "run")
    change(folder)
    candidate = MatrixRuns()
    with ExitStack() as after:
        candidate.open_run_folder(case.name, folder, after)
        (found,) = compare_runs(prepared.plan, prepared.baseline, candidate, [case], [])
    if words in ("", "rounds"):
        assert found.worst is None and found.same_bits == (not words), found
    else:
        assert found.worst is not None and not found.same_bits and words in str(found.worst), found


def test_all_differences_are_found(prepared: Prepared, tmp_path: Path) -> None:
    case = CASES[0]
    folder = shutil.copytree(prepared.baseline.folders[case.name], tmp_path / "run")
    damage_checkpoint(folder / "checkpoints" / "step-00000002")

    def change(model: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        names = sorted(model)
        model[names[0]] = model[names[0]].double()
        model[names[1]] = model[names[1]].bfloat16().float()
        for name in names[2:]:
            model[name].mul_(1.5)
        state["sampler"]["step"] += 1

    for of in (
        saved(change), text("metrics.jsonl", "^.*\n", ""), anomaly('{"kind": "loss_drop", "step": 1}\n'), text("parameters.txt", "embedding", "e"),
        text("result.json", '"last_step": 6', '"last_step": 7'), text("result.json", '"manifest_sha256": "', '"manifest_sha256": "0'),
        text("result.json", '"skipped_checkpoints": \\[', '"skipped_checkpoints": ["x"'),
    ):  # fmt: skip
        of(folder)
    candidate = MatrixRuns()
    with ExitStack() as after:
        candidate.open_run_folder(case.name, folder, after)
        found = find_discrepancies(prepared.plan, case, prepared.baseline, candidate)
    weights = sorted(
        checkpoints.load_checkpoint(prepared.baseline.folders[case.name] / "checkpoints" / "step-00000006").model
    )
    last = "step-00000006"
    begins = [
        "metrics.jsonl has 5 lines", "anomalies.jsonl has", "result.json: last_step", "the SHA-256 in result.json",
        "the candidate's and the baseline's",
        "parameters.txt", "step-00000002: model.safetensors does not", "step-00000002: ", f"{last}, state.json: sampler: step",
        f"{last}: {weights[0]} has the shape", f"{last}: {weights[1]} has numbers of a lower", *(f"{last}: {name}" for name in weights[2:]),
    ]  # fmt: skip
    found[9:] = sorted(found[9:], key=lambda one: one.what)
    assert len(found) == len(begins) and all(one.what.startswith(begin) for one, begin in zip(found, begins)), found
    assert {one.total for one in found[11:]} == {f"{last}: weights"} and not any(one.total for one in found[:7])
    assert {math.isinf(one.far.apart) for one in found[:6]} == {True} and all(
        0 < one.share_of_scale < 100 for one in found[11:]
    )


@pytest.mark.parametrize(
    ("printed", "checkpoint", "words"),
    [
        ("in OUT", True, ""),
        ("in OUT,", True, "the tool's output with the candidate's code differs"),
        ("in OUT", False, "checkpoints [], and the baseline left [step-00000002]"),
        (None, True, "printed.txt is missing"),
    ],
)
def test_output_and_checkpoints_of_a_tool_are_compared(
    prepared: Prepared, tmp_path: Path, printed: str | None, checkpoint: bool, words: str
) -> None:
    tool, sides = TOOLS[0], []
    of = prepared.baseline.folders[CASES[0].name] / "checkpoints" / "step-00000002"
    with ExitStack() as after:
        for name, said, left in (("ours", "in OUT", True), ("theirs", printed, checkpoint)):
            folder = tmp_path / name
            (folder / "checkpoints").mkdir(parents=True)
            if said is not None:
                (folder / "printed.txt").write_text(said.replace("OUT", str(folder)))  # where it is, is no difference
            if left:
                shutil.copytree(of, folder / "checkpoints" / of.name)
            sides.append(MatrixRuns())
            sides[-1].open_run_folder(make_tool_name(tool), folder, after)
        (found,) = compare_runs(prepared.plan, *sides, [], [tool])
    assert found.same_bits == (not words) and words in str(found.worst or ""), found
