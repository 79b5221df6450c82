"""No file with the bit of setuid or setgid comes out of a sandbox, whichever system call tries to make one, and older ones lose it."""

from __future__ import annotations

import errno
import gc
import os
import platform
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from factory.core.path_removal import remove_path
from factory.sandbox import live_sandbox, seccomp_filter
from factory.sandbox.set_id_bits import remove_set_id_bits
from tests.support.factory.sandboxed import TELL, inside, told

COLUMN = seccomp_filter.ARCHITECTURES[platform.machine()][0]
NUMBERS = {
    name: numbers[COLUMN]
    for name, numbers in {**seccomp_filter.MODES, **seccomp_filter.OPENS, "openat2": seccomp_filter.OPENAT2}.items()
    if numbers[COLUMN] is not None
}
WAYS = """
    import shutil, stat
    os.umask(0)
    HERE, EMPTY, CREATE, TEMPORARY = -100, 0x1000, os.O_CREAT | os.O_RDWR, os.O_TMPFILE | os.O_RDWR
    number = NUMBERS
    def fresh(name):
        with open(name, 'w') as file:
            file.write('#!/bin/sh')
        return name.encode()
    def ways(bits):  # each with a file of its own
        mode, high = 0o755 | bits, 7 << 32
        held = os.open(fresh(f'held-{bits:o}'), os.O_RDWR)
        yield 'chmod', lambda: call(number['chmod'], fresh(f'chmod-{bits:o}'), mode)
        yield 'chmod, upper half set', lambda: call(number['chmod'], fresh(f'upper-{bits:o}'), mode | high)
        yield 'fchmod', lambda: call(number['fchmod'], held, mode)
        yield 'fchmodat', lambda: call(number['fchmodat'], HERE, fresh(f'at-{bits:o}'), mode)
        yield 'fchmodat2', lambda: call(number['fchmodat2'], HERE, fresh(f'at2-{bits:o}'), mode, 0)
        yield 'fchmodat2 of a descriptor', lambda: call(number['fchmodat2'], held, b'', mode, EMPTY)
        yield 'chmod through proc', lambda: call(number['chmod'], f'/proc/self/fd/{held}'.encode(), mode)
        yield 'creat', lambda: call(number['creat'], f'creat-{bits:o}'.encode(), mode)
        yield 'open', lambda: call(number['open'], f'open-{bits:o}'.encode(), CREATE, mode)
        yield 'openat', lambda: call(number['openat'], HERE, f'openat-{bits:o}'.encode(), CREATE, mode)
        yield 'openat, upper half set', lambda: call(number['openat'], HERE, f'uphalf-{bits:o}'.encode(), CREATE | high, mode | high)
        yield 'open without a name', lambda: call(number['openat'], HERE, b'.', TEMPORARY, mode)
        how = (ctypes.c_uint64 * 3)(CREATE, mode, 0)
        yield 'openat2', lambda: call(number['openat2'], HERE, f'openat2-{bits:o}'.encode(), how, 24)
        for kind in (stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK):
            yield f'mknod {kind:o}', lambda kind=kind: call(number['mknod'], f'node-{kind:o}-{bits:o}'.encode(), kind | mode, 0)
            yield f'mknodat {kind:o}', lambda kind=kind: call(number['mknodat'], HERE, f'nodeat-{kind:o}-{bits:o}'.encode(), kind | mode, 0)
        near = socket.socket(socket.AF_UNIX)
        yield 'the mode of a socket', lambda: (os.fchmod(near.fileno(), mode), near.bind(f'socket-{bits:o}'))
        yield 'a folder', lambda: (os.mkdir(f'folder-{bits:o}'), os.chmod(f'folder-{bits:o}', mode))
    for bits in (stat.S_ISUID, stat.S_ISGID, stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        for name, way in ways(bits):
            if name.split(',')[0].split()[0] in number or name[:2] in ('op', 'th', 'a '):
                tell(f'{name} {bits:o}', way)
    for kind in (stat.S_IFCHR, stat.S_IFBLK):
        tell(f'a device {kind:o}', lambda: os.mknod(f'device-{kind:o}', kind | 0o666, os.makedev(1, 3)))
        tell(f'a hole of overlayfs {kind:o}', lambda: os.mknod(f'hole-{kind:o}', kind | 0o666, 0))
"""
OTHER_WAYS = """
    import shutil, stat, struct
    os.umask(0)
    tell('mkdir', lambda: os.mkdir('made', 0o7777))
    program = next((path for path in ('/usr/bin/su', '/usr/bin/passwd', '/usr/bin/mount') if os.path.exists(path)), None)
    if program is not None:
        shutil.copyfile(program, 'taken')
        tell('copy of the mode', lambda: shutil.copymode(program, 'taken'))
        tell('hard link', lambda: os.link(program, 'linked'))
        tell('rename', lambda: os.rename(program, 'moved'))
    open('capable', 'w').close()
    rights = struct.pack("<5I", 0x02000001, 0xffffffff, 0, 0, 0)  # capability.h: VFS_CAP_REVISION_2, effective
    tell('capability', lambda: os.setxattr('capable', "security.capability", rights))
"""
HONEST = """
    import shutil, stat, tarfile, tempfile
    os.umask(0)
    open('plain', 'w').close()
    for mode in (0o755, 0o600, 0o1777, 0):
        tell(f'chmod {mode:o}', lambda: os.chmod('plain', mode))
        tell(f'open {mode:o}', lambda: os.open(f'new-{mode:o}', os.O_CREAT | os.O_RDWR, mode))
    os.chmod('plain', 0o644)
    tell('open of a file that exists: the third argument does not count', lambda: call(NUMBERS['openat'], -100, b'plain', 0, 0o6755))
    tell('pipe', lambda: os.mkfifo('pipe'))
    tell('socket', lambda: socket.socket(socket.AF_UNIX).bind('socket'))
    tell('temporary', lambda: (tempfile.mkdtemp(dir='.'), tempfile.TemporaryFile(dir='.')))
    tell('copies', lambda: (os.mkdir('tree'), shutil.copy2('plain', 'tree/plain'), shutil.copytree('tree', 'tree2')))
    with tarfile.open('archive', 'w') as archive:
        archive.add('tree')
    tell('archive', lambda: tarfile.open('archive').extractall('unpacked', filter='data'))
"""


def find_set_ids(folder: Path) -> list[str]:
    found = [path for path in folder.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o6000]
    return sorted(path.name for path in found)


@pytest.mark.usefixtures("isolates")
def test_no_system_call_sets_the_bits(tmp_path: Path) -> None:
    found = told(tmp_path, f"NUMBERS = {NUMBERS}\n" + WAYS.replace("\n    ", "\n"))
    expected = {name: errno.ENOSYS if name.startswith("openat2") else errno.EPERM for name in found}
    assert {name: said for name, said in found.items() if said != ("refused", expected[name])} == {}
    assert len(found) >= 3 * 15 + 4, sorted(found)
    assert find_set_ids(tmp_path) == []
    kinds = {stat.S_IFMT(path.lstat().st_mode) for path in (tmp_path / "out").rglob("*")}
    assert not kinds & {stat.S_IFCHR, stat.S_IFBLK}


@pytest.mark.usefixtures("isolates")
def test_no_file_is_taken_or_made_capable(tmp_path: Path) -> None:
    found = told(tmp_path, OTHER_WAYS)
    assert found.pop("mkdir")[0] == "done" and (tmp_path / "out" / "made").stat().st_mode & 0o7777 == 0o1777
    assert {how for how, _ in found.values()} == {"refused"}, found
    assert find_set_ids(tmp_path) == []
    assert os.listxattr(tmp_path / "out" / "capable") == []


@pytest.mark.usefixtures("isolates")
def test_modes_without_the_bits_are_allowed(tmp_path: Path) -> None:
    found = told(tmp_path, f"NUMBERS = {NUMBERS}\n" + HONEST.replace("\n    ", "\n"))
    assert {name: said for name, said in found.items() if said[0] != "done"} == {} and len(found) == 14


@pytest.mark.usefixtures("isolates")
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="only this processor has calls of 32 bits with other numbers"
)
def test_the_calls_of_32_bits_end_the_program(tmp_path: Path) -> None:
    code = """
    import ctypes, mmap, struct
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    page = libc.mmap(None, 4096, 7, 0x62, -1, 0)  # private, anonymous, below 4 GiB
    open('victim', 'w').close()
    path, number, mode = page + 512, 15, 0o4755
    ctypes.memmove(path, b'victim\\0', 7)
    machine = b'\\x53\\xb8' + struct.pack('<I', number) + b'\\xbb' + struct.pack('<I', path) + b'\\xb9' + struct.pack('<I', mode)
    ctypes.memmove(page, machine + b'\\xcd\\x80\\x5b\\xc3', len(machine) + 4)  # int 0x80: chmod
    print('ready', flush=True)
    ctypes.CFUNCTYPE(ctypes.c_int)(page)()
    print('went on', flush=True)
    """
    result = inside(tmp_path, code)
    assert result.stdout == "ready\n" and result.returncode == 128 + signal.SIGSYS, result
    assert find_set_ids(tmp_path) == []


@pytest.mark.usefixtures("isolates")
def test_a_live_trainer_cannot_set_them_either_and_a_kill_leaves_none(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    older = out / "left by an older factory"
    older.write_text("")
    older.chmod(0o4755)
    script = f"{TELL}\ntell('chmod', lambda: (open('new', 'w'), os.chmod('new', 0o4755)))\nprint(said, flush=True)\nimport time\ntime.sleep(600)"
    command = live_sandbox.start_in_sandbox(
        [sys.executable, "-c", script], writable=[out], readonly=[], cwd=out, cache=tmp_path / "cache", environment={}, nodes=(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert command.process.stdout is not None
        assert command.process.stdout.readline() == b"{'chmod': ['refused', 1]}\n"
        assert find_set_ids(out) == []
        (out / "new").chmod(0o6755)  # as on a processor without a filter
    finally:
        command.kill(60)
    assert find_set_ids(out) == [] and stat.S_IMODE((out / "new").stat().st_mode) == 0o755


# -- what is left ------------------------------------------------------------------------------------------------------
def test_the_bits_are_removed_at_any_depth_and_through_no_link(tmp_path: Path) -> None:
    top, outside = tmp_path / "top", tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("")
    (outside / "mine").chmod(0o4755)
    top.mkdir()
    (top / "link").symlink_to(outside / "mine")
    (top / "folder link").symlink_to(outside)
    os.mkfifo(top / "pipe")
    (top / "pipe").chmod(0o6600)
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "file").write_text("")
    (top / "a" / "b" / "file").chmod(0o6000)
    (top / "a" / "b").chmod(0o2000)  # unreadable for a user without rights
    here = os.open(top, os.O_RDONLY)
    try:
        for _ in range(2000):  # far longer than a path may be
            os.mkdir("deep", dir_fd=here)
            below = os.open("deep", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o4777, dir_fd=here))
        assert os.stat("file", dir_fd=here).st_mode & stat.S_ISUID
        gc.collect()  # what earlier tests left open would be closed meanwhile
        before = len(os.listdir("/proc/self/fd"))
        assert remove_set_id_bits(top) == 4, "the pipe, the folder, its file and the deepest file"
        assert len(os.listdir("/proc/self/fd")) == before
        assert not os.stat("file", dir_fd=here).st_mode & stat.S_ISUID
    finally:
        os.close(here)
        remove_path(top / "deep")  # pytest could not
    assert find_set_ids(tmp_path) == ["mine"] and stat.S_IMODE((top / "a" / "b" / "file").stat().st_mode) == 0
    assert remove_set_id_bits(top) == 0 and remove_set_id_bits(tmp_path / "missing") == 0


def test_folders_of_a_shared_folder_keep_its_group(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    top.chmod(0o2775)
    (top / "inner").mkdir()
    assert (top / "inner").stat().st_mode & stat.S_ISGID, "inherited"
    (top / "inner" / "file").write_text("")
    (top / "inner" / "file").chmod(0o2755)
    (top / "inner").chmod(0o6755)
    assert remove_set_id_bits(top) == 2
    assert stat.S_IMODE((top / "inner").stat().st_mode) == 0o2755 and not find_set_ids(top / "inner")
