"""Builds the shim, arms it for a run, and reads its log."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).with_name("preload")
MODES = ("record", "kill before", "kill after", "tear", "EIO", "ENOSPC", "EIO for good", "ENOSPC for good", "hold")
ERRORS = MODES[4:8]
# The kinds of effects that the shim logs. Another kind in a log is an error.
WRITES = frozenset({"write", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range"})
NAMES = frozenset({"create", "rename", "unlink", "link", "symlink", "mkdir", "rmdir"})
SYNCS = frozenset({"fsync", "fdatasync"})
SPAWN = "spawn"  # the start of a program; its injected error is EAGAIN
FREE = frozenset({"unlink", "rmdir", "rename", SPAWN})  # effects that need no space: a full disk does not stop them
KINDS = WRITES | NAMES | SYNCS | {"truncate", SPAWN}
SEGMENT = re.compile(r"(?<=/segments/#-)\w+")  # the same code writes each kind of segment
DATABASE = re.compile(r"\.db(-wal|-journal)?$")


@dataclass(frozen=True)
class Effect:
    """An effect: a line of the log."""

    number: int
    kind: str
    error: int  # 0, or minus errno; -ECANCELED: the process was killed before it
    size: int  # bytes asked for
    inode: int
    folder: int  # inode of the folder that holds ``path``
    other_folder: int
    path: str
    other: str  # the new name of a rename, the old name of a link, the target of a symlink
    program: str

    def place(self, root: Path) -> str:
        """Return its path without parts that differ between runs: ``plant/segments/#-trunk/checkpoints/step-#/state.json``."""
        path = self.other if self.kind == "rename" else self.path
        return place_of(str(Path(path).relative_to(root)) if path != str(root) else ".")


def places(effects: Iterable[Effect], root: Path) -> dict[int, str]:
    """Return the place of each effect by its number: kind, path and program.

    All transactions are written to the same files. In a database the place therefore also has the program's effect before.
    """
    found, before = {}, dict[str, str]()
    for effect in effects:
        told = f"{effect.kind} {SEGMENT.sub('*', effect.place(root))}"
        found[effect.number] = f"{told} ({effect.program})"
        if DATABASE.search(effect.path):
            found[effect.number] += f", after {before.get(effect.program, 'its start')}"
        else:
            before[effect.program] = told
    return found


def place_of(path: str) -> str:
    """
    >>> place_of("plant/shards/.writing-1234/tokens.bin")
    'plant/shards/.writing-#/tokens.bin'
    """
    path = re.sub(r"^(plant/worktrees/[^/]+/)[^.].*", r"\1*", path)
    path = re.sub(r"(/\.removed-\d+/).+", r"\1*", path)
    path = re.sub(r"objects/[0-9a-f]{2}(?=/|$)", "objects/#", path)
    path = re.sub(r"(tmp_obj_|\.artifact\.uploading\.)\w+", r"\1#", path)
    path = re.sub(r"\b[0-9a-f]{12,64}(?=[^a-z0-9]|$)|(?<=[-/.:])[0-9a-f]{12,64}(?=[-/.:]|$)", "#", path)
    return re.sub(r"\d+", "#", path)


@functools.cache
def built() -> Path:
    """Return the shim as a library, built once with this machine's C compiler."""
    sources = [HERE / "shim.c", HERE / "effects.h"]
    name = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"factory-chaos-{name}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / "shim.so"
            words = [
                "cc",
                "-shared",
                "-fPIC",
                "-O1",
                "-Wall",
                "-Werror",
                "-o",
                str(made),
                str(sources[0]),
                "-ldl",
                "-lpthread",
            ]
            subprocess.run(words, check=True)
            made.rename(target)
    return target


def environment(control: Path) -> dict[str, str]:
    return {"LD_PRELOAD": str(built()), "LD_SHIM_CONTROL": str(control)}


class Control:
    """The control file of a tree of processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"\0" * (1 << 13))

    def arm(self, root: Path, log: Path, mode: str = "record", target: int = 0, store: Path | None = None) -> None:
        """Start to count effects below ``root``. ``store``: a folder for the contents of flushed files."""
        log.unlink(missing_ok=True)
        words = [str(self.path), str(root), str(log), str(store or "")]
        library = ctypes.CDLL(str(built()))
        library.shim_arm(*(w.encode() for w in words), ctypes.c_long(MODES.index(mode)), ctypes.c_long(target))

    @property
    def held(self) -> int:
        """The number of the effect before which a process waits; 0: no process waits."""
        *_, held, released = self._read()
        return held if held > released else 0

    def release(self, number: int) -> None:
        with open(self.path, "r+b") as file:
            file.seek(7 * 8)
            file.write(struct.pack("<q", number))

    def disarm(self) -> None:
        with open(self.path, "r+b") as file:
            file.write(struct.pack("<q", 0))

    def _read(self) -> tuple[int, ...]:
        return struct.unpack("<8q", self.path.read_bytes()[:64])

    @property
    def counted(self) -> int:
        return self._read()[3]

    @property
    def fired(self) -> bool:
        return bool(self._read()[4])

    @property
    def dead(self) -> bool:
        return bool(self._read()[5])


def read_log(path: Path, opened: bool = False) -> list[Effect]:
    """Return the effects in order. With ``opened``, also the opens of hidden files for reading, which have the number 0."""
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        number, kind, error, size, inode, folder, other_folder, *words = line.split("\t")
        numbers = map(int, (error, size, inode, folder, other_folder))
        if opened or int(number):
            found.append(Effect(int(number), kind, *numbers, *words))  # type: ignore[arg-type]
    return found


# The paths where a factory may make effects, and why an interruption there does no harm. An effect at another path is an error.
PLACES = {
    r"plant/ledger\.db(-wal|-journal)?": "SQLite's transactions",
    r"plant/index\.db(-wal|-journal)?": "SQLite's transactions; made of shards/hashes, and made anew where it is damaged",
    r"plant/mlflow\.db(-wal|-journal)?": "SQLite's transactions; MLflow only shows",
    r"plant/\.mlflow\.db\.new(-journal)?": "made aside, flushed, renamed",
    r"plant/[a-z-]+\.lock|plant/segments/#-[a-z]+\.lock|target/\.git/factory-turn": "the kernel holds the lock, what is in the file is for people",
    r"plant/.*/\.[^/]+\.#\.part": "written aside, flushed, renamed (write_atomically)",
    r"plant/(exports|shards|segments/#-[a-z]+/checkpoints)/\.writing-[^/]+(/[^/]+)?": "a folder made aside, flushed, renamed",
    r"plant/ladder/#/\.step-#(/[^/]+)?": "a folder made aside, flushed, renamed",
    r"plant/quarantine/\.[^/]+\.writing": "a copy made aside, renamed",
    r"plant/backups/\.backup-[^/]+(/.*)?": "a folder made aside, flushed, renamed",
    r"plant/backups/journal\.lock": "the kernel holds the lock, what is in the file is for people",
    r"plant/backups/[^./][^/]*/journal\.jsonl": "flushed at each commit",
    r"plant/backups(/[^./][^/]*)?(/.*)?": "a name that is given to what is whole; old ones are removed",
    r"plant/segments/#-[a-z]+/owner\.json": "a name that is given to what is whole",
    r"plant/exports/\.champion\.new": "a link made aside, renamed",
    r"plant/shards/\.ingest-#(/[^/]+){0,2}": "a spool: the next ingest removes it",
    r"plant/exports/(champion|serving\.json|segment-#)": "a name that is given to what is whole",
    r"plant/(ladder/#|segments/#-[a-z]+/checkpoints)/step-#(/[^/]+)?": "named when it is whole; an old one that is removed is no longer named first",
    r"plant/segments/#-[a-z]+/(kernels\.yaml|segment\.json|result\.json)": "a name that is given to what is whole",
    r"plant/segments/#-[a-z]+/(metrics|anomalies)\.jsonl": "flushed before each checkpoint; what is newer than the checkpoint is dropped",
    r"plant/segments/#-[a-z]+/parameters\.txt|plant/logs/.*": "for people",
    r"plant/(shards/#|shards/raw/[^/]+|shards/hashes/[^/]+|quarantine/[^/]+)": "a name that is given to what is whole",
    r"plant/shards/#/(tokens\.bin|loss_mask\.bin|documents\.parquet|manifest\.json|columns\.arrow)": "one whose text was erased is removed, again by the next pass",  # noqa: E501
    r"plant/shards/\.again-#(/[^/]+)?": "a link to what is ingested again; the next restore removes it",
    r"plant/root": "where an older factory made the workspace; removed once its ledger holds no whole paths",
    r"plant/backups/\.restoring(/.*)?|plant/\.ledger\.db\.restored": "a ledger made aside, flushed, renamed",
    r"plant/(.*/)?\.retired-[^/]+(/.*)?": "being removed, as the ledger says; the next clean goes on with it",
    r"plant/tokenizer/[a-z_]+\.(json|jinja)": "a name that is given to what is whole",
    r"plant/(reports|diagnoses)/.*": "a name that is given to what is whole; made again where it is missing",
    r"plant/mlartifacts/.*": "MLflow's; sent again",
    r"plant/worktrees/.*": "compared with the stored tree before each use, and made again",
    r"plant/(inbox|ladder|ladder/#|segments/#-[a-z]+|segments/#-[a-z]+/checkpoints|quarantine|mlartifacts|diagnoses|cache.*)": "a folder",
    r"plant/shards/(raw|hashes)": "a folder",
    r"target/\.git/(.*/)?(HEAD|index|config|refs/.*|packed-refs)(\.lock)?": "git's: a lock file, flushed, renamed; one that is left is removed",
    r"target/\.git/objects/#(/.*)?": "git's: written aside, flushed, linked",
    r"target/\.git/logs/.*|target/\.git/worktrees(/.*)?": "git's: for people, or made again with the worktree",
    r"target/\.git/factory-at-work": "says whose lock files are left",
    r"target/.*\.factory-part": "written aside, flushed, renamed",
    r"\(spawn\)/.*": "whoever starts a program writes down first what it is for, or looks for what is left",
    r"target/[^.].*": "renamed into place, flushed; after a kill the same decision finishes",
}


def unknown(effects: Iterable[Effect], root: Path) -> list[str]:
    """Return the effects of an unknown kind or at an unknown place."""
    found = set()
    for effect in effects:
        place = effect.place(root)
        flushes_folder = effect.kind in SYNCS
        if effect.kind not in KINDS or not (
            flushes_folder or effect.error or any(re.fullmatch(p, place) for p in PLACES)
        ):
            found.add(f"{effect.kind} {place}")
    return sorted(found)
