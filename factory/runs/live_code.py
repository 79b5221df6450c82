"""Runs live code in the sandbox: the trainer and its tools (export, averaging, tuning, the line profiler).

Live code is approved, but an agent may have written it, and no gate executes all paths of the code. So it can access only the files it needs. It
reads its worktree, token shards and a checkpoint. It writes to its own folder and its commit's compile cache. It has the GPUs, and a private
loopback network for its ranks. ``training_sandbox`` in ``factory.yaml`` decides what happens if no sandbox can be made.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa

from factory.core import devices
from factory.core.errors import ConfigError, IsolationError
from factory.core.launching import build_launcher_command, count_ranks, make_parent_death_hook
from factory.core.stop_signals import TRAINER_STOP_SECONDS
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, proposals
from factory.ledger.plant import Plant
from factory.retrying.policy import RetryPolicy
from factory.retrying.watchdog import kill_when_idle
from factory.runs.compile_cache import copy_older_cache
from factory.sandbox import live_sandbox
from factory.sandbox.filesystem_view import make_cache_variables
from factory.sandbox.live_sandbox import RunningCommand
from kernels.contract.message import Message
from trainer.contract import stopping

OUTPUT_BYTES, ERROR_LINES = 16 << 20, 1000  # of a tool's standard output and error, the last that are kept


@dataclass(frozen=True)
class LiveCode:
    """A commit's worktree, and whether its code runs in the sandbox."""

    folder: Path
    cache: Path | None  # compile cache of this commit; None: torch's default
    isolated: bool
    hung_seconds: float = RetryPolicy().hung_seconds  # a tool that is idle for this long is killed

    @classmethod
    def check_out_commit(cls, plant: Plant, commit: str) -> LiveCode:
        """Check out the live code of a commit. Raises: RepositoryError; IsolationError if the code needs a sandbox and none can be made."""
        from factory.git.repository import checkout_live_code

        isolated, why = decide_live_code_isolation(plant)
        if not isolated:
            plant.progress.line(
                Message("runs.not_isolated", "  WARNING: live code runs WITHOUT the sandbox: {why}", why=why)
            )
        cache = devices.get_compiled_code_folder(plant.workspace.root, commit)
        copy_older_cache(plant, commit)
        patience = RetryPolicy.load(plant.workspace.policy_path("retries.yaml")).hung_seconds
        return cls(checkout_live_code(plant.workspace, commit), cache, isolated, patience)

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
    ) -> RunningCommand:
        """Start ``command`` in the worktree, as ``live_sandbox.start_in_sandbox`` does. It dies with the factory. Raises: IsolationError; OSError."""
        own = {"PYTHONPATH": str(self.folder), **environment}
        if self.isolated:
            assert self.cache is not None
            return live_sandbox.start_in_sandbox(
                command,
                writable=writable,
                readonly=readonly,
                cwd=self.folder,
                cache=self.cache,
                environment=own,
                nodes=devices.list_gpu_device_files(all_gpus=True),
                stdout=stdout,
                stderr=stderr,
                lock=lock,
            )
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **(make_cache_variables(self.cache) if self.cache else {}), **own},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[] if lock is None else [lock],
            preexec_fn=make_parent_death_hook(os.getpid()),
            start_new_session=True,  # the factory handles Ctrl-C: the trainer gets a SIGTERM, to leave a checkpoint
        )
        return RunningCommand(process)

    def run_python(
        self,
        *words: str,
        writable: Sequence[Path] = (),
        readonly: Sequence[Path] = (),
        on_line: Callable[[str], object] = lambda _: None,
        environment: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with ``words``, and wait for its end. ``on_line`` gets each line of its standard error.

        Of a long output only the end is returned.

        A process that hangs or exceeds a limit of the sandbox is killed, and the last line of its standard error then says so.

        Raises: IsolationError.
        """
        with tempfile.TemporaryFile("w+b") as out:
            process = self.start(
                [sys.executable, *words],
                writable=writable,
                readonly=readonly,
                environment=devices.make_device_environment() | dict(environment),
                stdout=out,
                stderr=subprocess.PIPE,
            )
            errors = deque[str](maxlen=ERROR_LINES)
            try:
                with kill_when_idle(process.pid, self.hung_seconds) as killed:
                    for line in process.read_error_lines():
                        on_line(line)
                        errors.append(line)
                    process.wait()
                errors.extend(f"{line}\n" for line in killed)
                if process.returncode and process.exceeded_limit:
                    errors.append(
                        f"{Message('runs.tool_over_limit', 'the command {limit}', limit=process.exceeded_limit)}\n"
                    )
            except IsolationError as error:
                raise IsolationError(
                    "runs.not_run",
                    "{error}: {line}",
                    error=error.message, line=errors[-1].strip() if errors else "",
                ) from None  # fmt: skip
            finally:
                process.kill()
            out.seek(max(0, out.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            said = out.read(OUTPUT_BYTES).decode(errors="replace")
            return subprocess.CompletedProcess(words, process.returncode or 0, said, "".join(errors))


def decide_live_code_isolation(plant: Plant) -> tuple[bool, str]:
    """Return (True, '') if live code runs in the sandbox, else (False, the reason). Raises: IsolationError if it must not run at all."""
    chosen, where = plant.workspace.config.training_sandbox, plant.workspace.root / "factory.yaml"
    if chosen == "off":
        return False, Message("runs.sandbox_off", "training_sandbox is off in {file}", file=where)
    if plant.workspace.config.launcher:
        why: str = Message(
            "runs.own_launcher",
            "the launcher in {file} starts processes outside any sandbox of this factory",
            file=where,
        )
    else:
        why = live_sandbox.find_sandbox_problem()
    if not why:
        return True, ""
    advice = Message(
        "runs.sandbox_advice",
        "To see what is missing: 'factory check'. To train without a sandbox, write 'training_sandbox: off' in {file}. Merged code then runs with "
        "your permissions.",
        file=where,
    )
    if chosen == "required":
        raise IsolationError(
            "runs.sandbox_required",
            "Training did not start: training_sandbox is 'required', but {why}. {advice}",
            why=why, advice=advice,
        )  # fmt: skip
    if number := find_newest_merged_proposal(plant.ledger):
        raise IsolationError(
            "runs.sandbox_for_agents",
            "Training did not start: the live code contains proposal {proposal} of an agent, but {why}. {advice}",
            proposal=number, why=why, advice=advice,
        )  # fmt: skip
    return False, Message(
        "runs.until_merge",
        "{why}. Once a patch of an agent is merged, live code runs only in the sandbox",
        why=why,
    )


def find_newest_merged_proposal(ledger: Ledger) -> int | None:
    """Return the number of the newest merged proposal, or None."""
    newest = sa.select(sa.func.max(proposals.c.number).label("newest")).where(proposals.c.state == "approved")
    row = ledger.select_first(newest)
    return row["newest"] if row else None


# -- the trainer -------------------------------------------------------------------------------------------------------
def list_paths_read_by_trainer(spec: Mapping[str, Any]) -> list[Path]:
    """Return the paths that a trainer reads besides its folder and code: token shards, a checkpoint, ``kernels.yaml``."""
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
) -> RunningCommand:
    """Start ``python -m trainer`` of this code with ``arguments``. Its output goes to ``out``. The process holds ``lock`` until it ends.

    ``count``: the number of ranks, all on this machine; None: the number in the workspace's configuration. If the caller holds a device, the
    trainer uses only that device.

    Raises: ConfigError if the launcher cannot be started; IsolationError.
    """
    environment = {
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(
            math.ceil(stopping.GRACE_SECONDS) + 1
        ),  # torchrun kills its ranks after this time
        **devices.make_device_environment(),
    }
    if (started := count or count_ranks(workspace)) > 1:  # by default, torchrun gives each rank one thread
        threads = str(max(1, len(os.sched_getaffinity(0)) // started))
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", threads)
    logs = Path("/tmp") if code.isolated else workspace.logs / "torchrun"
    words = build_launcher_command(workspace, logs, count)
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
        raise ConfigError(
            "runs.launcher",
            "The program {program} of 'launcher' in {file} cannot be started: {error}",
            file=workspace.root / "factory.yaml", program=words[0], error=error.strerror,
        ) from error  # fmt: skip


def wait_for_process_end(process: RunningCommand, seconds: float) -> bool:
    """Wait at most ``seconds``. Returns whether the process has ended. Raises: IsolationError if nothing was run."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def stop_trainer(process: RunningCommand) -> None:
    """Stop a trainer, and wait for its end. Code of an older commit may finish its step first. If that takes too long, it is killed."""
    process.terminate()
    try:
        if wait_for_process_end(process, TRAINER_STOP_SECONDS):
            return
    except IsolationError:
        return
    process.kill()
