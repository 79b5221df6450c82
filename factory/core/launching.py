"""Starts the trainer: one process, or as many ranks as ``factory.yaml`` has, through torchrun (torch elastic).

Whatever starts them, the ranks die with the factory, and how the trainer ended is known here by its own exit code: torchrun
reports only that a rank failed, so ranks leave theirs in the segment's folder.
"""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from factory.core import devices
from factory.core.errors import ConfigError
from factory.core.stopping import TRAINER_SECONDS
from factory.core.workspace import Workspace
from trainer.contract import stopping

EXIT_STOPPED = 75  # the trainer was stopped, and goes on from its newest checkpoint
EXIT_DISK_FULL = 74
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")  # what Linux has where torch could find several: NVIDIA, AMD, WSL
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=0")


def ranks(workspace: Workspace) -> int:
    """How many ranks train: ``ranks`` of ``factory.yaml``; by default one for each GPU of this machine, one without any."""
    if workspace.config.ranks:
        return workspace.config.ranks
    if not any(found for name in GPU_DEVICES for found in Path("/dev").glob(name)):
        return 1  # found without torch, which takes a second to import
    import torch

    return max(1, torch.cuda.device_count())


def launcher(workspace: Workspace) -> list[str]:
    """The words before ``-m trainer``. Raises: ConfigError for a ``launcher`` that is no shell line, or without ``ranks``."""
    where = workspace.root / "factory.yaml"
    if workspace.config.launcher:
        if not workspace.config.ranks:
            raise ConfigError(f"{where}: launcher: set 'ranks' to the number of ranks that it starts")
        try:
            if words := shlex.split(workspace.config.launcher):
                return words
            raise ValueError("it is empty")
        except ValueError as error:
            raise ConfigError(f"{where}: launcher: {error}: {workspace.config.launcher!r}") from error
    count = ranks(workspace)
    torchrun = (*TORCHRUN, f"--nproc-per-node={count}", f"--log-dir={workspace.logs / 'torchrun'}")
    return [sys.executable, *(torchrun if count > 1 else ())]


def start_trainer(
    workspace: Workspace, code: Path, arguments: list[str], out: IO[bytes], lock: int
) -> subprocess.Popen[bytes]:
    """``-m trainer …`` of that code, with its output in ``out``; it holds ``lock`` as long as it lives.

    Raises: ConfigError when the launcher cannot be started.
    """
    environment = os.environ | {
        "PYTHONPATH": str(code),
        "TORCHINDUCTOR_CACHE_DIR": str(devices.compiled(workspace.root)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(stopping.GRACE_SECONDS) + 1),  # then it kills its ranks
    }
    if (count := ranks(workspace)) > 1:  # torchrun would give each rank one thread
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    words = [*launcher(workspace), "-m", "trainer", *arguments]
    try:
        return subprocess.Popen(
            words,
            cwd=code,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=(lock,),
            preexec_fn=die_with(os.getpid()),
            start_new_session=True,  # Ctrl-C is ours: the trainer gets a SIGTERM, to leave a checkpoint
        )
    except OSError as error:
        raise ConfigError(f"{workspace.root / 'factory.yaml'}: launcher: {words[0]}: {error.strerror}") from error


def ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Has it ended? Waits for at most so many seconds."""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def stop_trainer(process: subprocess.Popen[bytes]) -> None:
    """Returns once it has ended, in order or not: code of an older commit ends its step first, however long that takes."""
    process.terminate()
    if not ended(process, TRAINER_SECONDS):
        stopping.kill([process.pid])
        process.wait()


def forget_exit(folder: Path) -> None:
    """Remove the exit codes of earlier processes, before a start."""
    for path in folder.glob("exit-*"):
        path.unlink(missing_ok=True)


def exit_code(process: subprocess.Popen[bytes], folders: Iterable[Path]) -> int:
    """How the trainer ended: as a rank left it in one of the folders, else as its process ended."""
    names = [path.name.removeprefix("exit-") for folder in folders for path in folder.glob("exit-*")]
    left = [int(name) for name in names if name.isdigit()]
    # a rank that failed before one that was stopped because of it: the lower number is the cause
    return min(left) if process.returncode and left else process.returncode


def failure_line(log: Path) -> str:
    """The line of a log that best explains why it ended: the trainer's own, one of a rank's, else the last."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for start in ("trainer: ", "[rank"):
        if found := [line for line in lines[-200:] if line.startswith(start)]:
            return found[-1][:400]
    return lines[-1][:400] if lines else ""


def run_python(
    code: Path, *words: str, on_line: Callable[[str], object] = lambda _: None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python words`` on a checkout's code to its end; it dies with the factory. ``on_line`` gets its standard error line by line."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=code,
            env=os.environ | {"PYTHONPATH": str(code)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with(os.getpid()),
        )
        errors = []
        try:
            for line in process.stderr or ():
                on_line(line)
                errors.append(line)
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        out.seek(0)
        return subprocess.CompletedProcess(words, process.returncode, out.read(), "".join(errors))


def die_with(parent: int) -> Callable[[], None]:
    """To be run in the child: it gets a SIGTERM when the factory dies, however it dies."""

    def request() -> None:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return request
