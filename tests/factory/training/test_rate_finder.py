"""The rate of an imported model is searched once, before its first training, on the data that will be trained on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.diagnosis.remedies import rewind_segment
from factory.ingest.chain import ingest_shard
from factory.ledger.imported_model import RATE_FOUND, RATE_NOT_SEARCHED
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, RunRow, SegmentRow
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.status.status import format_status_lines, read_status_facts
from factory.training import rate_finder
from factory.training.continuing_recipe import RATE_COMMENT
from factory.training.exporting import export_candidate
from factory.training.held_out_loss import load_held_out_loss_meter
from factory.training.planning import load_recipe, make_next_trunk_spec, read_last_checkpoint
from factory.training.rate_finder import (
    RateNotFoundError,
    find_lowest_loss_rate,
    find_rate,
    find_rate_if_due,
    make_ramp,
)
from tests.support.factory.code_loop import make_target
from tests.support.factory.own_data import DATA, passages, write_shards
from tests.support.lent_libraries import lend
from tests.support.messages import codes, refused
from tests.support.plants.trained_plant import close, opened, train_trunk
from tests.support.trainer.public_model import CARD, save_public_model

# What a team of a laptop would lower. The rate, and the line that names its source, stay as the import wrote them.
CHANGES = {
    "precision: auto": "precision: fp32",
    "  sequences: 128": "  sequences: 8",
    "  micro_sequences: 32": "  micro_sequences: 2",
    "  max_epochs: 4": "  max_epochs: 20",
}
STEPS = 32  # that 200 steps of four micro-batches allow


def make(folder: Path, source: Path, repository: Path) -> Plant:
    """A workspace from a model, with documents and no training."""
    make_imported_workspace(folder, ImportOptions(source, context=128), repository, SILENT)
    workspace, ledger = opened(folder)
    lend(workspace)
    text = workspace.recipe_path().read_text()
    for old, new in CHANGES.items():
        assert old in text, old
        text = text.replace(old, new)
    workspace.recipe_path().write_text(text)
    (folder / "documents").mkdir()
    first, _ = write_shards(folder / "documents", DATA["three-domain prose"])
    plant = Plant(workspace, ledger)
    ingest_shard(plant, first)
    return plant


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of the journey's small model, with documents and no training."""
    root = tmp_path_factory.mktemp("rates")
    source = root / "public"
    source.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_public_model(source, [one.text for one in passages()[::2]], vocab_size=1024, **sizes)
    plant = make(root / "plant", source, make_target(root / "code"))
    close(plant.workspace, plant.ledger)
    return root / "plant"


@pytest.fixture
def plant(made: Path, tmp_path: Path) -> Plant:
    return Plant(*opened(shutil.copytree(made, tmp_path / "plant", symlinks=True)))


def events(plant: Plant, kind: str) -> list[dict[str, Any]]:
    return [row["detail"] for row in plant.ledger.read("SELECT detail FROM events WHERE kind = :kind", kind=kind)]


def rate_line(plant: Plant) -> list[str]:
    lines = format_status_lines(read_status_facts(plant.workspace))
    return [code for code in codes(lines) if code.startswith("status.rate")]


def set_steps(plant: Plant, steps: int) -> None:
    path = plant.workspace.recipe_path()
    path.write_text(
        path.read_text().replace("    first: 200", f"    first: {steps}").replace("warmup_steps: 20", "warmup_steps: 2")
    )


@pytest.mark.slow("trains 64 steps to find the rate, and 100 steps with each of two rates")
def test_a_found_rate_is_recorded_and_is_not_worse_on_held_out_documents_than_the_imports_rate(
    plant: Plant, tmp_path: Path
) -> None:
    imported = load_recipe(plant.workspace).optimizer.lr
    find_rate_if_due(plant)
    (found,) = events(plant, RATE_FOUND)
    rate = load_recipe(plant.workspace).optimizer.lr
    assert (found["rate"], found["before"], found["steps"]) == (rate, imported, STEPS) and found["gain"] < 0
    assert imported < rate <= 10 * imported, "a model of random weights learns faster with a higher rate"
    text = plant.workspace.recipe_path().read_text()
    assert text.count("1506.01186") == 1 and str(RATE_COMMENT) not in text
    assert rate_line(plant) == ["status.rate_found"]
    assert len(SegmentRow.select(plant.ledger)) == 1 and not (plant.workspace.root / "rate-finder").exists()
    assert {(row.purpose, row.state) for row in RunRow.select(plant.ledger)} == {("rate finder", "done")}
    find_rate_if_due(plant)
    assert len(events(plant, RATE_FOUND)) == 1 and events(plant, RATE_NOT_SEARCHED) == []

    set_steps(plant, 100)
    losses = [train_copy(plant, tmp_path / name, lr)[0] for name, lr in (("import", imported), ("found", rate))]
    print(f"\nheld-out bits per byte: {losses[0]:.4f} with {imported:.1e}, {losses[1]:.4f} with {rate:.1e}")
    assert losses[1] <= losses[0]


@pytest.mark.long(
    "trains a model, imports it, finds its rate, and trains it with each of two rates: three minutes of a busy core"
)
def test_a_rate_that_is_found_for_a_trained_model_is_not_worse_than_the_imports_rate(
    plant: Plant, tmp_path: Path
) -> None:
    set_steps(plant, 150)
    before, source = train_copy(plant, tmp_path / "first", 0.003)
    (source / "README.md").write_text(CARD)
    again = make(tmp_path / "second", source, plant.workspace.repository)
    imported = load_recipe(again.workspace).optimizer.lr
    find_rate_if_due(again)
    rate = load_recipe(again.workspace).optimizer.lr
    assert [one["rate"] for one in events(again, RATE_FOUND)] == [rate] and 0.1 * imported <= rate <= 10 * imported
    set_steps(again, 60)
    losses = [train_copy(again, tmp_path / name, lr)[0] for name, lr in (("import", imported), ("found", rate))]
    print(
        f"\nheld-out bits per byte: {before:.4f} before, {losses[0]:.4f} with {imported:.1e}, {losses[1]:.4f} with {rate:.1e}"
    )
    assert losses[1] <= losses[0]


def train_copy(plant: Plant, folder: Path, rate: float) -> tuple[float, Path]:
    """Train a copy of a workspace with a rate. Returns (its held-out bits per byte, its export)."""
    copied = Plant(*opened(shutil.copytree(plant.workspace.root, folder, symlinks=True)))
    recipe = yaml.safe_load(copied.workspace.recipe_path().read_text())
    recipe["optimizer"]["lr"] = rate
    copied.workspace.recipe_path().write_text(yaml.safe_dump(recipe | {"compile": False}))
    candidate = export_candidate(copied, train_trunk(copied.workspace, copied.ledger))
    export = Path(CandidateRow.get(copied.ledger, candidate).export_path)
    loss = load_held_out_loss_meter(copied).measure_loss(export)
    with refused("rate_finder.trained", InputError, segment=2):
        find_rate(copied)
    rewind_segment(copied.ledger, 2, "a person")  # as the refusal advises
    assert make_next_trunk_spec(copied, 2)["first_step"] == 0
    close(copied.workspace, copied.ledger)
    return loss, export


def test_a_test_that_was_interrupted_keeps_the_runs_that_ended(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    home, stop = plant.workspace.root / "rate-finder", RuntimeError("the process ends here")

    def die(*_: object) -> None:
        raise stop

    with monkeypatch.context() as patch:
        patch.setattr(rate_finder, "read_step_lines", die)
        with pytest.raises(RuntimeError):
            find_rate_if_due(plant)
    kept = {path: path.stat().st_mtime_ns for path in home.glob("*/metrics.jsonl")}
    assert len(kept) == 2 and str(RATE_COMMENT) in plant.workspace.recipe_path().read_text()
    (home / "of another commit").mkdir()
    with monkeypatch.context() as patch:
        read = rate_finder.read_step_lines

        def look(folder: Path, name: str) -> list[dict[str, Any]]:
            assert (folder / name).stat().st_mtime_ns == kept[folder / name], "it was not trained again"
            assert not (home / "of another commit").exists()
            return read(folder, name)

        patch.setattr(rate_finder, "read_step_lines", look)
        find_rate_if_due(plant)
    assert len(events(plant, RATE_FOUND)) == 1 and not home.exists()


@pytest.mark.parametrize("why", ["too short", "factory.yaml", "an option", "the trainer fails", "the disk is full"])
def test_a_rate_that_is_not_searched_stays_with_a_reason(
    plant: Plant, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "rate_finder.not_wanted"
    allowed = why != "an option"
    if why == "too short":
        set_steps(plant, 99)
        expected = "rate_finder.too_short"
    elif why == "factory.yaml":
        file = plant.workspace.root / "factory.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"find_rate": False}))
        plant = Plant(Workspace.open(plant.workspace.root), plant.ledger)
    elif why == "the trainer fails":
        expected = "rate_finder.failed"
        checkpoint = Path(read_last_checkpoint(plant.ledger, 1)["path"])
        (checkpoint / "model.safetensors").write_bytes(b"damaged")
    elif why == "the disk is full":
        expected = "rate_finder.disk"
        monkeypatch.setattr(rate_finder, "CHECKPOINT_BYTES", 1 << 60)
    before = plant.workspace.recipe_path().read_text()
    for _ in range(2):
        find_rate_if_due(plant, allowed=allowed)
    (event,) = events(plant, RATE_NOT_SEARCHED)
    assert event["reason"]["code"] == expected and events(plant, RATE_FOUND) == []
    assert plant.workspace.recipe_path().read_text() == before and not (plant.workspace.root / "rate-finder").exists()
    assert rate_line(plant) == ["status.rate_not_searched"]


@pytest.mark.parametrize("why", ["another rate", "no comment of the import", "too few documents"])
def test_a_rate_that_a_person_chose_is_left_alone_without_a_word(plant: Plant, why: str) -> None:
    path = plant.workspace.recipe_path()
    if why == "another rate":
        path.write_text(
            "".join("  lr: 0.01\n" if "  lr:" in line else line for line in path.read_text().splitlines(True))
        )
    elif why == "no comment of the import":
        path.write_text(path.read_text().replace(str(RATE_COMMENT), ""))
    else:
        path.write_text(
            path.read_text().replace("max_epochs: 20", "max_epochs: 1").replace("sequences: 8", "sequences: 800")
        )
    before = path.read_text()
    find_rate_if_due(plant)
    assert path.read_text() == before and events(plant, RATE_FOUND) + events(plant, RATE_NOT_SEARCHED) == []
    assert rate_line(plant) == []


def test_the_ramp_rises_exponentially_to_its_peak() -> None:
    ramp = make_ramp(40)
    rates = [(one["from_step"] + 1) / 40 * one["share"] for one in ramp]
    ratios = [after / before for before, after in zip(rates, rates[1:], strict=False)]
    assert rates[-1] == pytest.approx(1) and all(one == pytest.approx(ratios[0]) for one in ratios)


def test_a_loss_that_is_not_finite_ends_the_test_and_none_is_an_error() -> None:
    assert find_lowest_loss_rate([1.0, 2.0, 4.0], [-1.0, float("nan"), -9.0]) == (1.0, pytest.approx(-1.0))
    with refused("rate_finder.no_loss", RateNotFoundError):
        find_lowest_loss_rate([1.0], [float("inf")])
    with refused("rate_finder.no_gain", RateNotFoundError):  # the first difference is 0: no weight has changed
        find_lowest_loss_rate([1.0, 2.0, 4.0], [0.0, 0.1, 0.3])
