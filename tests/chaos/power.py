"""Computes the disk after a power cut: replays the shim's log without the effects that were not flushed.

A file system may lose data in two ways:
    names kept   all names stay; each file has the content of its last fsync (a new file without an fsync is empty)
    names lost   the names in a folder, too, are those of the folder's last fsync

The shim keeps the content of each file at its fsync. In the git repository names are always kept: git flushes files but not folders, and relies
on a journal that writes names in their order before later flushes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.shim import SPAWN, SYNCS, Effect

REPLAYS = "/plant/diagnoses/"
LOSSES = ("power cut, names kept", "power cut, names lost")


@dataclass
class Node:
    """A file, a link or a folder."""

    kind: str  # 'file' | 'link' | 'folder'
    content: Path | None = None  # the flushed content; None: an empty file
    target: str = ""  # of a link
    names: dict[str, Node] = field(default_factory=dict)  # of a folder: the names that programs see
    flushed: dict[str, Node] = field(default_factory=dict)  # the names that are on the disk
    mode: int = 0o644


def cut(start: Path, site: Path, done: list[Effect], store: Path, loss: str) -> None:
    """Replace ``site`` by its state after a power cut: ``start`` and the flushed effects among ``done``."""
    root = _read(start)
    for effect in done:
        if not effect.error:
            try:
                _apply(root, site, effect, store)
            except (
                KeyError
            ):  # the effects of a diagnosis's replays are not recorded: they run with their own environment
                if REPLAYS not in effect.path:
                    raise
    aside = site.with_name(".cut")
    shutil.rmtree(aside, ignore_errors=True)
    _write(root, aside, loss == LOSSES[1], within_git=False)
    shutil.rmtree(site)
    aside.rename(site)


def _read(path: Path) -> Node:
    if path.is_symlink():
        return Node("link", target=os.readlink(path))
    if path.is_dir():
        names = {entry.name: _read(entry) for entry in path.iterdir()}
        return Node("folder", names=names, flushed=dict(names), mode=path.stat().st_mode & 0o777)
    return Node("file", content=path, mode=path.stat().st_mode & 0o777)


def _at(root: Node, site: Path, path: str) -> tuple[Node, str]:
    """Return the folder of a path and the path's name in it."""
    *folders, name = Path(path).relative_to(site).parts
    node = root
    for part in folders:
        node = node.names[part]
    return node, name


def _apply(root: Node, site: Path, effect: Effect, store: Path) -> None:
    if effect.path == str(site):
        if effect.kind in SYNCS:
            root.flushed = dict(root.names)
        return
    if effect.kind == SPAWN:  # a program's start leaves nothing on a disk
        return
    folder, name = _at(root, site, effect.path)
    kind = effect.kind
    if kind == "create":
        folder.names[name] = Node("file")
    elif kind == "mkdir":
        folder.names[name] = Node("folder", mode=0o755)
    elif kind == "symlink":
        folder.names[name] = Node("link", target=effect.other)
    elif kind in ("unlink", "rmdir"):
        folder.names.pop(name, None)
    elif kind == "link":
        source, old = _at(root, site, effect.other)
        folder.names[name] = source.names[old]
    elif kind == "rename":
        target, new = _at(root, site, effect.other)
        target.names[new] = folder.names.pop(name)
    elif kind in SYNCS and name in folder.names:
        node = folder.names[name]
        if node.kind == "folder":
            node.flushed = dict(node.names)
        elif (kept := store / str(effect.number)).exists():
            node.content = kept


def _write(node: Node, path: Path, lose_names: bool, within_git: bool) -> None:
    if node.kind == "link":
        os.symlink(node.target, path)
    elif node.kind == "file":
        if node.content is None:
            path.touch()
        else:
            # The inbox depends on the times of its files. git reads a file again if its time has changed.
            (shutil.copy2 if "plant" in path.parts else shutil.copyfile)(node.content, path)
        path.chmod(node.mode)
    else:
        path.mkdir()
        for name, child in (node.flushed if lose_names and not within_git else node.names).items():
            _write(child, path / name, lose_names, within_git or name == ".git")
        path.chmod(node.mode)
