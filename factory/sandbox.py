"""Runs code that nobody trusts: a proposed patch, its build, its training steps (DESIGN §5).

``run`` starts one command under bubblewrap and holds its whole process tree:

* own user, pid, ipc, network, uts and cgroup namespaces; no capability, no new privileges, no further user namespace
* a file system made of the interpreter, its packages, ``/usr``, the inputs that the caller names (all read-only), one
  writable output folder, and small tmpfs for ``/tmp`` and ``/dev/shm``; no home, no ``/sys``, ``/proc/sys`` read-only
* a clean environment; a seccomp filter (``sandbox_filter``) and, where the kernel has it, Landlock (``sandbox_launch``)
* limits: wall and CPU seconds, memory of one process and of the tree, size of one file and of the output folder,
  processes, log bytes

The kernel limits the tree's tasks (by control group where one can be made, else by rlimit, from which it exempts root).
What it does not enforce for a tree (memory, bytes in the output folder) is watched from outside ten times a second,
as are processes, and the tree is killed when it goes over. Killing is certain: every process lives in a pid
namespace whose init dies with bubblewrap. Time is measured here, outside. Without bubblewrap or user namespaces ``run``
refuses: IsolationError.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agents.untrusted import one_line
from factory import sandbox_cgroup, sandbox_filter
from factory.errors import IsolationError
from factory.sandbox_pipes import Told, in_memory
from factory.sandbox_watch import folder_size, tree

WATCH_SECONDS = 0.1
SETUP_SECONDS = 5.0  # how long bubblewrap may take to start its child
TAIL_BYTES = 64 * 1024
TASKS = 8  # tasks a process, on average: the kernel counts threads, the watch counts processes
MIB = 1 << 20
LAUNCHER = Path(__file__).with_name("sandbox_launch.py")
LAUNCHER_INSIDE = "/run/launch.py"
PASSWD = b"sandbox:x:1000:1000::/tmp:/bin/sh\n"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")


@dataclass(frozen=True)
class Limits:
    """What one command may use. Bytes unless a name says otherwise."""

    wall_seconds: float = 120.0
    cpu_seconds: int = 600  # of each process
    memory: int = 6 << 30  # of the tree's resident pages, and of each process's private writable mappings
    file: int = 1 << 30  # largest file that may be written
    output: int = 2 << 30  # everything in the output folder
    output_files: int = 20_000
    processes: int = 256  # processes in the tree, the two of the sandbox included
    log: int = 8 * MIB  # stdout and stderr together
    tmp: int = 512 * MIB  # /tmp, and /dev/shm


@dataclass(frozen=True)
class Result:
    """How a command ended.

    ``stopped`` names the limit that killed it: 'wall', 'memory', 'processes', 'output' or 'log'; None if none did.
    """

    returncode: int  # 128 + n after signal n, as a shell tells it
    stdout: str  # the last 64 KiB
    stderr: str
    seconds: float  # from start to end, by this process's clock
    stopped: str | None
    peak_memory: int  # bytes resident in the tree, as sampled
    output: int  # bytes in the output folder at the end

    @property
    def timed_out(self) -> bool:
        return self.stopped == "wall"

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and self.stopped is None

    def why(self) -> str:
        """One line for a person: which limit stopped it, or how it ended and the last thing it said, which nobody vouches for."""
        if self.stopped:
            return f"stopped: over its {self.stopped} limit after {self.seconds:.1f} s"
        said = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return f"ended with code {self.returncode}" + (f": {one_line(said[-1], 300)}" if said else "")


def run(
    command: Sequence[str],
    *,
    output: Path,
    readonly: Sequence[Path] = (),
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> Result:
    """Run ``command`` with ``output`` (made when missing) writable and ``readonly`` visible, all under their own names.

    The current folder is ``cwd`` (a visible path), else the output folder. Compile caches go to ``output/cache``.
    Raises: IsolationError when bubblewrap is missing or cannot set the sandbox up; nothing was run then.
    """
    limits = limits or Limits()
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        pipe = lambda: [opened.enter_context(os.fdopen(end, mode, 0)) for end, mode in zip(os.pipe(), ("rb", "wb"))]
        (status, status_write), (alive, alive_write), (go_read, go) = pipe(), pipe(), pipe()
        given = [opened.enter_context(in_memory(data)) for data in (sandbox_filter.program(), PASSWD)]
        rules = json.dumps(_rules(output, limits) | {"go": go_read.fileno()})
        arguments = [
            _bubblewrap(),
            *("--json-status-fd", str(status_write.fileno()), "--sync-fd", str(alive_write.fileno())),
            *(("--seccomp", str(given[0].fileno())) if sandbox_filter.program() else ()),
            *_mounts(output, readonly, limits, given[1].fileno()),
            *("--chdir", str(cwd or output)),
            *_environment(output, environment or {}),
            *("--", sys.executable, "-I", "-S", LAUNCHER_INSIDE, rules, *map(str, command)),
        ]
        inherited = (status_write, alive_write, go_read, *given)
        process: subprocess.Popen[bytes] | None = None
        child: int | None = None
        told = Told(status.fileno())
        with sandbox_cgroup.task_limit(limits.processes * TASKS) as group:
            started = time.monotonic()
            try:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[end.fileno() for end in inherited],
                    env={},
                    start_new_session=True,
                )
                _close(inherited)
                held = _Held(process, started, limits, output)
                child = told.child()  # there before anything runs; None when bubblewrap failed
                if group is not None and child is not None:
                    sandbox_cgroup.put(group, child)
                with contextlib.suppress(BrokenPipeError):
                    go.write(b".")
                held.watch()
            finally:
                # Reached with the tree alive only when this process is interrupted. Bubblewrap alone is not enough to
                # kill: while it sets up, its child waits for it and does not yet die with it; and an interrupt inside
                # Popen leaves no handle of it. So the child's number is awaited, which bubblewrap tells at once, or
                # the pipe's end, when it was not even started. A launcher that reads no "." ends.
                _close(inherited)
                if told.anything() or select.select([status], [], [], SETUP_SECONDS)[0]:
                    child = told.child()
                if process is not None:
                    process.kill()
                    process.wait()
                if child is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                while alive.read(1):  # its other end closes when the namespace's init is gone, and all with it
                    pass
                events = told.all()
                for tail in (process.stdout, process.stderr) if process is not None else ():
                    assert tail is not None
                    tail.close()
    code = next((event["exit-code"] for event in events if "exit-code" in event), None)
    stderr = held.tail(process.stderr)
    if held.stopped is None and code is None and process.returncode != -9:
        raise IsolationError(f"bubblewrap could not set up the sandbox; nothing was run: {stderr.strip()[-500:]}")
    return Result(
        returncode=code if code is not None and held.stopped is None else 137,
        stdout=held.tail(process.stdout),
        stderr=stderr,
        seconds=held.seconds,
        stopped=held.stopped,
        peak_memory=held.peak_memory,
        output=folder_size(output)[0],
    )


def _close(files: Iterable[IO[bytes]]) -> None:
    for file in files:
        file.close()


class _Held:
    """One running sandbox: its last output, and whether it stays within its limits."""

    def __init__(self, process: subprocess.Popen[bytes], started: float, limits: Limits, output: Path) -> None:
        self.process, self.started, self.limits, self.output = process, started, limits, output
        self.stopped: str | None = None
        self.peak_memory = 0
        self.seconds = 0.0
        self._logged = 0
        assert process.stdout is not None and process.stderr is not None
        self._tails: dict[IO[bytes], bytes] = {process.stdout: b"", process.stderr: b""}
        self._next_look_at_output = started

    def tail(self, pipe: IO[bytes] | None) -> str:
        assert pipe is not None
        return self._tails[pipe].decode("utf-8", "replace")

    def watch(self) -> None:
        """Return when the command has ended or was killed for going over a limit."""
        ended = os.pidfd_open(self.process.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ, None)
            for pipe in self._tails:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe.fileno(), selectors.EVENT_READ, pipe)
            next_look = self.started
            running = True
            while running:
                ready = [key for key, _ in selector.select(max(0.0, min(next_look, self._deadline) - time.monotonic()))]
                for key in ready:
                    if key.data is None:
                        running = False
                        self.seconds = time.monotonic() - self.started
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)
                if not running:
                    break
                if time.monotonic() >= next_look:
                    self._look()
                    next_look = time.monotonic() + WATCH_SECONDS
                if self._logged > self.limits.log:
                    self.stopped = self.stopped or "log"
                if time.monotonic() > self._deadline:
                    self.stopped = self.stopped or "wall"
                if self.stopped:
                    self.process.kill()
                    self.seconds = time.monotonic() - self.started
                    running = False
            for pipe in self._tails:  # what was still in the pipes
                self._read(pipe)
        os.close(ended)

    @property
    def _deadline(self) -> float:
        return self.started + self.limits.wall_seconds

    def _read(self, pipe: IO[bytes]) -> bool:
        """Take what a pipe holds (bounded, so that a flood cannot keep us here); False at its end."""
        for _ in range(16):
            try:
                data = os.read(pipe.fileno(), 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._logged += len(data)
            self._tails[pipe] = (self._tails[pipe] + data)[-TAIL_BYTES:]
        return True

    def _look(self) -> None:
        processes, memory = tree(self.process.pid, self.limits.processes)
        self.peak_memory = max(self.peak_memory, memory)
        if processes > self.limits.processes:
            self.stopped = "processes"
        elif memory > self.limits.memory:
            self.stopped = "memory"
        now = time.monotonic()
        if now >= self._next_look_at_output:
            size, files = folder_size(self.output)
            if size > self.limits.output or files > self.limits.output_files:
                self.stopped = self.stopped or "output"
            # A folder of many files is slow to walk: never spend more than a twentieth of the time on it.
            self._next_look_at_output = now + 20 * (time.monotonic() - now)


def describe() -> dict[str, str]:
    """What is in force here, for ``factory doctor``. ``"isolation"`` starts with 'none' when ``run`` would refuse."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            probe = run([sys.executable, "-I", "-S", LAUNCHER_INSIDE, "--describe"], output=Path(folder))
        inside = json.loads(probe.stdout)
    except (IsolationError, ValueError) as error:
        return {"isolation": f"none: {error}"}
    rules = len(sandbox_filter.program()) // 8
    return {
        "isolation": f"{_bubblewrap_version()}: user, pid, ipc, net, uts and cgroup namespaces",
        "user": f"mapped from {os.geteuid()}, capabilities {inside['capabilities']}, "
        + ("no new privileges" if inside["no_new_privileges"] else "MAY GAIN PRIVILEGES"),
        "seccomp": f"filter of {rules} instructions" if inside["seccomp"] else "none: no table for this processor",
        "landlock": f"ABI {inside['landlock']}"
        if inside["landlock"]
        else "none here; the read-only mounts stand alone",
        "memory": "rlimit for each process; tree watched ten times a second",
        "processes": f"watched ten times a second; {_task_limit()}",
        "output": "rlimit for each file; folder watched",
    }


def _task_limit() -> str:
    with sandbox_cgroup.task_limit(1) as group:
        if group is not None:
            return "a control group limits tasks"
    return "no control group can be made, and root has no rlimit" if os.geteuid() == 0 else "rlimit"


def _mounts(output: Path, readonly: Sequence[Path], limits: Limits, passwd: int) -> list[str]:
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    arguments += ["--uid", "1000", "--gid", "1000"]
    arguments += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev"]
    arguments += ["--size", str(limits.tmp), "--tmpfs", "/dev/shm", "--size", str(limits.tmp), "--tmpfs", "/tmp"]
    # To the kernel a sandbox started by root is still user 0, who may write sysctls: core_pattern is a way out.
    for path in ("/proc/sys", "/proc/sysrq-trigger"):
        arguments += ["--ro-bind-try", path, path]
    for path in SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            arguments += ["--ro-bind", path, path]
    for path in (*SYSTEM_FILES, *interpreter_paths()):
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--ro-bind-data", str(passwd), "/etc/passwd", "--ro-bind", str(LAUNCHER), LAUNCHER_INSIDE]
    for given in map(str, readonly):
        arguments += ["--ro-bind", given, given]
    return [*arguments, "--bind", str(output), str(output), "--remount-ro", "/dev", "--remount-ro", "/"]


@functools.cache
def interpreter_paths() -> tuple[str, ...]:
    """The interpreter's folders outside ``/usr``: the environment, its base, whatever its link passes."""
    folders = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    paths = [*folders, *map(os.path.realpath, folders)]
    link = sys.executable
    for _ in range(40):
        if not any(_inside(link, path) for path in (*paths, "/usr")):
            paths.append(link)
        if not os.path.islink(link):
            break
        link = os.path.join(os.path.dirname(link), os.readlink(link))
    return tuple(dict.fromkeys(path for path in paths if not _inside(path, "/usr")))


def _environment(output: Path, extra: Mapping[str, str]) -> list[str]:
    cache = output / "cache"
    values = {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        # Idle OpenMP threads that spin make a busy machine many times slower, and its times useless.
        "OMP_WAIT_POLICY": "PASSIVE",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        **extra,
    }
    return ["--clearenv", *(word for key, value in values.items() for word in ("--setenv", key, value))]


def _rules(output: Path, limits: Limits) -> dict[str, object]:
    """What the launcher puts in force on itself before it becomes the command."""
    return {
        "rlimits": {
            "RLIMIT_CPU": limits.cpu_seconds,
            "RLIMIT_DATA": limits.memory,
            "RLIMIT_FSIZE": limits.file,
            "RLIMIT_NPROC": limits.processes * TASKS,
            "RLIMIT_NOFILE": 4096,
            "RLIMIT_CORE": 0,
        },
        "writable": [str(output), "/tmp", "/dev"],
    }


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise IsolationError("no sandbox: bubblewrap (bwrap) is missing; install it with your system's package manager")
    return found


def _bubblewrap_version() -> str:
    return subprocess.run([_bubblewrap(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
