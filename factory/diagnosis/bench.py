"""The loss doctor's bench: replays a window of a segment under an arm, and scores the window's documents with the judge's own model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from agents.loss_doctor.arms import AnomalyCase, Arm, ArmOutcome, BudgetSpent, DocumentScore, Start
from agents.loss_doctor.curves import StepPoint, Symptom, points
from factory.audit.comparing import step_lines
from factory.audit.replaying import WindowReplay
from factory.core.removal import remove
from factory.gates.patch.held_out import reference_model
from factory.training.segment_folder import write_spec
from kernels.contract.files import write_atomically
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint, name_of
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.recipe import Recipe

# (output folder, segment folder, spec, code, start, until) → how it ended; ``factory.audit.replaying.replay_segment`` but for its limit.
Runner = Callable[[Path, Path, Mapping[str, Any], Path, Path, int], WindowReplay]
USUAL_STEPS = 32  # before the onset, or before an older checkpoint, that say what is usual


@dataclass(frozen=True)
class Episode:
    """Anomalies of one segment that belong together, with what is needed to run their window again."""

    kind: str  # of the first one
    onset: int
    last: int
    spec: Mapping[str, Any]  # the segment's, as it trained
    kernels: Mapping[str, str]  # op → implementation, by name; empty: the code's own kernels.yaml
    device: str  # of the kernels: cpu or cuda
    lines: Sequence[StepPoint]  # of the live run, those of the segments before it too
    rungs: Sequence[tuple[int, Path]]  # checkpoints at or before the onset, oldest first
    code: Path
    previous_code: Path | None = None
    generation_begins: int | None = None

    @property
    def until(self) -> int:
        return min(self.last + 1, int(self.spec["last_step"]))

    @property
    def newest(self) -> tuple[int, Path]:
        return self.rungs[-1]

    def in_segment(self) -> list[tuple[int, Path]]:
        """Rungs from which the segment's own data plan trains through to the window."""
        return [rung for rung in self.rungs if rung[0] >= self.spec["first_step"]]

    def older(self) -> tuple[int, Path] | None:
        """The rung whose state differs enough and is trained enough: the one nearest to half of the onset's steps."""
        return min(self.rungs[:-1], key=lambda rung: abs(rung[0] - self.onset / 2), default=None)

    def usual_before(self, step: int) -> list[StepPoint]:
        return [point for point in self.lines if step - USUAL_STEPS <= point.step < step]

    def symptom(self) -> Symptom:
        window = [point for point in self.lines if self.onset <= point.step <= self.last]
        return Symptom.seen(self.kind, self.usual_before(self.onset), window)


@dataclass
class WindowBench:
    """A ``ReplayBench`` in ``folder``. What was replayed before a kill is read again, and counts for the budget."""

    episode: Episode
    folder: Path
    run_trainer: Runner
    budget: int  # steps that may be replayed in all
    replayed: int = field(default=0)

    def case(self) -> AnomalyCase:
        found = self.episode
        return AnomalyCase(
            kind=found.kind,
            onset=found.onset,
            last=found.last,
            symptom=found.symptom(),
            recipe=found.spec["recipe"],
            all_reference=set(found.kernels.values()) == {"reference"},
            has_previous_commit=found.previous_code is not None,
            has_earlier=len(found.in_segment()) > 1,
            has_older=found.older() is not None,
            resumed_at=found.newest[0] if moments_are_lost(found.newest[1]) else None,
            generation_begins=found.generation_begins,
        )

    # -- replays -------------------------------------------------------------------------------------------------------
    def run(self, arm: Arm) -> ArmOutcome:
        """Raises: BudgetSpent; IsolationError."""
        name = hashlib.sha256(repr(arm).encode()).hexdigest()[:12]
        done = self.folder / f"{name}.json"
        if done.exists():
            found = json.loads(done.read_text())
            outcome = ArmOutcome(**found | {"curve": tuple(StepPoint(*point) for point in found["curve"])})
            self.replayed += outcome.steps
            return outcome
        first, start = self._start(arm.start)
        steps = self.episode.until - first
        if self.replayed + steps > self.budget:
            raise BudgetSpent(
                f"the budget of {self.budget} replayed steps is spent: {self.replayed} were replayed, and '{arm.name}' needs {steps} more"
            )
        outcome = self._replay(arm, name, first, start)
        self.replayed += outcome.steps
        stored = asdict(outcome) | {"curve": [[p.step, p.loss, p.grad_norm] for p in outcome.curve]}
        write_atomically(done, json.dumps(stored))
        return outcome

    def _start(self, start: Start) -> tuple[int, Path]:
        if start == "earlier":
            return self.episode.in_segment()[-2]
        if start == "older weights":
            older = self.episode.older()
            assert older is not None
            return self.episode.newest[0], graft(older[1], self.episode.newest[1], self.folder / "grafted")
        return self.episode.newest

    def _replay(self, arm: Arm, name: str, first: int, start: Path) -> ArmOutcome:
        episode, output = self.episode, self.folder / name
        remove(output)  # of a process that was killed here
        segment = output / "segment"
        (segment / "checkpoints").mkdir(parents=True)
        spec = self._spec(arm, segment)
        if first > spec["first_step"]:
            shutil.copytree(start, segment / "checkpoints" / name_of(first))
        elif start != episode.newest[1] or spec["initial_checkpoint"] is not None:
            spec["initial_checkpoint"] = str(start)
        write_spec(segment, spec)
        code = episode.previous_code if arm.previous_commit and episode.previous_code else episode.code
        ended = self.run_trainer(output, segment, spec, code, start, episode.until)
        steps = episode.until - first
        if ended.failed:
            remove(output)
            return ArmOutcome(arm.name, None, steps, failed=ended.failed)
        curve = [p for p in points(step_lines(segment, "metrics.jsonl")) if first <= p.step < episode.until]
        window = [p for p in curve if episode.onset <= p.step <= episode.last]
        files = checkpoints.read_manifest(segment / "checkpoints" / name_of(episode.until))["files"]
        tensors = sorted((key, f["sha256"]) for key, f in files.items() if key != "state.json")
        bits = hashlib.sha256(json.dumps([tensors, *map(astuple, curve)]).encode()).hexdigest()
        remove(output)  # the numbers are kept, not the weights
        return ArmOutcome(
            arm.name,
            None if arm.start == "older weights" else self.episode.symptom().fires(window),
            steps,
            bits,
            tuple(curve),
        )

    def _spec(self, arm: Arm, segment: Path) -> dict[str, Any]:
        spec = json.loads(json.dumps(dict(self.episode.spec)))
        recipe = spec["recipe"] | {"checkpoint_every": self.episode.until, "keep_checkpoints": 2}
        for path, value in arm.recipe.items():
            *outer, last = path.split(".")
            inner = recipe
            for part in outer:
                inner = inner[part]
            inner[last] = value
        if arm.masked:
            plan = DataPlan.from_json(spec["data_plan"]).masking(arm.masked)
            spec["data_plan"] = json.loads(plan.to_json())
        kernels = self.episode.kernels
        if arm.reference_kernels:
            kernels = dict.fromkeys(kernels, "reference")
        if kernels:
            spec["kernels"] = str(segment / "kernels.yaml")
            (segment / "kernels.yaml").write_text(yaml.safe_dump({self.episode.device: dict(kernels)}))
        return spec | {"recipe": recipe}

    # -- documents -----------------------------------------------------------------------------------------------------
    def scores(self, start: Start) -> list[DocumentScore]:
        """Of every document of the window's steps, the episode's last included."""
        path = self._start(start)[1]
        return score_documents(self.episode, path)


def score_documents(episode: Episode, checkpoint: Path) -> list[DocumentScore]:
    """Loss and gradient norm of each document of an episode's steps, of what was trained on of it, at a checkpoint. On the CPU."""
    recipe = Recipe.parse(dict(episode.spec["recipe"]))
    model = reference_model(checkpoints.read_tensors(checkpoint, "model"), dict(episode.spec["recipe"]))
    plan = DataPlan.from_json(episode.spec["data_plan"])
    restarts = episode.spec.get("restart_data") and episode.newest[0] == episode.spec["first_step"]
    state = None if restarts else checkpoints.read_state(episode.newest[1])["sampler"]
    sizes = {"context": recipe.model.context, "vocab_size": recipe.model.vocab_size}
    order = DataOrder(plan, batch=recipe.batch, state=state, **sizes)
    if restarts:
        order.step = episode.newest[0]
    pieces: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    while order.step <= min(episode.last, episode.until - 1):
        step, rows = order.step, order.next_rows()
        for piece in (piece for row in rows for piece in row if step >= episode.onset):
            stream = order.streams[piece.stream]
            scored = np.broadcast_to(stream.target_mask(piece), piece.positions)
            if scored.any():
                tokens = torch.from_numpy(stream.tokens(piece).astype(np.int64))
                pieces[stream.key(piece.document)].append((tokens, torch.from_numpy(scored.copy())))
    found = []
    for key, parts in sorted(pieces.items()):
        nats, norm = model.gradient_norm(parts)
        found.append(DocumentScore(key, nats / sum(int(scored.sum()) for _, scored in parts), norm))
    return found


def graft(older: Path, newest: Path, parent: Path) -> Path:
    """A checkpoint with the weights and moments of ``older``, standing where ``newest`` stands: same step, same documents next."""
    target = parent / newest.name
    if not target.exists():
        tensors = checkpoints.load(older)
        parent.mkdir(parents=True, exist_ok=True)
        checkpoints.save(parent, Checkpoint(tensors.model, tensors.optimizer, checkpoints.read_state(newest)))
    return target


def moments_are_lost(checkpoint: Path) -> bool:
    """Are all moments of a checkpoint that was trained for some steps zero?"""
    moments = [
        t
        for key, t in checkpoints.read_tensors(checkpoint, "optimizer").items()
        if key.startswith(("exp_avg", "momentum"))
    ]
    return bool(moments) and not any(bool(tensor.any()) for tensor in moments)
