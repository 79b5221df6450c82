"""Checks that the sandbox has the libraries that items import. Without them, every answer to such an item would be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from factory.tasks.items import CodeItem, TaskError
from factory.tasks.policy import TaskLimits
from factory.tasks.program_texts import FIND_LIBRARIES
from factory.tasks.verifiers import check_programs

AT_ONCE = 10  # names in a program, so that an error's last line can hold them


def refuse_missing_libraries(items: Sequence[CodeItem], limits: TaskLimits) -> None:
    """Raises: TaskError naming the libraries that programs in the sandbox cannot import, and the number of items that need them."""
    used = Counter(name for item in items for name in set(item.libraries))
    if not used:
        return
    names = sorted(used)
    parts = [names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE)]
    found = check_programs([(FIND_LIBRARIES.format(names=part), "assert True") for part in parts], limits)
    missing: list[str] = []
    for one in found:
        if not one.right:
            if "AssertionError: " not in one.why:
                raise TaskError(
                    "libraries.not_checked",
                    "The factory could not find out which libraries the items need: {reason}",
                    reason=one.why or one.stopped,
                )
            missing += one.why.rsplit("AssertionError: ", 1)[1].split(", ")
    if missing:
        concerned = sum(bool(set(item.libraries) & set(missing)) for item in items)
        raise TaskError(
            "libraries.missing",
            "{concerned:,} of {items:,} items need libraries that are not installed: {libraries}. Install them in the factory's environment, or "
            "remove these items",
            concerned=concerned, items=len(items), libraries=missing,
        )  # fmt: skip
