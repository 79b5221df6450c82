"""Makes the test inputs and the truth of ops, or answers them with a worktree's implementations. Runs inside the sandbox, from the worktree.

``python op_driver.py make REQUEST OUT`` runs approved code. It writes inputs and upstream gradients to OUT/inputs, and exact and eager results to
OUT/truth. ``python op_driver.py answer REQUEST IN OUT`` runs the candidate's code. It reads the inputs in IN and writes outputs and gradients to OUT.
It never sees the right ones. If the request has ``watched``, the record of executed code is OUT/truth/executed.json or OUT/executed.json.

REQUEST is the path of a JSON object. ``device`` ('cpu' or 'cuda') computes everything. ``recorder`` is the path of
``factory.gates.patch.execution_recorder``. ``watched`` has the lines to record by path in the worktree. ``jobs`` is a list of
``{"op", "implementation", "case", "dtype", "values", "seed"}``. A job with a ``shape`` (the fields of kernels.contract.op.Shape) has no ``case``.
With a ``swap`` (a seed), two elements of each tensor are exchanged. A ``number`` is that of the job's files, if it is not the job's place in the
list. Jobs of one op with the same ``storage`` get their data in the same tensors, one after the other, and their results are read again after the
op's last job (``later …``). If an op raises an exception, the answer is ``raised``. The driver does not judge. ``skips_unknown``: jobs of
implementations that the code lacks are left out.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = os.getcwd()  # the worktree's packages, not this file's neighbours
recorder: Any = None
ASKED: dict[str, Any] = json.loads(Path(sys.argv[2]).read_text()) if __name__ == "__main__" else {}
if ASKED.get("watched"):  # before watched code is imported
    recorder = runpy.run_path(ASKED["recorder"])["ExecutionRecorder"](os.getcwd(), ASKED["watched"])
    recorder.watch_imports()
    recorder.watch_compiler()
    recorder.start()

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

from kernels.contract.op import OracleCase, Shape  # noqa: E402
from kernels.contract.registry import OPS, find_op, load_choice  # noqa: E402

DEVICE = torch.device("cpu")  # of this process; the request sets it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def make_inputs_and_truth(jobs: list[dict[str, Any]], folder: Path) -> None:
    from kernels.contract.oracle import HOSTILE

    out, truth = folder / "inputs", folder / "truth"
    for part in (out, truth):
        part.mkdir(exist_ok=True)
    for number, job in enumerate(jobs):
        if job["op"] not in OPS:
            continue  # kernels.yaml names an unknown op; the answer reports that
        op = OPS[job["op"]]
        drawn = OracleCase("drawn", Shape(**job["shape"])) if "shape" in job else None
        case = drawn or next(c for c in op.cases if c.name == job["case"])
        inputs: list[Any] = tree_map_only(
            Tensor, Tensor.detach, list(op.inputs(case, dtype=DTYPES[job["dtype"]], seed=job["seed"]))
        )
        for position in op.hostile:
            inputs[position] = tree_map_only(Tensor, HOSTILE[job["values"]], inputs[position])
            if job.get("swap") is not None:
                inputs[position] = tree_map_only(Tensor, partial(_swapped, seed=job["swap"]), inputs[position])
        upstream = _upstream(op, inputs, job["seed"])
        here = tree_map_only(Tensor, lambda x: x.to(DEVICE), inputs)
        exact = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, here)
        by = [u.to(DEVICE) for u in upstream]
        for kind, arguments, given in (("exact", exact, [u.double() for u in by]), ("eager", here, by)):
            found, _ = call_op(op.reference, arguments, op.gradients, op.writes, given, outputs=op.writes)
            save_file({name: x.cpu() for name, x in found.items()}, truth / f"{kind}-{number}.safetensors")
        tensors: dict[str, Tensor] = {}
        told = [_told(value, tensors) for value in inputs]
        save_file(tensors | {f"upstream {i}": u for i, u in enumerate(upstream)}, out / f"given-{number}.safetensors")
        words = {
            "inputs": told,
            "upstream": len(upstream),
            "gradients": op.gradients,
            "writes": op.writes,
            "clobbers": op.clobbers,
            "contiguous": case.contiguous,
            "cost": asdict(op.cost(case.shape, 2)),
        }
        (out / f"given-{number}.json").write_text(json.dumps(words))


def write_job_answers(jobs: list[dict[str, Any]], inputs_folder: Path, out: Path) -> None:
    load_choice(Path("policies/kernels.yaml"), DEVICE.type)  # raises ConfigError
    storages: dict[Any, tuple[list[Any], list[Tensor]]] = {}
    waiting: list[tuple[int, dict[str, Tensor], dict[str, Tensor]]] = []  # answers that wait for the op's last call
    launches: LaunchCounter | None = None
    for place, job in enumerate(jobs):
        number = job.get("number", place)
        if any(job[key] != jobs[place - 1][key] for key in ("op", "implementation")):
            _look_again(waiting, storages, out)
        words = json.loads((inputs_folder / f"given-{number}.json").read_text())
        loaded = load_file(inputs_folder / f"given-{number}.safetensors")
        inputs, upstream = _read(words, {name: x.to(DEVICE) for name, x in loaded.items()})
        shared = job.get("storage") is not None
        if shared:
            inputs, upstream = _into(storages, job["storage"], words["gradients"], inputs, upstream)
        may_change = [*words["clobbers"], *(words["writes"] if shared else ())]
        before = tree_map_only(Tensor, lambda x: x.detach().clone(), inputs)
        if ASKED.get("skips_unknown") and job["implementation"] not in find_op(job["op"]).implementations:
            continue
        implementation = find_op(job["op"]).implementation(job["implementation"])
        if implementation.needs_triton:
            launches = launches or LaunchCounter()
        before_launches = launches.count if launches else 0
        copied = () if shared else words["writes"]
        try:
            found, own = call_op(
                implementation.function, inputs, words["gradients"], copied, upstream, outputs=words["writes"]
            )
        except Exception as error:
            found, own = {"raised": _as_bytes(error)}, {}
        changed = [i for i, (a, b) in enumerate(zip(before, inputs)) if i not in may_change and not _same(a, b)]
        found["inputs changed"] = torch.tensor(changed, dtype=torch.int64)
        if launches and implementation.needs_triton:
            found["launches"] = torch.tensor(launches.count - before_launches)
        if shared:
            waiting.append((number, found, {} if words["writes"] else own))
        else:
            _save(found, out, number)
    _look_again(waiting, storages, out)


def call_op(
    function: Any,
    inputs: list[Any],
    gradients: Sequence[int],
    copied_positions: Sequence[int],
    upstream: list[Tensor],
    outputs: Sequence[int],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Call an op. Returns two dicts by name: copies of outputs and gradients, made when the call returned, and the returned tensors themselves.

    ``copied_positions``: positions of the arguments of which the op gets copies. ``outputs``: positions of the arguments that the op writes in place
    as its outputs. Raises: TypeError for results that are not plain tensors, because a subclass may delay its work.
    """
    arguments = list(inputs)
    for position in copied_positions:
        arguments[position] = tree_map_only(Tensor, _copy, arguments[position])
    for position in gradients:
        if not arguments[position].requires_grad:
            arguments[position] = arguments[position].detach().requires_grad_()
    returned = function(*arguments)
    returned = tuple(tree_leaves([arguments[p] for p in outputs])) if outputs else returned
    returned = returned if isinstance(returned, tuple) else (returned,)
    own = {f"output {i}": _plain(f"output {i}", o) for i, o in enumerate(returned)}
    copies = {name: o.detach().contiguous().clone() for name, o in own.items()}
    if gradients:
        # The upstream gradients are in the sums: as an argument of ``grad`` they would make torch import sympy, which takes half a second.
        weighted = [(o * u).sum() for o, u in zip([o for o in returned if o.requires_grad], upstream, strict=True)]
        found = torch.autograd.grad(weighted, [arguments[p] for p in gradients])
        grads = {f"gradient {p}": _plain(f"gradient {p}", g) for p, g in zip(gradients, found)}
        copies |= {name: g.contiguous().clone() for name, g in grads.items()}
        own |= grads
    return copies, own


def _plain(name: str, x: Any) -> Tensor:
    if type(x) is not Tensor or x.layout is not torch.strided or x.device.type != DEVICE.type:
        raise TypeError(f"{name} is not a plain tensor: {type(x).__name__}")
    return x


def _as_bytes(error: Exception) -> Tensor:
    """Return the exception and its place in this worktree as a tensor of UTF-8 bytes."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename.startswith(os.getcwd() + os.sep)]
    where = f" ({os.path.relpath(inside[-1].filename)}, line {inside[-1].lineno})" if inside else ""
    text = f"{type(error).__name__}: {error}"[:1500] + where
    return torch.tensor(list(text.encode("utf-8", "replace")), dtype=torch.uint8)


def _look_again(
    waiting: list[tuple[int, dict[str, Tensor], dict[str, Tensor]]], storages: dict[Any, Any], out: Path
) -> None:
    """Copy the returned tensors once more, and save the waiting answers with these copies."""
    for number, found, own in waiting:
        later = {f"later {name}": x.detach().contiguous().clone() for name, x in own.items()}
        _save(found | later, out, number)
    waiting.clear()
    storages.clear()


def _save(found: dict[str, Tensor], out: Path, number: int) -> None:
    save_file({name: x.cpu() for name, x in found.items()}, out / f"answer-{number}.safetensors")


def _read(words: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[list[Any], list[Tensor]]:
    """Return the inputs and upstream gradients of one job, from the files of ``make_inputs_and_truth``."""
    inputs = [_given(value, tensors) for value in words["inputs"]]
    if not words["contiguous"]:
        inputs = tree_map_only(Tensor, _strided, inputs)
    return inputs, [tensors[f"upstream {i}"] for i in range(words["upstream"])]


def _into(
    storages: dict[Any, tuple[list[Any], list[Tensor]]],
    key: Any,
    gradients: Sequence[int],
    inputs: list[Any],
    upstream: list[Tensor],
) -> tuple[list[Any], list[Tensor]]:
    """Write the values of a call into the tensors of the earlier calls, and return these: the same objects, pointers and version counters."""
    if key not in storages:
        for position in gradients:
            inputs[position].requires_grad_()
        storages[key] = inputs, upstream
    for old, new in zip(tree_leaves(list(storages[key])), tree_leaves([inputs, upstream]), strict=True):
        if isinstance(old, Tensor):
            old.data.copy_(new)
    return storages[key]


class LaunchCounter:
    """Counts the Triton kernels that this process launches."""

    def __init__(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        self.count = 0
        for kind in (InterpretedFunction, JITFunction):
            kind.run = self._counting(kind.run)

    def _counting(self, run: Any) -> Any:
        def counted(function: Any, *arguments: Any, **settings: Any) -> Any:
            self.count += not settings.get("warmup")
            return run(function, *arguments, **settings)

        return counted


def _upstream(op: Any, inputs: list[Any], seed: int) -> list[Tensor]:
    if not op.gradients:
        return []
    arguments = list(inputs)
    arguments[op.gradients[0]] = arguments[op.gradients[0]].detach().requires_grad_()
    outputs = op.reference(*arguments)
    generator = torch.Generator().manual_seed(seed + 1)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = lambda o: torch.randn(o.shape, generator=generator).to(o.dtype)
    # The upstream gradient of a loss is a scalar. As a power of two, it scales every gradient without more rounding.
    return [draw(o) if o.ndim else torch.full((), -0.5, dtype=o.dtype) for o in outputs if o.requires_grad]


def _told(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return one argument as JSON, and add its tensors to ``tensors``."""
    if isinstance(value, list | tuple):
        return [_told(one, tensors) for one in value]
    if not isinstance(value, Tensor):
        return value
    name = f"input {len(tensors)}"
    tensors[name] = value.contiguous()
    return {"tensor": name}


def _given(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the argument from the JSON of ``_told``."""
    if isinstance(value, list):
        return [_given(one, tensors) for one in value]
    return tensors[value["tensor"]] if isinstance(value, dict) else value


def _same(before: Any, after: Any) -> bool:
    pairs = zip(tree_leaves(before), tree_leaves(after), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def _copy(x: Tensor) -> Tensor:
    """Return a copy with the same strides. A plain clone would be contiguous."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _swapped(x: Tensor, seed: int) -> Tensor:
    """Return ``x`` with two elements exchanged. Its sum, its norm and most elements stay the same."""
    if x.numel() < 2:
        return x
    first, second = torch.randint(x.numel(), (2,), generator=torch.Generator().manual_seed(seed)).tolist()
    flat = x.clone().flatten()
    flat[[first, second]] = flat[[second, first]]
    return flat.view(x.shape)


def _strided(x: Tensor) -> Tensor:
    wide = x.new_zeros((*x.shape, 2))
    wide[..., 0] = x
    return wide[..., 0]


if __name__ == "__main__":
    verb, request, *folders = sys.argv[1:]
    jobs, DEVICE = ASKED["jobs"], torch.device(ASKED["device"])
    if verb == "make":
        make_inputs_and_truth(jobs, Path(folders[0]))
    else:
        write_job_answers(jobs, Path(folders[0]), Path(folders[1]))
    if recorder is not None:
        recorder.stop()
        left = Path(folders[0]) / "truth" if verb == "make" else Path(folders[1])
        (left / "executed.json").write_text(json.dumps(recorder.to_json()))
