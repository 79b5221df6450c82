"""Real attempts to use too much of the machine from inside the sandbox. Each is stopped, and the result names the limit."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from factory.sandbox import cgroup as sandbox_cgroup
from factory.sandbox import cpu_clock as sandbox_clock
from factory.sandbox import sandbox
from factory.sandbox.cpu_clock import UsedCpuSeconds
from factory.sandbox.sandbox import MIB, SandboxLimits
from tests.support.factory.sandboxed import PATIENCE, inside, processes_naming, timed_out

pytestmark = pytest.mark.usefixtures("isolates")


def test_an_endless_loop_is_stopped(tmp_path: Path) -> None:
    run = lambda limits: inside(tmp_path, "print('begun', flush=True)\nwhile True: pass", limits=limits)
    result = timed_out(run, began=lambda result: bool(result.stdout))
    assert result.timed_out and result.stdout == "begun\n" and "wall" in result.describe_ending()


def test_a_process_that_uses_too_many_cpu_seconds_is_stopped(tmp_path: Path) -> None:
    result = inside(tmp_path, "while True: pass", limits=SandboxLimits(wall_seconds=PATIENCE, cpu_seconds=1))
    assert not result.ok and not result.timed_out


def test_a_fork_bomb_is_stopped(tmp_path: Path) -> None:
    word = f"bomb-{os.getpid()}"
    code = """
    import os, time
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)
    """
    result = inside(tmp_path, code, word, limits=SandboxLimits(wall_seconds=10, processes=64))
    assert result.stopped in ("processes", "wall")
    assert processes_naming(word) == []


def groups_of_ours() -> list[Path]:
    mount = sandbox_cgroup.MOUNT
    return [made for made in mount.rglob(f"{sandbox_cgroup.PREFIX}{os.getpid()}-*") if made.is_dir()]


def test_the_kernel_limits_threads(tmp_path: Path) -> None:
    """The watch counts only processes, and an rlimit does not bind root. A control group limits threads, if one can be made."""
    if "no control group" in sandbox.describe_sandbox()["processes"]:
        pytest.skip("no control group can be made here")
    code = """
    import threading
    held = threading.Event()
    try:
        for started in range(1000):
            threading.Thread(target=held.wait, daemon=True).start()
    except RuntimeError as error:
        print(started, error)
    held.set()
    """
    result = inside(tmp_path, code, limits=SandboxLimits(wall_seconds=PATIENCE, processes=32))
    assert result.returncode == 0, result.describe_ending()
    assert int(result.stdout.split()[0]) <= 32 * sandbox.TASKS and "can't start new thread" in result.stdout
    deadline = time.monotonic() + PATIENCE  # the next sandbox removes a group whose last process was still ending
    while (left := groups_of_ours()) and time.monotonic() < deadline:
        with sandbox_cgroup.make_control_groups(1):
            pass
    assert left == []


def test_only_control_groups_of_ended_threads_are_removed(tmp_path: Path) -> None:
    over = threading.Event()
    living, dead = threading.Thread(target=over.wait, args=(PATIENCE,)), threading.Thread(target=int)
    for thread in (living, dead):
        thread.start()
    dead.join()
    deadline = time.monotonic() + PATIENCE  # the kernel's task ends after Python's thread
    while Path(f"/proc/self/task/{dead.native_id}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    me, nobody = os.getpid(), 1 << 30
    kept = {f"{me}-{living.native_id}-a", f"{me}-0a"}  # the second is an older version's, whose process still runs
    names = {
        *kept,
        f"{me}-{threading.get_native_id()}-a",
        f"{me}-{dead.native_id}-a",
        f"{nobody}-{nobody}-a",
        f"{nobody}-0a",
    }
    for name in names:
        (tmp_path / f"{sandbox_cgroup.PREFIX}{name}").mkdir()
    try:
        sandbox_cgroup._clear(tmp_path)
    finally:
        over.set()
        living.join()
    assert {path.name.removeprefix(sandbox_cgroup.PREFIX) for path in tmp_path.iterdir()} == kept


def test_a_memory_bomb_in_one_process_is_stopped(tmp_path: Path) -> None:
    result = inside(tmp_path, "b = bytearray(4 << 30)", limits=SandboxLimits(wall_seconds=PATIENCE, memory=512 * MIB))
    assert not result.ok and (result.stopped == "memory" or "MemoryError" in result.stderr)
    assert result.peak_memory < 4 << 30


def test_a_memory_bomb_over_many_processes_is_stopped(tmp_path: Path) -> None:
    code = """
    import os, time
    for _ in range(7):
        if os.fork() == 0: break
    held = b'x' * (100 << 20)
    time.sleep(600)
    """
    result = inside(tmp_path, code, limits=SandboxLimits(wall_seconds=PATIENCE, memory=400 * MIB))
    assert result.stopped == "memory" and result.peak_memory > 400 * MIB


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_temporary_space_is_small(tmp_path: Path, folder: str) -> None:
    code = "import sys\nwith open(sys.argv[1] + '/x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))"
    result = inside(tmp_path, code, folder, limits=SandboxLimits(wall_seconds=PATIENCE, tmp=32 * MIB))
    assert result.returncode == 1 and "No space left" in result.stderr


def test_a_disk_bomb_of_one_file_is_stopped(tmp_path: Path) -> None:
    code = "with open('x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))"
    result = inside(tmp_path, code, limits=SandboxLimits(wall_seconds=PATIENCE, file=16 * MIB))
    assert not result.ok and result.output <= 17 * MIB


def test_a_disk_bomb_of_many_files_is_stopped(tmp_path: Path) -> None:
    code = """
    import itertools, time
    for i in itertools.count():
        open(f'{i}', 'wb').write(bytes(1 << 20))
        time.sleep(0.002)
    """
    result = inside(tmp_path, code, limits=SandboxLimits(wall_seconds=PATIENCE, file=16 * MIB, output=64 * MIB))
    assert result.stopped == "output"
    small = "import itertools\nfor i in itertools.count(): open(f'{i}', 'wb')"
    result = inside(tmp_path / "small", small, limits=SandboxLimits(wall_seconds=PATIENCE, output_files=500))
    assert result.stopped == "output"


HOLD = """
    import ctypes, os, socket, sys, time
    libc = ctypes.CDLL(None)
    near, far = socket.socketpair()
    for _ in range(60):
        file = os.open('x', os.O_CREAT | os.O_RDWR)
        os.unlink('x')
        os.write(file, bytes(4 << 20))
        if sys.argv[1] == 'map':
            libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0))  # Python's mmap would keep the file open too
        if sys.argv[1] == 'send':
            socket.send_fds(near, [b'x'], [file])
        if sys.argv[1] != 'open':
            os.close(file)
        time.sleep(0.02)
    time.sleep(600)  # only a limit ends it, however late the watch looks
"""


@pytest.mark.parametrize("held", ["open", "map", "send"])
def test_a_disk_bomb_of_deleted_files_is_stopped(tmp_path: Path, held: str) -> None:
    result = inside(tmp_path, HOLD, held, limits=SandboxLimits(wall_seconds=PATIENCE, output=32 * MIB))
    assert result.stopped == "output" and result.output == 0, result


def test_writes_of_other_processes_to_the_disk_do_not_count(tmp_path: Path) -> None:
    code = """
    import os, time
    held = os.open('x', os.O_CREAT | os.O_RDWR)
    os.unlink('x')
    os.write(held, bytes(1 << 20))
    open('begun', 'w')
    while not os.path.exists('go'): time.sleep(0.01)
    time.sleep(0.4)  # several checks of the watch
    """
    begun, go = tmp_path / "out" / "begun", tmp_path / "out" / "go"

    def others() -> None:
        while not begun.exists():
            time.sleep(0.01)
        (tmp_path / "others").write_bytes(bytes(24 * MIB))
        go.touch()

    writer = threading.Thread(target=others)
    writer.start()
    result = inside(tmp_path, code, limits=SandboxLimits(wall_seconds=PATIENCE, output=8 * MIB))
    writer.join()
    assert result.ok, result


def test_a_command_that_floods_its_output_is_stopped(tmp_path: Path) -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536); os.write(2, b'y' * 65536)"
    result = inside(tmp_path, code, limits=SandboxLimits(wall_seconds=PATIENCE, log=4 * MIB))
    assert result.stopped == "log"
    assert max(len(result.stdout), len(result.stderr)) <= sandbox.TAIL_BYTES


def test_the_end_of_a_long_log_is_kept(tmp_path: Path) -> None:
    result = inside(tmp_path, "print('x' * 300_000); print('the end')")
    assert result.ok and result.stdout.endswith("the end\n") and len(result.stdout) == sandbox.TAIL_BYTES


def test_a_caller_can_end_the_command(tmp_path: Path) -> None:
    enough = threading.Event()
    begun = tmp_path / "out" / "begun"

    def wait() -> None:
        while not begun.exists():
            time.sleep(0.01)
        enough.set()

    watcher = threading.Thread(target=wait)
    watcher.start()
    code = "import time; open('begun', 'w'); time.sleep(600)"
    command = [sys.executable, "-c", code]
    result = sandbox.run_in_sandbox(
        command, output=tmp_path / "out", limits=SandboxLimits(wall_seconds=PATIENCE), enough=enough
    )
    watcher.join()
    assert result.stopped == "enough" and not result.ok and not result.timed_out


# -- CPU seconds, read from outside ----------------------------------------------------------------------------------------
USES = """
import hashlib, os, threading, time
def use(seconds):
    end, page = time.thread_time() + seconds, bytes(1 << 20)
    while time.thread_time() < end: hashlib.sha256(page).digest()  # which other threads need not wait for
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
open('begun', 'w')
wait_for('go')
threads = [threading.Thread(target=use, args=(0.4,)) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
if os.fork() == 0:
    use(0.3)
    os._exit(0)
os.wait()
use(0.8)
open('done', 'w')
wait_for('end')
"""


def test_cpu_seconds_of_the_whole_tree_are_read_from_outside(tmp_path: Path) -> None:
    """The work of ended threads, of an ended child and of the main thread counts, whatever the wall time."""
    inits: list[int] = []
    found: list[UsedCpuSeconds | None] = []
    out = tmp_path / "out"

    def watch() -> None:
        while not (out / "begun").exists():
            time.sleep(0.01)
        first = sandbox_clock.read_cpu_seconds(inits[0])
        (out / "go").touch()
        while not (out / "done").exists():
            time.sleep(0.01)
        found.append(sandbox_clock.compute_cpu_seconds_between(first, sandbox_clock.read_cpu_seconds(inits[0])))
        (out / "end").touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    command = [sys.executable, "-c", USES]
    result = sandbox.run_in_sandbox(
        command, output=out, limits=SandboxLimits(wall_seconds=PATIENCE), begun=inits.append
    )
    watcher.join()
    (used,) = found
    assert result.ok and used is not None, result
    assert used.tree >= 1.9 - 2 / sandbox_clock.TICKS_PER_SECOND and 0.8 <= used.thread < used.tree - 1
    assert sandbox_clock.read_cpu_seconds(1 << 23) == sandbox_clock.CpuReading(), "nobody has such a number"
    assert (
        sandbox_clock.compute_cpu_seconds_between(
            sandbox_clock.CpuReading(1.0, {7: 1.0}), sandbox_clock.CpuReading(2.0, {8: 1.0})
        )
        is None
    )
