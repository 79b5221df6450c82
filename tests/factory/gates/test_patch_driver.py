"""The driver of the op oracle: every op there is can be asked and answered, lists of tensors and writes in place too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from factory.gates import patch_driver
from kernels.registry import OPS

ROOT = Path(__file__).parents[3]


def test_every_ops_reference_answers_what_the_truth_says(tmp_path: Path) -> None:
    jobs = [
        {"op": op, "implementation": implementation, "case": case, "dtype": "fp32", "values": values, "seed": 3}
        for op, implementation in [*((op, "reference") for op in OPS), ("adamw", "fused")]  # as shipped
        for case, values in (("small", "outlier"), ("strided", "normal"))
    ]
    request, given, answers = tmp_path / "request.json", tmp_path / "given", tmp_path / "answers"
    request.write_text(json.dumps(jobs))
    given.mkdir()
    answers.mkdir()
    for arguments in (("make", request, given), ("answer", request, given / "inputs", answers)):
        command = [sys.executable, patch_driver.__file__, *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    for number, job in enumerate(jobs):
        eager = load_file(given / "truth" / f"eager-{number}.safetensors")
        exact = load_file(given / "truth" / f"exact-{number}.safetensors")
        found = load_file(answers / f"answer-{number}.safetensors")
        assert not len(found.pop("inputs changed")), job
        assert found.keys() == eager.keys() == exact.keys() and "output 0" in found
        assert len(found) > len(OPS[job["op"]].gradients)
        for name, value in found.items():
            assert exact[name].dtype in (torch.float64, torch.int64), (job, name)
            torch.testing.assert_close(value, eager[name], rtol=1e-4, atol=1e-4 * float(eager[name].abs().max()))
