"""What is missing on this machine, said so that it can be carried here: a bare GPU image has torch and triton, and no pydantic."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEED_PYDANTIC = "the parts 'step' and 'chain'"
FOUR = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection")


def wheels() -> list[str]:
    """``name==version`` of the four wheels, by constraints.txt."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    known = {name.replace("_", "-").lower(): version for name, version in pins.items()}
    return [f"{name}=={known[name]}" for name in FOUR]


def carry() -> str:
    """What to carry to a machine without pydantic, and how."""
    four, here = " ".join(wheels()), f"{sys.version_info.major}.{sys.version_info.minor}"
    built = f"--python-version {here} --platform manylinux2014_{platform.machine()}"
    return (
        f"pydantic is missing, which trainer/ reads recipes with. Carry four wheels: {', '.join(wheels())}. Where there is a network: "
        f"'pip download --no-deps --only-binary=:all: {built} -d wheels {four}'; "
        "here, without one: 'pip install --no-index --no-deps --target wheels/in wheels/*.whl && "
        "PYTHONPATH=wheels/in python -m benchmarks.gpu'"
    )


def why(error: ImportError) -> str:
    """Of a part or item whose import failed."""
    name = (error.name or "").partition(".")[0]
    if name.replace("_", "-") in FOUR:
        return "pydantic is missing here: carry four wheels, as 'facts' says"
    return (
        f"{name} is not installed here"
        if name and isinstance(error, ModuleNotFoundError)
        else f"{type(error).__name__}: {error}"
    )
