"""Chooses the target: the op or file that would save the largest share of the step if it ran at the roofline (Amdahl 1967)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.core.workbench import EarlierProposal
from agents.loop.role import TargetError, make_known_names_hint, make_nearest_name_hint

MOST_LINES = 12  # lines named for a target, hottest first
MOST_TRIES = 3  # rejected proposals after which the agent leaves a target alone, unless a person names it
LEAST_GAIN = 1.02  # a smaller attainable gain of the whole step is too small for the gate to measure


@dataclass(frozen=True)
class ProfileTarget:
    """An op or a file. ``share``: its part of the eager step's time. ``attainable``: the part of it that is saved at the roofline."""

    name: str  # kernel:<op> | file:<path>
    op: str
    lines: tuple[str, ...]  # file:line, hottest first
    share: float
    attainable: float

    @property
    def largest_possible_gain(self) -> float:
        """The whole step's gain if the target took no time at all: no hypothesis may predict more."""
        return 1.0 / (1.0 - min(self.share, 0.99))

    @property
    def gain_at_roofline(self) -> float:
        """The whole step's gain if all of the target ran at the roofline."""
        return 1.0 / (1.0 - min(self.attainable, 0.99))


def find_targets(profile: Mapping[str, Any], files: Collection[str]) -> list[ProfileTarget]:
    """The ops and files of a parsed profile.json that have lines in ``files``, largest attainable gain first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in profile["lines"]:
        if line["file"] in files:
            groups.setdefault(f"kernel:{line['op']}" if line["op"] else f"file:{line['file']}", []).append(line)
    found = []
    for name, lines in groups.items():
        lines.sort(key=lambda line: -line["share"])
        found.append(
            ProfileTarget(
                name,
                lines[0]["op"],
                tuple(f"{line['file']}:{line['line']}" for line in lines[:MOST_LINES]),
                sum(line["share"] for line in lines),
                sum(line["share"] * (1.0 - min(1.0, max(0.0, line["roofline"]))) for line in lines),
            )
        )
    return sorted(found, key=lambda target: -target.attainable)


def select_worthwhile_targets(
    found: Sequence[ProfileTarget], history: Callable[[str], Sequence[EarlierProposal]]
) -> list[ProfileTarget]:
    """The targets with a measurable attainable gain that were neither rejected too often nor closed, largest gain first."""
    worth = []
    for target in found:
        tried = history(target.name)
        refused = sum(attempt.outcome == "reject" for attempt in tried)
        if (
            target.gain_at_roofline >= LEAST_GAIN
            and refused < MOST_TRIES
            and not any(attempt.closed for attempt in tried)
        ):
            worth.append(target)
    return worth


def find_named_target(wanted_name: str, targets: Sequence[ProfileTarget], profile: Mapping[str, Any]) -> ProfileTarget:
    """The target with an op's name, or at a ``file:line``. Raises: TargetError that names the nearest one."""
    for target in targets:
        if wanted_name in (target.op, target.name):
            return target
    at = {f"{line['file']}:{line['line']}": line for line in profile["lines"]}
    if wanted_name in at:
        line = at[wanted_name]
        name = f"kernel:{line['op']}" if line["op"] else f"file:{line['file']}"
        for target in targets:
            if target.name == name:
                lines = (wanted_name, *(other for other in target.lines if other != wanted_name))
                return ProfileTarget(target.name, target.op, lines, target.share, target.attainable)
        raise TargetError(
            "kernel_engineer.not_patchable",
            "target {target!r} is a line of the profile, but agents may not patch its file.",
            target=wanted_name,
        )
    known = [target.op for target in targets if target.op] + list(at)
    near = difflib.get_close_matches(wanted_name, known, n=1)
    raise TargetError(
        "kernel_engineer.unknown_target",
        "target {target!r} is neither an op nor a line of the profile. {hint}",
        target=wanted_name,
        hint=make_nearest_name_hint(near[0]) if near else make_known_names_hint(known[:8]),
    )
