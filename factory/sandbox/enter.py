"""Makes a sandbox of the kernel's namespaces, and runs one command in it (``namespaces``).

Run by file name with ``python -I -S`` and the number of an open file that describes the sandbox in JSON; it may import only the standard
library. Three processes, as bubblewrap has them:

    outside  makes the namespaces, writes its child's number and at the end the command's exit code to the status pipe
    init     process 1 of the new pid namespace: makes the file system, gives up all rights, reaps orphans; when it dies, all die
    command  the launcher, which becomes the command

Each dies with the one before. Nothing of the old file system stays reachable: what may be seen is taken from it as detached mounts,
before ``pivot_root`` leaves it. Needs Linux 5.12.
Sources: unshare(2), user_namespaces(7), pivot_root(2), mount_setattr(2), capabilities(7), seccomp(2).
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys

# CLONE_NEWUSER, NEWNS, NEWPID, NEWIPC, NEWNET, NEWUTS, NEWCGROUP
NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000 | 0x40000000 | 0x04000000 | 0x02000000
NESTED = ("user", "mnt", "pid", "ipc", "net", "uts", "cgroup", "time")
# The same on every architecture.
OPEN_TREE, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT, MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
READONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
HERE, EMPTY_PATH, RECURSIVE, CLOEXEC = -100, 0x1000, 0x8000, 1
PRIVATE, DETACH = 1 << 18, 2
PDEATHSIG, DUMPABLE, SECCOMP, BOUNDING_DROP, NO_NEW_PRIVILEGES, AMBIENT = 1, 4, 22, 24, 38, 47
DEVICES = ("null", "zero", "full", "random", "urandom")
libc = ctypes.CDLL(None, use_errno=True)


def call(what: str, *arguments: object) -> int:
    """A function of the C library, or a system call by number; raises OSError naming it."""
    number = {"open_tree": OPEN_TREE, "move_mount": MOVE_MOUNT, "fsopen": FSOPEN, "fsconfig": FSCONFIG}
    number |= {"fsmount": FSMOUNT, "mount_setattr": MOUNT_SETATTR}
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    done = libc.syscall(number[what], *words) if what in number else getattr(libc, what)(*words)
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return done


# -- mounts ---------------------------------------------------------------------------------------------------------------
def set_attributes(mount: int, path: str, flags: int, attributes: int, propagation: int = 0) -> None:
    wanted = struct.pack("<QQQQ", attributes, 0, propagation, 0)
    call("mount_setattr", mount, path.encode(), flags, wanted, len(wanted))


def taken(path: str, attributes: int) -> int:
    """A detached mount of ``path`` and of what is mounted below it."""
    try:
        mount = call("open_tree", HERE, os.fsencode(path), 1 | os.O_CLOEXEC | RECURSIVE)
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from None
    set_attributes(mount, "", EMPTY_PATH | RECURSIVE, attributes)
    return mount


def made(kind: str, attributes: int, **options: str) -> int:
    """A new file system, detached."""
    context = call("fsopen", kind.encode(), CLOEXEC)
    for key, value in options.items():
        call("fsconfig", context, 1, key.encode(), value.encode(), 0)
    call("fsconfig", context, 6, None, None, 0)
    mount = call("fsmount", context, CLOEXEC, attributes)
    os.close(context)
    return mount


def attach(mount: int, path: str) -> None:
    if not os.path.exists(path):  # a path in another mount exists already
        if os.path.isdir(mount):
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))
    call("move_mount", mount, b"", HERE, os.fsencode(path), 4)
    os.close(mount)


def make_file_system(spec: dict) -> None:
    """Leave the old root for the one that ``spec`` (a ``View`` and more) describes."""
    set_attributes(HERE, "/", RECURSIVE, 0, PRIVATE)
    inside = NOSUID | NODEV
    small = {"size": str(spec["tmp"]), "mode": "1777"}
    mounts = [("/proc", made("proc", inside | NOEXEC)), ("/dev", made("tmpfs", inside, size="1m", mode="0755"))]
    mounts += [(f"/dev/{name}", taken(f"/dev/{name}", NOSUID | NOEXEC)) for name in DEVICES]
    mounts += [(path, taken(path, NOSUID | NOEXEC)) for path in spec["devices"]]
    mounts += [(path, made("tmpfs", inside, **small)) for path in ("/dev/shm", "/tmp")]
    mounts += [(path, taken(path, inside | READONLY)) for path in spec["system"]]
    source, target = spec["launcher"]
    mounts.append((target, taken(source, inside | READONLY)))
    mounts += [(place, taken(path, inside | READONLY)) for path, place in spec["given"]]
    mounts += [(path, taken(path, inside)) for path in spec["writable"]]

    attach(made("tmpfs", inside, size="1m", mode="0755"), "/tmp")
    os.chdir("/tmp")
    if libc.syscall(spec["pivot_root"], b".", b"."):  # the old root is now on top of the new one
        raise OSError(ctypes.get_errno(), "pivot_root")
    call("umount2", b".", DETACH)
    os.chdir("/")

    for path, target in spec["links"].items():
        os.symlink(target, path)
    for path, mount in mounts:
        attach(mount, path)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    os.symlink("/proc/self/fd", "/dev/fd")
    os.makedirs("/etc", exist_ok=True)
    for path, text in spec["etc"].items():
        with open(path, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(path, 0o444)
    for kind in NESTED:
        with open(f"/proc/sys/user/max_{kind}_namespaces", "w", encoding="ascii") as limit:
            limit.write("0")
    for path in ("/proc", "/dev", "/"):
        set_attributes(HERE, path, 0, READONLY)


# -- rights ---------------------------------------------------------------------------------------------------------------
def become(user: int, outside: "tuple[int, int]") -> None:
    """Be ``user`` in the new user namespace; outside, the user stays the same."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {outside[0]} 1"),
        ("gid_map", f"{user} {outside[1]} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def give_up_rights() -> None:
    """Drop all capabilities, now and for programs that are run later; no process may inspect this one."""
    number = 0
    while libc.prctl(BOUNDING_DROP, number, 0, 0, 0) == 0:
        number += 1
    call("prctl", AMBIENT, 4, 0, 0, 0)
    call("capset", struct.pack("<II", 0x20080522, 0), bytes(24))
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("prctl", DUMPABLE, 0, 0, 0, 0)


def filter_calls(program: bytes) -> None:
    held = ctypes.create_string_buffer(program, len(program))
    call("prctl", SECCOMP, 2, struct.pack("@HP", len(program) // 8, ctypes.addressof(held)), 0, 0)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


# -- the three processes --------------------------------------------------------------------------------------------------
def read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def init(spec: dict, program: bytes, go: int, ready: int) -> int:
    """The command's exit code. ``go``: reads "." once this process's number is written; ``ready``: gets "." when the command begins."""
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.read(go, 1) != b".":  # the pipe's end: the parent is dead
        return 1
    os.setsid()
    socket.sethostname(spec["hostname"])
    loopback_up()
    make_file_system(spec)
    os.chdir(spec["cwd"])
    give_up_rights()
    filter_calls(program)
    command = os.fork()
    if command == 0:
        os.execve(spec["command"][0], spec["command"], spec["environment"])
    os.write(ready, b".")
    held = spec["held"] or 2
    os.closerange(3, held)
    os.closerange(held + 1, 4096)
    while True:
        ended, status = os.wait()
        if ended == command:
            return exit_code(status)


def exit_code(status: int) -> int:
    """128 + n after signal n, as a shell has it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    spec = json.loads(read_all(int(sys.argv[1])))
    program = read_all(spec["filter"])
    status = spec["status"]
    os.set_inheritable(status, False)
    outside = os.geteuid(), os.getegid()
    call("unshare", NAMESPACES)
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != spec["parent"]:
        return 1
    become(spec["user"], outside)
    go_read, go = os.pipe()
    ready_read, ready = os.pipe()
    child = os.fork()
    if child == 0:
        for descriptor in (status, go, ready_read):
            os.close(descriptor)
        os._exit(guarded(init, spec, program, go_read, ready))
    for descriptor in (go_read, ready):
        os.close(descriptor)
    os.write(status, b'{"child-pid": %d}\n' % child)
    os.write(go, b".")
    give_up_rights()
    began = os.read(ready_read, 1) == b"."
    code = exit_code(os.waitpid(child, 0)[1])
    if began:
        os.write(status, b'{"exit-code": %d}\n' % code)
    return code


def guarded(function: object, *arguments: object) -> int:
    try:
        return function(*arguments)  # type: ignore[operator]
    except Exception as error:
        os.write(2, f"{getattr(error, 'strerror', '') or error}\n".encode(errors="replace"))
        return 1


os._exit(guarded(main))
