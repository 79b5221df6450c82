"""What programs and their tests import beside the standard library: an item whose libraries are missing would be wrong whatever is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from factory.tasks.items import CodeItem, TaskError
from factory.tasks.policy import TaskLimits
from factory.tasks.verifiers import check_programs

# The last line of what a program leaves is its error. A name, and not an import: some take seconds to import.
LOOK = """
import importlib.util
missing = [name for name in {names!r} if importlib.util.find_spec(name) is None]
assert not missing, ", ".join(missing)
"""
AT_ONCE = 10  # so that the names fit the line


def refuse_missing_libraries(items: Sequence[CodeItem], running: TaskLimits) -> None:
    """Raises: TaskError naming the libraries that programs in the sandbox cannot import, and how many items need one."""
    used = Counter(name for item in items for name in set(item.libraries))
    if not used:
        return
    names = sorted(used)
    parts = [names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE)]
    found = check_programs([(LOOK.format(names=part), "assert True") for part in parts], running)
    missing: list[str] = []
    for one in found:
        if not one.right:
            if "AssertionError: " not in one.why:
                raise TaskError(f"the libraries of its items could not be looked for: {one.why or one.stopped}")
            missing += one.why.rsplit("AssertionError: ", 1)[1].split(", ")
    if missing:
        concerned = sum(bool(set(item.libraries) & set(missing)) for item in items)
        raise TaskError(
            f"{concerned} of {len(items)} items need libraries that programs here do not have: {', '.join(missing)}; install them "
            "beside the factory, or remove those items"
        )
