"""What nvidia-smi says of the card between the parts, when nothing of ours runs on it: clock, power, and what else is there."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

FIELDS = ("clock", "power", "temperature", "utilisation")
QUERY = "clocks.sm,power.draw,temperature.gpu,utilization.gpu"
IDLE = 5  # per cent of utilisation, up to which a card is idle
TIMEOUT_S = 20


def look(uuid: str) -> dict[str, Any]:
    """MHz, W, °C and % of the card of that UUID, and "processes": how many others compute on it. Empty: there is no nvidia-smi."""
    card = ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"] if uuid else []
    said = ask(*card, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    if not said:
        return {}
    processes = ask(*card, "--query-compute-apps=pid", "--format=csv,noheader")
    return numbers(said) | {"processes": len(processes.splitlines())}


def numbers(line: str) -> dict[str, float | None]:
    """A line of the answer.

    >>> numbers("1980, 71.22, 33, [N/A]")
    {'clock': 1980.0, 'power': 71.22, 'temperature': 33.0, 'utilisation': None}
    """
    found: dict[str, float | None] = {}
    for name, word in zip(FIELDS, line.splitlines()[0].split(",")):
        try:
            found[name] = float(word)
        except ValueError:
            found[name] = None
    return found


def ask(*words: str) -> str:
    """Its answer; '' where there is none. Reads only."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
