"""May a patch touch these files, with this content?

The rules are about names and bytes only and are applied twice: to an agent's edits before anything is written, and to the commit that is
judged, as git has it.
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

from agents.core.improve_policy import ImprovePolicy
from agents.core.untrusted import INVISIBLE
from agents.llm.policy import LlmPolicy
from factory.core.policy_file import Count, StrictPolicy, load_policy

# May a new file have this name? Python imports by name: the wrong one is imported in place of somebody else's module.
# Two names shadow: a package beside a module of its name (Python takes the package), and a name of the standard library or of an installed package
# (a folder may be first on Python's path). Judged from the names alone, before anything of the patch is imported.
OURS = ("agents", "benchmarks", "factory", "kernels", "tests", "trainer")
SPECIAL = "__init__"  # the only name of this kind that a new file may have


def name_problems(path: str, existing: Collection[str], left: Collection[str]) -> Iterable[str]:
    """What is wrong with the name of a *new* file. ``existing``: all files and folders of the base; ``left``: those of the patched tree."""
    parts = path.split("/")
    names = [*parts[:-1], parts[-1].removesuffix(".py")]
    folded = {other.casefold(): other for other in left}
    for count, name in enumerate(names, 1):
        place = "/".join(parts[:count])
        if place in existing:
            continue
        module = "/".join([*parts[: count - 1], name])
        for other in (module, f"{module}.py"):
            if other.casefold() != place.casefold() and (there := folded.get(other.casefold())):
                yield f"{place} and {there} would be one module to Python: choose another name"
        if not path.endswith(".py"):
            continue
        if not name.isidentifier() or keyword.iskeyword(name):
            yield f"{name!r} is not a name that Python can import: use letters, digits and '_'"
        if name.startswith("__") and name.endswith("__") and name != SPECIAL:
            yield f"{name!r} means something of its own to Python: choose another name"
        if name.casefold() in known_modules() and not _usual(parts[:count], existing):
            yield f"{name!r} is a module of Python or of an installed package, which it could shadow: choose another name"


def _usual(parts: list[str], existing: Collection[str]) -> bool:
    """Do the folders beside the file's own have a file of its name already, as every op has its ``triton.py``?

    >>> _usual(["kernels", "mine", "triton.py"], {"kernels/rms_norm/triton.py"})
    True
    >>> _usual(["kernels", "triton.py"], {"kernels/rms_norm/triton.py"})
    False
    """
    *above, _, last = parts if len(parts) > 2 else ["", "", ""]
    split = (other.split("/") for other in existing)
    return bool(last) and any(other[:-2] == above and other[-1] == last for other in split if len(other) == len(parts))


@functools.cache
def known_modules() -> frozenset[str]:
    """Names that ``import`` finds outside this checkout, without importing any: lower case."""
    found = {*sys.stdlib_module_names, *sys.builtin_module_names, *OURS}
    for folder in sys.path:
        if os.path.basename(folder) in ("site-packages", "dist-packages") and os.path.isdir(folder):
            found |= {name.partition(".")[0] for name in os.listdir(folder) if not name.endswith("-info")}
    return frozenset(name.casefold() for name in found)


# Plain ASCII names: no control characters, look-alikes, back slashes, drive letters or alternate streams.
COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# Modules that tools run because of their names.
LOADED_BY_NAME = {"conftest", "sitecustomize", "usercustomize", "setup", "noxfile", "tasks", "wscript"}
LONGEST_PATH = 200  # characters
DEVICE_NAMES = {"con", "prn", "aux", "nul", *(f"{kind}{n}" for kind in ("com", "lpt") for n in range(10))}


class ScopeRule(StrictPolicy):
    """One place that patches may write to: an exact path, or ``folder/**``."""

    paths: str = Field(pattern=r"^[A-Za-z0-9_./-]+(/\*\*)?$")
    suffixes: list[str]

    def covers(self, path: str) -> bool:
        folder, star, _ = self.paths.partition("**")
        return (path.startswith(folder) if star else path == self.paths) and path.endswith(tuple(self.suffixes))


class AgentsPolicy(StrictPolicy):
    """``policies/agents.yaml``."""

    scope: list[ScopeRule]
    """Where a patch may write; everything else is out of scope."""
    out_of_scope: list[str] = []
    """Folders inside the scope that agents may read but not patch."""
    max_files: Count = 8
    """Files that one patch may change."""
    max_file_bytes: Count = 100_000
    """Of a file, as the patch leaves it."""
    max_patch_bytes: Count = 200_000
    """Of all files of a patch together."""
    measure_seconds: float = Field(default=60.0, gt=0)
    """Seconds that an agent may spend on measuring implementations before it proposes."""
    improve: ImprovePolicy = ImprovePolicy()
    llm: LlmPolicy = LlmPolicy()

    @field_validator("out_of_scope")
    @classmethod
    def _folders(cls, named: list[str]) -> list[str]:
        if wrong := [one for one in named if not re.fullmatch(r"[A-Za-z0-9_./-]+/\*\*", one)]:
            raise ValueError(f"{wrong[0]!r} is no folder: write 'kernels/contract/**' and 'trainer/contract/**'")
        return named

    @classmethod
    def load(cls, path: Path) -> AgentsPolicy:
        return load_policy(cls, path)

    def readable(self, path: str) -> bool:
        """Is the path in scope, whether agents may patch it or only read it?"""
        return any(rule.covers(path) for rule in self.scope)

    def protected(self, path: str) -> bool:
        """Is the path one that only people may change? Upper and lower case count as the same, as on some file systems.

        >>> keys = ("max_files", "max_file_bytes", "max_patch_bytes", "measure_seconds")
        >>> policy = AgentsPolicy(scope=[], out_of_scope=["trainer/contract/**"], **dict.fromkeys(keys, 1))
        >>> policy.protected("trainer/contract/recipe.py"), policy.protected("trainer/Contract/new.py"), policy.protected("trainer/run.py")
        (True, True, False)
        >>> policy.protected("trainer/__init__.py")  # importing trainer.contract runs it
        True
        """
        path = path.casefold()
        for pattern in self.out_of_scope:
            folder = pattern.casefold().removesuffix("/**")
            parts = folder.split("/")
            above = {"/".join((*parts[:n], "__init__.py")) for n in range(1, len(parts))}
            if path in above or path == f"{folder}.py" or path.startswith(f"{folder}/"):
                return True
        return False

    def patchable(self, path: str) -> bool:
        """May agents patch the file?"""
        return self.readable(path) and not self.protected(path)


@dataclass(frozen=True)
class Change:
    """One changed file, as the patch leaves it. ``mode`` is git's ('100644' …); ``content`` None: the file is deleted."""

    path: str
    content: bytes | None
    mode: str = "100644"
    old_mode: str | None = None  # None: the file is new


def problems(policy: AgentsPolicy, changes: Iterable[Change], existing: Mapping[str, str]) -> list[str]:
    """What is wrong with a patch, a sentence each; [] when it is in scope. ``existing``: path → mode at its base."""
    changes = list(changes)
    found = [f"{_shown(change.path)}: {problem}" for change in changes for problem in _one(policy, change)]
    places = {above for path in existing for above in _above(path)}
    folded = {above.casefold(): above for above in places}
    plain = [change for change in changes if len(change.path) <= LONGEST_PATH]  # what is longer is refused already
    gone = {change.path for change in plain if change.content is None}
    kept = (existing.keys() - gone) | {change.path for change in plain if change.content is not None}
    left = {above for path in kept for above in _above(path)}
    seen: set[str] = set()
    for change in plain:
        if change.path not in existing:
            found += [f"{_shown(change.path)}: {problem}" for problem in name_problems(change.path, places, left)]
        for path in _above(change.path):
            other = folded.get(path.casefold(), path)
            if other != path:
                found.append(f"{_shown(change.path)}: {_shown(path)} differs from {other} only in case")
                break
        if change.path.casefold() in seen:
            found.append(f"{_shown(change.path)}: changed twice")
        seen.add(change.path.casefold())
        for above in _above(change.path)[:-1]:
            if above in existing:
                found.append(f"{_shown(change.path)}: {above} is a file")
        if any(path.startswith(change.path + "/") for path in existing):
            found.append(f"{_shown(change.path)}: is a folder")
        if existing.get(change.path, "100644") not in ("100644", "100755"):
            found.append(f"{_shown(change.path)}: is not a regular file")
    if not changes:
        found.append("the patch changes nothing")
    if len(changes) > policy.max_files:
        found.append(f"{len(changes)} files are changed; at most {policy.max_files} are allowed")
    size = sum(len(change.content or b"") for change in changes)
    if size > policy.max_patch_bytes:
        found.append(f"the changed files hold {size} bytes; at most {policy.max_patch_bytes} are allowed")
    return found


def _above(path: str) -> list[str]:
    """``a/b/c`` → a, a/b, a/b/c."""
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _one(policy: AgentsPolicy, change: Change) -> Iterable[str]:
    yield from _name_problems(change.path)
    if policy.protected(change.path):
        yield "only people may change it: patches are judged with it, or the factory imports it"
    if not policy.readable(change.path):
        yield "out of scope: patches may change " + ", ".join(rule.paths for rule in policy.scope)
    if change.mode not in ("100644", "100755") or (change.old_mode or "100644") not in ("100644", "100755"):
        kind = {"120000": "a symbolic link", "160000": "a submodule"}.get(change.mode, f"of mode {change.mode}")
        yield f"is {kind}; only regular files may change"
    elif change.content is not None and change.mode != (change.old_mode or "100644"):
        yield f"changes its mode to {change.mode}"
    if change.content is not None:
        yield from _content_problems(policy, change.content)


def _name_problems(path: str) -> Iterable[str]:
    parts = path.split("/")
    if len(path) > LONGEST_PATH:
        yield f"the path has {len(path)} characters; at most {LONGEST_PATH} are allowed"
        return
    if not all(COMPONENT.fullmatch(part) for part in parts):
        yield "not a plain relative path of letters, digits, '_', '-' and '.'"
    for part in parts:
        if part.endswith(".") or part.split(".")[0].casefold() in DEVICE_NAMES:
            yield f"{part!r} has another meaning on some file systems"
    if any(part.casefold().partition(".")[0] in LOADED_BY_NAME for part in parts):
        yield "tools load this file by its name"


def _content_problems(policy: AgentsPolicy, content: bytes) -> Iterable[str]:
    if len(content) > policy.max_file_bytes:
        yield f"holds {len(content)} bytes; at most {policy.max_file_bytes} are allowed"
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        yield f"is not UTF-8 text (byte {error.start})"
        return
    for number, line in enumerate(text.split("\n"), 1):
        odd = next((c for c in line if c != "\t" and unicodedata.category(c) in INVISIBLE), None)
        if odd is not None:
            yield f"line {number} holds the invisible character U+{ord(odd):04X}"
            return


def _shown(path: str) -> str:
    path = path if len(path) <= LONGEST_PATH else f"{path[:LONGEST_PATH]}…"
    return path if path.replace("…", "").isascii() and path.isprintable() else ascii(path)
