"""Runs live code in the sandbox: the trainer, and the tools that come with it (export, averaging, tuning, the line profiler).

Live code is approved, but an agent may have written it, and no gate has executed all that it can do. So it sees what its work needs and
nothing else: its worktree, token shards and a checkpoint to read, its own folder and its commit's compile cache to write, GPUs, and a
loopback of its own for its ranks. ``training_sandbox`` in ``factory.yaml`` says what happens where no sandbox can be made.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa

from factory.core import devices
from factory.core.errors import ConfigError, IsolationError
from factory.core.launching import die_with, launcher, ranks
from factory.core.stopping import TRAINER_SECONDS
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, proposals
from factory.ledger.plant import Plant
from factory.retrying.policy import RetryPolicy
from factory.retrying.watchdog import idle_timeout
from factory.runs.compile_cache import begin_cache
from factory.sandbox import live
from factory.sandbox.live import Running
from factory.sandbox.view import cache_variables
from trainer.contract import stopping


@dataclass(frozen=True)
class LiveCode:
    """A commit's worktree, and whether its code runs in the sandbox."""

    folder: Path
    cache: Path | None  # of what this commit's code compiled, which no other code reads; None: torch's own
    isolated: bool
    hung_seconds: float = RetryPolicy().hung_seconds  # a tool that does nothing for so long is killed

    @classmethod
    def of(cls, plant: Plant, commit: str) -> LiveCode:
        """Raises: RepositoryError; IsolationError when the code may not run here, as there is no sandbox."""
        from factory.git.repository import checkout_live

        isolated, why = isolation(plant)
        if not isolated:
            plant.progress.line(f"  WARNING: live code runs, and NOT in the sandbox: {why}")
        cache = devices.compiled(plant.workspace.root, commit)
        begin_cache(plant, commit)
        patience = RetryPolicy.load(plant.workspace.policy("retries.yaml")).hung_seconds
        return cls(checkout_live(plant.workspace, commit), cache, isolated, patience)

    def start(
        self,
        command: Sequence[str],
        *,
        writable: Sequence[Path],
        readonly: Sequence[Path],
        environment: Mapping[str, str],
        stdout: IO[bytes] | int,
        stderr: IO[bytes] | int,
        lock: int | None = None,
    ) -> Running:
        """Start ``command`` in its folder; ``live.start`` says the rest. It dies with the factory. Raises: IsolationError; OSError."""
        own = {"PYTHONPATH": str(self.folder), **environment}
        if self.isolated:
            assert self.cache is not None
            return live.start(
                command,
                writable=writable,
                readonly=readonly,
                cwd=self.folder,
                cache=self.cache,
                environment=own,
                nodes=devices.nodes(every=True),
                stdout=stdout,
                stderr=stderr,
                lock=lock,
            )
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **(cache_variables(self.cache) if self.cache else {}), **own},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[] if lock is None else [lock],
            preexec_fn=die_with(os.getpid()),
            start_new_session=True,  # Ctrl-C is ours: the trainer gets a SIGTERM, to leave a checkpoint
        )
        return Running(process)

    def run(
        self,
        *words: str,
        writable: Sequence[Path] = (),
        readonly: Sequence[Path] = (),
        on_line: Callable[[str], object] = lambda _: None,
        environment: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:
        """``python words`` to its end; ``on_line`` gets its standard error line by line. One that hangs is killed, and says so last there.

        Raises: IsolationError.
        """
        with tempfile.TemporaryFile("w+b") as out:
            process = self.start(
                [sys.executable, *words],
                writable=writable,
                readonly=readonly,
                environment=devices.environment() | dict(environment),
                stdout=out,
                stderr=subprocess.PIPE,
            )
            errors = []
            try:
                with idle_timeout(process.pid, self.hung_seconds) as killed:
                    for line in process.errors():
                        on_line(line)
                        errors.append(line)
                    process.wait()
                errors += [f"{line}\n" for line in killed]
            except IsolationError as error:
                raise IsolationError(f"{error}: {(errors or [''])[-1].strip()}") from None
            finally:
                process.kill()
            out.seek(0)
            return subprocess.CompletedProcess(
                words, process.returncode or 0, out.read().decode(errors="replace"), "".join(errors)
            )


def isolation(plant: Plant) -> tuple[bool, str]:
    """(does live code run in the sandbox, why not). Raises: IsolationError when it may not run at all."""
    chosen, where = plant.workspace.config.training_sandbox, plant.workspace.root / "factory.yaml"
    if chosen == "off":
        return False, f"training_sandbox is off in {where}"
    if plant.workspace.config.launcher:
        why = f"the launcher in {where} starts processes that this factory cannot put into one"
    else:
        why = live.refusal()
    if not why:
        return True, ""
    advice = f"'factory check' shows what is missing; 'training_sandbox: off' in {where} trains without, on this machine's trust in all merged code"
    if chosen == "required":
        raise IsolationError(f"nothing is trained: training_sandbox is 'required', and {why}. {advice}")
    if number := merged_by_agent(plant.ledger):
        raise IsolationError(
            f"nothing is trained: the live code holds proposal {number}, which an agent wrote, and {why}. {advice}"
        )
    return False, f"{why}; it stops once a patch that an agent wrote is merged"


def merged_by_agent(ledger: Ledger) -> int | None:
    """The number of the newest merged proposal, or None."""
    newest = sa.select(sa.func.max(proposals.c.number).label("newest")).where(proposals.c.state == "approved")
    row = ledger.one(newest)
    return row["newest"] if row else None


# -- the trainer -------------------------------------------------------------------------------------------------------
def read_by(spec: Mapping[str, Any]) -> list[Path]:
    """What a trainer reads besides its folder and its code: token shards, a checkpoint, ``kernels.yaml``."""
    names = [shard["path"] for shard in spec["data_plan"]["token_shards"]]
    return [Path(name) for name in (*names, spec["initial_checkpoint"], spec["kernels"]) if name]


def start_trainer(
    workspace: Workspace,
    code: LiveCode,
    arguments: Sequence[str],
    *,
    writable: Sequence[Path],
    readonly: Sequence[Path],
    out: IO[bytes],
    lock: int,
    count: int | None = None,
) -> Running:
    """``-m trainer …`` of that code, with its output in ``out``; ``lock`` is held as long as it lives.

    ``count``: so many ranks, on this machine; else those that the workspace trains with. A caller that holds one device keeps it to that.

    Raises: ConfigError when the launcher cannot be started; IsolationError.
    """
    environment = {
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(stopping.GRACE_SECONDS) + 1),  # then it kills its ranks
        **devices.environment(),
    }
    if (started := count or ranks(workspace)) > 1:  # torchrun would give each rank one thread
        threads = str(max(1, len(os.sched_getaffinity(0)) // started))
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", threads)
    logs = Path("/tmp") if code.isolated else workspace.logs / "torchrun"
    words = launcher(workspace, logs, count)
    try:
        return code.start(
            [*words, "-m", "trainer", *arguments],
            writable=writable,
            readonly=readonly,
            environment=environment,
            stdout=out,
            stderr=out,
            lock=lock,
        )
    except OSError as error:
        raise ConfigError(f"{workspace.root / 'factory.yaml'}: launcher: {words[0]}: {error.strerror}") from error


def ended(process: Running, seconds: float) -> bool:
    """Has it ended? Waits for at most so many seconds. Raises: IsolationError when nothing was run."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def stop_trainer(process: Running) -> None:
    """Returns once it has ended, in order or not: code of an older commit ends its step first, however long that takes."""
    process.terminate()
    try:
        if ended(process, TRAINER_SECONDS):
            return
    except IsolationError:
        return
    process.kill()
