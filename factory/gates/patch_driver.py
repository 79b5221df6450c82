"""Runs inside the sandbox, from a worktree: makes an op's test inputs, or answers them with that worktree's implementation.

``python patch_driver.py make REQUEST OUT`` (approved code): OUT/inputs gets inputs and upstream gradients, OUT/truth the exact and
the eager results.
``python patch_driver.py answer REQUEST IN OUT`` (the candidate's code): outputs and gradients. It never sees the right ones.
REQUEST is a JSON list of ``{"op", "implementation", "case", "dtype", "values", "seed"}``. Nothing here judges.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = os.getcwd()  # the worktree's packages, not this file's neighbours

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from kernels.registry import OPS, get  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(jobs: list[dict[str, Any]], folder: Path) -> None:
    from kernels.oracle import HOSTILE

    out, truth = folder / "inputs", folder / "truth"
    for part in (out, truth):
        part.mkdir(exist_ok=True)
    for number, job in enumerate(jobs):
        op = OPS[job["op"]]
        case = next(c for c in op.cases if c.name == job["case"])
        inputs = [
            x.detach() if isinstance(x, Tensor) else x
            for x in op.inputs(case, dtype=DTYPES[job["dtype"]], seed=job["seed"])
        ]
        for position in op.gradients:
            inputs[position] = HOSTILE[job["values"]](inputs[position])
        upstream = _upstream(op, inputs, job["seed"])
        exact = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
        save_file(
            results(op.reference, exact, op.gradients, [u.double() for u in upstream]),
            truth / f"exact-{number}.safetensors",
        )
        save_file(results(op.reference, inputs, op.gradients, upstream), truth / f"eager-{number}.safetensors")
        tensors = {f"input {i}": x.contiguous() for i, x in enumerate(inputs) if isinstance(x, Tensor)}
        save_file(tensors | {f"upstream {i}": u for i, u in enumerate(upstream)}, out / f"given-{number}.safetensors")
        plain = {str(i): x for i, x in enumerate(inputs) if not isinstance(x, Tensor)}
        words = {"plain": plain, "count": len(inputs), "gradients": op.gradients, "contiguous": case.contiguous}
        (out / f"given-{number}.json").write_text(json.dumps(words))


def answer(jobs: list[dict[str, Any]], given: Path, out: Path) -> None:
    for number, job in enumerate(jobs):
        words = json.loads((given / f"given-{number}.json").read_text())
        tensors = load_file(given / f"given-{number}.safetensors")
        inputs = [
            tensors[f"input {i}"] if f"input {i}" in tensors else words["plain"][str(i)] for i in range(words["count"])
        ]
        if not words["contiguous"]:
            inputs = [_strided(x) if isinstance(x, Tensor) else x for x in inputs]
        upstream = [tensors[f"upstream {i}"] for i in range(sum(name.startswith("upstream") for name in tensors))]
        before = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        found = results(
            get(job["op"]).implementation(job["implementation"]).function, inputs, words["gradients"], upstream
        )
        changed = [i for i, (a, b) in enumerate(zip(before, inputs)) if isinstance(a, Tensor) and not torch.equal(a, b)]
        found["inputs changed"] = torch.tensor(changed, dtype=torch.int64)
        save_file(found, out / f"answer-{number}.safetensors")


def results(function: Any, inputs: list[Any], gradients: Sequence[int], upstream: list[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    arguments = list(inputs)
    for position in gradients:
        arguments[position] = arguments[position].detach().requires_grad_()
    outputs = function(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [o for o in outputs if o.requires_grad]
    found = torch.autograd.grad(wanted, [arguments[p] for p in gradients], upstream)
    named = {f"output {i}": o.detach().contiguous().clone() for i, o in enumerate(outputs)}
    return named | {f"gradient {p}": g.contiguous().clone() for p, g in zip(gradients, found)}


def _upstream(op: Any, inputs: list[Any], seed: int) -> list[Tensor]:
    arguments = list(inputs)
    arguments[op.gradients[0]] = arguments[op.gradients[0]].detach().requires_grad_()
    outputs = op.reference(*arguments)
    generator = torch.Generator().manual_seed(seed + 1)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = lambda o: torch.randn(o.shape, generator=generator).to(o.dtype)
    # A loss's gradient is one: a power of two scales every gradient without rounding it once more.
    return [draw(o) if o.ndim else torch.full((), -0.5, dtype=o.dtype) for o in outputs if o.requires_grad]


def _strided(x: Tensor) -> Tensor:
    wide = x.new_zeros((*x.shape, 2))
    wide[..., 0] = x
    return wide[..., 0]


if __name__ == "__main__":
    verb, request, *folders = sys.argv[1:]
    jobs = json.loads(Path(request).read_text())
    if verb == "make":
        make(jobs, Path(folders[0]))
    else:
        answer(jobs, Path(folders[0]), Path(folders[1]))
