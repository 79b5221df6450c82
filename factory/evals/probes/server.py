"""Starts ``server_probe`` on an export, in its own process group, with a clean environment, limits on time and memory, and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from factory.core.launching import run_in_background_process
from kernels.contract.message import Message
from models.adapters import FAMILIES

PROBE = Path(__file__).with_name("server_probe.py")
ENVIRONMENT = {
    "PATH": os.defpath, "LANG": "C.UTF-8", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip
AGAIN = 5  # the second attempt may take this many times as long as the first


@dataclass(frozen=True)
class ProbeAnswer:
    """The probe's answer, or the ``problem`` if the probe did not finish."""

    answer: dict[str, Any]
    logits_TV: npt.NDArray[np.float32] | None
    problem: str = ""
    out_of_time: bool = False  # the time limit ended the probe, which says nothing about the export


def run_transformers_probe(request: dict[str, Any], seconds: int) -> ProbeAnswer:
    """Run the probe. If its time runs out, run it once more with more time. Nothing in the export can make the function raise."""
    first = _attempt(request, seconds)
    return _attempt(request, AGAIN * seconds) if first.out_of_time else first


def _attempt(request: dict[str, Any], seconds: int) -> ProbeAnswer:
    with tempfile.TemporaryDirectory(prefix="factory-probe-") as name:
        folder = Path(name)
        asked, answered = folder / "request.json", folder / "answer.json"
        cpu_seconds = max(4, os.cpu_count() or 1) * seconds
        classes = {model_type: family.class_name for model_type, family in FAMILIES.items()}
        asked.write_text(json.dumps(request | {"cpu_seconds": cpu_seconds, "classes": classes}), encoding="utf-8")
        environment = ENVIRONMENT | {"HOME": name, "HF_HOME": name, "TMPDIR": name}
        command = [sys.executable, "-I", str(PROBE), str(asked), str(answered)]
        with run_in_background_process(command, folder, folder / "log", environment) as process:
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                late = Message(
                    "server.late",
                    "the process that tests transformers did not finish within {seconds:,} s. Close other programs, or "
                    "raise probe_seconds in policies/evals.yaml",
                    seconds=seconds,
                )
                return ProbeAnswer({}, None, late, out_of_time=True)
        if process.returncode or not answered.exists():
            lines = (folder / "log").read_text(errors="replace").strip().splitlines()
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
            last = lines[-1][:300] if lines else "no output"
            return ProbeAnswer(
                {},
                None,
                Message(
                    "server.ended", "the process that tests transformers ended with {how}: {last}", how=how, last=last
                ),
            )
        return ProbeAnswer(json.loads(answered.read_text()), np.load(f"{answered}.npy", allow_pickle=False))
