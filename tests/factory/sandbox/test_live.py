"""Tests of ``live_sandbox.start_in_sandbox``: what the command sees, also with GPUs, and how it ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from factory.core.errors import IsolationError
from factory.core.file_lock import LockedError, hold_file_lock
from factory.sandbox import bubblewrap, live_sandbox
from factory.sandbox.live_sandbox import RunningCommand
from factory.sandbox.pipes import SandboxPipes
from tests.support.messages import refused

RANKS = """
import os, signal, socket, sys, time
print(socket.gethostbyname(socket.gethostname()), [name for _, name in socket.if_nameindex()], sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()):
    print("met")
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(75))
print("ready", flush=True)
time.sleep(300)
"""


def started(tmp_path: Path, script: str, lock: int | None = None, nodes: tuple[str, ...] = ()) -> RunningCommand:
    (tmp_path / "out").mkdir(exist_ok=True)
    return live_sandbox.start_in_sandbox(
        [sys.executable, "-c", script],
        writable=[tmp_path / "out"],
        readonly=[],
        cwd=tmp_path / "out",
        cache=tmp_path / "cache",
        environment={},
        nodes=nodes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        lock=lock,
    )


def test_the_command_has_its_own_loopback_cannot_reach_the_lock_and_gets_sigterm(tmp_path: Path) -> None:
    with hold_file_lock(tmp_path / "lock") as lock:
        running = started(tmp_path, RANKS, lock)
    out = running.process.stdout
    assert out is not None
    assert [out.readline() for _ in range(3)] == [b"127.0.0.1 ['lo'] [0, 1, 2]\n", b"met\n", b"ready\n"]
    with pytest.raises(LockedError), hold_file_lock(tmp_path / "lock"):
        pass
    running.terminate()
    assert running.wait() == 75
    with hold_file_lock(tmp_path / "lock"):
        pass


def test_wait_returns_how_the_command_ended(tmp_path: Path) -> None:
    assert started(tmp_path, "import os; os.kill(os.getpid(), 9)").wait() == -9
    assert started(tmp_path, "raise SystemExit(2)").wait() == 2
    with refused("sandbox.not_started", IsolationError):
        started(tmp_path, "", nodes=("/dev/none-such",)).wait()


def test_the_sandbox_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed with SIGKILL."""
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from tests.factory.sandbox.test_live import started\n"
        "running = started(Path(sys.argv[2]), 'import time; time.sleep(300)')\n"
        "print(running.init, flush=True); time.sleep(300)"
    )
    words = [sys.executable, "-c", script, str(Path(__file__).parents[3]), str(tmp_path)]
    factory = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert factory.stdout is not None
    handle = os.pidfd_open(int(factory.stdout.readline()))
    factory.kill()
    factory.wait()
    assert select.select([handle], [], [], 60)[0]
    os.close(handle)


def test_only_harmless_variables_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    running = started(tmp_path, "import json, os; print(json.dumps(dict(os.environ)))")
    assert running.process.stdout is not None
    seen = running.process.stdout.read().decode()
    assert running.wait() == 0 and "secret" not in seen
    assert '"NCCL_SOCKET_IFNAME": "lo"' in seen and '"CUDA_VISIBLE_DEVICES": "1"' in seen and '"HOME": "/tmp"' in seen


def test_gpus_appear_as_device_files_in_the_sandbox(tmp_path: Path) -> None:
    """This machine has no GPU: the test checks bubblewrap's arguments."""
    nodes = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"]
    with SandboxPipes() as opening:
        words = bubblewrap.build_bubblewrap_command(
            ["true"], opening, writable=[tmp_path], given=[], cwd=tmp_path, environment={}, tmp=1, nodes=nodes, held=7
        )
    shown = [words[at + 1 : at + 3] for at, word in enumerate(words) if word == "--dev-bind"]
    assert shown == [[node, node] for node in nodes]
    assert ["/sys", "/sys"] in [words[at + 1 : at + 3] for at, word in enumerate(words) if word == "--ro-bind-try"]
    assert words[words.index("--sync-fd") + 1] == "7" and "--share-net" not in words
