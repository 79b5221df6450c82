"""Set-up with a real virtual environment and a real pip, without a network: two tiny packages, and a project that builds itself."""

from __future__ import annotations

import ast
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from factory.set_up import __main__ as script

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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose set-up replaced the environment of another Python."""
    root = tmp_path_factory.mktemp("project")
    (root / "wheels").mkdir()
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "constraints.txt").write_text("part==1\ntool==1\n")
    shutil.copytree(Path(script.__file__).parent, root / "factory" / "set_up")
    make: dict = {}
    exec(BACKEND, make)
    for name, version in (("part", "1"), ("part", "2"), ("tool", "1")):
        make["wheel"](root / "wheels", name, version)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")], check=True)
    (lib,) = (root / ".venv" / "lib").iterdir()
    another = lib.rename(lib.with_name("python3.0"))
    done = run(root)
    assert done.returncode == 0 and "making .venv with Python" in done.stdout and not another.exists(), done
    assert "packages: part, tiny" in done.stdout, "pip prints its work"
    return root


@pytest.fixture
def project(made: Path) -> Path:
    """The same checkout, set up again: a test may leave its environment in any state."""
    (made / "constraints.txt").write_text("part==1\ntool==1\n")
    assert run(made).returncode == 0
    return made


def command(root: Path, *options: str) -> list[str]:
    return [sys.executable, "-I", str(root / "factory" / "set_up" / "__main__.py"), *options]


def alone(root: Path, **more: str) -> dict[str, str]:
    """Variables with which pip sees only the wheels of this folder."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return mine | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(root / "wheels")} | more


def run(root: Path, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(root, *options), env=alone(root, **more), capture_output=True, text=True, timeout=300)


def packages(root: Path) -> Path:
    return next((root / ".venv" / "lib").glob("python*/site-packages"))


def installed(root: Path) -> dict[str, str]:
    found = (path.name.removesuffix(".dist-info").split("-") for path in packages(root).glob("*.dist-info"))
    return {name: version for name, version in found if name in ("part", "tiny", "tool")}


@pytest.mark.parametrize(
    ("version", "refused"), [((3, 10, 14), True), ((2, 7), True), ((3, 11, 0), False), ((3, 13), False)]
)
def test_an_old_python_is_refused(version: tuple[int, ...], refused: bool) -> None:
    line = script.explain_old_python(version)
    assert bool(line) == refused
    assert not refused or (".".join(map(str, version)) in line and "\n" not in line)


def test_an_old_python_can_parse_the_script() -> None:
    ast.parse(Path(script.__file__).read_text(), feature_version=(3, 6))


def test_the_script_imports_only_the_standard_library() -> None:
    """It runs in a Python without packages and without the checkout on its path."""
    words = [sys.executable, "-I", "-S", script.__file__, "--help"]
    assert "--dev" in subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_set_up_prints_a_line_for_each_missing_program(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script.list_missing_requirements(project) == []
    (project / ".venv" / ".ready").unlink()
    done = run(project, PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "") and "install g++ with your" in done.stderr
    found = script.importlib.util.find_spec
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else found(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    first, second, third = script.list_missing_requirements(project)
    assert "install python3-venv" in first and "g++" in second and "git" in third
    usage = shutil.disk_usage(project)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    line = script.list_missing_requirements(project)[3]
    assert "4 GB" in line and "1.0 GB" in line and line.endswith(str(project))


def test_a_second_set_up_of_an_up_to_date_environment_changes_nothing(project: Path) -> None:
    assert installed(project) == {"part": "1", "tiny": "1"}
    assert list(packages(project).glob("__pycache__/part.*.pyc")), "the sandbox cannot write byte-code later"
    os.utime(project / "constraints.txt")
    done = run(project)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_option_dev_adds_tools_within_the_constraints(project: Path) -> None:
    assert run(project, "--dev").returncode == 0
    assert installed(project) == {"part": "1", "tiny": "1", "tool": "1"}
    assert run(project).stdout == run(project, "--dev").stdout == ""
    (project / "constraints.txt").write_text("part==2\ntool==1\n")
    assert run(project).returncode == 0 and installed(project)["part"] == "2"
    assert "installing" in run(project, "--dev").stdout, "the tools were installed with the old constraints"


def test_an_error_of_pip_is_shown_and_the_next_set_up_installs_again(project: Path) -> None:
    (project / "constraints.txt").write_text("part==3\ntool==1\n")
    done = run(project)
    assert done.returncode == 1 and "ERROR: ResolutionImpossible" in done.stderr
    assert "run the same command again" in done.stderr.splitlines()[-1]
    (project / "constraints.txt").write_text("part==1\ntool==1\n")
    assert "installing" in run(project).stdout


def test_a_half_installed_package_is_installed_again(project: Path) -> None:
    folder = packages(project)
    (folder / "part-1.dist-info" / "RECORD").unlink()
    (folder / "part.py").write_text("half of a fi")
    (project / ".venv" / ".ready").unlink()
    assert run(project).returncode == 0
    assert (folder / "part.py").read_text() == "VALUE = 1\n"


def test_an_interrupted_set_up_continues_and_a_concurrent_set_up_waits(project: Path) -> None:
    """A set-up that is stopped while pip runs leaves no pip, which would hold the lock. The next set-up finishes."""
    (project / "slow").touch()
    (project / ".venv" / ".ready").unlink()
    process = subprocess.Popen(
        command(project), env=alone(project), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 300
    while not (project / "begun").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert "set-up was interrupted" in process.communicate(timeout=300)[1].splitlines()[-1]
    assert process.returncode == 1 and not (project / ".venv" / ".ready").exists()
    (project / "slow").unlink()
    lock = os.open(project, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waiting = subprocess.Popen(command(project), env=alone(project), stdout=subprocess.PIPE, text=True)
    assert waiting.stdout and waiting.stdout.readline().startswith("another set-up")
    os.close(lock)
    assert "making" not in waiting.communicate(timeout=300)[0] and waiting.returncode == 0
    assert installed(project).items() >= {"part": "1", "tiny": "1"}.items()
