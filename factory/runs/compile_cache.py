"""What compilers made for one commit of live code is where the next commit's cache begins.

A commit has a folder of its own, ``devices.compiled``: torch.compile's files in ``inductor/`` (graphs with the kernels that were made of
them, what autotuning chose, C++ and the project's own C++ kernels) and Triton's in ``triton/``. Segments, certificates, preflights,
exports and profiles of the commit all use it, and it survives kills and restarts. An entry is found by a hash of all that it was made from
(the graph, the compilers' settings and versions, the device), whatever commit and folder that came from: a patch that leaves a graph as
it was finds it compiled.

Who reads an entry runs it, so that a cache is as trustworthy as the code that wrote it. A copy goes from older approved code to newer
code that still holds it, and never back: a copy, not hard links, through which newer code could change what older code reads. From code
with agents' patches it goes only across more patches that were judged and take none back: a person's commit, or an undoing proposal, may
be there because a patch turned out hostile, and then what that compiled is hostile too. Where nothing may be copied the commit compiles
for itself. A candidate is not live code: gates hand it a copy that nobody else reads.
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
from factory.ledger.rows import UNDO, ProposalRow, SegmentRow

MOST_BYTES = (
    2 << 30
)  # of a cache that is copied: what no graph uses any more is never removed from it, so a larger one is left behind
PATIENCE_SECONDS = 600.0  # for another process that copies


def begin_cache(plant: Plant, commit: str) -> Path | None:
    """Before a commit's code first runs here, copy the cache of the newest code that it may read from; returns that folder.

    None: the commit has a cache already, or there is none to begin with. Raises: RepositoryError; OSError, and nothing is left.
    """
    own = devices.compiled(plant.workspace.root, commit)
    if own.exists():
        return None
    own.parent.mkdir(exist_ok=True)
    with plant.workspace.lock("compile-cache", PATIENCE_SECONDS):
        found = None if own.exists() else next(readable(plant, commit), None)
        if found is None or _bytes(found) > MOST_BYTES:
            return None
        aside = own.with_name("beginning")
        shutil.rmtree(aside, ignore_errors=True)  # of one that was killed
        try:
            _copy(found, aside)
            aside.rename(own)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return found


def readable(plant: Plant, commit: str) -> Iterator[Path]:
    """The caches of code that trained here, newest first, that ``commit`` may read: it holds all of that code. Raises: RepositoryError."""
    code = plant.workspace.repository
    rows = ProposalRow.select(plant.ledger, "WHERE state IN ('approved', 'reverted')")
    patches = {row.commit: row for row in rows if row.commit}
    trained = dict.fromkeys(row.code_commit for row in SegmentRow.select(plant.ledger, "ORDER BY id DESC"))
    for older in trained:
        cache = devices.compiled(plant.workspace.root, older)
        if older == commit or not cache.is_dir() or not repository.contains(code, commit, older):
            continue
        if not any(repository.contains(code, older, patch) for patch in patches):
            yield cache
            continue
        between = repository.commits_between(code, older, commit)
        if between <= patches.keys() and not any(patches[name].target.startswith(f"{UNDO}:") for name in between):
            yield cache


def copy_cache(compiled: Path, cache: Path) -> None:
    """Give a gate's run its own copy of what approved code compiled: nobody else ever reads what a candidate writes there."""
    if compiled.is_dir():
        shutil.copytree(compiled, cache, symlinks=True)


def _copy(source: Path, target: Path) -> None:
    """Folders and plain files alone: code that may be hostile wrote them."""
    for folder, _, names in os.walk(source):
        into = target / Path(folder).relative_to(source)
        into.mkdir(parents=True)
        for name in names:
            path = Path(folder, name)
            if stat.S_ISREG(path.lstat().st_mode):
                shutil.copy2(path, into / name, follow_symlinks=False)


def _bytes(folder: Path) -> int:
    return sum(os.lstat(Path(where, name)).st_size for where, _, names in os.walk(folder) for name in names)
