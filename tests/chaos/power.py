"""What is on the disk after a power cut: replays the shim's log, and leaves out what was not flushed.

Two losses, each of which a file system may choose:
    names kept   every name is as it was, every file holds what it held at its last fsync (a new one that was never flushed is empty)
    names lost   names in a folder, too, are those of the folder's last fsync

A file's content is what the shim kept at its fsync. In the repository names are kept in order: git flushes files and not folders, and
relies on a journal that writes names in the order in which they were made before it writes what is flushed after them.
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
    content: Path | None = None  # flushed; None: an empty file
    target: str = ""  # of a link
    names: dict[str, Node] = field(default_factory=dict)  # of a folder, as programs see them
    flushed: dict[str, Node] = field(default_factory=dict)  # as they are on the disk
    mode: int = 0o644


def cut(start: Path, site: Path, done: list[Effect], store: Path, loss: str) -> None:
    """Make ``site`` what is left of it: ``start`` and the effects ``done``, less what was not flushed."""
    root = _read(start)
    for effect in done:
        if not effect.error:
            try:
                _apply(root, site, effect, store)
            except (
                KeyError
            ):  # what replays of a diagnosis write is not recorded: they run in an environment of their own
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
    """The folder that holds a path, and the name there."""
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
    if effect.kind == SPAWN:  # it leaves nothing on a disk
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
            # The inbox goes by its files' times; git looks at a file again whose time is another.
            (shutil.copy2 if "plant" in path.parts else shutil.copyfile)(node.content, path)
        path.chmod(node.mode)
    else:
        path.mkdir()
        for name, child in (node.flushed if lose_names and not within_git else node.names).items():
            _write(child, path / name, lose_names, within_git or name == ".git")
        path.chmod(node.mode)
