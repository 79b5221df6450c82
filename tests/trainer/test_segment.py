from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.trainer.segment_runs import assert_same_run, die, result
from tests.support.trainer.segments import (
    MakeShard,
    plan_of,
    recipe_with,
    run_trainer,
    train_here,
    write_spec,
)
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.json_lines import read_json_lines

CALLS = 10_000  # several steps of the tiny model


@pytest.mark.portable
def test_trunk_then_anneal_learns_and_leaves_its_files(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard(counts={"code": 300, "docs": 150, "chat": 150}))
    trunk = write_spec(tmp_path / "trunk", plan, last_step=40)
    assert run_trainer(trunk) == (0, "")
    done = result(trunk)
    lines = read_json_lines(trunk / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(40))
    assert lines[-1]["tokens"] == done["tokens"] > 0.99 * 40 * 8 * 32
    assert done["loss"] == pytest.approx(sum(line["loss"] for line in lines[-20:]) / 20)
    assert set(done["loss_by_domain"]) == {"code", "docs", "chat"}
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    assert done["manifest_sha256"] == checkpoints.hash_manifest(Path(done["checkpoint"]))
    # the branch goes on from the trunk's weights, optimiser and data order, and the rate falls
    anneal = write_spec(
        tmp_path / "anneal", plan, kind="anneal", first_step=40, last_step=46, initial_checkpoint=done["checkpoint"]
    )
    assert train_here(anneal) == (0, "")
    lines = read_json_lines(anneal / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(40, 46))
    assert all(a["lr"] > b["lr"] for a, b in zip(lines, lines[1:], strict=False))
    assert result(anneal)["tokens"] == lines[-1]["tokens"] - done["tokens"]
    usual_rates = lambda folder: checkpoints.read_checkpoint_state(Path(result(folder)["checkpoint"]))["throughput"][
        "usual"
    ]
    assert usual_rates(trunk) and usual_rates(anneal)[: len(usual_rates(trunk))] == usual_rates(trunk)
    # finished: nothing is done again
    before = (anneal / "result.json").stat().st_mtime_ns
    assert train_here(anneal) == (0, "")
    assert (anneal / "result.json").stat().st_mtime_ns == before


def test_a_run_that_compiles_nothing_does_not_load_the_compiler(tmp_path: Path, make_shard: MakeShard) -> None:
    """Importing the compiler takes a second and a half: most of the time of a short segment."""
    plan, folders = plan_of(make_shard()), []
    for precision in ("fp32", "bf16"):
        folders.append(str(write_spec(tmp_path / precision, plan, recipe_with(precision=precision), last_step=2)))
    script = (
        "import sys; from trainer.__main__ import main\n"
        "assert main(['--wait', *sys.argv[1:]]) == 0\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, *folders]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


def test_resume_after_kills_is_exact_to_the_bit(tmp_path: Path, make_shard: MakeShard) -> None:
    """kill -9 at random moments, and a SIGTERM, against a run that nothing disturbed."""
    plan = plan_of(
        make_shard(counts={"code": 500, "docs": 200, "chat": 200}),
        phases=[{"from_step": 13, "weights": {"docs": 0.5, "chat": 0.5}}],
    )
    recipe = recipe_with(checkpoint_every=3)
    straight = write_spec(tmp_path / "straight", plan, recipe, last_step=40)
    assert train_here(straight) == (0, "")
    killed = write_spec(tmp_path / "killed", plan, recipe, last_step=40)
    chance, ends = random.Random(11), []
    for how, step in ((signal.SIGKILL, 6), (signal.SIGTERM, 16), (signal.SIGKILL, 27)):
        ends.append(die(killed, step, chance.randrange(CALLS), how))
    assert ends == [-9, 75, -9]
    assert train_here(killed)[0] == 0
    assert_same_run(straight, killed)


@pytest.mark.portable
def test_a_bad_checkpoint_is_skipped_and_reported_and_the_end_is_the_same(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    plan = plan_of(make_shard())
    straight = write_spec(tmp_path / "straight", plan)
    assert train_here(straight)[0] == 0
    damaged = write_spec(tmp_path / "damaged", plan)
    assert die(damaged, 14, 1) == -9
    newest = checkpoints.list_checkpoints(damaged / "checkpoints")[-1][1]
    with open(newest / "model.safetensors", "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\x00\x01\x02")
    code, errors = train_here(damaged)
    assert code == 0 and f"{newest}/model.safetensors" in errors
    assert [bad["path"] for bad in result(damaged)["skipped_checkpoints"]] == [
        str(newest.with_name(f"bad-{newest.name}"))
    ]
    assert_same_run(straight, damaged)


def test_a_full_disk_ends_with_one_line_and_code_74_and_the_run_resumes(tmp_path: Path, make_shard: MakeShard) -> None:
    plan = plan_of(make_shard())
    folder = write_spec(tmp_path / "full", plan)
    assert die(folder, 14, 1) == -9
    kept = checkpoints.list_checkpoints(folder / "checkpoints")
    while len(kept) > 1:
        kept.pop()[1].rename(tmp_path / f"away-{len(kept)}")
    size = (kept[0][1] / "optimizer.safetensors").stat().st_size
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
    code, errors = run_trainer(folder, preexec_fn=limit)
    assert code == 74
    assert len(errors.strip().splitlines()) == 1 and "File too large" in errors
    assert checkpoints.list_checkpoints(folder / "checkpoints") == kept
    assert checkpoints.load_checkpoint(kept[0][1]).step == kept[0][0]
    assert train_here(folder) == (0, "")
    straight = write_spec(tmp_path / "straight", plan)
    assert train_here(straight)[0] == 0
    assert_same_run(straight, folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "branch"}, "error[strict.wrong_value]: | key 'kind'"),
        ({"last_stp": 3}, "error[strict.unknown_key]: | 'last_stp' | 'last_step'"),
        ({"last_step": 0}, "error[strict.wrong_value]: | 'last_step'"),
        ({"first_step": 5}, "error[strict.wrong_value]: | initial_checkpoint is missing"),
        ({"kind": "anneal"}, "error[strict.wrong_value]: | initial_checkpoint is missing"),
        ({"initial_checkpoint": "/nowhere"}, "error[trainer.not_a_checkpoint]: | /nowhere"),
        ({"last_step": 10**7}, "error[plan.too_little_data]: | max_epochs"),
        ({"kernels": "error[kernels.unreadable_file]: | /nowhere.yaml"}, "/nowhere.yaml"),
    ],
)
def test_a_bad_spec_ends_with_one_line_and_code_2(
    tmp_path: Path, make_shard: MakeShard, change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.__main__ import main

    folder = write_spec(tmp_path / "bad", plan_of(make_shard()), **change)
    assert main([str(folder)]) == 2
    errors = capsys.readouterr().err
    assert all(part in errors for part in said.split(" | ")) and len(errors.strip().splitlines()) == 1
    assert not (folder / "checkpoints").exists()


def test_a_replaced_kernel_is_reported_at_the_start(
    tmp_path: Path, make_shard: MakeShard, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, folders = plan_of(make_shard()), []
    for name, chosen in (("compiled", "adamw: compiled"), ("references", "")):
        kernels = tmp_path / f"{name}.yaml"
        kernels.write_text(f"cpu: {{{chosen}}}\n")
        folders.append(write_spec(tmp_path / name, plan, last_step=1, kernels=str(kernels)))
    code, errors = run_trainer(folders)
    assert code == 0, errors
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("kernels: ")]
    assert len(said) == 1 and "adamw: compiled is replaced" in said[0], said


def test_a_missing_spec_and_invalid_json_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainer.__main__ import main

    assert main([str(tmp_path)]) == 2
    (tmp_path / "segment.json").write_text("{")
    assert main([str(tmp_path)]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert "error[plan.no_spec]" in errors[0] and "error[strict.not_json]" in errors[1]


def test_a_poisoned_step_is_skipped_and_its_documents_named(tmp_path: Path, make_shard: MakeShard) -> None:
    """Weights that overflow: the update is not made, and the anomaly names the documents of the batch."""
    plan = plan_of(make_shard())
    trunk = write_spec(tmp_path / "trunk", plan, last_step=4)
    assert train_here(trunk)[0] == 0
    good = checkpoints.load_checkpoint(Path(result(trunk)["checkpoint"]))
    good.model["final_norm"][0] = float("nan")
    poisoned = checkpoints.save_checkpoint(tmp_path / "poisoned", good)
    folder = write_spec(tmp_path / "on", plan, first_step=4, last_step=6, initial_checkpoint=str(poisoned))
    assert train_here(folder) == (0, "")
    assert result(folder)["loss"] is None
    found = read_json_lines(folder / "anomalies.jsonl")
    assert {(a["step"], a["kind"], a["skipped"]) for a in found} == {(4, "non_finite", True), (5, "non_finite", True)}
    assert all(key.split("-")[0] in ("code", "docs", "chat") for a in found for key in a["documents"])
    after = checkpoints.load_checkpoint(Path(result(folder)["checkpoint"]))
    assert all(torch.equal(after.model[n], good.model[n]) for n in good.model if n != "final_norm")
