"""Real attacks on the sandbox: each must be contained, and the result must say what happened."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from factory import sandbox, sandbox_cgroup, sandbox_filter
from factory.errors import IsolationError
from factory.ledger import Ledger
from factory.sandbox import MIB, Limits, Result
from factory.workspace import Workspace


def inside(
    tmp_path: Path, code: str, *arguments: str, limits: Limits | None = None, readonly: tuple[Path, ...] = ()
) -> Result:
    """Run a few lines of Python in the sandbox; 15 seconds at most unless told."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return sandbox.run(command, output=tmp_path / "out", readonly=readonly, limits=limits or Limits(wall_seconds=15))


def processes_naming(word: str) -> list[int]:
    """Processes of the whole machine whose command line holds ``word``, once the kernel has had time to bury the dead."""
    deadline = time.monotonic() + 3
    while (found := _processes_naming(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _processes_naming(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            others = entry.name.isdigit() and int(entry.name) != os.getpid()
            if others and word.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_an_honest_command_runs_and_leaves_its_output(tmp_path: Path) -> None:
    given = tmp_path / "input.txt"
    given.write_text("given")
    result = inside(
        tmp_path,
        """
        import pathlib, subprocess, sys, tempfile
        pathlib.Path('made.txt').write_text(pathlib.Path(sys.argv[1]).read_text())
        with tempfile.TemporaryDirectory() as folder:  # a C++ compiler works: torch.compile needs one
            source = pathlib.Path(folder, 'a.cpp')
            source.write_text('int main() { return 7; }')
            subprocess.run(['g++', str(source), '-o', folder + '/a'], check=True)
            print('built', subprocess.run([folder + '/a']).returncode)
        """,
        str(given),
        readonly=(given,),
    )
    assert result.ok, result
    assert result.stdout == "built 7\n"
    assert (tmp_path / "out" / "made.txt").read_text() == "given"
    assert 0 < result.seconds < 15 and result.peak_memory > MIB


def test_the_interpreters_packages_are_there(tmp_path: Path) -> None:
    result = inside(tmp_path, "import numpy, yaml, safetensors, pydantic; print(numpy.ones(3).sum())")
    assert result.ok and result.stdout == "3.0\n", result


@pytest.mark.parametrize("code", [0, 3, 77])
def test_exit_codes_come_out_even_by_the_back_door(tmp_path: Path, code: int) -> None:
    result = inside(tmp_path, f"import os; print('x', flush=True); os._exit({code})")
    assert (result.returncode, result.stopped, result.stdout) == (code, None, "x\n")


def test_a_signal_is_reported_as_a_shell_does(tmp_path: Path) -> None:
    assert inside(tmp_path, "import os; os.kill(os.getpid(), 11)").returncode == 128 + 11


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    result = sandbox.run(["/nowhere/at-all"], output=tmp_path / "out")
    assert result.returncode == 127 and "nowhere" in result.why()


# -- reaching out -----------------------------------------------------------------------------------------------------
def test_no_network_not_even_the_hosts_loopback(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        result = inside(
            tmp_path,
            """
            import socket, sys
            for address in (('1.1.1.1', 53), ('127.0.0.1', int(sys.argv[1]))):
                try:
                    socket.create_connection(address, timeout=2)
                    print('REACHED', address)
                except OSError as error:
                    print('refused', error.errno)
            try:
                socket.socket(40, socket.SOCK_STREAM)  # AF_VSOCK
                print('REACHED the hypervisor')
            except OSError as error:
                print('refused', error.errno)
            """,
            str(server.getsockname()[1]),
        )
    assert result.returncode == 0 and result.stdout.count("refused") == 3 and "REACHED" not in result.stdout


def test_no_home_no_passwords_no_ledger(tmp_path: Path, workspace: Workspace, ledger: Ledger) -> None:
    secret = workspace.root / "ledger.db"
    assert secret.exists()
    result = inside(
        tmp_path,
        """
        import os, sys
        for path in sys.argv[1:]:
            try:
                names = os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(10)
                print('READ', path, names)
            except OSError:
                print('refused')
        """,
        "/etc/shadow", "/etc/hostname", str(secret), str(Path.home() / ".ssh"), str(Path.home() / ".bashrc"),
        str(Path(__file__)), "/sys/kernel",
    )  # fmt: skip
    assert result.stdout.count("refused") == 7 and "READ" not in result.stdout, result.stdout


def test_nothing_of_our_environment_or_processes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    result = inside(
        tmp_path,
        """
        import os
        seen, processes = repr(os.environ), [p for p in os.listdir('/proc') if p.isdigit()]
        for p in processes:
            try:
                seen += repr(open(f'/proc/{p}/environ', 'rb').read())
            except OSError:
                pass
        print('sk-secret' in seen, len(processes), os.listdir('/proc/self/fd'))
        """,
    )
    leaked, processes, descriptors = result.stdout.split(maxsplit=2)
    assert leaked == "False" and int(processes) <= 3
    assert "4" not in descriptors, "bubblewrap's own descriptors stay outside"


OUTSIDE = (
    "/usr/x",
    "/etc/x",
    "/x",
    "/dev/x",
    "/proc/sys/kernel/core_pattern",
    "{input}/x",
    "{prefix}/x",
    "/run/launch.py",
)


@pytest.mark.parametrize("target", OUTSIDE)
def test_writing_outside_the_output_folder(tmp_path: Path, target: str) -> None:
    given = tmp_path / "given"
    given.mkdir()
    target = target.format(input=given, prefix=sys.prefix)
    result = inside(tmp_path, "import sys; open(sys.argv[1], 'w').write('|/tmp/out')", target, readonly=(given,))
    assert result.returncode == 1 and ("Read-only" in result.stderr or "Permission" in result.stderr), result
    assert not list(given.iterdir())


def test_a_link_out_of_the_output_folder_leads_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    inside(tmp_path, "import os, sys; os.symlink(sys.argv[1], 'link'); open('link', 'w').write('stolen')", str(victim))
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "call",
    ["c.unshare(0x10000000)", "c.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
     "c.ptrace(16, 1, 0, 0)", "c.syscall({keyctl}, 0, -3, 1)",
     "c.syscall(425, 8, c_buffer)", "c.syscall({clone}, 0x10000011, 0, 0, 0, 0)"],
)  # fmt: skip
def test_calls_that_open_doors_are_denied(tmp_path: Path, call: str) -> None:
    column = sandbox_filter.ARCHITECTURES[platform.machine()][0]
    call = call.format(keyctl=sandbox_filter.CALLS["keyctl"][column], clone=sandbox_filter.CLONE[column])
    code = f"""
    import ctypes, os
    c = ctypes.CDLL(None, use_errno=True)
    c_buffer = ctypes.create_string_buffer(256)
    try:
        result = {call}
        print(result, ctypes.get_errno())
    except OSError as error:
        print(-1, error.errno)
    """
    assert inside(tmp_path, code).stdout.split() == ["-1", "1"]


# -- using too much ---------------------------------------------------------------------------------------------------
def test_an_endless_loop(tmp_path: Path) -> None:
    result = inside(tmp_path, "print('begun', flush=True)\nwhile True: pass", limits=Limits(wall_seconds=1))
    assert result.timed_out and result.stdout == "begun\n" and 1 <= result.seconds < 2 and "wall" in result.why()


def test_cpu_seconds_run_out(tmp_path: Path) -> None:
    result = inside(tmp_path, "while True: pass", limits=Limits(wall_seconds=20, cpu_seconds=1))
    assert not result.ok and not result.timed_out and result.seconds < 10


def test_a_double_fork_does_not_outlive_the_time_out(tmp_path: Path) -> None:
    code = """
    import os, signal, sys, time
    for _ in range(2):
        if os.fork():
            if sys.argv[1] == 'stay': time.sleep(60)
            os._exit(0)
        os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        open('beat', 'w').write(str(time.time()))
    """
    for parent in ("stay", "leave"):  # the parent waits for its time-out, or ends at once and leaves an orphan behind
        word = f"orphan-{parent}-{os.getpid()}"
        result = inside(tmp_path, code, parent, word, limits=Limits(wall_seconds=1.5))
        assert result.timed_out == (parent == "stay")
        assert processes_naming(word) == []
    before = (tmp_path / "out" / "beat").stat().st_mtime_ns
    time.sleep(0.2)
    assert (tmp_path / "out" / "beat").stat().st_mtime_ns == before


def test_a_fork_bomb(tmp_path: Path) -> None:
    word = f"bomb-{os.getpid()}"
    code = """
    import os, time
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)
    """
    result = inside(tmp_path, code, word, limits=Limits(wall_seconds=10, processes=64))
    assert result.stopped in ("processes", "wall") and result.seconds < 12
    assert processes_naming(word) == []


def groups_of_ours() -> list[Path]:
    mount = sandbox_cgroup.MOUNT
    return [made for made in mount.rglob(f"{sandbox_cgroup.PREFIX}{os.getpid()}-*") if made.is_dir()]


def test_the_kernel_limits_tasks_that_no_watch_counts(tmp_path: Path) -> None:
    """Threads are no processes; root has no rlimit: where control groups can be made, one holds them."""
    if "no control group" in sandbox.describe()["processes"]:
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
    result = inside(tmp_path, code, limits=Limits(wall_seconds=15, processes=32))
    assert result.returncode == 0, result.why()
    assert int(result.stdout.split()[0]) <= 32 * sandbox.TASKS and "can't start new thread" in result.stdout
    deadline = time.monotonic() + 3  # one whose last process was still ending is removed by the next
    while (left := groups_of_ours()) and time.monotonic() < deadline:
        with sandbox_cgroup.task_limit(1):
            pass
    assert left == []


@pytest.mark.parametrize("failure", [IsolationError("no group"), KeyboardInterrupt()])
def test_nothing_runs_when_its_limits_could_not_be_set(
    tmp_path: Path, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(group: Path, init: int) -> None:
        raise failure

    monkeypatch.setattr(sandbox_cgroup, "put", put)
    monkeypatch.setattr(sandbox_cgroup, "_make", lambda parent, tasks: tmp_path)
    with pytest.raises(type(failure)):
        inside(tmp_path, "open('ran', 'w')")
    time.sleep(0.5)
    assert not (tmp_path / "out" / "ran").exists()


def test_an_interrupt_at_any_moment_ends_everything(tmp_path: Path) -> None:
    code = f"""
    import sys
    from pathlib import Path
    from factory import sandbox
    sandbox.sandbox_filter.program(), sandbox.interpreter_paths()
    print(flush=True)
    sys.stdin.readline()
    sandbox.run(["/bin/sleep", "{{}}"], output=Path({str(tmp_path / "out")!r}))
    """
    for trial in range(12):
        seconds = f"30.{os.getpid()}{trial}"
        words = [sys.executable, "-c", textwrap.dedent(code.format(seconds))]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        time.sleep(trial * 0.003)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=10)
        finally:
            process.kill()
        assert processes_naming(seconds) == []


def test_a_memory_bomb_in_one_process(tmp_path: Path) -> None:
    result = inside(tmp_path, "b = bytearray(4 << 30)", limits=Limits(wall_seconds=15, memory=512 * MIB))
    assert not result.ok and (result.stopped == "memory" or "MemoryError" in result.stderr)
    assert result.peak_memory < 4 << 30


def test_a_memory_bomb_over_many_processes(tmp_path: Path) -> None:
    code = """
    import os, time
    for _ in range(7):
        if os.fork() == 0: break
    held = b'x' * (100 << 20)
    time.sleep(30)
    """
    result = inside(tmp_path, code, limits=Limits(wall_seconds=20, memory=400 * MIB))
    assert result.stopped == "memory" and result.peak_memory > 400 * MIB


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_temporary_space_is_small(tmp_path: Path, folder: str) -> None:
    code = "import sys\nwith open(sys.argv[1] + '/x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))"
    result = inside(tmp_path, code, folder, limits=Limits(wall_seconds=15, tmp=32 * MIB))
    assert result.returncode == 1 and "No space left" in result.stderr


def test_a_disk_bomb_of_one_file(tmp_path: Path) -> None:
    code = "with open('x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))"
    result = inside(tmp_path, code, limits=Limits(wall_seconds=15, file=16 * MIB))
    assert not result.ok and result.output <= 17 * MIB


def test_a_disk_bomb_of_many_files(tmp_path: Path) -> None:
    code = """
    import itertools, time
    for i in itertools.count():
        open(f'{i}', 'wb').write(bytes(1 << 20))
        time.sleep(0.002)
    """
    result = inside(tmp_path, code, limits=Limits(wall_seconds=15, file=16 * MIB, output=64 * MIB))
    assert result.stopped == "output" and result.seconds < 10
    small = "import itertools\nfor i in itertools.count(): open(f'{i}', 'wb')"
    result = inside(tmp_path / "small", small, limits=Limits(wall_seconds=15, output_files=500))
    assert result.stopped == "output"


def test_a_log_bomb(tmp_path: Path) -> None:
    code = "import os\nwhile True: os.write(1, b'x' * 65536); os.write(2, b'y' * 65536)"
    result = inside(tmp_path, code, limits=Limits(wall_seconds=15, log=4 * MIB))
    assert result.stopped == "log" and result.seconds < 10
    assert max(len(result.stdout), len(result.stderr)) <= sandbox.TAIL_BYTES


def test_the_end_of_a_long_log_is_kept(tmp_path: Path) -> None:
    result = inside(tmp_path, "print('x' * 300_000); print('the end')")
    assert result.ok and result.stdout.endswith("the end\n") and len(result.stdout) == sandbox.TAIL_BYTES


# -- refusing ---------------------------------------------------------------------------------------------------------
def test_without_bubblewrap_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationError, match="install"):
        inside(tmp_path, "print('ran')")
    assert sandbox.describe()["isolation"].startswith("none")


def test_a_bubblewrap_that_cannot_isolate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "bin" / "bwrap"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    with pytest.raises(IsolationError, match="No permissions"):
        inside(tmp_path, "print('ran')")


def test_a_missing_input_is_an_isolation_error(tmp_path: Path) -> None:
    with pytest.raises(IsolationError, match="nowhere"):
        inside(tmp_path, "print('ran')", readonly=(tmp_path / "nowhere",))


def test_describe_says_what_is_in_force() -> None:
    described = sandbox.describe()
    assert described["isolation"].startswith("bubblewrap") and "capabilities none" in described["user"]
    assert ("filter" in described["seccomp"]) == (platform.machine() in sandbox_filter.ARCHITECTURES)


def test_a_killed_factory_leaves_no_sandbox_behind(tmp_path: Path) -> None:
    word = f"left-{os.getpid()}"
    root = Path(sandbox.__file__).parent.parent
    code = f"""
    import sys; sys.path.insert(0, {str(root)!r})
    from pathlib import Path
    from factory import sandbox
    inside = 'import time; open("begun", "w"); time.sleep(60)'
    sandbox.run([sys.executable, '-c', inside, '{word}'], output=Path({str(tmp_path)!r}))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    for _ in range(50):
        if not (left := processes_naming(word)):
            break
        time.sleep(0.1)
    assert not left
