"""Limits the processes and the memory of live code, so that a fork bomb or a growing list ends its own command and not the machine.

The limits are in proportion to the machine and far above what training needs. Control groups keep them where this process may make some: the kernel
then refuses a task, or kills, at once. A watch outside the sandbox ends the command when that happens. Elsewhere the watch itself measures, at least
once a second, and rlimits stop one process. In every case the kernel's OOM killer takes a process of the sandbox before one of the factory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from factory.sandbox.cgroup import ControlGroups, read_machine_memory
from factory.sandbox.usage import measure_memory, measure_memory_files, read_process_tree
from kernels.contract.message import Message
from trainer.contract import stopping

# A rank has a thread for each core, up to 32 compile workers with a few threads each, and some threads of its libraries.
TASKS, TASKS_PER_CORE = 4096, 256
SHARE = 0.9  # of the machine's memory
OOM_SCORE = 500  # of 1000: more than any share of memory below one half earns a process outside
WATCH_SECONDS, LONGEST_PAUSE, WATCH_COST = (
    0.1,
    1.0,
    0.02,
)  # the watch uses at most this share of a core, unless it would pause too long


@dataclass(frozen=True)
class LiveLimits:
    """The most processes and threads, and the most bytes of memory with the files in ``/tmp`` and ``/dev/shm``, of one command."""

    tasks: int
    memory: int

    @classmethod
    def of_this_machine(cls) -> LiveLimits:
        """Return the limits for this machine. Tasks are at most half of what the kernel has numbers for."""
        numbers = int(Path("/proc/sys/kernel/pid_max").read_text())
        return cls(
            min(TASKS + TASKS_PER_CORE * (os.cpu_count() or 1), numbers // 2), int(SHARE * read_machine_memory())
        )

    def make_rlimits(self, gpu: bool) -> dict[str, int]:
        """Return the rlimits that end one process which alone exceeds the limits. A driver of a GPU maps far more memory than it uses."""
        memory = {} if gpu else {"RLIMIT_DATA": int(self.memory / SHARE)}
        return {"RLIMIT_NPROC": self.tasks, **memory}


class LimitWatch:
    """Watches a running sandbox in a thread, and kills it when it exceeds ``limits``. ``exceeded`` then says so; else it is ''.

    The message is a predicate: it follows 'the trainer of segment 3'. The watch ends with the sandbox; call ``join`` then.
    """

    def __init__(self, init: int, groups: ControlGroups, limits: LiveLimits) -> None:
        """``init``: the process number of the sandbox's init, which has not ended."""
        self.exceeded = ""
        self.init, self.groups, self.limits = init, groups, limits
        self._handle = os.pidfd_open(init)
        self._thread = threading.Thread(target=self._watch, name="sandbox limits", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the watch has taken its last look."""
        self._thread.join()

    def _watch(self) -> None:
        pause = WATCH_SECONDS
        if not (self.groups.limits_tasks and self.groups.limits_memory):
            with contextlib.suppress(
                OSError
            ):  # only root may, whom no rlimit of processes binds: a bomb would starve the watch
                os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        try:
            while not select.select([self._handle], [], [], pause)[0]:
                began = time.thread_time()
                self.exceeded = self._find_excess()
                if self.exceeded:
                    signal.pidfd_send_signal(
                        self._handle, signal.SIGKILL
                    )  # the kernel kills the whole namespace with it
                    return
                pause = min(max(WATCH_SECONDS, (time.thread_time() - began) / WATCH_COST), LONGEST_PAUSE)
            self.exceeded = self._find_refusal()
        except ProcessLookupError:
            pass  # it ended by itself meanwhile
        finally:
            os.close(self._handle)

    def _find_refusal(self) -> str:
        """Return what the kernel refused or did because of the control groups' limits."""
        if self.groups.count_denied_tasks():
            return self._say_tasks(self.limits.tasks)
        return self._say_memory(self.limits.memory) if self.groups.count_oom_kills() else ""

    def _find_excess(self) -> str:
        if said := self._find_refusal():
            return said
        if self.groups.limits_tasks and self.groups.limits_memory:
            return ""
        tree = read_process_tree(self.init, self.limits.tasks)
        if tree.tasks > self.limits.tasks:
            return self._say_tasks(tree.tasks)
        files = measure_memory_files(self.init)
        if tree.memory + files > self.limits.memory:  # pages that processes share counted several times
            used = measure_memory(tree.processes) + files
            return self._say_memory(used) if used > self.limits.memory else ""
        return ""

    def _say_tasks(self, found: int) -> Message:
        return Message(
            "sandbox.live_tasks",
            "needed more than {limit} processes and threads, the limit on this machine, and the factory killed it. A program that starts processes "
            "without end does this",
            limit=self.limits.tasks, found=found,
        )  # fmt: skip

    def _say_memory(self, used: int) -> Message:
        return Message(
            "sandbox.live_memory",
            "needed more than {limit:.1f} GiB of memory ({share:.0%} of what this machine has), and the factory killed it. Train with fewer "
            "sequences in a micro-batch, a smaller model or fewer ranks, or look for a leak in the live code",
            limit=self.limits.memory / 2**30, share=SHARE, used=used,
        )  # fmt: skip


def offer_to_oom_killer(init: int) -> None:
    """Make the kernel's OOM killer prefer the processes of a sandbox, which has not started its command yet."""
    for process in (init, *stopping.list_child_processes(init)):
        with contextlib.suppress(OSError):  # it ended, or its files belong to another user
            Path(f"/proc/{process}/oom_score_adj").write_text(str(OOM_SCORE))
