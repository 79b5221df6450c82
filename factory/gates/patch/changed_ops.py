"""Which ops a patch changes, read from ``kernels.yaml`` and from the patch's paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.errors import nearest
from factory.gates.case import PatchCase, not_needed
from factory.gates.patch.policy import PatchPolicy
from kernels.contract.choice import EVERY_OP, UNTUNED, names_in, resolve, section_of

NO_OP = not_needed("the patch changes no op")


@dataclass(frozen=True)
class ChangedOp:
    """An op whose computation the patch changes: the baseline's implementation and the candidate's, by name."""

    op: str
    before: str
    after: str


def changed_sections(before: bytes | None, after: bytes | None) -> list[str]:
    """The top-level keys of kernels.yaml (a device each, and ``fallback``) whose values differ."""
    old, new = (found if isinstance(found := yaml.safe_load(text or b"{}"), dict) else {} for text in (before, after))
    return sorted(str(key) for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def other_devices(before: bytes | None, after: bytes | None) -> list[str]:
    """A sentence for each changed section of kernels.yaml that no run here can judge."""
    here = devices.kind()
    return [
        f"{KERNELS}: the section {key!r} does not apply to this machine and cannot be judged here: change {here!r} only"
        for key in changed_sections(before, after)
        if key != here
    ]


def unknown_ops(text: bytes | None) -> list[str]:
    """A sentence for each name in kernels.yaml that is no op. What stands there in place of a map, who loads it refuses.

    >>> unknown_ops(b"cpu: {swigul: reference}")
    ["policies/kernels.yaml: cpu: there is no op 'swigul'; did you mean 'swiglu'?"]
    """
    wrong = [(device, op) for device in UNTUNED for op in section_of(text, device) if op not in EVERY_OP]
    return [f"{KERNELS}: {device}: there is no op {op!r}{nearest(op, EVERY_OP)}" for device, op in wrong]


def changed_ops(
    before: bytes | None, after: bytes | None, paths: Sequence[str], device: str, tuned: Mapping[str, str]
) -> list[ChangedOp]:
    """``before``, ``after``: kernels.yaml; ``tuned``: op → the implementation that ``auto`` stands for.

    A patch to a file of ``kernels/`` may change any op, so all ops that kernels.yaml names count then.
    """
    old, new = (
        {op: names_in(choice)[0] for op, choice in resolve(section_of(text, device), tuned).items()}
        for text in (before, after)
    )
    all_ops = any(path.startswith("kernels/") for path in paths)
    names = sorted(set(old) | set(new))
    pairs = [ChangedOp(name, old.get(name, "reference"), new.get(name, "reference")) for name in names]
    return [pair for pair in pairs if all_ops or pair.before != pair.after]


def ops_of(case: PatchCase[PatchPolicy]) -> list[ChangedOp]:
    tuned = case.start.kernels if case.start else {}
    after = (case.candidate / KERNELS).read_bytes()
    return changed_ops(case.base_bytes(KERNELS), after, case.paths, devices.kind(), tuned)
