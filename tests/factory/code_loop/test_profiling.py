"""``factory profile``: in a workspace, its files are artifacts of a run. It also works without a workspace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from agents.kernel_engineer.targets import find_targets
from agents.line_profiler import profile_schema, session
from agents.line_profiler.__main__ import main
from agents.line_profiler.profile_schema import Profile
from factory.code_loop import profiling
from factory.code_loop.profiling import (
    FORMAT,
    ProfileError,
    ProfileOptions,
    find_best_rates,
    find_recipe,
    profile_live_code,
    read_profile,
    read_recent_profiles,
    run_profiler,
)
from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.core.workspace import find_checkout_root
from factory.ledger.ledger import Ledger, profiles
from factory.ledger.plant import Plant
from factory.ledger.writing import insert_row
from factory.runs.live_code import LiveCode
from factory.show.mlflow.runs import MlflowTracking
from tests.support.factory.code_loop import make
from tests.support.factory.engineer import profile
from tests.support.messages import refused
from tests.support.paths import ROOT

FILES = ("profile.json", "profile.html", "trace.json")


@pytest.mark.slow("a profile of the live code")
def test_a_profile_is_recorded_in_the_ledger_and_its_files_in_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler runs in this process, and waits for no quiet moment: a test of ``test_proposing.py`` starts a real one in the sandbox."""

    def here(code: LiveCode, arguments: list[str], *_: object, **__: object) -> None:
        assert main([*arguments, "--steps", "1"]) == 0

    for name in ("LEAST_S", "SETTLING_S"):
        monkeypatch.setattr(session, name, 0.0)
    monkeypatch.setattr(profiling, "run_profiler", here)
    made = make()
    number = profile_live_code(Plant(made.workspace, made.ledger), ProfileOptions(isolation_s=2, implementations_s=2))
    row = made.ledger.select_first(sa.select(profiles).where(profiles.c.id == number))
    assert row is not None
    found = Profile.from_mapping(json.loads(Path(row["path"]).read_text()))
    assert found.isolation is not None and row["summary"]["coverage"] == found.coverage
    tracking = MlflowTracking.open(Plant(made.workspace, made.ledger))
    run = tracking.update_profile_run(number)  # told again: the same run
    assert {artifact.path for artifact in tracking.client.list_artifacts(run)} == set(FILES)
    logged = tracking.client.get_run(run)
    assert logged.data.metrics["coverage"] == pytest.approx(found.coverage)
    assert logged.data.tags["mlflow.source.git.commit"] == row["code_commit"] and logged.info.status == "FINISHED"


@pytest.mark.long("a profiler that waits for a quiet machine, within the command")
def test_without_a_workspace_the_checkout_is_profiled(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "FACTORY_HOME"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "factory", "profile", "--recipe", "tiny", "--alone", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "profile").iterdir()} == set(FILES)
    assert "line by line" in done.stdout and "profile/profile.html" in done.stdout


def test_an_unknown_recipe_is_named_with_the_nearest() -> None:
    with refused("code_loop.no_recipe", InputError, name="tinny") as caught:
        find_recipe("tinny", None)
    assert "'tiny'" in caught.value.data["near"]


def test_the_error_contains_the_profilers_output(tmp_path: Path) -> None:
    outside = LiveCode(find_checkout_root(), None, False)
    with refused("code_loop.profiler_failed", ProfileError) as failed:
        run_profiler(outside, [], SILENT, module="no.such.module")
    assert "no.such.module" in failed.value.data["line"]
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("name: x\n")
    with pytest.raises(InputError, match="bad.yaml"):
        run_profiler(outside, ["--recipe", str(recipe), "--out", str(tmp_path)], SILENT)


def test_a_profile_of_another_format_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"format": 2}')
    with refused("code_loop.profile_format", ProfileError, found=2, expected=4):
        read_profile(path)
    assert FORMAT == profile_schema.FORMAT


def test_a_profile_of_the_format_before_is_read_as_one_of_the_eager_step(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    new = {"format", "compiled", "step_s", "machine", "machine_facts"}
    path.write_text(json.dumps({"format": 3} | {key: value for key, value in profile().items() if key not in new}))
    found = read_profile(path)
    assert (found["compiled"], found["step_s"]) == (False, 1.0)
    assert find_targets(found, {"kernels/swiglu/__init__.py"})[0].attainable == pytest.approx(0.08)


def record_profile(ledger: Ledger, path: Path, commit: str, found: dict[str, object], **summary: object) -> int:
    path.write_text(json.dumps(found))
    with ledger.begin() as tx:
        return insert_row(tx, profiles, code_commit=commit, path=str(path), summary=summary, created_at=1.0)


def test_the_recent_profiles_are_those_of_one_commit_recipe_and_machine(tmp_path: Path) -> None:
    ledger = Ledger.create(f"sqlite:///{tmp_path / 'ledger.db'}")
    alike = profile()
    mine = [record_profile(ledger, tmp_path / f"{n}.json", "a" * 40, alike | {"step_s": float(n)}) for n in range(7)]
    record_profile(ledger, tmp_path / "machine.json", "a" * 40, alike | {"machine": "another"})
    record_profile(ledger, tmp_path / "recipe.json", "a" * 40, alike | {"recipe": {"compile": True}})
    record_profile(ledger, tmp_path / "commit.json", "b" * 40, alike)
    (tmp_path / "6.json").write_text("not JSON")
    (tmp_path / "5.json").unlink()
    assert [found["step_s"] for found in read_recent_profiles(ledger, mine[2])] == [2.0, 4.0, 3.0, 1.0, 0.0]


def test_a_profile_of_a_busy_moment_gives_way_to_the_fastest_one(tmp_path: Path) -> None:
    ledger = Ledger.create(f"sqlite:///{tmp_path / 'ledger.db'}")

    def took(seconds: float) -> int:
        file = tmp_path / f"{seconds}.json"
        return record_profile(ledger, file, "a" * 40, profile() | {"covered_s": seconds})

    took(1.2)
    took(70.0)
    took(1.0)
    busy = took(60.0)
    assert [found["covered_s"] for found in read_recent_profiles(ledger, busy)] == [1.0, 1.2]
    quiet = took(1.1)
    assert [found["covered_s"] for found in read_recent_profiles(ledger, quiet)] == [1.1, 1.0, 1.2]
    (tmp_path / "1.0.json").unlink()
    (tmp_path / "1.1.json").unlink()
    (tmp_path / "1.2.json").unlink()
    assert [found["covered_s"] for found in read_recent_profiles(ledger, busy)] == [60.0, 70.0]


def test_the_best_rates_of_a_machine_are_remembered_for_a_while(tmp_path: Path) -> None:
    """One profile that a busy moment spoiled changes nothing. A rate that was wrong is forgotten after ``REMEMBERED`` profiles."""
    ledger = Ledger.create(f"sqlite:///{tmp_path / 'ledger.db'}")

    def measured(flops: object, rate: object, machine: str = "here", precision: str = "bf16") -> None:
        summary = {
            "machine": machine,
            "precision": precision,
            "measured_flops_per_s": flops,
            "measured_bytes_per_s": rate,
        }
        record_profile(ledger, tmp_path / "profile.json", "a" * 40, {}, **summary)

    assert find_best_rates(ledger, "here", "bf16") is None
    measured(9e11, 2e10)
    measured(1e11, 4e10)
    measured(5e15, 5e15, machine="elsewhere")
    measured(7e15, 7e15, precision="fp32")
    measured("much", float("inf"))
    record_profile(ledger, tmp_path / "profile.json", "a" * 40, {})  # of a version that told no machine
    assert find_best_rates(ledger, "here", "bf16") == (9e11, 4e10)
    for _ in range(profiling.REMEMBERED):
        measured(2e11, 1e10)
    assert find_best_rates(ledger, "here", "bf16") == (2e11, 1e10)
