"""Builds the command line of a trainer (one process, or several ranks through torchrun), and reads how the trainer ended.

torchrun reports only that a rank failed. Each rank therefore writes its exit code into the segment's folder. ``factory.runs.live_code``
starts the trainer.
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
from factory.core.untrusted_trainer_files import read_tail
from factory.core.workspace import Workspace
from trainer.contract.errors import TrainerError

if TYPE_CHECKING:
    from trainer.contract.recipe import Recipe

EXIT_STOPPED = 75  # the trainer was stopped; its next start continues from the newest checkpoint
EXIT_DISK_FULL = 74
GPU_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")  # files in /dev of a machine with GPUs: NVIDIA, AMD, WSL
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=0")
LOG_BYTES = 256 * 1024  # bytes that are read from the end of a log


def count_ranks(workspace: Workspace) -> int:
    """Return the number of ranks that train: ``ranks`` of ``factory.yaml``. The default is one for each GPU of this machine, or one without a GPU."""
    if workspace.config.ranks:
        return workspace.config.ranks
    if not any(found for name in GPU_DEVICES for found in Path("/dev").glob(name)):
        return 1  # no import of torch, which takes a second
    import torch

    return max(1, torch.cuda.device_count())


def check_ranks_fit(workspace: Workspace, recipe: Recipe) -> None:
    """Check that the ranks of this machine can share the recipe's batch evenly. Raises: ConfigError."""
    count = count_ranks(workspace)
    try:
        recipe.batch.refuse_uneven_split(recipe.parallel.data_ranks(count, recipe.model))
    except TrainerError as error:
        raise ConfigError(
            "launching.ranks_do_not_fit",
            "The recipe {recipe} cannot be trained with {ranks:,|rank|ranks}: {why}. To use another number of ranks, set 'ranks' in {file}. "
            "The default is one rank for each GPU of this machine",
            recipe=recipe.name,
            why=getattr(error, "message", str(error)),
            ranks=count,
            file=workspace.root / "factory.yaml",
        ) from error


def build_launcher_command(workspace: Workspace, logs: Path = Path("/tmp"), ranks: int | None = None) -> list[str]:
    """Return the part of the training command before ``-m trainer``: the launcher, torchrun or Python. torchrun makes a folder in ``logs``.

    ``ranks``: the number of ranks to start on this machine, whatever ``factory.yaml`` says.
    Raises: ConfigError when ``launcher`` of ``factory.yaml`` is not a shell command, or is set without ``ranks``.
    """
    where = workspace.root / "factory.yaml"
    if workspace.config.launcher and ranks is None:
        if not workspace.config.ranks:
            raise ConfigError(
                "launching.no_ranks",
                "{file} sets 'launcher' but not 'ranks'. Set 'ranks' to the number of ranks that the launcher starts",
                file=where,
            )
        try:
            if words := shlex.split(workspace.config.launcher):
                return words
            raise ValueError("it is empty")
        except ValueError as error:
            raise ConfigError(
                "launching.bad_launcher",
                "{file}: the value {launcher!r} of 'launcher' is not a shell command: {why}",
                file=where,
                why=str(error),
                launcher=workspace.config.launcher,
            ) from error
    ranks = ranks or count_ranks(workspace)
    torchrun = (*TORCHRUN, f"--nproc-per-node={ranks}", f"--log-dir={logs}")
    return [sys.executable, *(torchrun if ranks > 1 else ())]


def remove_exit_code_files(folder: Path) -> None:
    """Remove the files with the exit codes of an earlier start."""
    for path in folder.glob("exit-*"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


def find_trainer_exit_code(returncode: int, folders: Iterable[Path]) -> int:
    """Return the trainer's exit code: the one that a rank wrote into a folder, else ``returncode``, the exit code of the process."""
    left_files = (path for folder in folders for path in folder.glob("exit-*") if not path.is_dir())
    names = [path.name.removeprefix("exit-") for path in left_files]
    left = [int(name) for name in names if name.isdecimal() and len(name) <= 3]
    # A rank that fails makes torchrun stop the others. Codes of failures are lower than that of a stop (75).
    return min(left) if returncode and left else returncode


def find_failure_line(log: Path) -> str:
    """Return the line of a log that best explains why the trainer ended: the trainer's own message, else a rank's, else the last line."""
    lines = [line for line in read_tail(log, LOG_BYTES).decode(errors="replace").splitlines() if line.strip()]
    for start in ("trainer: ", "[rank"):
        if found := [line for line in lines[-200:] if line.startswith(start)]:
            return found[-1][:400]
    return lines[-1][:400] if lines else ""


def run_python(
    checkout: Path, *words: str, on_line: Callable[[str], object] = lambda _: None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with the arguments ``words`` and a checkout's code, and wait for its end. ``on_line`` gets each line of stderr.

    The process ends if the factory dies.
    """
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=make_parent_death_hook(os.getpid()),
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
def run_in_background_process(
    command: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that works in ``folder`` and writes to ``log``. At the end of the block, the process and its children are killed.

    The process also ends if the factory dies.
    """
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=make_parent_death_hook(os.getpid()),
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_parent_death_hook(parent: int) -> Callable[[], None]:
    """Return a function that the child process calls first. The child then gets a SIGTERM when the factory dies, even if the factory is killed."""

    def request() -> None:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # the factory died before the request
            os._exit(1)

    return request
