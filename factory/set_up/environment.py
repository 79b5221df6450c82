"""The virtual environment: whether it is complete, how it is made, and its byte-code."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from factory.set_up.journal import Journal, since

# What the demo's processes import, one half for each of two processes.
IMPORTS = (
    "torch._inductor.compile_fx torch.profiler torch.distributed torch.utils.cpp_extension safetensors.torch tokenizers "
    "transformers.models.qwen3.modeling_qwen3",
    "mlflow.tracking mlflow.store.tracking.sqlalchemy_store sqlalchemy pydantic yaml rensa rich.progress typer git "
    "pyarrow.parquet psutil",
)
DEV_IMPORTS = ("pytest xdist.plugin hypothesis",)


def fingerprint(root: Path) -> str:
    """A hash of what the virtual environment is made from. Its scripts name the folder, so a moved checkout is set up again."""
    parts = [str(root).encode(), *((root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def packages(venv: Path) -> Path | None:
    """The folder of its packages; None without a virtual environment, or when its Python is missing or has another version."""
    ask = "import sys; print('python%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([venv / "bin" / "python", "-I", "-c", ask], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = venv / "lib" / answer.stdout.strip() / "site-packages"
    return found if answer.returncode == 0 and found.is_dir() else None


def whole(folder: Path) -> int:
    """The number of completely installed packages: pip writes RECORD last."""
    return sum(1 for _ in folder.glob("*.dist-info/RECORD"))


def forget_halves(folder: Path) -> None:
    """Remove what a killed pip left. Pip counts a package with METADATA as installed, with or without RECORD."""
    for path in folder.glob("*.dist-info"):
        if not (path / "RECORD").exists():
            shutil.rmtree(path)
    for path in folder.glob("~*"):  # pip moves what it replaces there
        _remove(path)


def make_venv(venv: Path, journal: Journal) -> Path:
    """Make it, or clean up one that is complete. Returns the folder of its packages."""
    folder = packages(venv)
    if folder:
        forget_halves(folder)
        if any(folder.glob("pip-*.dist-info")):
            return folder
    for name in ("bin", "include", "lib", "lib64", "share", "pyvenv.cfg"):  # but not the log or pip's cache
        _remove(venv / name)
    journal.say(f"making {venv.name} with Python {'.'.join(map(str, sys.version_info[:3]))}")
    began = time.monotonic()
    code = journal.follow([[sys.executable, "-m", "venv", str(venv)]], lambda: f"making {venv.name}, {since(began)}")
    folder = packages(venv)
    if code or not folder:
        journal.fail("the virtual environment could not be made", "is python3-venv installed?")
    return folder


def compile_imports(venv: Path, groups: Sequence[str], journal: Journal) -> None:
    """Import each group once, all groups at the same time. That writes the byte-code, which the sandbox cannot do later, and
    checks that the installed packages can be imported."""
    journal.say("compiling the packages that will be imported")
    began = time.monotonic()
    unwanted = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONPATH", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment["MLFLOW_DISABLE_TELEMETRY"] = "true"
    lines = ("; ".join(f"import {name}" for name in group.split()) for group in groups)
    commands = [[str(venv / "bin" / "python"), "-sPc", line] for line in lines]
    if journal.follow(commands, lambda: f"compiling, {since(began)}", environment=environment):
        journal.fail("the installed packages cannot be imported", "remove .venv, then run the same command again")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
