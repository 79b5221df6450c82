"""The factory plans, starts, stops, refuses and certifies segments with several real ranks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa

from factory.core.errors import ConfigError, InputError, SegmentError
from factory.core.launching import build_launcher_command, count_ranks
from factory.core.workspace import Workspace
from factory.git.repository import checkout_live_code
from factory.ledger.ledger import Ledger, data_plans, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.retrying.trainer_deaths import abandon_segment
from factory.training.certifying import find_newest_code_verdict
from factory.training.planning import plan_trunk
from factory.training.training import run_segment
from tests.support.factory.code_loop import make_target
from tests.support.messages import refused
from tests.support.patience import PATIENCE_S
from tests.support.plants.trained_plant import commit_edit, make_plant

Opened = tuple[Workspace, Ledger]


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A trunk that one rank trained. Two ranks continue it."""
    root = tmp_path_factory.mktemp("launching")
    workspace, ledger = make_plant(root, make_target(root / "code"))
    (workspace.root / "policies" / "gates" / "certificate.yaml").write_text("steps: 4\npreflight: {parts: []}\n")
    return configured(workspace, "ranks: 2"), ledger


def configured(workspace: Workspace, *lines: str) -> Workspace:
    """Put these lines at the end of the workspace's factory.yaml, and open it again."""
    path = workspace.root / "factory.yaml"
    kept = [
        line
        for line in path.read_text().splitlines()
        if line.split(":")[0] not in ("ranks", "launcher", "training_sandbox")
    ]
    path.write_text("\n".join([*kept, *lines, ""]))
    return Workspace.open(workspace.root)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow("two times two ranks, and one rank beside them")
def test_two_ranks_train_as_one_rank_and_give_equal_bits_in_and_out_of_the_sandbox(
    plant: Opened, tmp_path: Path
) -> None:
    workspace, ledger = plant
    trained = []
    for chosen in ("required", "off"):
        number = plan_trunk(Plant(workspace, ledger), 8)
        run_segment(Plant(configured(workspace, "ranks: 2", f"training_sandbox: {chosen}"), ledger), number)
        row = SegmentRow.get(ledger, number)
        assert row.state == "done"
        trained.append(hashes(Path(str(row.result["checkpoint"]))))  # type: ignore[index]
        with ledger.begin() as tx:  # so that the next segment starts at the same step
            tx.execute(segments.update().where(segments.c.id == number).values(state="abandoned"))
    assert trained[0] == trained[1] and len(trained[0]) >= 4
    assert sum("00001" in name for name in trained[0]) >= 1, f"a share of each rank: {sorted(trained[0])}"
    folder = Path(row.folder)
    (tmp_path / "segment.json").write_text((folder / "segment.json").read_text())
    code = checkout_live_code(workspace, str(row.code_commit))
    subprocess.run([sys.executable, "-m", "trainer", str(tmp_path)], cwd=code, check=True, capture_output=True)
    assert losses(folder) == pytest.approx(losses(tmp_path), rel=2e-5)


def hashes(checkpoint: Path) -> dict[str, str]:
    files = checkpoint.glob("*.safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def training(workspace: Workspace, folder: Path, steps: int) -> subprocess.Popen[str]:
    """Start ``factory train``; return once it has done so many more steps."""
    before = len(losses(folder)) if (folder / "metrics.jsonl").exists() else 0
    words = [sys.executable, "-m", "factory", "train", "--workspace", str(workspace.root)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while not ((folder / "metrics.jsonl").exists() and len(losses(folder)) >= before + steps):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return process


def trainers_of(factory: subprocess.Popen[str]) -> list[psutil.Process]:
    """torchrun and the ranks, without bubblewrap's own processes, whose command lines contain the trainer's."""
    found = psutil.Process(factory.pid).children(recursive=True)
    return [process for process in found if "trainer" in process.cmdline() and process.name() != "bwrap"]


@pytest.mark.slow("the factory and its ranks started, stopped, killed and started again")
def test_ranks_stop_with_the_factory_and_die_with_their_launcher(plant: Opened) -> None:
    """Stopped ranks write a checkpoint. Orphaned ranks would train on beside the next attempt's, in the same folder."""
    workspace, ledger = plant
    number = plan_trunk(Plant(workspace, ledger), 60)
    folder = Path(SegmentRow.get(ledger, number).folder)
    process = training(workspace, folder, 3)
    try:
        trainers = trainers_of(process)
        assert len(trainers) == 3, "torchrun and two ranks"
        os.kill(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode != 0, said
    assert not psutil.wait_procs(trainers, timeout=PATIENCE_S)[1]
    row = SegmentRow.get(ledger, number)
    assert row.state != "failed" and row.attempts == 0 and (folder / "exit-75").exists()

    process = training(workspace, folder, 3)
    try:
        agent = next(p for p in trainers_of(process) if "torch.distributed.run" in p.cmdline())
        trainers = agent.children(recursive=True)
        agent.kill()
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert "SIGKILL" in said
    assert len(trainers) >= 2 and not psutil.wait_procs(trainers, timeout=PATIENCE_S)[1]
    run_segment(Plant(workspace, ledger), number)
    assert len(losses(folder)) == 60


@pytest.mark.slow("torchrun and its ranks")
def test_a_trainers_refusal_is_reported_through_torchrun(plant: Opened) -> None:
    """Exit code 2: another attempt would not help, and the trainer's own message is shown."""
    workspace, ledger = plant
    number = plan_trunk(Plant(workspace, ledger), 6)
    row = SegmentRow.get(ledger, number)
    folder = Path(row.folder)
    folder.mkdir(parents=True)
    (folder / "exit-75").touch()  # an earlier process wrote it
    plan = ledger.select_first(sa.select(data_plans.c.plan).where(data_plans.c.id == row.data_plan))
    assert plan is not None
    wrong = plan["plan"] | {"weights": {"nothing-of-it-here": 1.0}}
    with ledger.begin() as tx:
        tx.execute(data_plans.insert().values(id="wrong", plan=wrong, created_at=0.0))
        tx.execute(segments.update().where(segments.c.id == number).values(data_plan="wrong"))
    with pytest.raises(SegmentError, match=r"exit 2: .*nothing-of-it-here") as raised:
        run_segment(Plant(workspace, ledger), number)
    assert "====" not in str(raised.value) and SegmentRow.get(ledger, number).state == "failed"
    with refused("retrying.parked_to_do", InputError, segment=number, step=None) as parked:
        plan_trunk(Plant(workspace, ledger), 6)
    assert "ended with exit 2" in parked.value.data["parked"]
    assert row.parent and row.first_step >= 20
    abandoned = abandon_segment(ledger, number, "ada")
    assert (abandoned.data["lost"], abandoned.data["first"]) == (0, row.first_step)


def test_a_changed_number_of_ranks_fails_no_segment(plant: Opened) -> None:
    """With a GPU less than yesterday the segment waits for a person."""
    workspace, ledger = plant
    number = plan_trunk(Plant(workspace, ledger), 6)
    with refused("launching.ranks_do_not_fit", ConfigError, ranks=3):
        run_segment(Plant(configured(workspace, "ranks: 3"), ledger), number)
    row = SegmentRow.get(ledger, number)
    assert row.state == "planned" and row.attempts == 0
    configured(workspace, "ranks: 2")
    with ledger.begin() as tx:
        tx.execute(segments.update().where(segments.c.id == number).values(state="abandoned"))


@pytest.mark.long("ten runs by two ranks")
def test_changed_code_is_certified_with_several_ranks(plant: Opened) -> None:
    workspace, ledger = plant
    commit_edit(
        workspace.repository, "policies/kernels.yaml", "cpu:\n  rms_norm: reference", "cpu:\n  rms_norm: compiled"
    )
    number = plan_trunk(Plant(workspace, ledger), 6)
    run_segment(Plant(workspace, ledger), number)
    found = find_newest_code_verdict(ledger, number)
    assert found is not None and found.outcome == "promote", found
    assert SegmentRow.get(ledger, number).state == "done"


def test_planning_refuses_ranks_that_cannot_train(plant: Opened) -> None:
    workspace, ledger = plant
    file = workspace.root / "factory.yaml"
    cases: dict[str, tuple[str, dict[str, object]]] = {
        "ranks: 3": ("launching.ranks_do_not_fit", {"ranks": 3, "file": file}),
        "ranks: -1": ("workspace.bad_ranks", {"value": -1, "file": file}),
        "ranks: yes": ("workspace.wrong_type", {"key": "ranks", "value": "yes"}),
        "ranks: two": ("workspace.wrong_type", {"key": "ranks", "expected": "int", "value": "two"}),
    }
    for line, (code, data) in cases.items():
        with refused(code, ConfigError, **data):
            plan_trunk(Plant(configured(workspace, line), ledger), 4)
    with refused("launching.no_ranks", ConfigError, file=file):
        build_launcher_command(configured(workspace, "launcher: torchrun --nnodes=2"))
    with refused("launching.bad_launcher", ConfigError, why="No closing quotation"):
        build_launcher_command(configured(workspace, "ranks: 2", 'launcher: "srun \'torchrun"'))
    with refused("launching.bad_launcher", ConfigError, why="it is empty"):
        build_launcher_command(configured(workspace, "ranks: 2", "launcher: ' '"))
    words = build_launcher_command(
        configured(workspace, "ranks: 16", "launcher: srun torchrun --nnodes=2 --nproc-per-node=8")
    )
    assert words == ["srun", "torchrun", "--nnodes=2", "--nproc-per-node=8"]
    assert build_launcher_command(configured(workspace, "ranks: 1")) == [sys.executable]
    assert count_ranks(configured(workspace)) >= 1
