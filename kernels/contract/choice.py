"""``kernels.yaml`` as data: which implementation of each op runs, by device class, and what ``auto`` stands for.

    cpu:
      attention: auto        # what tuning found fastest on this machine
      swiglu: reference      # by name: on every machine

Nothing here imports an op, so that the factory can resolve the choice of code that it may not import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

AUTO = "auto"
UNTUNED = {"adamw": "fused"}  # what ``auto`` runs before anything was tuned; for any other op its reference
Choice = dict[str, str]  # op → implementation


def resolve(section: Mapping[str, str], tuned: Mapping[str, str] | None = None) -> Choice:
    """A section of ``kernels.yaml`` with every ``auto`` replaced: by ``tuned``, else by what runs untuned."""
    chosen = tuned or {}
    return {
        op: chosen.get(op, UNTUNED.get(op, "reference")) if implementation == AUTO else implementation
        for op, implementation in section.items()
    }


def automatic(section: Mapping[str, str]) -> list[str]:
    """The ops of a section whose implementation is ``auto``."""
    return [op for op, implementation in section.items() if implementation == AUTO]


def section_of(text: str | bytes | None, device: str) -> Choice:
    """A device's section of ``kernels.yaml``, as written. Anything but a map reads as empty; ``registry`` refuses it by name."""
    found = yaml.safe_load(text or "")
    section = found.get(device) if isinstance(found, dict) else None
    return {str(op): str(name) for op, name in section.items()} if isinstance(section, dict) else {}


def resolved_text(text: str | bytes, device: str, tuned: Mapping[str, str] | None = None) -> str:
    """``kernels.yaml`` for one device, without any ``auto``: its section resolved, and ``fallback`` as it stands.

    >>> print(resolved_text("cpu: {attention: auto, adamw: auto}", "cpu", {"attention": "native"}), end="")
    cpu:
      attention: native
      adamw: fused
    """
    document = yaml.safe_load(text) or {}
    kept: dict[str, Any] = {device: resolve(section_of(text, device), tuned)}
    if isinstance(document, dict) and "fallback" in document:
        kept["fallback"] = document["fallback"]
    return yaml.safe_dump(kept, sort_keys=False)
