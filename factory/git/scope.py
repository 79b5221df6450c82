"""Checks whether agents may change the files of a patch, and whether their names and contents are allowed.

The rules apply twice: to an agent's edits before they are written, and to the commit that the gate judges.
"""

from __future__ import annotations

import functools
import keyword
import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, field_validator

from agents.core.improvement_policy import ImprovementPolicy
from agents.core.untrusted import INVISIBLE
from agents.llm.policy import LlmPolicy
from factory.core.policy_file import Count, StrictPolicy, load_policy
from kernels.contract.message import Message

# The names of new files. Python must not import a new file instead of another module. This happens if a package and a module in the same folder have
# the same name (Python takes the package), or if a file has the name of a module of the standard library or of an installed package (the folder of
# the file may come first on Python's path). The check uses only names, before Python imports any file of the patch.
OURS = ("agents", "benchmarks", "factory", "kernels", "models", "tests", "trainer")
SPECIAL = "__init__"  # the only name with double underscores that a new file may have


def find_name_problems(path: str, existing: Collection[str], patched_paths: Collection[str]) -> Iterable[Message]:
    """Yield the problems of the name of a *new* file.

    ``existing``: all files and folders of the base. ``patched_paths``: those of the patched tree.
    """
    parts = path.split("/")
    names = [*parts[:-1], parts[-1].removesuffix(".py")]
    folded = {other.casefold(): other for other in patched_paths}
    for count, name in enumerate(names, 1):
        place = "/".join(parts[:count])
        if place in existing:
            continue
        module = "/".join([*parts[: count - 1], name])
        for other in (module, f"{module}.py"):
            if other.casefold() != place.casefold() and (there := folded.get(other.casefold())):
                yield Message(
                    "scope.same_module",
                    "Python cannot distinguish {place} from {other}, so choose another name",
                    place=_shown(place),
                    other=_shown(there),
                )
        if not path.endswith(".py"):
            continue
        if not name.isidentifier() or keyword.iskeyword(name):
            yield Message(
                "scope.not_importable",
                "Python cannot import a module with the name {name!r}, so use only letters, digits and '_'",
                name=_escaped(name),
            )
        if name.startswith("__") and name.endswith("__") and name != SPECIAL:
            yield Message(
                "scope.special_name",
                "{name!r} has a special meaning in Python, so choose another name",
                name=_escaped(name),
            )
        if name.casefold() in list_importable_modules() and not _usual(parts[:count], existing):
            yield Message(
                "scope.shadowed_module",
                "{name!r} could hide a module of Python or of an installed package, so choose another name",
                name=_escaped(name),
            )


def _usual(parts: list[str], existing: Collection[str]) -> bool:
    """Return whether a sibling of the file's folder has a file of the same name, as the folders of ops have ``triton.py``.

    >>> _usual(["kernels", "mine", "triton.py"], {"kernels/rms_norm/triton.py"})
    True
    >>> _usual(["kernels", "triton.py"], {"kernels/rms_norm/triton.py"})
    False
    """
    *above, _, last = parts if len(parts) > 2 else ["", "", ""]
    split = (other.split("/") for other in existing)
    return bool(last) and any(other[:-2] == above and other[-1] == last for other in split if len(other) == len(parts))


@functools.cache
def list_importable_modules() -> frozenset[str]:
    """Return the names, in lower case, of the top-level modules that Python can import. Nothing is imported."""
    found = {*sys.stdlib_module_names, *sys.builtin_module_names, *OURS}
    for folder in sys.path:
        if os.path.basename(folder) in ("site-packages", "dist-packages") and os.path.isdir(folder):
            found |= {name.partition(".")[0] for name in os.listdir(folder) if not name.endswith("-info")}
    return frozenset(name.casefold() for name in found)


# A part of a path: plain ASCII without control characters, look-alike letters, backslashes, drive letters or alternate streams.
COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# Modules that Python tools run because of their names.
LOADED_BY_NAME = {"conftest", "sitecustomize", "usercustomize", "setup", "noxfile", "tasks", "wscript"}
MAX_PATH_CHARACTERS = 200  # characters
DEVICE_NAMES = {"con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(10))}


class ScopeRule(StrictPolicy):
    """Files that patches may change: an exact path or ``folder/**``, and the suffixes that a path must have."""

    paths: str = Field(pattern=r"^[A-Za-z0-9_./-]+(/\*\*)?$")
    suffixes: list[str]

    def is_place_of(self, path: str) -> bool:
        """Return whether a path is where the rule applies, whatever its suffix."""
        folder, star, _ = self.paths.partition("**")
        return path.startswith(folder) if star else path == self.paths

    def covers(self, path: str) -> bool:
        """Return whether the rule allows a path."""
        return self.is_place_of(path) and path.endswith(tuple(self.suffixes))


NATIVE = (".cpp", ".cu", ".cuh", ".h")  # sources that agents may read beside the Python that runs them


class AgentsPolicy(StrictPolicy):
    """``policies/agents.yaml``: what agents may change, and what they may spend."""

    scope: list[ScopeRule]
    """The files that a patch may change. All other files are out of scope."""
    out_of_scope: list[str] = []
    """Folders inside the scope that agents may read but not patch, as ``folder/**``."""
    max_files: Count = 8
    """The most files that one patch may change."""
    max_file_bytes: Count = 100_000
    """The most bytes of a changed file."""
    max_patch_bytes: Count = 200_000
    """The most bytes of all changed files together."""
    measure_seconds: float = Field(default=60.0, gt=0)
    """The seconds that an agent may spend on measuring implementations that exist already, before it proposes. A measurement that has begun then
    goes on for at most two minutes more."""
    max_tries: int = Field(default=24, ge=0)
    """The most variants of a patch that one run of an agent may have timed (``try_patch``). 0: their results are checked, but nothing is timed."""
    try_seconds: float = Field(default=240.0, ge=0)
    """The most seconds of timing for these variants together. Start-up, compilation and checks of results do not count."""
    improve: ImprovementPolicy = ImprovementPolicy()
    llm: LlmPolicy = LlmPolicy()

    @field_validator("out_of_scope")
    @classmethod
    def _folders(cls, named: list[str]) -> list[str]:
        if wrong := [one for one in named if not re.fullmatch(r"[A-Za-z0-9_./-]+/\*\*", one)]:
            raise ValueError(f"{wrong[0]!r} is not a folder: write 'kernels/contract/**' and 'trainer/contract/**'")
        return named

    @classmethod
    def load(cls, path: Path) -> AgentsPolicy:
        return load_policy(cls, path)

    def is_readable(self, path: str) -> bool:
        """Return whether a path is in scope, for patching or only for reading."""
        return any(rule.covers(path) for rule in self.scope)

    def is_shown(self, path: str) -> bool:
        """Return whether agents may read a path: what is in scope, and native sources beside Python that is in scope.

        >>> policy = AgentsPolicy(scope=[ScopeRule(paths="kernels/**", suffixes=[".py"])])
        >>> [policy.is_shown(path) for path in ("kernels/swiglu/swiglu.cpp", "factory/x.cpp", "kernels/notes.md")]
        [True, False, False]
        """
        stem, dot, suffix = path.rpartition(".")
        return self.is_readable(path) or (dot + suffix in NATIVE and self.is_readable(f"{stem}.py"))

    def find_protecting_rule(self, path: str) -> str:
        """Return the rule of ``out_of_scope`` by which only people may change a path; '' if there is none. Upper and lower case count as equal, as
        on some file systems.

        >>> policy = AgentsPolicy(scope=[], out_of_scope=["trainer/contract/**"])
        >>> [policy.find_protecting_rule(f"trainer/{path}") for path in ("contract/recipe.py", "Contract/new.py", "run.py")]
        ['trainer/contract/**', 'trainer/contract/**', '']
        >>> policy.is_protected("trainer/__init__.py")  # importing trainer.contract runs it
        True
        """
        path = path.casefold()
        for pattern in self.out_of_scope:
            folder = pattern.casefold().removesuffix("/**")
            parts = folder.split("/")
            above = {"/".join((*parts[:n], "__init__.py")) for n in range(1, len(parts))}
            if path in above or path == f"{folder}.py" or path.startswith(f"{folder}/"):
                return pattern
        return ""

    def is_protected(self, path: str) -> bool:
        """Return whether only people may change a path."""
        return bool(self.find_protecting_rule(path))

    def list_suffixes_at(self, path: str) -> list[str]:
        """Return the suffixes that a file at this place may have; [] if no rule of ``scope`` is for this place."""
        return sorted({suffix for rule in self.scope if rule.is_place_of(path) for suffix in rule.suffixes})

    def is_patchable(self, path: str) -> bool:
        """Return whether agents may patch a file."""
        return self.is_readable(path) and not self.is_protected(path)


@dataclass(frozen=True)
class FileChange:
    """A changed file after the patch. ``mode`` is git's ('100644' …). ``content`` is None if the patch deletes the file."""

    path: str
    content: bytes | None
    mode: str = "100644"
    old_mode: str | None = None  # None: the file is new


def _of_file(path: str, problem: Message) -> Message:
    return Message("scope.file_problem", "{path}: {problem}", path=_shown(path), problem=problem)


def find_scope_problems(policy: AgentsPolicy, changes: Iterable[FileChange], existing: Mapping[str, str]) -> list[str]:
    """Return the problems of a patch, each a message; [] if the patch is in scope. ``existing``: path → mode at its base."""
    changes = list(changes)
    found: list[str] = [_of_file(change.path, problem) for change in changes for problem in _one(policy, change)]
    places = {above for path in existing for above in _above(path)}
    folded = {above.casefold(): above for above in places}
    plain = [
        change for change in changes if len(change.path) <= MAX_PATH_CHARACTERS
    ]  # longer paths already have a problem
    gone = {change.path for change in plain if change.content is None}
    kept = (existing.keys() - gone) | {change.path for change in plain if change.content is not None}
    left = {above for path in kept for above in _above(path)}
    seen: set[str] = set()
    for change in plain:
        if change.path not in existing:
            found += [_of_file(change.path, problem) for problem in find_name_problems(change.path, places, left)]
        for path in _above(change.path):
            other = folded.get(path.casefold(), path)
            if other != path:
                differs = Message(
                    "scope.other_case",
                    "{name} differs from {other} only in case",
                    name=_shown(path),
                    other=_shown(other),
                )
                found.append(_of_file(change.path, differs))
                break
        if change.path.casefold() in seen:
            found.append(_of_file(change.path, Message("scope.twice", "the patch changes this file twice")))
        seen.add(change.path.casefold())
        for above in _above(change.path)[:-1]:
            if above in existing:
                found.append(
                    _of_file(
                        change.path,
                        Message(
                            "scope.file_above", "{above} is a file, so a patch cannot use it as a folder", above=above
                        ),
                    )
                )
        if any(path.startswith(change.path + "/") for path in existing):
            found.append(_of_file(change.path, Message("scope.folder", "this path is a folder")))
        if existing.get(change.path, "100644") not in ("100644", "100755"):
            found.append(_of_file(change.path, Message("scope.not_regular", "this path is not a regular file")))
    if not changes:
        found.append(make_no_change_problem())
    if len(changes) > policy.max_files:
        found.append(
            Message(
                "scope.many_files",
                "the patch changes {files:,} files, but at most {limit:,} are allowed",
                files=len(changes),
                limit=policy.max_files,
            )
        )
    size = sum(len(change.content or b"") for change in changes)
    if size > policy.max_patch_bytes:
        found.append(
            Message(
                "scope.many_bytes",
                "the changed files have {size:,} bytes, but at most {limit:,} are allowed",
                size=size,
                limit=policy.max_patch_bytes,
            )
        )
    return found


def make_no_change_problem() -> Message:
    """Return the problem of a patch without changes."""
    return Message("scope.no_change", "the patch changes nothing")


def _above(path: str) -> list[str]:
    """Return the folders above a path, and the path: ``a/b/c`` → a, a/b, a/b/c."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _one(policy: AgentsPolicy, change: FileChange) -> Iterable[Message]:
    yield from _name_problems(change.path)
    if rule := policy.find_protecting_rule(change.path):
        yield Message(
            "scope.protected",
            "only people may change this file, by the rule {rule} of out_of_scope in policies/agents.yaml: the factory judges patches with it or "
            "imports it",
            rule=rule,
        )
    if not policy.is_readable(change.path):
        suffixes = policy.list_suffixes_at(change.path)
        yield (
            Message(
                "scope.wrong_suffix",
                "a patch may change only files that end with {suffixes} here, by the rule {rules} of scope in policies/agents.yaml",
                suffixes=suffixes,
                rules=[rule.paths for rule in policy.scope if rule.is_place_of(change.path)],
            )
            if suffixes
            else Message(
                "scope.not_patchable",
                "this file is outside the paths that patches may change ({scope})",
                scope=[rule.paths for rule in policy.scope],
            )
        )
    if change.mode not in ("100644", "100755") or (change.old_mode or "100644") not in ("100644", "100755"):
        kind = {"120000": "a symbolic link", "160000": "a submodule"}.get(change.mode, f"of mode {change.mode}")
        yield Message("scope.wrong_kind", "this path is {kind}, but patches may change only regular files", kind=kind)
    elif change.content is not None and change.mode != (change.old_mode or "100644"):
        yield Message("scope.mode", "the patch changes the file's mode to {mode}", mode=change.mode)
    if change.content is not None:
        yield from _content_problems(policy, change.content)


def _name_problems(path: str) -> Iterable[Message]:
    parts = path.split("/")
    if len(path) > MAX_PATH_CHARACTERS:
        yield Message(
            "scope.long_path",
            "the path has {length:,} characters, but at most {limit:,} are allowed",
            length=len(path),
            limit=MAX_PATH_CHARACTERS,
        )
        return
    if not all(COMPONENT.fullmatch(part) for part in parts):
        yield Message(
            "scope.odd_path", "a path must be relative, and its parts may have only letters, digits, '_', '-' and '.'"
        )
    for part in parts:
        if part.endswith(".") or part.split(".")[0].casefold() in DEVICE_NAMES:
            yield Message(
                "scope.device_name",
                "{name!r} has a special meaning on some file systems, so choose another name",
                name=_escaped(part),
            )
    if any(part.casefold().partition(".")[0] in LOADED_BY_NAME for part in parts):
        yield Message("scope.loaded_by_name", "Python tools load any file with this name, so choose another name")


def _content_problems(policy: AgentsPolicy, content: bytes) -> Iterable[Message]:
    if len(content) > policy.max_file_bytes:
        yield Message(
            "scope.large_file",
            "the file has {size:,} bytes, but at most {limit:,} are allowed",
            size=len(content),
            limit=policy.max_file_bytes,
        )
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield Message("scope.not_text", "the file is not UTF-8 text (byte {byte})", byte=error.start)
        return
    for number, line in enumerate(text.split("\n"), 1):
        odd = next((c for c in line if c != "\t" and unicodedata.category(c) in INVISIBLE), None)
        if odd is not None:
            yield Message(
                "scope.invisible_character",
                "line {line} has the invisible character U+{character:04X}",
                line=number,
                character=ord(odd),
            )
            return


def _escaped(name: str) -> str:
    """Return a name for a message's data, in which no character begins a new line or controls a terminal."""
    return name if name.isprintable() else name.encode("unicode_escape").decode("ascii")


def _shown(path: str) -> str:
    path = path if len(path) <= MAX_PATH_CHARACTERS else f"{path[:MAX_PATH_CHARACTERS]}…"
    return path if path.replace("…", "").isascii() and path.isprintable() else ascii(path)
