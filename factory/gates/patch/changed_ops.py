"""Finds the ops that a patch changes, from ``kernels.yaml`` and from the paths of the patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.errors import suggest_name
from factory.gates.patch.policy import PatchPolicy
from factory.gates.stage_interface import PatchCase, make_not_needed_evidence
from kernels.contract.choice import EVERY_OP, UNTUNED, read_device_section, replace_auto, split_implementation_names
from kernels.contract.message import Message

NO_OP = make_not_needed_evidence(Message("patch.no_op", "The patch changes no op."))


@dataclass(frozen=True)
class ChangedOp:
    """An op whose computation the patch changes: the baseline's implementation and the candidate's, by name."""

    op: str
    before: str
    after: str


def find_changed_sections_of_kernels_file(before: bytes | None, after: bytes | None) -> list[str]:
    """Return the top-level keys of kernels.yaml (the devices, and ``fallback``) whose values the patch changes."""
    old, new = (found if isinstance(found := yaml.safe_load(text or b"{}"), dict) else {} for text in (before, after))
    return sorted(str(key) for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def find_sections_of_other_devices(before: bytes | None, after: bytes | None) -> list[Message]:
    """Return a message for each changed section of kernels.yaml that is for another device, so that no run here can judge it."""
    here = devices.get_device_kind()
    return [
        Message(
            "patch.other_device",
            "{file}: the section {section!r} is for another device, so this machine cannot judge it. Change only the section {here!r}.",
            file=KERNELS, section=key, here=here,
        )
        for key in find_changed_sections_of_kernels_file(before, after)
        if key != here
    ]  # fmt: skip


def find_unknown_ops(text: bytes | None) -> list[Message]:
    """Return a message for each name in kernels.yaml that is not an op. Loading the file refuses a value that is not a map.

    >>> find_unknown_ops(b"cpu: {swigul: reference}")
    ["policies/kernels.yaml: the section 'cpu' names 'swigul', which is not an op; did you mean 'swiglu'?"]
    """
    wrong = [(device, op) for device in UNTUNED for op in read_device_section(text, device) if op not in EVERY_OP]
    return [
        Message(
            "patch.unknown_op",
            "{file}: the section {device!r} names {op!r}, which is not an op{hint}",
            file=KERNELS, device=device, op=op, hint=suggest_name(op, EVERY_OP),
        )
        for device, op in wrong
    ]  # fmt: skip


def find_changed_ops(
    before: bytes | None, after: bytes | None, paths: Sequence[str], device: str, tuned: Mapping[str, str]
) -> list[ChangedOp]:
    """Return the ops that a patch changes. ``before``, ``after``: kernels.yaml. ``tuned``: op → the implementation that ``auto`` stands for.

    A patch to a file of ``kernels/`` may change any op, so then all ops that kernels.yaml names count as changed.
    """
    old, new = (
        {
            op: split_implementation_names(choice)[0]
            for op, choice in replace_auto(read_device_section(text, device), tuned).items()
        }
        for text in (before, after)
    )
    all_ops = any(path.startswith("kernels/") for path in paths)
    names = sorted(set(old) | set(new))
    pairs = [ChangedOp(name, old.get(name, "reference"), new.get(name, "reference")) for name in names]
    return [pair for pair in pairs if all_ops or pair.before != pair.after]


def find_changed_ops_of_patch(case: PatchCase[PatchPolicy]) -> list[ChangedOp]:
    tuned = case.start.kernels if case.start else {}
    after = (case.candidate / KERNELS).read_bytes()
    return find_changed_ops(case.read_base_file(KERNELS), after, case.changed_paths, devices.get_device_kind(), tuned)
