"""``factory profile``: in a workspace, its files are artifacts of a run. It also works without a workspace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from agents.line_profiler import profile_schema, session
from agents.line_profiler.__main__ import main
from agents.line_profiler.profile_schema import Profile
from factory.code_loop import profiling
from factory.code_loop.profiling import (
    FORMAT,
    ProfileError,
    ProfileOptions,
    find_recipe,
    profile_live_code,
    read_profile,
    run_profiler,
)
from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.core.workspace import find_checkout_root
from factory.ledger.ledger import profiles
from factory.ledger.plant import Plant
from factory.runs.live_code import LiveCode
from factory.show.mlflow.runs import MlflowTracking
from tests.support.factory.code_loop import make
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
    number = profile_live_code(Plant(made.workspace, made.ledger), ProfileOptions(isolation_s=2))
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
    with refused("code_loop.profile_format", ProfileError, found=2, expected=3):
        read_profile(path)
    assert FORMAT == profile_schema.FORMAT
