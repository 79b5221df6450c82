"""A disk has too little free space. To test this, the policy's floor is set above the size of any disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from factory.core.workspace import Workspace, WorkspaceConfig
from factory.ledger.file_events import find_low_disk
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.retention.disk import (
    EVERY_SECONDS,
    KEPT_BYTES,
    SAMPLES_FILE,
    estimate_hours_until_floor,
    read_free_space_samples,
    record_free_space_sample,
)
from factory.retention.low_disk import must_training_wait_for_disk_space
from tests.support.messages import codes, the
from tests.support.said import Said


def set_floor(workspace: Workspace, floor: int) -> None:
    (workspace.root / "policies" / "retention.yaml").write_text(f"floor_bytes: {floor}\n")


@pytest.fixture
def plant(tmp_path: Path, code_repository: Path) -> tuple[Workspace, Ledger]:
    workspace = Workspace.create(tmp_path / "w", WorkspaceConfig(repository=str(code_repository)))
    return workspace, Ledger.create(workspace.ledger_url)


def test_training_waits_below_the_floor_and_prints_one_line(plant: tuple[Workspace, Ledger]) -> None:
    workspace, ledger = plant
    said = Said()
    set_floor(workspace, 0)
    assert not must_training_wait_for_disk_space(Plant(workspace, ledger, said)) and said.lines == []
    set_floor(workspace, 1 << 60)
    assert must_training_wait_for_disk_space(Plant(workspace, ledger, said)) and must_training_wait_for_disk_space(
        Plant(workspace, ledger, said)
    )
    (line,) = said.lines
    data = the([line], "low_disk.training_waits").data
    assert data["floor_gb"] == (1 << 60) / 1e9 and data["folder"] == workspace.root
    assert (find_low_disk(ledger) or {})["floor"] == 1 << 60
    set_floor(workspace, 0)
    assert not must_training_wait_for_disk_space(Plant(workspace, ledger, said)) and codes(said.lines[1:]) == [
        "low_disk.training_continues"
    ]
    assert find_low_disk(ledger) is None and len(said.lines) == 2


def test_the_growth_of_the_used_space_is_measured_from_samples(plant: tuple[Workspace, Ledger]) -> None:
    workspace, _ = plant
    for number in range(4):
        record_free_space_sample(workspace, now=1000.0 + number * EVERY_SECONDS / 2)
    assert [at for at, _ in read_free_space_samples(workspace)] == [1000.0, 1000.0 + EVERY_SECONDS]
    path = workspace.logs / SAMPLES_FILE
    line = json.dumps({"at": 5.0, "free": 7}) + "\n"
    path.write_text("cut off\n" + line * (3 * KEPT_BYTES // len(line)) + '{"at": 9')
    record_free_space_sample(workspace, now=9000.0)
    assert path.stat().st_size < 2 * KEPT_BYTES
    assert read_free_space_samples(workspace)[0] == (5.0, 7) and read_free_space_samples(workspace)[-1][0] == 9000.0
    lost = [(0.0, 10_000_000_000), (7200.0, 6_000_000_000)]  # 2 GB an hour
    assert estimate_hours_until_floor(lost, free=6_000_000_000, floor=1_000_000_000, now=7200.0) == 2.5
    assert estimate_hours_until_floor(lost, free=6_000_000_000, floor=7_000_000_000, now=7200.0) == 0.0
