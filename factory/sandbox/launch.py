"""The launcher, the first program inside a sandbox: it restricts itself with rlimits and Landlock, then executes the command in its place.

It is started by its file name with ``python -I -S``, so it can import only the standard library. With ``--describe`` it prints its restrictions.
"""

import ctypes
import json
import os
import resource
import struct
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
PR_SET_NO_NEW_PRIVS, PATH_BENEATH = 38, 1
# The rights of linux/landlock.h that change nothing: execute, read file and read directory. All others allow a change.
READ = (1 << 0) | (1 << 2) | (1 << 3)
WRITE_BY_ABI = {1: ((1 << 13) - 1) & ~READ, 2: ((1 << 14) - 1) & ~READ, 3: ((1 << 15) - 1) & ~READ}
libc = ctypes.CDLL(None, use_errno=True)


def read_landlock_abi() -> int:
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def forbid_writing_outside(folders: "list[str]") -> None:
    """Forbid writing outside ``folders`` with Landlock, if the kernel has it. It is a second barrier beside the read-only mounts."""
    abi = read_landlock_abi()
    if not abi:
        return
    write = WRITE_BY_ABI[min(abi, 3)]
    attributes = ctypes.create_string_buffer(struct.pack("<Q", write), 8)
    ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(8), ctypes.c_uint32(0))
    for folder in folders:
        opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("<Qi", write, opened), 12)
        if libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, ctypes.c_uint32(0)):
            raise OSError(ctypes.get_errno(), "landlock_add_rule")
        os.close(opened)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(RESTRICT_SELF, ruleset, ctypes.c_uint32(0)):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def list_writable_proc_entries() -> "list[str]":
    """Return the entries of /proc that are on a writable mount and belong to init or to no process."""
    paths = [f"/proc/{name}" for name in os.listdir("/proc") if name == "1" or not name.isdigit()]
    return [path for path in paths if not os.path.islink(path) and not os.statvfs(path).f_flag & os.ST_RDONLY]


def describe_restrictions() -> "dict[str, object]":
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    return {
        "capabilities": "none" if int(fields["CapEff"], 16) == 0 else fields["CapEff"],
        "no_new_privileges": fields["NoNewPrivs"].strip() == "1",
        "seccomp": fields["Seccomp"].strip() == "2",
        "landlock": read_landlock_abi(),
    }


def main() -> None:
    if sys.argv[1] == "--describe":
        print(json.dumps(describe_restrictions()))
        return
    rules = json.loads(sys.argv[1])
    for name, value in rules["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    if found := list_writable_proc_entries():
        print(f"not started: the sandbox could write to {', '.join(found)}", file=sys.stderr)
        os._exit(126)
    forbid_writing_outside(rules["writable"])
    os.write(rules["here"], b".")
    if os.read(rules["go"], 1) != b".":  # the factory was killed before it had set up the control group and the watch
        os._exit(126)
    os.closerange(3, 4096)  # closes bubblewrap's descriptors, so that the command cannot write to its status pipe
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"{sys.argv[2]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


main()
