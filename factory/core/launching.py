"""How the trainer is started: one process, or as many ranks as ``factory.yaml`` has, through torchrun (torch elastic); and how it ended.

That is known by the trainer's own exit code: torchrun reports only that a rank failed, so ranks leave theirs in the segment's folder.
``factory.runs.live_code`` starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from factory.core.errors import ConfigError
from factory.core.left_files import read_tail
from factory.core.workspace import Workspace
from trainer.contract.errors import TrainerError

if TYPE_CHECKING:
    from trainer.contract.recipe import Recipe

EXIT_STOPPED = 75  # the trainer was stopped, and goes on from its newest checkpoint
EXIT_DISK_FULL = 74
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")  # what Linux has where torch could find several: NVIDIA, AMD, WSL
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=0")
LOG_BYTES = 256 * 1024  # of a log's end that are read


def ranks(workspace: Workspace) -> int:
    """How many ranks train: ``ranks`` of ``factory.yaml``; by default one for each GPU of this machine, one without any."""
    if workspace.config.ranks:
        return workspace.config.ranks
    if not any(found for name in GPU_DEVICES for found in Path("/dev").glob(name)):
        return 1  # found without torch, which takes a second to import
    import torch

    return max(1, torch.cuda.device_count())


def check_ranks(workspace: Workspace, recipe: Recipe) -> None:
    """Raises: ConfigError when as many ranks as would be started now cannot share the recipe's work."""
    count = ranks(workspace)
    try:
        recipe.batch.check_ranks(recipe.parallel.data_ranks(count, recipe.model))
    except TrainerError as error:
        hint = f"{count} ranks train ('ranks' in {workspace.root / 'factory.yaml'}, by default one for each GPU)"
        raise ConfigError(f"recipe {recipe.name}: {error}; {hint}") from error


def launcher(workspace: Workspace, logs: Path = Path("/tmp"), count: int | None = None) -> list[str]:
    """The words before ``-m trainer``; torchrun makes a folder in ``logs``. ``count``: so many ranks, on this machine.

    Raises: ConfigError for a ``launcher`` that is no shell line, or without ``ranks``.
    """
    where = workspace.root / "factory.yaml"
    if workspace.config.launcher and count is None:
        if not workspace.config.ranks:
            raise ConfigError(f"{where}: launcher: set 'ranks' to the number of ranks that it starts")
        try:
            if words := shlex.split(workspace.config.launcher):
                return words
            raise ValueError("it is empty")
        except ValueError as error:
            raise ConfigError(f"{where}: launcher: {error}: {workspace.config.launcher!r}") from error
    count = count or ranks(workspace)
    torchrun = (*TORCHRUN, f"--nproc-per-node={count}", f"--log-dir={logs}")
    return [sys.executable, *(torchrun if count > 1 else ())]


def forget_exit(folder: Path) -> None:
    """Remove the exit codes of earlier processes, before a start."""
    for path in folder.glob("exit-*"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


def exit_code(returncode: int, folders: Iterable[Path]) -> int:
    """How the trainer ended: as a rank left it in one of the folders, else as its process ended."""
    left_files = (path for folder in folders for path in folder.glob("exit-*") if not path.is_dir())
    names = [path.name.removeprefix("exit-") for path in left_files]
    left = [int(name) for name in names if name.isdecimal() and len(name) <= 3]
    # a rank that failed before one that was stopped because of it: the lower number is the cause
    return min(left) if returncode and left else returncode


def failure_line(log: Path) -> str:
    """The line of a log that best explains why it ended: the trainer's own, one of a rank's, else the last."""
    lines = [line for line in read_tail(log, LOG_BYTES).decode(errors="replace").splitlines() if line.strip()]
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


@contextmanager
def background_process(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that works in ``folder`` and writes to ``log``. It ends with the block, or the factory; what it started, with the block."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def die_with(parent: int) -> Callable[[], None]:
    """To be run in the child: it gets a SIGTERM when the factory dies, however it dies."""

    def request() -> None:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return request
