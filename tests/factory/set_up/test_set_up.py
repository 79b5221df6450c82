"""Set-up with a real virtual environment and a real pip, without a network: two tiny packages, and a project that builds itself."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from factory.set_up import __main__ as script
from factory.set_up import journal as journal_file
from factory.set_up import steps
from factory.set_up.environment import forget_halves, packages
from factory.set_up.journal import Journal, SetUpError, bytes_in
from factory.set_up.needs import bubblewrap, obstacles
from factory.set_up.pip import PipOutput, download
from factory.set_up.steps import set_up
from tests.support.paths import ROOT

# A build backend that needs nothing: it also makes the wheels of the packages that the project asks for.
BACKEND = """
import os, time, zipfile

def wheel(folder, name, version, metadata="", files=()):
    info = f"{name}-{version}.dist-info"
    files = {f"{name}.py": "VALUE = 1\\n", **dict(files), f"{info}/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
             f"{info}/METADATA": f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n{metadata}"}
    files[f"{info}/RECORD"] = "".join(f"{file},,\\n" for file in files)
    with zipfile.ZipFile(os.path.join(folder, f"{name}-{version}-py3-none-any.whl"), "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return f"{name}-{version}-py3-none-any.whl"

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    if os.path.exists("slow"):
        open("begun", "w").close()
        time.sleep(60)
    needs = "Requires-Dist: part\\nProvides-Extra: dev\\nRequires-Dist: tool; extra == 'dev'\\n"
    return wheel(wheel_directory, "tiny", "1", needs)
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def no_network(folder: Path) -> dict[str, str]:
    """An environment whose pip sees the wheels of this folder and nothing else of this machine."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**mine, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels")}


@pytest.fixture
def offline(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in no_network(project).items():
        monkeypatch.setenv(name, value)
    run(project)  # what another test left undone


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a set-up done: the tests that share it leave it so."""
    root = tmp_path_factory.mktemp("project")
    (root / "wheels").mkdir()
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "constraints.txt").write_text("part==1\ntool==1\n")
    make: dict = {}
    exec(BACKEND, make)
    for name, version in (("part", "1"), ("part", "2"), ("tool", "1")):
        make["wheel"](root / "wheels", name, version)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in no_network(root).items():
            patch.setenv(name, value)
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            patch.delenv(name, raising=False)
        said = run(root)
    assert any(line.startswith("making .venv with Python") for line in said)
    assert any("unpacking 2 packages" in line for line in said), said
    return root


def run(root: Path, dev: bool = False) -> list[str]:
    said: list[str] = []
    set_up(root, dev, said.append, imports=("part", "tiny"), dev_imports=("tool",))
    return said


def installed(root: Path) -> dict[str, str]:
    folder = packages(root / ".venv")
    assert folder
    found = (path.name.removesuffix(".dist-info").split("-") for path in folder.glob("*.dist-info"))
    return {name: version for name, version in found if name in ("part", "tiny", "tool")}


def byte_code(root: Path, name: str) -> list[Path]:
    folder = packages(root / ".venv")
    assert folder
    return list(folder.glob(f"__pycache__/{name}.*.pyc"))


@pytest.mark.parametrize(
    ("version", "refused"), [((3, 10, 14), True), ((2, 7), True), ((3, 11, 0), False), ((3, 13), False)]
)
def test_an_old_python_is_refused(version: tuple[int, ...], refused: bool) -> None:
    line = script.too_old(version)
    assert bool(line) == refused
    assert not refused or (".".join(map(str, version)) in line and "\n" not in line)


def test_an_old_python_can_read_what_refuses_it() -> None:
    ast.parse(Path(script.__file__).read_text(), feature_version=(3, 6))


def test_set_up_imports_the_standard_library_only() -> None:
    """In a Python without packages, and without the checkout's folder on its path."""
    command = [sys.executable, "-I", "-S", script.__file__, "--help"]
    assert "--dev" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_each_missing_thing_has_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(obstacles(tmp_path, 1.0, makes_venv=True))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else found(name))
    lines = list(obstacles(tmp_path, 1e18, makes_venv=True))
    for line, word in zip(lines, ("python3-venv", "git is needed", "g++", "of disk are needed"), strict=True):
        assert word in line and "\n" not in line
    assert "python3-venv" not in " ".join(obstacles(tmp_path, 1.0, makes_venv=False))
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    with pytest.raises(SetUpError, match="git is needed"):
        run(tmp_path)
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl (16.9 MB)",
            "downloading numpy 2.4.6, 16.9 MB",
        ),
        (
            "Downloading https://host/a/torch-2.13.0%2Bcu130-cp311-linux.whl (0.9 GB)",
            "downloading torch 2.13.0%2Bcu130, 0.9 GB",
        ),
        (
            "Using cached pyarrow-25.0.1-cp311-cp311-manylinux_2_28_x86_64.whl (50.1 MB)",
            "using cached pyarrow 25.0.1, 50.1 MB",
        ),
        ("  Downloading sources-1.0.tar.gz (7.5 MB)", "downloading sources 1.0, 7.5 MB"),
        ("  Downloading typer-0.29.2-py3-none-any.whl (46 kB)", ""),
        ("  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl.metadata (62 MB)", ""),
        ("  Downloading mystery-1-py3-none-any.whl", ""),
        (
            "  WARNING: Location 'file:///a/b/' is ignored: it is either a non-existing path or lacks a specific scheme.",
            "",
        ),
        ("Requirement already satisfied: pip in ./.venv/lib/python3.11/site-packages (23.2.1)", ""),
        (
            "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'NewConnectionError(…)': /simple/a/",
            "no answer from the package index; pip tries again",
        ),
    ],
)
def test_a_line_of_pip_in_plain_words(line: str, told: str, tmp_path: Path) -> None:
    assert PipOutput(tmp_path, tmp_path).hear(line) == told


def test_progress_of_pip(tmp_path: Path) -> None:
    folder, aside = tmp_path / "packages", tmp_path / "tmp"
    told = PipOutput(folder, aside)
    for name in ("Alpha>=1", "beta[extra]~=2 (from alpha)", "alpha"):
        told.hear(f"Collecting {name}")
    (aside / "pip-unpack-x").mkdir(parents=True)
    (aside / "pip-unpack-x" / "a.whl").write_bytes(bytes(3_000_000))
    (aside / "pip-build-env").mkdir()
    (aside / "pip-build-env" / "more").write_bytes(bytes(3_000_000))
    assert told.state().startswith("2 packages found, 3 MB fetched, ")
    (folder / "old-1.dist-info").mkdir(parents=True)
    (folder / "old-1.dist-info" / "RECORD").touch()
    assert told.hear("Installing collected packages: alpha, beta").endswith("unpacking 2 packages")
    (folder / "alpha-1.dist-info").mkdir()
    (folder / "alpha-1.dist-info" / "RECORD").touch()
    (folder / "beta.py").write_bytes(bytes(2_000_000))
    assert told.state().startswith("1 of 2 packages unpacked, 2 MB, ")


def test_a_download_of_unknown_size_has_no_line() -> None:
    assert download("Downloading", "a-1-py3-none-any.whl", None, None) == ""


def test_set_up_once_and_then_nothing(project: Path, offline: None) -> None:
    assert installed(project) == {"part": "1", "tiny": "1"}
    assert byte_code(project, "part"), "what is imported is compiled, whatever PYTHONDONTWRITEBYTECODE says"
    assert not byte_code(project, "tool")
    assert not (project / ".venv" / "tmp").exists()
    assert "Installing collected packages" in (project / ".venv" / "set-up.log").read_text()
    os.utime(project / "constraints.txt")
    assert run(project) == []


def test_development_tools_are_asked_for_and_constraints_followed(project: Path, offline: None) -> None:
    run(project, dev=True)
    assert installed(project) == {"part": "1", "tiny": "1", "tool": "1"}
    assert run(project) == run(project, dev=True) == []
    text = (project / "constraints.txt").read_text()
    (project / "constraints.txt").write_text("part==2\ntool==1\n")
    assert any(line.startswith("set-up took") for line in run(project))
    assert installed(project)["part"] == "2"
    assert not (project / ".venv" / ".ready-dev").exists(), "its tools are of the old constraints"
    (project / "constraints.txt").write_text(text)
    run(project)
    assert installed(project)["part"] == "1"


def test_an_error_of_pip_is_shown_whole(project: Path, offline: None) -> None:
    text = (project / "constraints.txt").read_text()
    (project / "constraints.txt").write_text("part==3\n")
    with pytest.raises(SetUpError) as caught:
        run(project)
    (project / "constraints.txt").write_text(text)
    shown = str(caught.value)
    assert (
        shown.startswith("  ERROR: Cannot install tiny")
        and "part==3" in shown
        and "ERROR: ResolutionImpossible" in shown
    )
    assert "WARNING" not in shown and str(project / ".venv" / "set-up.log") in shown
    assert run(project), "what failed half-way is done again, even with the constraints of before"


def test_no_network_says_so(project: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIP_NO_INDEX", "0"), ("PIP_INDEX_URL", "http://127.0.0.1:9/simple"), ("PIP_RETRIES", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    text = (project / "constraints.txt").read_text()
    (project / "constraints.txt").write_text("part==2\n")
    with pytest.raises(SetUpError, match="the package index cannot be reached") as caught:
        run(project)
    (project / "constraints.txt").write_text(text)
    assert "ERROR: " in str(caught.value)


def test_half_a_package_is_installed_again(project: Path, offline: None) -> None:
    folder = packages(project / ".venv")
    assert folder
    (folder / "part-1.dist-info" / "RECORD").unlink(missing_ok=True)
    (folder / "part.py").write_text("half of a fi")
    (folder / "~art").mkdir()
    (project / ".venv" / ".ready").unlink(missing_ok=True)
    run(project)
    assert (folder / "part.py").read_text() == "VALUE = 1\n"
    assert not (folder / "~art").exists()


def test_half_installed_packages_are_removed_and_others_stay(tmp_path: Path) -> None:
    for name, file in (("a-1.dist-info", "RECORD"), ("b-1.dist-info", "METADATA"), ("b", "x.py")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    forget_halves(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1.dist-info", "b"]


def test_an_environment_of_another_python_is_made_again(project: Path, offline: None) -> None:
    folder = packages(project / ".venv")
    assert folder
    folder.parent.rename(folder.parent.with_name("python3.0"))
    assert packages(project / ".venv") is None
    assert any(line.startswith("making .venv") for line in run(project))
    assert installed(project) == {"part": "1", "tiny": "1"}
    assert not (folder.parent.parent / "python3.0").exists()


def test_an_interrupted_set_up_goes_on(project: Path, offline: None) -> None:
    """The script itself, stopped while pip runs: it leaves no pip behind, and the next set-up finishes."""
    here = project / "factory"
    shutil.copytree(Path(script.__file__).parent, here / "set_up", dirs_exist_ok=True)
    (here / "__init__.py").touch()
    (project / "slow").touch()
    (project / "begun").unlink(missing_ok=True)
    (project / ".venv" / ".ready").unlink()
    command = [sys.executable, "-I", str(here / "set_up" / "__main__.py")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 15
    while not (project / "begun").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=10)[1].startswith("set-up was interrupted")
    assert process.returncode == 1 and not (project / ".venv" / ".ready").exists()
    with (project / ".venv" / "set-up.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a pip that is left would hold it
    (project / "slow").unlink()
    run(project)
    assert installed(project) == {"part": "1", "tiny": "1"}


STRUCK_IN_A_CALLBACK = """
import os, signal, sys, time
from factory.set_up import steps
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
def set_up(*_):
    Dying()
    time.sleep(5)
steps.set_up, sys.argv = set_up, ["set_up"]
steps.main()
"""


def test_an_interrupt_in_a_callback_that_drops_exceptions_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", STRUCK_IN_A_CALLBACK], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "set-up was interrupted: the same command goes on from here\n")


def test_two_at_once_wait_for_one_another(project: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "EVERY", 0.05)
    (project / ".venv" / ".ready").rename(project / "stamp")
    said: list[str] = []
    with (project / ".venv" / "set-up.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)

        def other_finishes(line: str) -> None:
            said.append(line)
            if len(said) == 2:
                (project / "stamp").rename(project / ".venv" / ".ready")
                fcntl.flock(log, fcntl.LOCK_UN)

        set_up(project, False, other_finishes, ("part",))
    assert len(said) == 2 and all("another set-up" in line for line in said)


def test_silence_ends_with_progress_and_the_worst_status_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "EVERY", 0.2)
    said: list[str] = []
    with (tmp_path / "log").open("w", buffering=1) as log:
        journal = Journal(log, said.append)
        commands = [["sh", "-c", "sleep 1; echo late"], ["sh", "-c", "echo ERROR: no >&2; exit 3"]]
        assert (
            journal.follow(commands, lambda: "still there", lambda line: f"heard {line}" if "late" in line else "") == 3
        )
        with pytest.raises(SetUpError, match=r"ERROR: no[\s\S]*it failed"):
            journal.fail("it failed")
    assert said[-1] == "  heard late" and 2 <= said.count("  still there") <= 5


@pytest.mark.parametrize(
    ("root", "status", "last"),
    [
        (True, 0, "  Need to get 48.3 kB of archives."),
        (True, 1, "bubblewrap could not be"),
        (False, 0, "bubblewrap is missing"),
    ],
)
def test_bubblewrap_is_never_installed_in_silence(
    root: bool, status: int, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against an ``apt-get`` of ours: a slow one, and one that fails."""
    apt = tmp_path / "apt-get"
    apt.write_text(
        f"#!/bin/sh\n/bin/sleep 0.5\n[ $1 = update ] || echo 'Need to get 48.3 kB of archives.'\nexit {status}\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(journal_file, "EVERY", 0.2)
    said: list[str] = []
    with (tmp_path / "log").open("w", buffering=1) as log:
        bubblewrap(Journal(log, said.append))
    assert said[-1].startswith(last)
    assert any(line.startswith("  apt-get update, ") for line in said) == root


def test_bytes_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(bytes(10))
    (tmp_path / "y").write_bytes(bytes(5))
    (tmp_path / "link").symlink_to("a")
    assert bytes_in(tmp_path) == 15 + len("a")
    assert bytes_in(tmp_path / "none") == 0
