"""Runs approved code in the sandbox, for as long as its work takes: live training and its tools.

The same walls as ``sandbox.run`` makes: no network but a loopback of its own, no home, no other process, and of all files only those that
the caller names. What differs: no limits of time, memory or size, a SIGTERM that reaches the command, and output that goes where the
caller says.
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
from factory.sandbox.pipes import Opening, StatusPipe, kill_and_wait, launched
from factory.sandbox.together import together
from factory.sandbox.view import cache_variables, clean_environment, writable_system
from trainer.contract import stopping

# Variables of the factory that may change how code computes, and hold no secret; all others stay outside.
PASSED = (
    "ATEN_", "CC", "CUBLAS", "CUDA_", "CUDNN_", "CXX", "DNNL_", "GLOO_", "GOMP_", "HIP_", "HSA_", "KMP_", "LC_", "LD_", "MALLOC_", "MKL_",
    "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "ROCR_", "TORCH", "TRITON_", "TZ",
)  # fmt: skip
LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "lo")
NOTHING = [sys.executable, "-I", "-S", "-c", ""]


class Running:
    """A started command, in the sandbox or outside."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        events: StatusPipe | None = None,
        init: int = 0,
        status: IO[bytes] | None = None,
        links: contextlib.ExitStack | None = None,
    ) -> None:
        """``events`` come through ``status``; ``init`` is the process number of the sandbox's init; ``links`` are there until
        its end. All are for a sandbox only."""
        self.process, self.events, self.init = process, events, init
        self._status = status  # open as long as events come
        self._links = links or contextlib.ExitStack()
        self._end = _pidfd(init) if init else None
        self.pid = process.pid
        self.returncode: int | None = None

    def wait(self, seconds: float | None = None) -> int:
        """How it ended: its exit code, or −n after signal n. Raises: subprocess.TimeoutExpired; IsolationError when no sandbox could be
        made for it, and nothing was run."""
        if self.returncode is None:
            code = self.process.wait(seconds)
            self._wait_for_all()
            if self.events is not None:
                written = self.events.all()
                if code >= 0 and not any("exit-code" in event for event in written):
                    self.returncode = code
                    raise IsolationError("no sandbox could be set up, and nothing was run; its log says why")
                code = 128 - code if code > 128 else code
            self.returncode = code
        return self.returncode

    def command(self) -> int:
        """The process number of the command itself; the sandbox's, while that is still being made or has ended."""
        return min(stopping.children(self.init), default=self.pid) if self.init else self.pid

    def terminate(self) -> None:
        """SIGTERM to the command: in the sandbox, to what its init started, as the processes before that would not pass it on."""
        started = stopping.children(self.init) if self.init else [self.pid]
        for process in started or [self.pid]:  # of a sandbox that is still being made, nothing is lost
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)

    def kill(self, seconds: float | None = None) -> None:
        """End it and all that it started, unless it has ended.

        Raises: subprocess.TimeoutExpired when it has not ended after so many seconds: it waits in the kernel, for a device.
        """
        if self.returncode is None:
            stopping.kill([self.pid])
            self.returncode = self.process.wait(seconds)
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Until the kernel has ended every process in the sandbox: bubblewrap ends before its init and what the command left behind."""
        if self._end is not None:
            with self._end:
                select.select([self._end], [], [])
            self._end = None
        self._links.close()

    def errors(self) -> Iterator[str]:
        """The lines of its standard error, where that is a pipe, until it closes it."""
        assert self.process.stderr is not None
        with self.process.stderr as pipe:
            for line in pipe:
                yield line.decode(errors="replace")


def _pidfd(process: int) -> IO[bytes] | None:
    try:
        return os.fdopen(os.pidfd_open(process), "rb", 0)
    except ProcessLookupError:
        return None


def start(
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
) -> Running:
    """Start ``command`` where it can write in the folders ``writable`` and ``cache`` (for what is compiled) and read ``readonly`` and ``cwd``.

    ``environment`` comes on top of the sandbox's and of what ``PASSED`` lets in. ``nodes``: the files in ``/dev`` of its GPUs. ``lock`` is
    held as long as the sandbox is there, and out of the command's reach. It dies with this process.
    Raises: IsolationError when no sandbox can be set up; nothing was run then.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folders = [path.resolve() for path in (*writable, cache)]
    for path in (*readonly, cwd):
        if not path.exists():
            raise IsolationError(f"{path}, which {command[0]} needs to read, is not there; nothing was run")
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    variables = {**clean_environment(cache), **passed, **cache_variables(cache), **LOOPBACK, **environment}
    rules = {"rlimits": {"RLIMIT_CORE": 0}, "writable": [*map(str, folders), *writable_system(nodes)]}
    with Opening() as opening, contextlib.ExitStack() as links:
        arguments = bubblewrap.command(
            launched(command, rules, opening),
            opening,
            writable=folders,
            given=links.enter_context(together([*readonly, cwd])),
            cwd=cwd,
            environment=variables,
            tmp=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2,  # as Linux sizes /dev/shm
            nodes=nodes,
            held=lock,
        )
        held = [] if lock is None else [lock]
        status = opening.keep_status()
        events = StatusPipe(status.fileno())
        process: subprocess.Popen[bytes] | None = None
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[*opening.inherited(), *held],
                env={},
                start_new_session=True,  # Ctrl-C is ours: the command gets a SIGTERM
            )
            opening.close_inherited()
            init = events.child()
            opening.go_on()
        except BaseException:
            opening.close_inherited()
            kill_and_wait(events)
            if process is not None:
                process.kill()
                process.wait()
            raise
        return Running(process, events, init or 0, status, links.pop_all())


def refusal() -> str:
    """Why there is no sandbox here; '': there is one. It is tried until there was one in this process."""
    try:
        _try(os.environ.get("FACTORY_BWRAP", ""))
    except IsolationError as error:
        return str(error)
    return ""


@functools.cache
def _try(named: str) -> None:
    """Raises: IsolationError, which is not cached."""
    with tempfile.TemporaryDirectory() as folder:
        sandbox.run(NOTHING, output=Path(folder))
