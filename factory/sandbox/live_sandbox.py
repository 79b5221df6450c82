"""Runs approved code in the sandbox without a time limit: live training and its tools.

The isolation is that of ``sandbox.run_in_sandbox``: a network with loopback only, no home, no other processes, and only the files that the caller
names. There are four differences: time and size are not limited, the limits of memory and processes are generous (``live_limits``), a SIGTERM reaches
the command, and the caller chooses where output goes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from factory.core.errors import IsolationError
from factory.sandbox import bubblewrap, sandbox
from factory.sandbox import cgroup as sandbox_cgroup
from factory.sandbox.filesystem_view import list_writable_system_paths, make_cache_variables, make_sandbox_environment
from factory.sandbox.linked_mounts import make_linked_mounts
from factory.sandbox.live_limits import LimitWatch, LiveLimits, offer_to_oom_killer
from factory.sandbox.pipes import SandboxPipes, StatusPipe, build_launcher_command, kill_sandbox_and_wait
from factory.sandbox.set_id_bits import remove_set_id_bits
from trainer.contract import stopping

# Prefixes of environment variables that may change how code computes and contain no secrets. No other variables are passed on.
PASSED_PREFIXES = (
    "ATEN_", "CC", "CUBLAS", "CUDA_", "CUDNN_", "CXX", "DNNL_", "GLOO_", "GOMP_", "HIP_", "HSA_", "KMP_", "LC_", "LD_", "MALLOC_", "MKL_",
    "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "ROCR_", "TORCH", "TRITON_", "TZ",
)  # fmt: skip
LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "lo")
LINE_BYTES = 64 << 10
NOTHING = [sys.executable, "-I", "-S", "-c", ""]


class RunningCommand:
    """A command that was started in a sandbox or without one."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        events: StatusPipe | None = None,
        init: int = 0,
        status: IO[bytes] | None = None,
        links: contextlib.ExitStack | None = None,
        watch: LimitWatch | None = None,
    ) -> None:
        """``events`` arrive through ``status``. ``init``: the process number of the sandbox's init. ``links`` are removed at its end.

        ``watch`` ends the sandbox when it exceeds a limit.

        Without a sandbox, only ``process`` is given.
        """
        self.process, self.events, self.init = process, events, init
        self._status = status  # kept open while events arrive
        self._links = links or contextlib.ExitStack()
        self._watch = watch
        self._end = _pidfd(init) if init else None
        self.pid = process.pid
        self.returncode: int | None = None

    @property
    def exceeded_limit(self) -> str:
        """The limit that the command exceeded, as a predicate; '' if none. It is final when ``wait`` or ``kill`` has returned."""
        return self._watch.exceeded if self._watch else ""

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the command's end. Returns its exit code, or −n after signal n.

        Raises: subprocess.TimeoutExpired; IsolationError when the sandbox could not be set up and nothing was run.
        """
        if self.returncode is None:
            code = self.process.wait(seconds)
            self._wait_for_all()
            if self.events is not None:
                written = self.events.read_all()
                if code >= 0 and not any("exit-code" in event for event in written):
                    self.returncode = -signal.SIGKILL if self.exceeded_limit else code
                    if self.exceeded_limit:
                        return self.returncode
                    raise IsolationError(
                        "sandbox.not_started",
                        "The sandbox could not be set up, and nothing was run. The sandbox's log says why",
                    )
                code = 128 - code if code > 128 else code
            self.returncode = code
        return self.returncode

    def find_command_process(self) -> int:
        """Return the process number of the command, or of bubblewrap before the command starts and after it ends."""
        return min(stopping.list_child_processes(self.init), default=self.pid) if self.init else self.pid

    def terminate(self) -> None:
        """Send SIGTERM to the command. In a sandbox the signal goes to the children of its init, since bubblewrap would not forward it."""
        started = stopping.list_child_processes(self.init) if self.init else [self.pid]
        for process in started or [self.pid]:  # before the command starts, bubblewrap gets the signal
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def kill(self, seconds: float | None = None) -> None:
        """Kill the command and its descendants, unless it has ended.

        Raises: subprocess.TimeoutExpired if it still runs after ``seconds``, because it waits in the kernel for a device.
        """
        if self.returncode is None:
            stopping.kill_with_descendants([self.pid])
            self.returncode = self.process.wait(seconds)
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Wait until all processes in the sandbox have ended. bubblewrap ends before its init and the command's children do."""
        if self._end is not None:
            with self._end:
                select.select([self._end], [], [])
            self._end = None
        if self._watch is not None:
            self._watch.join()
        self._links.close()

    def read_error_lines(self) -> Iterator[str]:
        """Yield the lines of the command's standard error, which must be a pipe, until the command closes it. A long line comes in pieces."""
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            for line in iter(lambda: pipe.readline(LINE_BYTES), b""):
                yield line.decode(errors="replace")


def _pidfd(process: int) -> IO[bytes] | None:
    try:
        return os.fdopen(os.pidfd_open(process), "rb", 0)
    except ProcessLookupError:
        return None


def start_in_sandbox(
    command: Sequence[str],
    *,
    writable: Sequence[Path],
    readonly: Sequence[Path],
    cwd: Path,
    cache: Path,
    environment: Mapping[str, str],
    nodes: Sequence[str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    lock: int | None = None,
) -> RunningCommand:
    """Start ``command``. It may write to the folders ``writable`` and ``cache`` (for compilers), and read ``readonly`` and ``cwd``.

    ``environment`` is added to the sandbox's own variables and to those with ``PASSED_PREFIXES``. ``nodes``: the device files of its GPUs.
    The sandbox holds the descriptor ``lock`` until it ends, but the command has no access to it. The sandbox dies with this process.
    Raises: IsolationError when the sandbox cannot be set up. Then nothing was run.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folders = [path.resolve() for path in (*writable, cache)]
    for path in (*readonly, cwd):
        if not path.exists():
            raise IsolationError(
                "sandbox.missing_input",
                "{path} does not exist, but the command {command} reads it. Nothing was run",
                path=path,
                command=command[0],
            )
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_PREFIXES)}
    variables = {**make_sandbox_environment(cache), **passed, **make_cache_variables(cache), **LOOPBACK, **environment}
    limits = LiveLimits.of_this_machine()
    rlimits = {"RLIMIT_CORE": 0, **limits.make_rlimits(gpu=bool(nodes))}
    rules = {"rlimits": rlimits, "writable": [*map(str, folders), *list_writable_system_paths(nodes)]}
    with SandboxPipes() as opening, contextlib.ExitStack() as links:
        arguments = bubblewrap.build_bubblewrap_command(
            build_launcher_command(command, rules, opening),
            opening,
            writable=folders,
            given=links.enter_context(make_linked_mounts([*readonly, cwd])),
            cwd=cwd,
            environment=variables,
            tmp=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2,  # as Linux sizes /dev/shm
            nodes=nodes,
            held=lock,
        )
        held = [] if lock is None else [lock]
        status = opening.copy_status_pipe()
        events = StatusPipe(status.fileno())
        process: subprocess.Popen[bytes] | None = None
        watch = None
        for folder in folders:
            remove_set_id_bits(folder)  # left by a factory that was killed with its sandbox
            links.callback(remove_set_id_bits, folder)
        groups = links.enter_context(sandbox_cgroup.make_control_groups(limits.tasks, limits.memory))
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[*opening.list_inherited_descriptors(), *held],
                env={},
                start_new_session=True,  # Ctrl-C goes to the factory, which sends the command a SIGTERM
            )
            opening.close_inherited()
            init = events.wait_for_child()
            if init is not None:
                sandbox_cgroup.move_sandbox_into_groups(groups, init)
                offer_to_oom_killer(init)
                with contextlib.suppress(ProcessLookupError):  # it ended at once
                    watch = LimitWatch(init, groups, limits)
            opening.start_command()
        except BaseException:
            opening.close_inherited()
            kill_sandbox_and_wait(events)
            if process is not None:
                process.kill()
                process.wait()
            raise
        return RunningCommand(process, events, init or 0, status, links.pop_all(), watch)


def find_sandbox_problem() -> str:
    """Return why no sandbox can be made on this machine; '' if one can. A success is cached."""
    try:
        _try(os.environ.get("FACTORY_BWRAP", ""))
    except IsolationError as error:
        return error.message
    return ""


@functools.cache
def _try(named: str) -> None:
    """Run an empty command in a sandbox. Raises: IsolationError. Only a success is cached."""
    with tempfile.TemporaryDirectory() as folder:
        sandbox.run_in_sandbox(NOTHING, output=Path(folder))
