"""Real programs that do not want to stand still: they fork as fast as they can, leave their parents, and continue themselves by a timer."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from factory.sandbox import cgroup, freezer, live_sandbox
from factory.sandbox.live_sandbox import RunningCommand
from tests.support.factory.sandboxed import PATIENCE

pytestmark = pytest.mark.usefixtures("isolates")
WAYS = ("group", "signals")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to freeze. The first needs a control group that this machine may not allow."""
    if request.param == "signals":
        monkeypatch.setattr(freezer, "find_freezer", lambda init: None)
    else:
        with cgroup.make_control_groups(1) as groups:
            if cgroup.FREEZE not in groups.files:
                pytest.skip("no control group of version 2 can be made here")
    return str(request.param)


@contextmanager
def running(tmp_path: Path, script: str) -> Iterator[RunningCommand]:
    """A Python program in the sandbox, once it has made the file ``begun``."""
    out = tmp_path / "out"
    out.mkdir()
    with (tmp_path / "log").open("wb") as log:
        command = live_sandbox.start_in_sandbox(
            [sys.executable, "-c", script], writable=[out], readonly=[], cwd=out, cache=tmp_path / "cache", environment={}, nodes=(),
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        wait_until(lambda: (out / "begun").exists(), (tmp_path / "log").read_text)
        yield command
    finally:
        command.kill(PATIENCE)


def wait_until(true: object, evidence: object = lambda: "") -> None:
    assert callable(true) and callable(evidence)
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, evidence()
        time.sleep(0.01)


def sizes(tmp_path: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}


BEATS = """
import os, sys, threading, time
def beat(name):
    with open(name, 'ab', 0) as file:
        while True:
            file.write(b'.')
for number in range(3):
    if os.fork() == 0:
        if number == 2 and os.fork():  # an orphan, which init adopts
            os._exit(0)
        threading.Thread(target=beat, args=(f'{number}.thread',)).start()
        beat(f'{number}.main')
while len(os.listdir()) < 6: time.sleep(0.01)
open('begun', 'w')
time.sleep(600)
"""


def test_a_frozen_sandbox_writes_nothing_and_goes_on_when_thawed(tmp_path: Path, way: str) -> None:
    with running(tmp_path, BEATS) as command:
        frozen = freezer.freeze(command.init, PATIENCE)
        assert frozen.still and (frozen.group is not None) == (way == "group")
        assert len(frozen.clocks) >= 8, "init, the command, three beating processes with two threads each"
        first = sizes(tmp_path)
        time.sleep(0.3)
        assert sizes(tmp_path) == first and len(first) == 7
        assert freezer.thaw(frozen) == 0.0
        wait_until(lambda: all(size > first[name] for name, size in sizes(tmp_path).items() if name != "begun"))


FORKS = """
import os, signal, sys, time
counter = os.open('count', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
def go_on(number, frame):
    os.write(counter, b'c')
    if os.fork() == 0:  # a handler that forks, too
        os._exit(0)
for number in (signal.SIGCONT, signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
    signal.signal(number, go_on if number == signal.SIGCONT else signal.SIG_IGN)
for _ in range(4):
    if os.fork() == 0:
        break
open('begun', 'w')
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:  # a grandchild, which the next process of the chain leaves behind
                os.write(counter, b'.')
                if os.fork():
                    os._exit(0)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os._exit(0)
    except OSError:
        time.sleep(0.001)
"""


def test_a_program_that_forks_as_fast_as_it_can_is_frozen(tmp_path: Path, way: str) -> None:
    with running(tmp_path, FORKS) as command:
        wait_until(lambda: sizes(tmp_path)["count"] > 100)
        for _ in range(5):
            frozen = freezer.freeze(command.init, PATIENCE)
            assert frozen.still
            first = sizes(tmp_path)
            time.sleep(0.2)
            assert sizes(tmp_path) == first
            assert freezer.thaw(frozen) == 0.0
            wait_until(lambda first=first: sizes(tmp_path)["count"] > first["count"] + 20)


TIMER = """
import ctypes, os, signal, time
class Event(ctypes.Structure):  # struct sigevent of sigevent(3)
    _fields_ = [('value', ctypes.c_void_p), ('signo', ctypes.c_int), ('notify', ctypes.c_int), ('rest', ctypes.c_char * 48)]
libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
made = libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(Event(None, signal.SIGCONT, 0)), ctypes.byref(timer))
every = (ctypes.c_long * 4)(0, 50_000_000, 0, 50_000_000)
assert made == 0 and libc.timer_settime(timer, 0, every, None) == 0
open('begun', 'w')
with open('count', 'ab', 0) as file:
    while True:
        file.write(b'.')
"""


def test_a_timer_that_continues_its_process_is_powerless_or_seen(tmp_path: Path, way: str) -> None:
    with running(tmp_path, TIMER) as command:
        frozen = freezer.freeze(command.init, PATIENCE)
        first = sizes(tmp_path)
        if way == "group":
            time.sleep(0.3)
            assert frozen.still and sizes(tmp_path) == first and freezer.thaw(frozen) == 0.0
        else:  # signals cannot hold it, and the clocks say so
            wait_until(lambda: sizes(tmp_path) != first)
            assert freezer.thaw(frozen) > 0.0


def test_a_frozen_sandbox_can_be_killed(tmp_path: Path, way: str) -> None:
    with running(tmp_path, BEATS) as command:
        frozen = freezer.freeze(command.init, PATIENCE)
        command.kill(PATIENCE)
        assert command.wait() == -signal.SIGKILL
        assert freezer.thaw(frozen) == float("inf"), "its clocks are gone"
        assert not freezer.freeze(command.init, PATIENCE).still


def test_a_parent_that_waits_for_its_vfork_child_is_frozen_with_it(tmp_path: Path, way: str) -> None:
    """subprocess uses vfork: the parent is in the kernel until the child has started its program, and a frozen child never does."""
    script = "import subprocess, sys\nopen('begun', 'w')\nwhile True: subprocess.run(['/bin/true']); open('count', 'a').write('.')"
    with running(tmp_path, script) as command:
        for _ in range(30):
            frozen = freezer.freeze(command.init, PATIENCE)
            assert frozen.still
            assert freezer.thaw(frozen) == 0.0
            time.sleep(0.003)
