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
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

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
        inputs: list[Any] = tree_map_only(
            Tensor, Tensor.detach, list(op.inputs(case, dtype=DTYPES[job["dtype"]], seed=job["seed"]))
        )
        for position in op.hostile:
            inputs[position] = tree_map_only(Tensor, HOSTILE[job["values"]], inputs[position])
        upstream = _upstream(op, inputs, job["seed"])
        exact = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
        for kind, arguments, by in (("exact", exact, [u.double() for u in upstream]), ("eager", inputs, upstream)):
            found = results(op.reference, arguments, op.gradients, op.writes, by)
            save_file(found, truth / f"{kind}-{number}.safetensors")
        tensors = {_name(i, j): x.contiguous() for i, value in enumerate(inputs) for j, x in _tensors(value)}
        save_file(tensors | {f"upstream {i}": u for i, u in enumerate(upstream)}, out / f"given-{number}.safetensors")
        words = {
            "plain": {str(i): x for i, x in enumerate(inputs) if not isinstance(x, (Tensor, list))},
            "lists": {str(i): len(x) for i, x in enumerate(inputs) if isinstance(x, list)},
            "count": len(inputs),
            "gradients": op.gradients,
            "writes": op.writes,
            "spoils": op.spoils,
            "contiguous": case.contiguous,
        }
        (out / f"given-{number}.json").write_text(json.dumps(words))


def answer(jobs: list[dict[str, Any]], given: Path, out: Path) -> None:
    for number, job in enumerate(jobs):
        words = json.loads((given / f"given-{number}.json").read_text())
        tensors = load_file(given / f"given-{number}.safetensors")
        inputs = [_given(tensors, words, i) for i in range(words["count"])]
        if not words["contiguous"]:
            inputs = tree_map_only(Tensor, _strided, inputs)
        upstream = [tensors[f"upstream {i}"] for i in range(sum(name.startswith("upstream") for name in tensors))]
        before = tree_map_only(Tensor, Tensor.clone, inputs)
        function = get(job["op"]).implementation(job["implementation"]).function
        found = results(function, inputs, words["gradients"], words["writes"], upstream)
        changed = [i for i, (a, b) in enumerate(zip(before, inputs)) if i not in words["spoils"] and not _same(a, b)]
        found["inputs changed"] = torch.tensor(changed, dtype=torch.int64)
        save_file(found, out / f"answer-{number}.safetensors")


def results(
    function: Any, inputs: list[Any], gradients: Sequence[int], writes: Sequence[int], upstream: list[Tensor]
) -> dict[str, Tensor]:
    """Outputs and gradients by name. What the op writes in place are copies, and its outputs."""
    arguments = list(inputs)
    for position in writes:
        arguments[position] = tree_map_only(Tensor, _copy, arguments[position])
    for position in gradients:
        arguments[position] = arguments[position].detach().requires_grad_()
    outputs = function(*arguments)
    outputs = tuple(tree_leaves([arguments[p] for p in writes])) if writes else outputs
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {f"output {i}": o.detach().contiguous().clone() for i, o in enumerate(outputs)}
    if not gradients:
        return named
    # Inside the sums, not as an argument: for that torch imports sympy, which takes half a second.
    weighted = [(o * u).sum() for o, u in zip([o for o in outputs if o.requires_grad], upstream, strict=True)]
    found = torch.autograd.grad(weighted, [arguments[p] for p in gradients])
    return named | {f"gradient {p}": g.contiguous().clone() for p, g in zip(gradients, found)}


def _upstream(op: Any, inputs: list[Any], seed: int) -> list[Tensor]:
    if not op.gradients:
        return []
    arguments = list(inputs)
    arguments[op.gradients[0]] = arguments[op.gradients[0]].detach().requires_grad_()
    outputs = op.reference(*arguments)
    generator = torch.Generator().manual_seed(seed + 1)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = lambda o: torch.randn(o.shape, generator=generator).to(o.dtype)
    # A loss's gradient is one: a power of two scales every gradient without rounding it once more.
    return [draw(o) if o.ndim else torch.full((), -0.5, dtype=o.dtype) for o in outputs if o.requires_grad]


def _tensors(value: Any) -> list[tuple[int | None, Tensor]]:
    """The tensors of one argument, each with its place if the argument is a list."""
    if isinstance(value, list):
        return list(enumerate(value))
    return [(None, value)] if isinstance(value, Tensor) else []


def _name(argument: int, place: int | None) -> str:
    return f"input {argument}" if place is None else f"input {argument} {place}"


def _given(tensors: dict[str, Tensor], words: dict[str, Any], argument: int) -> Any:
    if str(argument) in words["plain"]:
        return words["plain"][str(argument)]
    if str(argument) in words["lists"]:
        return [tensors[_name(argument, place)] for place in range(words["lists"][str(argument)])]
    return tensors[_name(argument, None)]


def _same(before: Any, after: Any) -> bool:
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(_tensors(before), _tensors(after)))


def _copy(x: Tensor) -> Tensor:
    """The same values in the same layout: a plain clone would be contiguous."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


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
