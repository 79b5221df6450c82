"""Finds the files that ``factory ingest`` names: paths, folders, patterns and addresses. A data set on disk becomes a file group, and so do
many small files."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ingest.file_groups import MANY, SMALL_BYTES, FileGroup
from factory.ingest.readers import ShardProblem, is_readable_kind
from factory.ingest.reading.columns import is_dataset
from factory.ingest.reading.file_kinds import is_archive
from factory.ingest.remote import fetch_files, is_address
from factory.ingest.rules.policy import DataPolicy
from factory.ledger.plant import Plant
from kernels.contract.message import Message


@dataclass
class GatheredFiles:
    """The files that a command names.

    ``left_out`` counts files of unsupported kinds by suffix. ``addresses`` has the address of each fetched file. ``known`` is the number of files
    at addresses that were ingested before. ``broken`` says, for a folder with a data set, why the data set cannot be read.
    """

    packs: list[FileGroup] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    addresses: dict[Path, str] = field(default_factory=dict)
    known: int = 0
    broken: dict[str, str] = field(default_factory=dict)

    def describe_unsupported_files(self) -> str:
        """Return a line about the files that are left out, or '' if none are."""
        if self.left_out.total() == 0:
            return ""
        return Message(
            "ingest.kinds_left_out",
            "{files:,|file is|files are} not ingested, because files of these types are not supported: {kinds}",
            files=self.left_out.total(),
            kinds=[f"{suffix or 'no suffix'} {count:,}" for suffix, count in self.left_out.most_common(6)],
        )


def gather_files(plant: Plant, names: Sequence[str]) -> GatheredFiles:
    """Find the files that these names stand for. Files at addresses are fetched.

    Raises: InputError for a name that is not a file, folder or pattern, and for an address that cannot be read.
    """
    found = GatheredFiles()
    listed: list[tuple[Path, Path]] = []  # (folder that a person named, file in it)
    for name in names:
        if is_address(name):
            folder, there, found.known = fetch_files(plant, name)
            found.addresses |= there
            listed += [(folder, path) for path in _wanted(sorted(there), found)]
            continue
        for path in _paths(plant.workspace, name):
            if not path.is_dir():
                listed += [(path.parent, one) for one in ([path] if str(path) == name else _wanted([path], found))]
            elif is_dataset(path):
                found.packs.append(_dataset(path))
            else:
                listed += [(path, file) for file in _wanted(_walk(path, found, plant.workspace.root), found)]
    small = [(folder, path) for folder, path in listed if _is_small(path)]
    if len(small) >= MANY:
        base = Path(os.path.commonpath([folder.resolve() for folder, _ in small]))
        files = sorted((str(path.resolve().relative_to(base)), path) for _, path in small if _is_below(path, base))
        pack, refused = FileGroup(base.name or "files", files).split_off_refused_files(
            DataPolicy.load(plant.workspace.policy_path("data.yaml"))
        )
        found.packs += [pack] if pack.files else []
        together = {path for _, path in files}
        listed = [one for one in listed if one[1] not in together or one[1] in refused]
    found.files = list(dict.fromkeys(path for _, path in listed))
    return found


def _paths(workspace: Workspace, name: str) -> list[Path]:
    """Return the file or folder with this path, else the file with this name in quarantine/, else the files that match the pattern."""
    if not name.strip():  # the cause may be an unset shell variable; Python would read the name as the current folder
        raise InputError(
            "ingest.empty_name",
            "one of the given names is empty. Give names of files or folders, patterns or addresses ('.' is the current folder)",
        )
    path = Path(name)
    if path.exists():
        return [path]
    if (kept := workspace.quarantine / path.name).is_file():
        return [kept]
    if glob.has_magic(name):
        if matched := [Path(one) for one in sorted(glob.glob(name, recursive=True))]:
            files = list(
                {one.resolve(): one for one in matched if not one.is_dir()}.values()
            )  # links may form a circle
            return files or matched
        raise InputError("ingest.no_match", "no file matches the pattern {pattern}", pattern=name)
    raise InputError(
        "ingest.no_named_file",
        "no file {file} was found, neither at the given path nor in {quarantine}",
        file=path.name,
        quarantine=workspace.quarantine,
    )


def _dataset(folder: Path) -> FileGroup:
    try:
        return FileGroup.of_dataset(folder)
    except ShardProblem as problem:
        raise InputError("ingest.dataset", "{folder}: {why}", folder=folder, why=problem.message) from problem


def _walk(folder: Path, found: GatheredFiles, workspace: Path) -> Iterator[Path]:
    """Yield the regular files below ``folder``, sorted by name. Data sets on disk are added to ``found`` as file groups.

    Hidden files and folders, links to folders, and the workspace itself (its policies and logs are not data) are skipped.
    """
    for where, folders, files in os.walk(folder):
        home = [one for one in folders if (Path(where) / one).resolve() == workspace.resolve()]
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one not in home)
        for one in [one for one in folders if is_dataset(Path(where) / one)]:
            folders.remove(one)
            try:
                found.packs.append(_dataset(Path(where) / one))
            except InputError as error:
                found.broken[str(Path(where) / one)] = str(error)
        for name in sorted(files):
            if not name.startswith(".") and (path := Path(where) / name).is_file():
                yield path


def _wanted(files: Iterable[Path], found: GatheredFiles) -> list[Path]:
    wanted = []
    for path in files:
        if is_readable_kind(path.name):
            wanted.append(path)
        else:
            found.left_out[path.suffix.lower()] += 1
    return wanted


def _is_small(path: Path) -> bool:
    return (
        path.stat().st_size < SMALL_BYTES
        and is_readable_kind(path.name)
        and not is_archive(path.name)
        and _is_utf8(path)
    )


def _is_utf8(path: Path) -> bool:
    return os.fsencode(path.name).decode("utf-8", "replace") == path.name


def _is_below(path: Path, base: Path) -> bool:
    return path.resolve().is_relative_to(base)
