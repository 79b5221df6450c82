"""Runs untrusted code: a proposed patch, its build, its training steps (DESIGN §5).

``run_in_sandbox`` starts one command under bubblewrap, and restricts its whole process tree. The tree has:

* its own user, pid, ipc, network, uts, mount and cgroup namespaces; no capability, no new privileges, no further user namespaces
* a file system with the interpreter, its packages, ``/usr`` and the caller's inputs (all read-only), one writable output folder, and a small
  ``/tmp`` and ``/dev/shm`` in memory; no home, no ``/sys``, ``/proc/sys`` read-only
* a clean environment; a seccomp filter (``seccomp_filter``) and, if the kernel has it, Landlock (``launch``)
* limits: wall and CPU seconds, memory of one process and of the tree, size of one file and of the output folder, processes, log bytes

The kernel limits the tree's tasks: with a control group if possible, else with an rlimit (which does not bind root). A watch outside the sandbox
checks the tree's memory, output bytes and processes ten times a second, and kills a tree that exceeds a limit. No process survives the kill: all are
in a pid namespace, whose init dies with its parent, which dies with the factory. Time is measured outside. If bubblewrap cannot isolate,
``run_in_sandbox`` raises IsolationError.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agents.core.untrusted import fold_to_one_line
from factory.core import devices
from factory.core.errors import IsolationError
from factory.sandbox import bubblewrap
from factory.sandbox import cgroup as sandbox_cgroup
from factory.sandbox import seccomp_filter as sandbox_filter
from factory.sandbox.filesystem_view import LAUNCHER_INSIDE, list_writable_system_paths, make_sandbox_environment
from factory.sandbox.linked_mounts import make_linked_mounts
from factory.sandbox.live_limits import offer_to_oom_killer
from factory.sandbox.pipes import SandboxPipes, StatusPipe, build_launcher_command, kill_sandbox_and_wait
from factory.sandbox.set_id_bits import remove_set_id_bits
from factory.sandbox.usage import measure_deleted_files, measure_folder, measure_free_disk_bytes, read_process_tree
from kernels.contract.message import Message

WATCH_SECONDS = 0.1
TAIL_BYTES = 64 * 1024
TASKS = 8  # allowed threads for each allowed process: the kernel counts threads, the watch counts processes
MIB = 1 << 20


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of one command, in bytes unless a name says otherwise."""

    wall_seconds: float = 120.0
    cpu_seconds: int | None = None  # for each process; None: the wall limit, times the number of cores
    memory: int = 6 << 30  # for the resident pages of the tree, and for the private writable mappings of each process
    file: int = 1 << 30  # the largest file that the command may write
    output: int = 2 << 30  # all files in the output folder
    output_files: int = 20_000
    processes: int = 256  # in the tree, including the sandbox's own two
    log: int = 8 * MIB  # stdout and stderr together
    tmp: int = 512 * MIB  # /tmp and /dev/shm, each

    @property
    def cpu_seconds_per_process(self) -> int:
        """The CPU seconds that each process may use."""
        whole = math.ceil(self.wall_seconds * (os.cpu_count() or 1)) + 1
        return whole if self.cpu_seconds is None else self.cpu_seconds


@dataclass(frozen=True)
class SandboxResult:
    """How a command ended.

    ``stopped``: the limit that the command exceeded before it was killed ('wall', 'memory', 'processes', 'output' or 'log'), or 'enough' if the
    caller ended it; None if the command ended by itself.
    """

    returncode: int  # 128 + n after signal n, as in a shell
    stdout: str  # the last 64 KiB
    stderr: str
    seconds: float  # from start to end, by this process's clock
    stopped: str | None
    peak_memory: int  # the most resident bytes of the tree in any sample
    output: int  # bytes in the output folder at the end

    @property
    def timed_out(self) -> bool:
        return self.stopped == "wall"

    @property
    def ok(self) -> bool:
        return self.returncode == 0 and self.stopped is None

    def describe_ending(self) -> Message:
        """Return a line for a person: the limit that stopped the command, or its exit code and the last line of its output (untrusted text)."""
        if self.stopped:
            return Message(
                "sandbox.over_limit",
                "the command was stopped after {seconds:.1f} s, because it exceeded its {limit} limit",
                limit=self.stopped,
                seconds=self.seconds,
            )
        said = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return Message(
            "sandbox.ended",
            "the command ended with code {code}{line}",
            code=self.returncode,
            line=f": {fold_to_one_line(said[-1], 300)}" if said else "",
        )


def run_in_sandbox(
    command: Sequence[str],
    *,
    output: Path,
    readonly: Sequence[Path] = (),
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
    begun: Callable[[int], None] | None = None,
    enough: threading.Event | None = None,
) -> SandboxResult:
    """Run ``command``. It may write to the folder ``output``, which is made if it is missing, and read the paths ``readonly``.

    Paths inside the sandbox are the same as outside. The current folder is ``cwd`` (a visible path), or else ``output``. Compilers keep their results
    in ``output/cache``. Before the command starts, ``begun`` is called with the process number of the namespace's init. The caller sets ``enough`` to
    end the command. Raises: IsolationError when the sandbox cannot be set up. Then nothing was run.
    """
    limits = limits or SandboxLimits()
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    # Idle OpenMP threads that spin would make a busy machine many times slower, and its timings useless.
    seen_variables = {
        **make_sandbox_environment(output / "cache"),
        "OMP_WAIT_POLICY": "PASSIVE",
        **devices.make_device_environment(),
    }
    with SandboxPipes() as opening, make_linked_mounts(readonly) as given:
        rules = _rules(output, limits, devices.list_gpu_device_files())
        arguments = bubblewrap.build_bubblewrap_command(
            build_launcher_command(command, rules, opening),
            opening,
            writable=[output],
            given=given,
            cwd=cwd or output,
            environment={**seen_variables, **(environment or {})},
            tmp=limits.tmp,
            nodes=devices.list_gpu_device_files(),
        )
        process: subprocess.Popen[bytes] | None = None
        events = StatusPipe(opening.status.fileno())
        with sandbox_cgroup.make_control_groups(limits.processes * TASKS) as groups:
            started = time.monotonic()
            try:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=opening.list_inherited_descriptors(),
                    env={},
                    start_new_session=True,
                )
                opening.close_inherited()
                held = _Held(process, started, limits, output, enough)
                child = events.wait_for_child()  # known before the command starts; None if bubblewrap failed
                if child is not None:
                    sandbox_cgroup.move_sandbox_into_groups(groups, child)
                    offer_to_oom_killer(child)
                if begun is not None and child is not None:
                    begun(child)
                opening.start_command()
                held.watch()
            finally:
                # At this point the tree still runs only if this process was interrupted.
                opening.close_inherited()
                kill_sandbox_and_wait(events)
                if process is not None:
                    process.kill()
                    process.wait()
                written = events.read_all()
                for tail in (process.stdout, process.stderr) if process is not None else ():
                    assert tail is not None
                    tail.close()
                remove_set_id_bits(output)
    code = next((event["exit-code"] for event in written if "exit-code" in event), None)
    stderr = held.tail(process.stderr)
    if held.stopped is None and code is None and process.returncode != -9:
        raise IsolationError(
            "sandbox.no_setup",
            "The sandbox could not be set up, and nothing was run: {program}: {why}",
            program=arguments[0],
            why=stderr.strip()[-500:],
        )
    return SandboxResult(
        returncode=code if code is not None and held.stopped is None else 137,
        stdout=held.tail(process.stdout),
        stderr=stderr,
        seconds=held.seconds,
        stopped=held.stopped,
        peak_memory=held.peak_memory,
        output=measure_folder(output)[0],
    )


class _Held:
    """Watches a running sandbox: keeps the end of its output, and checks the limits."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        started: float,
        limits: SandboxLimits,
        output: Path,
        enough: threading.Event | None = None,
    ) -> None:
        self.enough = enough or threading.Event()
        self.process, self.started, self.limits, self.output = process, started, limits, output
        self.stopped: str | None = None
        self.peak_memory = 0
        self.seconds = 0.0
        self._logged = 0
        assert process.stdout is not None and process.stderr is not None
        self._tails: dict[IO[bytes], bytes] = {process.stdout: b"", process.stderr: b""}
        self._next_look_at_output = started
        self._room: int | None = None  # free bytes on the disk if the output folder were empty

    def tail(self, pipe: IO[bytes] | None) -> str:
        assert pipe is not None
        return self._tails[pipe].decode("utf-8", "replace")

    def watch(self) -> None:
        """Watch until the command has ended, or has been killed because it exceeded a limit."""
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
                if self.enough.is_set():
                    self.stopped = self.stopped or "enough"
                if self.stopped:
                    self.process.kill()
                    self.seconds = time.monotonic() - self.started
                    running = False
            for pipe in self._tails:  # the output that is still in the pipes
                self._read(pipe)
        os.close(ended)

    @property
    def _deadline(self) -> float:
        return self.started + self.limits.wall_seconds

    def _read(self, pipe: IO[bytes]) -> bool:
        """Read the bytes in a pipe, at most 1 MiB, so that a flood of output cannot stop the watch. Returns False at the pipe's end."""
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
        tree = read_process_tree(self.process.pid, self.limits.processes)
        self.peak_memory = max(self.peak_memory, tree.memory)
        if len(tree.processes) > self.limits.processes:
            self.stopped = "processes"
        elif tree.memory > self.limits.memory:
            self.stopped = "memory"
        now = time.monotonic()
        if now >= self._next_look_at_output:
            size, files = self._output(tree.processes[2:])  # without bubblewrap's own two processes
            if size > self.limits.output or files > self.limits.output_files:
                self.stopped = self.stopped or "output"
            # Walking a folder with many files is slow, so the walks may take at most a twentieth of the time.
            self._next_look_at_output = now + 20 * (time.monotonic() - now)

    def _output(self, processes: list[int]) -> tuple[int, int]:
        """Return the bytes and the number of entries of the output folder, including deleted files that a process still has open.

        Deleted files are measured only if the free space on the disk has shrunk by more than the limit. If they cannot be measured, this shrinkage
        is returned as the bytes.
        """
        size, files = measure_folder(self.output)
        free = measure_free_disk_bytes(self.output)
        if self._room is None:
            self._room = free + size
        lost = self._room - free
        if size <= self.limits.output < lost:
            hidden, whole = measure_deleted_files(processes, self.output)
            size = size + hidden if whole else lost
        return size, files


def describe_sandbox() -> dict[str, str]:
    """Describe the sandbox's restrictions on this machine, for ``factory check``.

    The text of ``"isolation"`` starts with 'none' if ``run_in_sandbox`` would refuse.
    """
    try:
        program, refused = bubblewrap.choose_bubblewrap()
        with tempfile.TemporaryDirectory() as folder:
            probe = run_in_sandbox([sys.executable, "-I", "-S", LAUNCHER_INSIDE, "--describe"], output=Path(folder))
        inside = json.loads(probe.stdout)
    except (IsolationError, ValueError) as error:
        return {"isolation": Message("sandbox.none", "none: {why}", why=getattr(error, "message", str(error)))}
    rules = len(sandbox_filter.assemble_filter()) // 8
    return {
        "isolation": Message(
            "sandbox.isolation",
            "{version}: {program} makes user, pid, ipc, net, uts, mount and cgroup namespaces{others}",
            version=bubblewrap.read_bubblewrap_version(program),
            program=program,
            others=f". Not used: {refused}" if refused else "",
        ),
        "user": Message(
            "sandbox.user",
            "mapped from user {user} of this machine, with capabilities {capabilities} and {privileges}",
            user=os.geteuid(),
            capabilities=inside["capabilities"],
            privileges="no way to gain more" if inside["no_new_privileges"] else "A WAY TO GAIN MORE",
        ),
        "seccomp": Message(
            "sandbox.seccomp", "a filter of {instructions} instructions denies system calls", instructions=rules
        )
        if inside["seccomp"]
        else Message("sandbox.no_seccomp", "none, because the factory has no filter for this processor"),
        "landlock": Message(
            "sandbox.landlock", "forbids writing to other folders (Landlock ABI {abi})", abi=inside["landlock"]
        )
        if inside["landlock"]
        else Message("sandbox.no_landlock", "none. Only the read-only mounts protect files"),
        "memory": Message(
            "sandbox.memory",
            "an rlimit limits each process, and the factory checks the sum of all processes ten times a second",
        ),
        "processes": Message(
            "sandbox.processes",
            "the factory counts the sandbox's processes ten times a second; {task_limit}",
            task_limit=_task_limit(),
        ),
        "output": Message(
            "sandbox.output",
            "an rlimit limits each file, and the factory checks the size of the output folder and of deleted files",
        ),
    }


def _task_limit() -> Message:
    with sandbox_cgroup.make_control_groups(1) as groups:
        if groups.limits_tasks:
            return Message("sandbox.control_group", "a control group limits the number of processes and threads")
    if os.geteuid() == 0:
        return Message(
            "sandbox.no_task_limit", "no control group can be made, and an rlimit does not limit root's processes"
        )
    return Message("sandbox.task_rlimit", "an rlimit limits the number of processes and threads")


def _rules(output: Path, limits: SandboxLimits, nodes: Sequence[str]) -> dict[str, object]:
    """Return the rules that the launcher applies to itself before it executes the command.

    With a GPU, memory has no rlimit, because the driver maps far more memory than it uses. Then only the watch limits the tree's memory.
    """
    return {
        "rlimits": {
            "RLIMIT_CPU": limits.cpu_seconds_per_process,
            **({} if nodes else {"RLIMIT_DATA": limits.memory}),
            "RLIMIT_FSIZE": limits.file,
            "RLIMIT_NPROC": limits.processes * TASKS,
            "RLIMIT_NOFILE": 4096,
            "RLIMIT_CORE": 0,
        },
        "writable": [str(output), *list_writable_system_paths(nodes)],
    }
