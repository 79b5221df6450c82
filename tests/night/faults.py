"""The faults of a night. Each comes from outside the factory, as from a machine, a disk or a person."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.night.daemon import Night

HELD_S = 20.0  # how long a lock is held or a disk stays full


@dataclass(frozen=True)
class Fault:
    name: str
    act: Callable[[Night], str]  # causes the fault, and returns a short description
    needs_own_disk: bool = False
    by_hand: str = ""  # the command that the daemon asks for, if it cannot continue by itself
    always_by_hand: str = ""  # a command that a person always runs after this fault


def machine_dies(night: Night) -> str:
    killed = len(night.tree())
    night.kill()
    night.start()
    return f"{killed} processes killed"


def daemon_dies(night: Night) -> str:
    night.kill(whole_tree=False)
    night.start()
    return "its children are left"


def trainer_dies(night: Night) -> str:
    """Kill the trainer like an OOM killer."""
    if not (found := night.wait_for_trainer()):
        return "none trained"
    for process in found:
        _signal(process, signal.SIGKILL)
    return f"{len(found)} processes killed"


def trainer_hangs(night: Night) -> str:
    """Suspend the trainer for good: only a watchdog can end it."""
    if not (found := night.wait_for_trainer()):
        return "none trained"
    for process in found:
        _signal(process, signal.SIGSTOP)
    return f"{len(found)} processes stopped"


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def daemon_is_stopped(night: Night) -> str:
    assert night.daemon is not None
    started = night.tree()
    night.daemon.send_signal(night.rng.choice([signal.SIGTERM, signal.SIGINT]))
    night.daemon.wait()
    left = psutil.wait_procs(started, timeout=10)[1]
    night.start()
    return f"{len(left)} processes left" if left else "nothing left"


def ledger_is_locked(night: Night) -> str:
    with sqlite3.connect(night.workspace.root / "ledger.db", timeout=60, isolation_level=None) as db:
        db.execute("BEGIN IMMEDIATE")
        time.sleep(HELD_S)
        db.execute("ROLLBACK")
    db.close()
    return f"for {HELD_S:.0f} s"


def disk_is_full(night: Night) -> str:
    filler = night.workspace.root.parent / "filler"
    with open(filler, "wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError:
            size = filler.stat().st_size
    night.watch_until(time.monotonic() + HELD_S)
    filler.unlink()
    return f"{size >> 20} MiB, for {HELD_S:.0f} s"


def _flip(path: Path, place: float) -> None:
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        at = int(path.stat().st_size * place)
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def newest_checkpoint_is_damaged(night: Night) -> str:
    found = sorted(
        night.workspace.root.glob("segments/*/checkpoints/*/*.safetensors"), key=lambda path: path.stat().st_mtime
    )
    if not found:
        return "there was none"
    _flip(found[-1], night.rng.uniform(0.2, 0.9))
    return "one bit"


def token_shard_is_gone(night: Night) -> str:
    found = sorted(path for path in night.workspace.shards.rglob("tokens.bin"))
    found[night.rng.randrange(len(found))].unlink()
    return "its tokens"


def token_shard_is_damaged(night: Night) -> str:
    found = sorted(path for path in night.workspace.shards.rglob("tokens.bin"))
    _flip(found[night.rng.randrange(len(found))], night.rng.uniform(0.2, 0.9))
    return "one bit"


def mlflow_is_damaged(night: Night) -> str:
    with open(night.workspace.root / "mlflow.db", "r+b") as file:
        file.write(night.rng.randbytes(4096))
    return "its first page"


def ledger_is_damaged(night: Night) -> str:
    """Damage the ledger. The daemon prints the remedy, and a person runs it."""
    night.kill()
    for suffix in ("-wal", "-shm"):
        Path(f"{night.workspace.root / 'ledger.db'}{suffix}").unlink(missing_ok=True)
    with open(night.workspace.root / "ledger.db", "r+b") as file:
        file.write(night.rng.randbytes(8192))
    place = night.out.stat().st_size
    night.start()
    assert night.daemon is not None
    code = night.daemon.wait()
    said = night.said_since(place)
    assert code and "factory restore" in said and "Traceback" not in said, said[-2000:]
    restored = night.command("restore")
    assert restored.returncode == 0, restored.stdout + restored.stderr
    night.start()
    return "its first pages; restored"


def strange_files_arrive(night: Night) -> str:
    inbox = night.workspace.inbox
    stamp = time.time_ns()
    with open(os.fsencode(inbox) + f"/not-utf8-{stamp}-".encode() + b"\xff\xfe.jsonl", "wb") as file:
        file.write(b'{"text": "def odd(name):\\n    return name\\n"}\n')
    (inbox / f"cut-{stamp}.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00cut short")
    (inbox / f"folder-{stamp}").mkdir()
    (inbox / f"link-{stamp}.jsonl").symlink_to("/etc/hostname")
    (inbox / f"empty-{stamp}.jsonl").touch()
    return "five"


def writer_pauses(night: Night) -> str:
    """Write a file into the inbox, with a pause within a row that is longer than the daemon waits for a file to settle."""
    name = f"slow-{len(night.dropped)}"
    ids = night.drop(name)
    whole = night.workspace.inbox / f"{name}.jsonl"
    try:
        text = whole.read_bytes()
        whole.unlink()
    except FileNotFoundError:  # the daemon was faster
        return "too late"
    slow = night.workspace.inbox / f"{name}-again.jsonl"
    night.dropped[slow.name] = ids
    del night.dropped[whole.name]
    with open(slow, "wb") as file:
        for part in (text[: len(text) // 2 + 17], text[len(text) // 2 + 17 :]):
            file.write(part)
            file.flush()
            time.sleep(6.0)
    return "6 s, in a row"


def git_dies_with_its_lock(night: Night) -> str:
    repository = night.workspace.repository
    for name in ("index.lock", "HEAD.lock"):
        (repository / ".git" / name).touch()
    return "two lock files"


def paused(night: Night) -> str:
    assert night.command("pause").returncode == 0
    night.watch_until(time.monotonic() + HELD_S)
    assert night.command("resume").returncode == 0
    return f"for {HELD_S:.0f} s"


FAULTS = (
    Fault("the machine dies", machine_dies),
    Fault("the daemon dies", daemon_dies),
    Fault("the trainer dies", trainer_dies),
    Fault("the trainer hangs", trainer_hangs),
    Fault("the daemon is stopped", daemon_is_stopped),
    Fault("the ledger is locked", ledger_is_locked),
    Fault("the disk is full", disk_is_full, needs_own_disk=True),
    Fault("the newest checkpoint is damaged", newest_checkpoint_is_damaged),
    Fault("a token shard is gone", token_shard_is_gone),
    Fault("a token shard is damaged", token_shard_is_damaged),
    Fault("MLflow's database is damaged", mlflow_is_damaged),
    Fault("the ledger is damaged", ledger_is_damaged, always_by_hand="factory restore"),
    Fault("strange files arrive", strange_files_arrive),
    Fault("a writer pauses", writer_pauses),
    Fault("git dies with its locks", git_dies_with_its_lock),
    Fault("paused and resumed", paused, always_by_hand="factory pause, resume"),
)
