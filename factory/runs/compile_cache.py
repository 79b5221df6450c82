"""Gives each commit of live code a compile cache, which starts as a copy of an older commit's cache.

Each commit has its own folder, ``devices.compiled``: torch.compile's files in ``inductor/`` (graphs with their kernels, the choices of
autotuning, C++ and the project's own C++ kernels) and Triton's in ``triton/``. Segments, certificates, preflights, exports and profiles of the
commit use it, and it survives kills and restarts. The key of an entry is a hash of its sources (the graph, the compilers' settings and
versions, the device), independent of commit and folder. So a patch that does not change a graph finds it compiled.

Reading an entry means running it, so a cache is as trustworthy as the code that wrote it. A cache is copied from older approved code to newer
code that contains the older code, never in the other direction. Hard links would not do: newer code could change the files that older code reads.
The cache of code with agents' patches is copied only if all commits between are judged patches that undo no other patch. A person's commit or an
undoing proposal may remove a hostile patch, but the compiled files of that patch would remain in the copy. Where nothing may be copied, the commit
starts with an empty cache. A candidate is not live code: gates give it a private copy.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from factory.core import devices
from factory.git import repository
from factory.ledger.plant import Plant
from factory.ledger.rows import UNDO_TARGET, ProposalRow, SegmentRow

MOST_BYTES = 2 << 30  # a larger cache is not copied, because unused entries are never removed from a cache
PATIENCE_SECONDS = 600.0  # longest wait for another process that copies


def copy_older_cache(plant: Plant, commit: str) -> Path | None:
    """Copy the newest cache that a commit may read, before the commit's code first runs. Returns the folder that was copied.

    None: the commit has a cache already, or no cache may be copied. Raises: RepositoryError; OSError, and then no copy exists.
    """
    own = devices.get_compiled_code_folder(plant.workspace.root, commit)
    if own.exists():
        return None
    own.parent.mkdir(exist_ok=True)
    with plant.workspace.hold_lock("compile-cache", PATIENCE_SECONDS):
        found = None if own.exists() else next(find_readable_caches(plant, commit), None)
        if found is None or _bytes(found) > MOST_BYTES:
            return None
        aside = own.with_name("beginning")
        shutil.rmtree(aside, ignore_errors=True)  # left by a killed process
        try:
            _copy(found, aside)
            aside.rename(own)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return found


def find_readable_caches(plant: Plant, commit: str) -> Iterator[Path]:
    """Yield the caches that ``commit`` may read, newest first: caches of code that trained here and that the commit contains.

    Raises: RepositoryError.
    """
    code = plant.workspace.repository
    rows = ProposalRow.select(plant.ledger, "WHERE state IN ('approved', 'reverted')")
    patches = {row.commit: row for row in rows if row.commit}
    trained = dict.fromkeys(row.code_commit for row in SegmentRow.select(plant.ledger, "ORDER BY id DESC"))
    for older in trained:
        cache = devices.get_compiled_code_folder(plant.workspace.root, older)
        if older == commit or not cache.is_dir() or not repository.is_ancestor(code, commit, older):
            continue
        if not any(repository.is_ancestor(code, older, patch) for patch in patches):
            yield cache
            continue
        between = repository.list_commits_between(code, older, commit)
        if between <= patches.keys() and not any(
            patches[name].target.startswith(f"{UNDO_TARGET}:") for name in between
        ):
            yield cache


def copy_cache(compiled: Path, cache: Path) -> None:
    """Copy the cache of approved code to ``cache``, a private folder of a gate's run. No other process reads files that a candidate writes there."""
    if compiled.is_dir():
        shutil.copytree(compiled, cache, symlinks=True)


def _copy(source: Path, target: Path) -> None:
    """Copy only folders and plain files, because code that may be hostile wrote them."""
    for folder, _, names in os.walk(source):
        into = target / Path(folder).relative_to(source)
        into.mkdir(parents=True)
        for name in names:
            path = Path(folder, name)
            if stat.S_ISREG(path.lstat().st_mode):
                shutil.copy2(path, into / name, follow_symlinks=False)


def _bytes(folder: Path) -> int:
    return sum(os.lstat(Path(where, name)).st_size for where, _, names in os.walk(folder) for name in names)
