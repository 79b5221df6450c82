"""Live code that uses too much of the machine is ended with a message that names the limit, with and without control groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from factory.sandbox import cgroup, live_limits, live_sandbox, usage
from factory.sandbox.cgroup import ControlGroups
from factory.sandbox.live_limits import LiveLimits
from factory.sandbox.live_sandbox import RunningCommand
from factory.sandbox.sandbox import MIB
from tests.support.factory.sandboxed import PATIENCE, processes_naming
from tests.support.messages import codes

pytestmark = pytest.mark.usefixtures("isolates")
LIMITS = LiveLimits(tasks=150, memory=300 * MIB)


@pytest.fixture(params=["groups", "watch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to keep the limits. The first needs control groups that this machine may not allow."""
    monkeypatch.setattr(LiveLimits, "of_this_machine", classmethod(lambda cls: LIMITS))
    with cgroup.make_control_groups(10, MIB) as groups:
        possible = groups.limits_tasks and groups.limits_memory
    if request.param == "groups" and not possible:
        pytest.skip("no control groups can be made here")
    if request.param == "watch":
        make = cgroup.make_control_groups

        @contextlib.contextmanager
        def make_unseen(*limits: int) -> Iterator[ControlGroups]:
            """Groups of which the watch does not know. They only protect this machine, should the watch fail."""
            with make(2000) as groups:
                yield ControlGroups(groups.folders)

        monkeypatch.setattr(cgroup, "make_control_groups", make_unseen)
        monkeypatch.setattr(cgroup, "DENIED_TASKS", ())
    return str(request.param)


@contextlib.contextmanager
def running(tmp_path: Path, script: str, *words: str) -> Iterator[RunningCommand]:
    (tmp_path / "out").mkdir()
    with (tmp_path / "log").open("wb") as log:
        command = live_sandbox.start_in_sandbox(
            [sys.executable, "-c", script, *words], writable=[tmp_path / "out"], readonly=[], cwd=tmp_path / "out", cache=tmp_path / "cache",
            environment={}, nodes=(), stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield command
    finally:
        command.kill(PATIENCE)


BOMB = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""
THREADS = """
import threading, time
threading.stack_size(64 << 10)
while True:
    try:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    except RuntimeError:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("bomb", [BOMB, THREADS], ids=["processes", "threads"])
def test_a_command_with_too_many_tasks_is_killed_and_says_so(tmp_path: Path, way: str, bomb: str) -> None:
    word = f"bomb-{os.getpid()}-{way}"
    with running(tmp_path, bomb, word) as command:
        assert command.wait(PATIENCE) == -signal.SIGKILL
        assert codes([command.exceeded_limit]) == ["sandbox.live_tasks"]
        assert processes_naming(word) == []


BALLOONS = {
    "one process": "held = []\nwhile True: held.append(b'x' * (4 << 20)); time.sleep(0.005)",
    "many processes": "for _ in range(9):\n    if os.fork() == 0: break\nheld = b'x' * (50 << 20)\ntime.sleep(600)",
    "files in memory": """
for number in range(1000):
    with open(f'/{("tmp", "dev/shm")[number % 2]}/{number}', 'wb') as file: file.write(b'x' * (2 << 20))
    time.sleep(0.005)
time.sleep(600)""",
    "shared pages": """
held = mmap.mmap(-1, 1 << 30)
for _ in range(256):
    held.write(b'x' * (4 << 20))
    time.sleep(0.005)""",
}


@pytest.mark.parametrize("balloon", BALLOONS)
def test_a_command_that_needs_too_much_memory_is_killed_and_says_so(tmp_path: Path, way: str, balloon: str) -> None:
    with running(tmp_path, f"import mmap, os, time\n{BALLOONS[balloon]}\nprint('never')") as command:
        if balloon == "one process" and way == "watch":
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # an rlimit may be faster: then Python says what happened
                command.wait(PATIENCE)
            assert command.returncode
            assert command.exceeded_limit or "MemoryError" in (tmp_path / "log").read_text()
            return
        assert command.wait(PATIENCE)
        assert codes([command.exceeded_limit]) == ["sandbox.live_memory"], (tmp_path / "log").read_text()


SHARING = """
import mmap, os, time
private, shared = b'x' * (100 << 20), mmap.mmap(-1, 60 << 20)
shared.write(b'x' * (60 << 20))
children = [os.fork() for _ in range(8) if os.getpid() == me] if (me := os.getpid()) else []
time.sleep(3)
print(len(private), shared[-1])
"""


def test_pages_that_processes_share_count_once(tmp_path: Path, way: str) -> None:
    """Nine processes with 160 MiB each, which are the same 160 MiB: as loaders have that were forked from a rank."""
    with running(tmp_path, SHARING) as command:
        assert command.wait(PATIENCE) == 0, (command.exceeded_limit, (tmp_path / "log").read_text())
        assert command.exceeded_limit == ""


def test_a_command_that_ends_by_itself_exceeded_nothing(tmp_path: Path, way: str) -> None:
    for number, script in enumerate(("pass", "raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)")):
        (tmp_path / str(number)).mkdir()
        with running(tmp_path / str(number), script) as command:
            assert command.wait(PATIENCE) == (0, 3, -9)[number] and command.exceeded_limit == ""


def test_the_kernels_oom_killer_prefers_the_sandbox(tmp_path: Path) -> None:
    with running(
        tmp_path, "print(open('/proc/self/oom_score_adj').read(), open('/proc/1/oom_score_adj').read())"
    ) as command:
        assert command.wait(PATIENCE) == 0
    expected = str(live_limits.OOM_SCORE)
    assert (tmp_path / "log").read_text().split() == [expected, expected]


def test_the_limits_are_in_proportion_to_the_machine() -> None:
    limits = LiveLimits.of_this_machine()
    numbers = int(Path("/proc/sys/kernel/pid_max").read_text())
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert limits.tasks == min(4096 + 256 * (os.cpu_count() or 1), numbers // 2)
    assert limits.memory <= 0.9 * whole and limits.memory == int(0.9 * cgroup.read_machine_memory())
    assert "RLIMIT_DATA" in limits.make_rlimits(gpu=False) and "RLIMIT_DATA" not in limits.make_rlimits(gpu=True)


def test_memory_is_measured_without_pages_of_files(tmp_path: Path) -> None:
    """A child maps 64 MiB of a file, fills 32 MiB of its own and shares 16 MiB with a grandchild."""
    (tmp_path / "file").write_bytes(b"x" * (64 * MIB))
    script = """
import mmap, os, sys, time
with open(sys.argv[1], 'rb') as file: mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(mapped[at] for at in range(0, len(mapped), 4096))
shared = mmap.mmap(-1, 16 << 20)
shared.write(b'x' * (16 << 20))
if os.fork() == 0:
    shared.seek(0); shared.read()
    print(flush=True)
    time.sleep(600)
private = b'x' * (32 << 20)
print(flush=True)
time.sleep(600)
"""
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "file")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        for _ in range(2):
            child.stdout.readline()
        tree = usage.read_process_tree(child.pid, 10)
        assert len(tree.processes) == tree.tasks == 2 and tree.memory > (64 + 32 + 2 * 16) * MIB
        assert 48 * MIB < usage.measure_memory(tree.processes) < 48 * MIB + 40 * MIB
    finally:
        for process in reversed(usage.read_process_tree(child.pid, 10).processes):
            os.kill(process, signal.SIGKILL)
        child.wait()
        child.stdout.close()
