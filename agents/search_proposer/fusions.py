"""Fusion candidates of the profile, and what covers them: another implementation of their op, or the compiler over the
model's blocks (the recipe's key ``compile``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agents.core.proposal import Edit, Proposal
from agents.core.workbench import ReadError, Workbench
from agents.core.yaml_edit import set_value

Fusion = Mapping[str, Any]  # one of profile.json's ``fusion_candidates``
NAMED = 3
BLOCKS = "trainer/model/transformer.py"  # its lines outside of ops are compiled with their block


def of_op(profile: Mapping[str, Any], op: str) -> list[Fusion]:
    """The candidates with all lines in that op, which another implementation covers. Largest gain first."""
    return [f for f in profile.get("fusion_candidates", ()) if {_op(line) for line in f["lines"]} == {op}]


def of_blocks(profile: Mapping[str, Any]) -> list[Fusion]:
    """The candidates that compiled blocks cover. Largest gain first."""
    in_block = {op["op"]: op["in_block"] for op in profile["ops"]}
    inside = lambda line: in_block.get(_op(line), False) if _op(line) else line.startswith(f"{BLOCKS}:")
    return [f for f in profile.get("fusion_candidates", ()) if all(inside(line) for line in f["lines"])]


def _op(line: str) -> str:
    return line.partition("#")[2]


def in_words(fusions: Sequence[Fusion]) -> str:
    """The largest by name, and how many more."""
    named = [
        f"{' → '.join(f['lines'])} ({f['bytes_saved'] / 1e6:,.0f} MB, {f['gain_s'] * 1e3:.1f} ms)"
        for f in fusions[:NAMED]
    ]
    more = f"; and {len(fusions) - NAMED} more" if len(fusions) > NAMED else ""
    return "; ".join(named) + more


def compile_blocks(profile: Mapping[str, Any], workbench: Workbench, agent: str) -> Proposal | None:
    """``compile: true`` for a recipe that runs its blocks eagerly, where the profile has candidates in them.

    The prediction is the candidates' bytes at the measured bandwidth; saved launches are not counted.
    """
    recipe, fusions = profile["recipe"], of_blocks(profile)
    if recipe["compile"] or not fusions:
        return None
    path = f"policies/recipes/{recipe['name']}.yaml"
    try:
        changed = set_value(workbench.read(path), ("compile",), True)
    except (ReadError, ValueError):
        return None  # the recipe is the workspace's own: no patch of the repository changes it
    share = min(0.9, sum(f["gain_share"] for f in fusions))
    gain = 1 / (1 - share)
    megabytes = sum(f["bytes_saved"] for f in fusions) / 1e6
    return Proposal(
        agent=agent,
        target="recipe:compile",
        title=f"recipe {recipe['name']}: compile its blocks",
        hypothesis=(
            f"torch.compile over each block covers {len(fusions)} fusion candidates of the profile, {megabytes:,.0f} MB and "
            f"{share:.0%} of the eager step together: {in_words(fusions)}. If the whole step does not get at least "
            f"{1 + (gain - 1) / 2:.3f} times as fast (predicted: {gain:.3f}), or held-out evaluations get worse, this is refuted."
        ),
        predicted_gain=gain,
        edits=(Edit(path, changed),),
    )
