"""A process that has imported torch, and forks for each command. Itself it runs nothing, and imports nothing of this repository.

The program that stands for a command (``inside.py``) connects to it and names the command. Of one in a sandbox, a fork enters that sandbox's
namespaces, takes over its limits, gives up every capability and puts the sandbox's seccomp filter in force; its orphan, a child of the sandbox's
init by then, runs the command in a fork of its own and tells how it ended. Where it cannot enter, it says so, and ``inside.py`` becomes the command.

    sandbox's init ── launcher → inside.py           waits for the exit code
                 └─── fork (joined, waits) ── fork   is the command

Outside of a sandbox the fork that waits is the server's child, passes signals on, and ends the command when who stands for it was killed.
"""

from __future__ import annotations

import _imp
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.machinery
import importlib.util
import json
import marshal
import os
import random
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

NAMESPACES = (
    "cgroup",
    "ipc",
    "uts",
    "net",
    "pid",
    "mnt",
    "user",
)  # the user's last: then the others can no longer be entered
NS_GET_PARENT = 0xB702
SET_DUMPABLE, SET_SECCOMP, FILTER, SET_NO_NEW_PRIVILEGES = 4, 22, 2, 38
CAPABILITIES_3 = 0x20080522
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

CHECKOUT = Path(__file__).parents[3]
libc = ctypes.CDLL(None, use_errno=True)
Request = tuple[list[str], str, dict[str, str]]  # words, folder, environment


def serve(listening: socket.socket, seccomp: bytes) -> NoReturn:
    """Until the process has ended that its standard input is a descriptor of."""
    while True:
        ready, _, _ = select.select([listening, 0], [], [], 5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if 0 in ready:
            os._exit(0)
        if not ready:
            continue
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            try:
                _answer(connection, seccomp)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        connection.close()


def _answer(connection: socket.socket, seccomp: bytes) -> None:
    head, outputs, _, _ = socket.recv_fds(connection, 4, 2)
    (size,) = struct.unpack("I", head)
    request: Request = json.loads(connection.recv(size, socket.MSG_WAITALL))
    process, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    limits = {number: resource.prlimit(process, number) for number in LIMITS}
    sandboxed = not os.path.samefile(f"/proc/{process}/ns/mnt", "/proc/self/ns/mnt")
    if sandboxed:
        try:
            _join(process)
        except OSError:
            connection.sendall(b"-")
            return
        if entered := os.fork():
            os.waitpid(entered, 0)  # the sandbox's init ends only once someone has waited for every process in it
            return
        if os.fork():  # whose child is a child of the sandbox's init once this one has ended
            os._exit(0)
    os.setsid()
    for number, value in limits.items():
        resource.setrlimit(number, value)
    if sandboxed:
        _restrict(seccomp)
    _run_and_tell(connection, outputs, request)


def _join(process: int) -> None:
    opened = [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in NAMESPACES]
    if (
        os.geteuid()
    ):  # not root outside: only within the outer of the sandbox's two user namespaces can it enter the rest
        opened.insert(0, fcntl.ioctl(opened[-1], NS_GET_PARENT))
    for descriptor in opened:
        _called(libc.setns(descriptor, 0))
        os.close(descriptor)


def _restrict(seccomp: bytes) -> None:
    """What bubblewrap and the launcher do to the command, in a process that is there already."""
    _called(libc.capset(struct.pack("Ii", CAPABILITIES_3, 0), struct.pack("6I", *[0] * 6)))
    _called(libc.prctl(SET_DUMPABLE, 1, 0, 0, 0))  # entering took it away: /proc/self would be another user's
    _called(libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    if seccomp:
        held = ctypes.create_string_buffer(seccomp, len(seccomp))
        program = struct.pack("HP", len(seccomp) // 8, ctypes.addressof(held))
        _called(libc.prctl(SET_SECCOMP, FILTER, program, 0, 0))


def _called(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "a sandbox could not be entered")


def _run_and_tell(connection: socket.socket, outputs: Sequence[int], request: Request) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if not child:
        connection.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        with open(os.devnull) as nothing:
            for number, descriptor in enumerate([nothing.fileno(), *outputs]):
                os.dup2(descriptor, number)
        os.closerange(3, 4096)
        run(*request)
    terminate = lambda *_: os.kill(child, signal.SIGTERM)  # not waited for yet, so it is there
    signal.signal(signal.SIGTERM, terminate)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for descriptor in outputs:
        os.close(descriptor)
    connection.sendall(b"+")
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([ended, connection], [], [])[0]):
        if connection in ready:
            os.kill(child, sent[0] if (sent := connection.recv(1)) else signal.SIGKILL)
            if not sent:
                break
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def compile_once() -> None:
    """A file of a worktree that is one of this checkout's, byte for byte, is not compiled again by every fork: a worktree has no byte-code."""
    known: dict[bytes, bytes] = {}
    for top in ("kernels", "models", "trainer", "factory"):
        for path in (CHECKOUT / top).rglob("*.py"):
            with contextlib.suppress(OSError):
                made, seen = Path(importlib.util.cache_from_source(str(path))).read_bytes(), path.stat()
                if struct.unpack("<III", made[4:16]) == (0, int(seen.st_mtime), seen.st_size):
                    known[path.read_bytes()] = made[16:]
    loader, whole = importlib.machinery.SourceFileLoader, importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **others: Any) -> Any:
        if (made := known.get(data)) is None:
            return whole(self, data, path, **others)
        _imp._fix_co_filename(code := marshal.loads(made), path)
        return code

    loader.source_to_code = source_to_code  # type: ignore[method-assign]


def run(words: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    """Be ``python words``, to the end of this process."""
    code = 1
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
        if "PYTHONUNBUFFERED" in environment:
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        random.seed()
        sys.modules["numpy"].random.seed()
        if words[0] == "-I":
            words = words[1:]
        else:
            named = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
            where = {"-m": folder, "-c": ""}.get(words[0], os.path.dirname(words[0]))
            sys.path[:] = [where, *named, *sys.path]
        main: Any = types.ModuleType("__main__")
        main.__builtins__ = __builtins__
        sys.modules["__main__"] = main
        if words[0] == "-m":
            sys.argv[:] = ["-m", *words[2:]]
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            sys.argv[:] = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv[:] = words
            main.__file__ = words[0]
            with open(words[0], "rb") as file:
                exec(compile(file.read(), words[0], "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    del sys.path[0]
    for imported in sys.argv[3:]:
        importlib.import_module(imported)
    compile_once()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])), bytes.fromhex(sys.argv[2]))
