"""The bench of the loss doctor. It replays a window of a segment in an arm, and scores the window's documents with the judge's model."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from agents.loss_doctor.arms import (
    AGAIN,
    AnomalyCase,
    ArmOutcome,
    DocumentScore,
    NewShardsComparison,
    ReplayArm,
    ReplayBudgetSpentError,
    Start,
)
from agents.loss_doctor.curves import StepMetrics, Symptom, choose_quantity_of_anomaly, read_step_metrics
from factory.audit.kept_checkpoints import copy_checkpoint
from factory.core.path_removal import remove_path
from factory.diagnosis.new_documents import compare_new_documents
from factory.gates.patch.held_out_scores import make_reference_model
from factory.runs.arm import Arm
from factory.runs.sandboxed_training import ArmRunEnd
from factory.runs.trace import RunTrace
from kernels.contract.files import write_atomically
from kernels.contract.message import Message
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint, format_checkpoint_name
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.document_stream import DocumentPiece, DocumentStream, parse_stream_generation
from trainer.contract.recipe import Recipe

ArmTrainer = Callable[[Arm], ArmRunEnd]  # trains an arm
USUAL_STEPS = 32  # steps before the onset that define the usual values
SAMPLE = 200  # documents of earlier shards that are scored for comparison


@dataclass(frozen=True)
class AnomalyEpisode:
    """Anomalies of one segment that belong together, with everything that a replay of their window needs."""

    kind: str  # of the first one
    onset: int
    last: int
    spec: Mapping[str, Any]  # of the segment, as it was trained
    kernels: Mapping[str, str]  # op → implementation, by name; empty: the code's own kernels.yaml
    device: str  # of the kernels: cpu or cuda
    lines: Sequence[StepMetrics]  # of the live run, with those of the segments before it
    rungs: Sequence[tuple[int, Path]]  # checkpoints at or before the onset, oldest first
    code: Path
    previous_code: Path | None = None
    previous_commit: str = ""  # the commit of ``previous_code``
    generation_begins: int | None = None
    where: str = ""  # domain/<name> or layer/<name> of the anomaly
    previous_weights: Mapping[str, float] | None = None  # earlier shares of the domains, if they changed recently
    changed_recipe_keys: Mapping[str, Any] = field(
        default_factory=dict
    )  # keys of optimiser and schedule that differ in the segment before, with their earlier values
    one_rank: bool = False  # replayed on one rank, though the segment was trained by several
    end: Path | None = None  # the newest checkpoint of the segment, after the window
    environment_changed: str = ""  # libraries that differ from the segment before

    def choose_code_folder(self, arm: Arm) -> Path:
        """Return the folder with the code of an arm."""
        return self.previous_code if self.previous_code and arm.code == self.previous_commit else self.code

    @property
    def end_step(self) -> int:
        return min(self.last + 1, int(self.spec["last_step"]))

    @property
    def newest_checkpoint(self) -> tuple[int, Path]:
        return self.rungs[-1]

    def list_checkpoints_in_segment(self) -> list[tuple[int, Path]]:
        """Return the checkpoints from which the segment's own data plan reaches the window."""
        return [rung for rung in self.rungs if rung[0] >= self.spec["first_step"]]

    def find_older_checkpoint(self) -> tuple[int, Path] | None:
        """Return the checkpoint nearest to half of the onset's steps, or None. Its weights are trained enough, and differ enough from the newest."""
        return min(self.rungs[:-1], key=lambda rung: abs(rung[0] - self.onset / 2), default=None)

    def measure_symptom_of_live_run(self) -> Symptom:
        quantity = choose_quantity_of_anomaly(self.kind, self.where)
        before = [p for p in self.lines if p.step < self.onset and p.look_up_quantity(quantity) is not None]
        return Symptom.from_live_run(
            self.kind, before[-USUAL_STEPS:], self.select_points_in_window(self.lines), self.where
        )

    def select_points_in_window(self, points: Sequence[StepMetrics]) -> list[StepMetrics]:
        return [point for point in points if self.onset <= point.step <= self.last]


@dataclass
class EpisodeReplayBench:
    """A ``ReplayBench`` that works in ``folder``. After a kill, the results of finished replays are read and count for the budget."""

    episode: AnomalyEpisode
    folder: Path
    run_trainer: ArmTrainer
    budget: int  # the most steps that may be replayed
    before: str = ""  # the Python interpreter of the previous environment
    told: Callable[[float, str], None] = lambda steps, arm: (
        None
    )  # reports progress: (steps since the last call, name of the arm)
    replayed: int = field(default=0)

    def case(self) -> AnomalyCase:
        found = self.episode
        return AnomalyCase(
            kind=found.kind,
            onset=found.onset,
            last=found.last,
            symptom=found.measure_symptom_of_live_run(),
            recipe=found.spec["recipe"],
            live=tuple(p for p in found.lines if found.newest_checkpoint[0] <= p.step < found.end_step),
            all_reference=set(found.kernels.values()) == {"reference"},
            has_previous_commit=found.previous_code is not None,
            has_previous_environment=bool(self.before),
            environment_changed=found.environment_changed,
            has_end=found.end is not None,
            has_earlier=len(found.list_checkpoints_in_segment()) > 1,
            has_older=found.find_older_checkpoint() is not None,
            resumed_at=found.newest_checkpoint[0] if has_zero_optimizer_moments(found.newest_checkpoint[1]) else None,
            generation_begins=found.generation_begins,
            has_previous_mixture=found.previous_weights is not None,
            was_otherwise=found.changed_recipe_keys,
            one_rank=found.one_rank,
        )

    # -- replays -------------------------------------------------------------------------------------------------------
    def run(self, arm: ReplayArm) -> ArmOutcome:
        """Replay the window in an arm, or read the stored outcome. Raises: ReplayBudgetSpentError; IsolationError."""
        name = hashlib.sha256(repr(arm).encode()).hexdigest()[:12]
        done = self.folder / f"{name}.json"
        self.told(0, arm.name)
        if (outcome := _stored(done)) is None:
            first = self._first(arm.start)
            approach = self.episode.onset - self.episode.newest_checkpoint[0] if arm == AGAIN[0] else 0
            steps = self.episode.end_step - first + approach
            if self.replayed + steps > self.budget:
                raise ReplayBudgetSpentError(
                    Message(
                        "diagnosis.budget_spent",
                        "the budget of {budget:,|replayed step|replayed steps} is too small: {replayed:,|step was|steps were} "
                        "replayed, and the replay '{arm}' needs {needed} more",
                        budget=self.budget,
                        replayed=self.replayed,
                        arm=arm.name,
                        needed=steps,
                    )
                )
            before = self._approach() if arm.start in ("onset", "older weights") else None
            if before is not None and before.failed:
                return replace(before, arm=arm.name)
            outcome = self._replay(arm, first, self._start(arm.start), self.episode.end_step)
            if before is not None and approach and not outcome.failed:
                curve = (*before.curve, *outcome.curve)
                outcome = replace(outcome, steps=steps, curve=curve, bits=_bits(outcome.bits, curve))
            _store(done, outcome)
        self.replayed += outcome.steps
        self.told(outcome.steps, "")
        return outcome

    def _approach(self) -> ArmOutcome:
        """Replay the steps from the newest checkpoint to the onset, once. The checkpoint at the onset is the start of most arms.

        These steps are a part of the arm 'same again'.
        """
        done = self.folder / "approach.json"
        if (outcome := _stored(done)) is None:
            first, start = self.episode.newest_checkpoint
            if first == self.episode.onset:
                return ArmOutcome("approach", None)
            outcome = self._replay(ReplayArm("approach"), first, start, self.episode.onset)
            _store(done, outcome)
        return outcome

    def _first(self, start: Start) -> int:
        if start == "earlier":
            return self.episode.list_checkpoints_in_segment()[-2][0]
        return self.episode.newest_checkpoint[0] if start == "newest" else self.episode.onset

    def _start(self, start: Start) -> Path:
        """Return the checkpoint from which an arm starts."""
        episode = self.episode
        if start == "earlier":
            return episode.list_checkpoints_in_segment()[-2][1]
        if start == "end":
            assert episode.end is not None
            return episode.end
        if start == "newest" or (start == "onset" and episode.newest_checkpoint[0] == episode.onset):
            return episode.newest_checkpoint[1]
        at_onset = self.folder / "onset" / format_checkpoint_name(episode.onset)
        if start == "onset":
            return at_onset
        older = episode.find_older_checkpoint()
        assert older is not None
        return write_checkpoint_with_older_weights(
            older[1], at_onset if at_onset.exists() else episode.newest_checkpoint[1], self.folder / "grafted"
        )

    def _replay(self, arm: ReplayArm, first: int, start: Path, until: int) -> ArmOutcome:
        episode = self.episode
        ended = self.run_trainer(self._arm(arm, first, start, until))
        steps = until - first
        if ended.failed:
            remove_path(ended.folder)
            return ArmOutcome(arm.name, None, steps, failed=ended.failed)
        left = RunTrace(ended.folder, first, until, ends=False)
        curve, bits = tuple(read_step_metrics(list(left.metric_lines_by_step.values()))), left.final_checkpoint_hash
        if until == episode.onset:
            at_onset = self.folder / "onset" / format_checkpoint_name(until)
            remove_path(at_onset)  # left by a process that was killed before it stored the outcome
            copy_checkpoint(left.final_checkpoint_path, at_onset)
        remove_path(ended.folder)  # the numbers are kept, not the weights
        fires = (
            None
            if arm.start == "older weights" or until == episode.onset
            else episode.measure_symptom_of_live_run().is_present_in(episode.select_points_in_window(curve))
        )
        whole = arm.start == "newest" or first == episode.newest_checkpoint[0]
        return ArmOutcome(arm.name, fires, steps, _bits(bits, curve) if whole else bits, curve)

    def _arm(self, arm: ReplayArm, first: int, start: Path, until: int) -> Arm:
        """Return the run of an arm. The learning rate of a trunk does not depend on its last step, so an arm of a trunk can end with the window."""
        episode, base = self.episode, dict(self.episode.spec)
        if base["kind"] == "trunk":
            base["last_step"] = until
        plan: dict[str, Any] = {"reshuffled": arm.reshuffled} if arm.reshuffled else {}
        if arm.masked:
            plan["masked"] = DataPlan.from_json(base["data_plan"]).copy_with_masked_documents(arm.masked).masked
        if arm.previous_mixture and episode.previous_weights is not None:
            plan |= {"weights": dict(episode.previous_weights), "phases": []}
        kernels = dict.fromkeys(episode.kernels, "reference") if arm.reference_kernels else dict(episode.kernels)
        goes_on = (
            first > base["first_step"]
            or start != episode.newest_checkpoint[1]
            or base["initial_checkpoint"] is not None
        )
        return Arm(
            arm.name, base, episode.previous_commit if arm.previous_commit and episode.previous_code else base["code_commit"],
            recipe={"checkpoint_every": until, "keep_checkpoints": 2, **arm.recipe}, plan=plan, start=start if goes_on else None, until=until,
            kernels=yaml.safe_dump({episode.device: kernels}) if kernels else "", environment=self.before if arm.previous_environment else "",
        )  # fmt: skip

    # -- documents -----------------------------------------------------------------------------------------------------
    def score_documents_at(self, start: Start) -> list[DocumentScore]:
        """Return the scores of all documents in the window, of ``SAMPLE`` documents of earlier shards, and of as many of the newest."""
        path = self._start(start)
        stored = self.folder / f"scores-{start.replace(' ', '-')}.json"
        if stored.exists():
            return [DocumentScore(*row) for row in json.loads(stored.read_text())]
        self.told(0, f"documents scored, {start}")
        found = score_documents(self.episode, path)
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(stored, json.dumps([astuple(score) for score in found]))
        return found

    def compare_new_shards(self) -> list[NewShardsComparison]:
        """Compare, for each domain, the documents that the newest shards bring into the window with earlier documents."""
        order = load_data_order_at(self.episode, self.episode.onset)
        keys: dict[str, set[str]] = defaultdict(set)
        for key, piece in read_document_pieces_until(order, self.episode.end_step):
            keys[piece.stream].add(key)
        return compare_new_documents(order, {stream: tuple(sorted(found)) for stream, found in keys.items()})


def load_data_order_at(episode: AnomalyEpisode, step: int) -> DataOrder:
    """Return the segment's data order, advanced to ``step``, which must be at or after the newest checkpoint."""
    recipe = Recipe.parse(dict(episode.spec["recipe"]))
    plan = DataPlan.from_json(episode.spec["data_plan"])
    first, path = episode.newest_checkpoint
    restarts = episode.spec.get("restart_data") and first == episode.spec["first_step"]
    state = None if restarts else checkpoints.read_checkpoint_state(path).get("sampler")  # an imported model has none
    sizes = {"context": recipe.model.context, "vocab_size": recipe.model.vocab_size}
    order = DataOrder(plan, batch=recipe.batch, state=state, **sizes)
    if restarts:
        order.step = first
    while order.step < step:
        order.draw_next_rows()
    return order


def read_document_pieces_until(order: DataOrder, step: int) -> Iterator[tuple[str, DocumentPiece]]:
    """Yield (key of the document, piece) for each piece of the steps before ``step``."""
    while order.step < step:
        for piece in (piece for row in order.draw_next_rows() for piece in row):
            yield order.streams[piece.stream].look_up_document_key(piece.document), piece


def score_documents(episode: AnomalyEpisode, checkpoint: Path) -> list[DocumentScore]:
    """Return the loss and the gradient norm of documents with the weights of a checkpoint, computed on the CPU.

    The documents are those in the episode's window, and those of ``sample_document_pieces``.
    """
    model = make_reference_model(checkpoints.read_tensors(checkpoint, "model"), dict(episode.spec["recipe"]))
    order = load_data_order_at(episode, episode.onset)
    pieces: dict[tuple[str, bool], list[DocumentPiece]] = defaultdict(list)
    for key, piece in read_document_pieces_until(order, episode.end_step):
        pieces[key, True].append(piece)
    for piece in sample_document_pieces(order, SAMPLE):
        key = order.streams[piece.stream].look_up_document_key(piece.document)
        if (key, True) not in pieces:
            pieces[key, False].append(piece)
    joined = find_streams_of_newest_generation(order)
    every = [
        order.streams[piece.stream].read_piece_tokens(piece).astype(np.int64)
        for parts in pieces.values()
        for piece in parts
    ]
    counts = np.bincount(np.concatenate(every), minlength=int(episode.spec["recipe"]["model"]["vocab_size"])) + 1.0
    nats_of = -np.log(counts / counts.sum())
    found = []
    for (key, in_window), parts in sorted(pieces.items()):
        scored = []
        for piece in parts:
            stream = order.streams[piece.stream]
            targets = np.broadcast_to(stream.read_target_mask(piece), piece.positions)
            if targets.any():
                tokens = torch.from_numpy(stream.read_piece_tokens(piece).astype(np.int64))
                scored.append((tokens, torch.from_numpy(targets.copy())))
        if scored:
            nats, norm = model.measure_gradient_norm(scored)
            count = sum(int(targets.sum()) for _, targets in scored)
            new = any(piece.stream in joined for piece in parts)
            by_frequency = sum(float(nats_of[tokens[1:][targets]].sum()) for tokens, targets in scored) / count
            found.append(DocumentScore(key, nats / count, norm, count, in_window, new, by_frequency))
    return found


def find_streams_of_newest_generation(order: DataOrder) -> set[str]:
    """Return the names of the streams of the newest generation. The set is empty if there is only one generation."""
    newest, oldest = (end(map(parse_stream_generation, order.streams)) for end in (max, min))
    return {name for name in order.streams if parse_stream_generation(name) == newest > oldest}


def sample_document_pieces(order: DataOrder, count: int) -> list[DocumentPiece]:
    """Return the first piece of about ``count`` documents of the newest generation, and of as many earlier documents, evenly spaced."""
    joined, found = find_streams_of_newest_generation(order), []
    for new in (True, False):
        streams = [stream for name, stream in order.streams.items() if (name in joined) == new]
        share = min(1.0, count / max(1, sum(stream.documents for stream in streams)))
        for stream in streams:
            held = stream.documents
            chosen = np.linspace(0, held - 1, max(1, int(share * held))).astype(int).tolist()
            usable = [index for index in chosen if stream.find_document(index).length > 1]
            found += [make_first_document_piece(stream, index) for index in usable]
    return found


def make_first_document_piece(stream: DocumentStream, document: int) -> DocumentPiece:
    """Return the first piece of a document, as a row would hold it."""
    return stream.make_piece(0, document, 0, min(stream.context, stream.find_document(document).length - 1))


def _bits(tensors: str, curve: Sequence[StepMetrics]) -> str:
    return hashlib.sha256(json.dumps([tensors, *(point.to_row() for point in curve)]).encode()).hexdigest()


def _stored(path: Path) -> ArmOutcome | None:
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    return ArmOutcome(**found | {"curve": tuple(StepMetrics(*point) for point in found["curve"])})


def _store(path: Path, outcome: ArmOutcome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path, json.dumps(asdict(replace(outcome, curve=())) | {"curve": [p.to_row() for p in outcome.curve]})
    )


def write_checkpoint_with_older_weights(older: Path, newest: Path, parent: Path) -> Path:
    """Write a checkpoint into ``parent`` with the weights and moments of ``older`` and the step and data position of ``newest``. Returns its path."""
    target = parent / newest.name
    if not target.exists():
        tensors = checkpoints.load_checkpoint(older)
        parent.mkdir(parents=True, exist_ok=True)
        checkpoints.save_checkpoint(
            parent, Checkpoint(tensors.model, tensors.optimizer, checkpoints.read_checkpoint_state(newest))
        )
    return target


def has_zero_optimizer_moments(checkpoint: Path) -> bool:
    """Return whether all moments of a checkpoint are zero."""
    moments = [
        t
        for key, t in checkpoints.read_tensors(checkpoint, "optimizer").items()
        if key.startswith(("exp_avg", "momentum"))
    ]
    return bool(moments) and not any(bool(tensor.any()) for tensor in moments)
