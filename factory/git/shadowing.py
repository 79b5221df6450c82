"""May a new file have this name? Python imports by name: the wrong one is imported in place of somebody else's module.

Two names shadow: a package beside a module of its name (Python takes the package), and a name of the standard library or of an installed
package (a folder may be first on Python's path). Judged from the names alone, before anything of the patch is imported.
"""

from __future__ import annotations

import functools
import keyword
import os
import sys
from collections.abc import Collection, Iterable

OURS = ("agents", "benchmarks", "factory", "kernels", "tests", "trainer")
SPECIAL = "__init__"  # the only name of this kind that a new file may have


def problems(path: str, existing: Collection[str], left: Collection[str]) -> Iterable[str]:
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
