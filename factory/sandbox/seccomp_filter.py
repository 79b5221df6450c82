"""Assembles the sandbox's seccomp filter. It denies system calls that training never needs and that escapes often use.

It is a classic BPF program over ``struct seccomp_data`` (seccomp(2)), assembled without a library. A denied call returns EPERM. Only clone3 and
openat2 return ENOSYS, because their arguments are in memory: programs then use clone and openat, whose arguments the filter can read.

No call can give a file the bit of setuid or setgid: the file would be the factory user's, so every user of the machine could run it as this user.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

# Numbers from the kernel's asm/unistd.h: (x86_64, aarch64). Numbers from 424 on are the same on all processors.
CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162),
    "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # The pages of these files belong to no process's memory, so the watch would not count them.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "pidfd_getfd": (438, 438), "mount_setattr": (442, 442),
}  # fmt: skip
CLONE, CLONE3, OPENAT2, SOCKET = (56, 220), (435, 435), (437, 437), (41, 198)
# Calls that set the mode of a file: (x86_64, aarch64), and which argument is the mode. aarch64 lacks the older calls.
MODES = {
    "chmod": (90, None, 1), "fchmod": (91, 52, 1), "fchmodat": (268, 53, 2), "fchmodat2": (452, 452, 2),
    "creat": (85, None, 1), "mknod": (133, None, 1), "mknodat": (259, 33, 2),
}  # fmt: skip
OPENS = {"open": (2, None, 2), "openat": (257, 56, 3)}  # the argument before the mode says whether the mode counts
NEW_FILE = 0o100 | 0o20000000  # O_CREAT and O_TMPFILE's own bit (asm-generic/fcntl.h)
SET_ID = 0o6000  # S_ISUID and S_ISGID
DEVICE = 0o020000  # set in S_IFCHR and S_IFBLK, and in no other type of file that mknod makes
NEW_NAMESPACES = 0x7E020000 | 0x00000080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET} and NEWTIME
# AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK stay in the sandbox's own network namespace. AF_VSOCK would reach the hypervisor.
FAMILIES = (1, 2, 10, 16)
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

LOAD, JUMP_EQ, JUMP_GE, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; of an argument, the lower half comes first


@functools.cache
def assemble_filter(machine: str = platform.machine()) -> bytes:
    """Return the assembled filter; b'' for a processor that ``CALLS`` does not cover."""
    if machine not in ARCHITECTURES:
        return b""
    column, audit = ARCHITECTURES[machine]
    code: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQ, 1, 0, audit),
        (RETURN, 0, 0, KILL),  # kills 32-bit calls, which have other numbers
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        code += [(JUMP_GE, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]  # kills calls of the x32 table
    for numbers in CALLS.values():
        code += [(JUMP_EQ, 0, 1, numbers[column]), (RETURN, 0, 0, DENY | errno.EPERM)]
    for numbers in (CLONE3, OPENAT2):
        code += [(JUMP_EQ, 0, 1, numbers[column]), (RETURN, 0, 0, DENY | errno.ENOSYS)]
    code += _deny_bits(CLONE[column], 0, NEW_NAMESPACES)
    for name, (x86_64, aarch64, mode) in MODES.items():
        code += _deny_bits((x86_64, aarch64)[column], mode, SET_ID | (DEVICE if name.startswith("mknod") else 0))
    for x86_64, aarch64, mode in OPENS.values():
        code += _deny_bits((x86_64, aarch64)[column], mode, SET_ID, unless_lacks=(mode - 1, NEW_FILE))
    code += [(JUMP_EQ, 0, 2 + len(FAMILIES), SOCKET[column]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    code += [(JUMP_EQ, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
    code += [(RETURN, 0, 0, DENY | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def _deny_bits(
    call: int | None, argument: int, bits: int, unless_lacks: tuple[int, int] | None = None
) -> list[tuple[int, int, int, int]]:
    """Return the instructions that deny ``call`` if ``argument`` has one of ``bits``, and else allow it; none for a call that does not exist.

    ``unless_lacks``: another argument, which must have one of other bits too.
    """
    if call is None:
        return []
    tests = [(argument, bits)] if unless_lacks is None else [unless_lacks, (argument, bits)]
    code = [(JUMP_EQ, 0, 2 * len(tests) + 2, call)]
    for left, (number, wanted) in zip(reversed(range(len(tests))), tests, strict=True):
        code += [(LOAD, 0, 0, FIRST_ARGUMENT + 8 * number), (JUMP_SET, 0, 2 * left + 1, wanted)]
    return [*code, (RETURN, 0, 0, DENY | errno.EPERM), (RETURN, 0, 0, ALLOW)]
