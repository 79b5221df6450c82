"""Chooses the target: the op or file that would save the largest share of the step if it ran at the roofline (Amdahl 1967).

The shares are those of the step as the recipe runs it. Several profiles of one commit and one machine count together: a target has the median of
its shares, and its range.
"""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agents.core.workbench import EarlierProposal
from agents.loop.role import TargetError, make_known_names_hint, make_nearest_name_hint
from kernels.contract.message import Message

MOST_LINES = 12  # lines named for a target, hottest first
MOST_NAMED = 5  # offered targets that people are told by name
MOST_TRIES = 3  # rejected proposals after which the agent leaves a target alone, unless a person names it
LEAST_GAIN = (
    1.02  # training.min_gain of the gate, if nobody says otherwise: a smaller gain of the whole step is never kept
)


@dataclass(frozen=True)
class ProfileTarget:
    """An op or a file. ``share``: its part of the step's time. ``attainable``: the part of the step that is saved at the roofline. Both are medians
    over ``profiles`` profiles. ``least_attainable`` and ``most_attainable``: the range."""

    name: str  # kernel:<op> | file:<path>
    op: str
    lines: tuple[str, ...]  # file:line, hottest first
    share: float
    attainable: float
    least_attainable: float = 0.0
    most_attainable: float = 0.0
    profiles: int = 1

    @property
    def largest_possible_gain(self) -> float:
        """The whole step's gain if the target took no time at all: no hypothesis may predict more."""
        return 1.0 / (1.0 - min(self.share, 0.99))

    @property
    def gain_at_roofline(self) -> float:
        """The whole step's gain if all of the target ran at the roofline."""
        return 1.0 / (1.0 - min(self.attainable, 0.99))

    def can_gain(self, least_gain: float) -> bool:
        """True if the step could become ``least_gain`` times as fast, even if only by a target that takes no time any more."""
        return self.largest_possible_gain >= least_gain


def find_targets(
    profile: Mapping[str, Any], files: Collection[str], earlier: Sequence[Mapping[str, Any]] = ()
) -> list[ProfileTarget]:
    """The ops and files of a parsed profile.json that have lines in ``files``, largest attainable gain first.

    ``earlier``: other profiles of the same commit, recipe and machine. All are measured against the rates of ``profile``.
    """
    every = [_sum_targets(one, files, profile) for one in (profile, *earlier)]
    found = []
    for name, (lines, _, _) in every[0].items():
        shares, attainable = zip(*((one[name][1], one[name][2]) for one in every if name in one))
        found.append(
            ProfileTarget(
                name,
                lines[0]["op"],
                tuple(f"{line['file']}:{line['line']}" for line in lines[:MOST_LINES]),
                statistics.median(shares),
                statistics.median(attainable),
                min(attainable),
                max(attainable),
                len(shares),
            )
        )
    return sorted(found, key=lambda target: -target.attainable)


Lines = list[Mapping[str, Any]]


def _sum_targets(
    profile: Mapping[str, Any], files: Collection[str], rates: Mapping[str, Any]
) -> dict[str, tuple[Lines, float, float]]:
    """Target → (its lines, hottest first; its share; the share that is saved at the roofline of ``rates``)."""
    groups: dict[str, Lines] = {}
    for line in profile["lines"]:
        if line["file"] in files:
            groups.setdefault(f"kernel:{line['op']}" if line["op"] else f"file:{line['file']}", []).append(line)
    found = {}
    for name, lines in groups.items():
        lines.sort(key=lambda line: -line["share"])
        saved = sum(line["share"] * (1.0 - _find_roofline(line, profile, rates)) for line in lines)
        found[name] = lines, sum(line["share"] for line in lines), saved
    return found


def _find_roofline(line: Mapping[str, Any], profile: Mapping[str, Any], rates: Mapping[str, Any]) -> float:
    """The line's part of the roofline, from 0 to 1, by the rates of another profile of the same machine."""
    least = [
        max(line["flops"] / one["matmul_flops_per_s"], line["bytes"] / one["memory_bytes_per_s"])
        for one in (rates, profile)
    ]
    scale = least[0] / least[1] if least[1] else 1.0
    return float(min(1.0, max(0.0, line["roofline"] * scale)))


def select_worthwhile_targets(
    found: Sequence[ProfileTarget],
    history: Callable[[str], Sequence[EarlierProposal]],
    least_gain: float = LEAST_GAIN,
) -> list[ProfileTarget]:
    """The targets that could gain ``least_gain`` at the roofline, and that were neither rejected too often nor closed; largest gain first."""
    worth = []
    for target in found:
        tried = history(target.name)
        refused = sum(attempt.outcome == "reject" for attempt in tried)
        if (
            target.gain_at_roofline >= least_gain
            and refused < MOST_TRIES
            and not any(attempt.closed for attempt in tried)
        ):
            worth.append(target)
    return worth


def describe_offered_targets(found: Sequence[ProfileTarget], least_gain: float) -> Message:
    """How many targets are offered, how many never are, and the range of the best ones over the profiles."""
    offered = [target for target in found if target.can_gain(least_gain)]
    if not offered:
        return Message(
            "kernel_engineer.none_offered",
            "  No target of {targets} is offered to proposers: the step would not be {gain:g} times as fast if one of them "
            "took no time (training.min_gain).",
            targets=len(found),
            gain=least_gain,
        )
    best = [
        Message(
            "kernel_engineer.offered_target",
            "{target} ({attainable:.1%} of the step attainable; {least:.1%} to {most:.1%} in {profiles:,|profile|profiles})",
            target=target.op or target.name.partition(":")[2],
            attainable=target.attainable,
            least=target.least_attainable,
            most=target.most_attainable,
            profiles=target.profiles,
        )
        for target in offered[:MOST_NAMED]
    ]
    return Message(
        "kernel_engineer.offered",
        "  {offered} of {targets:,|target|targets} are offered to proposers. The first are: {best}. The other {left:,|target is|targets are} never "
        "offered: the step would not be {gain:g} times as fast if they took no time (training.min_gain).",
        offered=len(offered),
        targets=len(found),
        best=best,
        left=len(found) - len(offered),
        gain=least_gain,
    )


def find_named_target(
    wanted_name: str, targets: Sequence[ProfileTarget], profile: Mapping[str, Any], least_gain: float = LEAST_GAIN
) -> ProfileTarget:
    """The target with an op's name, or at a ``file:line``. Raises: TargetError that names the nearest one, or says that nothing is to gain."""
    found = _find_named_target(wanted_name, targets, profile)
    if not found.can_gain(least_gain):
        raise TargetError(
            "kernel_engineer.too_small",
            "target {target!r} is not offered: it takes {share:.2%} of the step, and without it the step would be {most:.3f} times as fast. The gate "
            "keeps a patch from {least:g} times on (training.min_gain in policies/gates/patch.yaml).",
            target=wanted_name,
            share=found.share,
            most=found.largest_possible_gain,
            least=least_gain,
        )
    return found


def _find_named_target(wanted_name: str, targets: Sequence[ProfileTarget], profile: Mapping[str, Any]) -> ProfileTarget:
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
                return replace(target, lines=lines)
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
