"""Training in this process with a fault in it: in the order of its documents, or in what computes."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.loss_doctor.faults import Doing, Fault
from trainer.__main__ import main as train
from trainer.batch import Batch
from trainer.contract.data import document_stream
from trainer.contract.data.permutation import Permutation
from trainer.optim.optimizer import Optimizer
from trainer.run import SegmentRun

CODE, FAULTY = Path("good code"), Path("faulty code")


class Sorted(Permutation):
    """No permutation of the documents that joined, unless the plan reshuffles."""

    def __init__(self, n: int, key: str) -> None:
        super().__init__(n, key)
        parts = key.split("/")  # seed/domain/generation/epoch, and how the plan reshuffles
        self.off = parts[2] == "1" and len(parts) == 4

    def at(self, places: Any) -> Any:
        return places if self.off else super().values_at(places)


@contextlib.contextmanager
def order_of(fault: Fault) -> Iterator[None]:
    if not fault.shuffled:
        document_stream.Permutation = Sorted  # type: ignore[misc]
    try:
        yield
    finally:
        document_stream.Permutation = Permutation  # type: ignore[misc]


@contextlib.contextmanager
def injected(fault: Fault, live: bool, code: Path, spec: Mapping[str, Any], seed: int, changed: bool) -> Iterator[None]:
    """While the block trains, what computes is as the fault says. ``changed``: in the environment of the segment, not of the one before."""
    if fault.injects is None or fault.act is None:
        yield
        return
    injects, act = fault.injects, fault.act
    kernels = yaml.safe_load(Path(spec["kernels"]).read_text())["cpu"]
    reference = set(kernels.values()) == {"reference"}
    launch_of, gradients_of = SegmentRun.launch_step, Optimizer.gradients
    now: dict[str, Any] = {}

    def launch(run: SegmentRun, batch: Batch) -> None:
        streams = run.order.streams
        pieces = [(streams[piece.stream], piece.document) for row in batch.rows for piece in row]
        now["step"] = batch.step
        state = run.optimizer.state_tensors()
        now["updates"] = int(next((value for key, value in state.items() if key.startswith("step.")), torch.zeros(())))
        now["documents"] = frozenset(
            stream.look_up_document_key(number) for stream, number in pieces if number not in stream.masked
        )
        launch_of(run, batch)

    def gradients(optimizer: Optimizer) -> dict[str, torch.Tensor]:
        found = gradients_of(optimizer)
        recipe = spec["recipe"]
        if injects(
            Doing(
                live=live,
                reference=reference,
                precision=recipe["precision"],
                faulty_code=code == FAULTY,
                changed_environment=changed,
                accumulates=bool(recipe["batch"]["micro_sequences"]),
                **now,
            )
        ):
            act(found | optimizer.state_tensors(), np.random.default_rng(seed))
        return found

    SegmentRun.launch_step, Optimizer.gradients = launch, gradients  # type: ignore[method-assign]
    try:
        yield
    finally:
        SegmentRun.launch_step, Optimizer.gradients = launch_of, gradients_of  # type: ignore[method-assign]


def run_here(
    fault: Fault, seed: int, folder: Path, spec: Mapping[str, Any], code: Path, live: bool, changed: bool = True
) -> str:
    """Train in this process; returns why it failed, or ''."""
    (folder / "segment.json").write_text(json.dumps(dict(spec)))
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
        torch.random.fork_rng(devices=[]),
        injected(fault, live, code, spec, seed, changed),
    ):
        exit_code = train([str(folder)])
    return said.getvalue().strip() if exit_code else ""
