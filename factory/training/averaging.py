"""Candidates that are averages of the newest checkpoints of one run, with equal weights or weights from the held-out loss.

An average is a segment of kind 'average' that trains nothing. Its parent is the segment of the newest checkpoint, and it leaves a
checkpoint in its folder. Lineage, provenance, tracking, export and the gate therefore treat its candidate like any other.
The event 'segment_planned' names the checkpoints. After a kill, the factory finds the segment open and makes the average again.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from factory.core.errors import ConfigError, InputError
from factory.core.path_removal import remove_path
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import select_held_out_documents
from factory.evals.tasks import (
    EvalItem,
    ScoredText,
    compute_bits_per_byte_by_domain,
    encode_documents,
    measure_noise_floor,
    score_bits_per_byte,
)
from factory.evals.token_bytes import TokenBytes
from factory.gates.release.policy import ReleasePolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.ledger.stored_paths import make_paths_absolute
from factory.runs.live_code import LiveCode
from factory.runs.trainer_folder import remove_links_and_pipes
from factory.training.planning import find_last_finished_segment, insert_planned_segment
from factory.training.segment_folder import (
    claim_segment_folder,
    mark_segment_failed,
    raise_trainer_failure,
    record_segment_done,
)
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

KIND = "average"
PARENT_COLUMNS = " ".join(
    ("generation", "recipe", "recipe_json", "recipe_sha256", "data_plan")
)  # columns copied from the parent's row
MOST_CHECKPOINTS = 5  # checkpoints, by default
WeightingRule = Literal["uniform", "held-out-loss"]


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint on disk that is part of an average."""

    id: str  # SHA-256 of its manifest
    segment: int
    step: int
    path: str


def compute_averaging_weights(losses: Sequence[float], noise: float) -> list[float]:
    """Weights that sum to one and fall with the loss: softmax(−loss / τ), τ = max(standard deviation of the losses, noise).

    These are Boltzmann weights at the losses' own scale; Akaike weights have a fixed scale (Burnham and Anderson 2002, §2.9).
    The unit of the loss does not matter. No checkpoint gets weight zero: the losses of K checkpoints span at most √(2K)
    standard deviations, so the least weight is at least e^−√(2K) of the largest. Losses that differ by less than the
    measurement's ``noise`` get almost equal weights.
    """
    mean = math.fsum(losses) / len(losses)
    temperature = max(math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses)), noise)
    if temperature <= 0:
        return [1 / len(losses)] * len(losses)
    raised = [math.exp((min(losses) - loss) / temperature) for loss in losses]
    return [part / math.fsum(raised) for part in raised]


# -- choosing and planning ---------------------------------------------------------------------------------------------
def list_averageable_checkpoints(ledger: Ledger, segment: SegmentRow) -> list[SourceCheckpoint]:
    """The checkpoints on disk that may be averaged with a segment's newest checkpoint, oldest first.

    An anneal has its own checkpoints only. A trunk segment also has those of earlier trunk segments with the same recipe.
    """
    from trainer.contract.checkpoint.format import hash_manifest, list_checkpoints

    found: dict[Path, SourceCheckpoint] = {}
    row = segment
    while row.recipe_sha256 == segment.recipe_sha256:
        if row.kind == segment.kind:
            listed = ledger.read("SELECT path FROM checkpoints WHERE segment = :segment", segment=row.id)
            own = {path.resolve(): step for step, path in list_checkpoints(Path(row.folder) / "checkpoints")}
            own |= {Path(r["path"]).resolve(): int(Path(r["path"]).name.rpartition("-")[2]) for r in listed}
            for path, step in own.items():
                if path not in found and (path / "manifest.json").is_file():
                    found[path] = SourceCheckpoint(hash_manifest(path), row.id, step, str(path))
        if segment.kind == "anneal" or row.parent is None:
            break
        row = SegmentRow.get(ledger, row.parent)
    return sorted(found.values(), key=lambda source: source.step)


def choose_checkpoints_to_average(ledger: Ledger, segment: int | None, last: int | None) -> list[SourceCheckpoint]:
    """The checkpoints to average, oldest first: the newest ``last`` of a segment. The default is all of them, at most ``MOST_CHECKPOINTS``.

    ``segment``: None for the newest finished trunk segment. Raises: InputError with the known checkpoints, when there are too few.
    """
    if segment is None:
        row = find_last_finished_segment(ledger, "trunk")
        if row is None:
            raise InputError(
                "training.no_trunk_to_average",
                "No trunk segment is finished, so there are no checkpoints to average. Run 'factory train' first.",
            )
    else:
        trained = SegmentRow.select(ledger, "WHERE kind NOT IN ('average', 'import') AND state = 'done' ORDER BY id")
        row = next((one for one in trained if one.id == segment), None)
        if row is None:
            raise InputError(
                "training.segment_not_finished", "Segment {segment} is not finished or does not exist. Finished segments: {finished}.",
                segment=segment, finished=[one.id for one in trained] or "none",
            )  # fmt: skip
    available = list_averageable_checkpoints(ledger, row)
    count = last if last is not None else min(MOST_CHECKPOINTS, len(available))
    if count < 2 or len(available) < count:
        raise InputError(
            "training.too_few_checkpoints",
            "An average needs {needed} checkpoints. Segment {segment}, with the earlier trunk segments of the same recipe, has "
            "checkpoints of these steps: {steps}. Average fewer checkpoints (--last, at least 2), or raise keep_checkpoints in the recipe.",
            needed=max(count, 2), segment=row.id, steps=[source.step for source in available] or "none",
        )  # fmt: skip
    return available[-count:]


def plan_average(plant: Plant, rule: WeightingRule, segment: int | None = None, last: int | None = None) -> int:
    """Record an average as a planned segment; returns its id. The same rule and checkpoints give the same segment."""
    from factory.git.repository import get_live_commit

    sources = choose_checkpoints_to_average(plant.ledger, segment, last)
    listed = [asdict(source) | {"path": plant.ledger.to_stored_path(source.path)} for source in sources]
    plan = {"rule": rule, "sources": listed}
    for row in SegmentRow.select(
        plant.ledger, f"WHERE kind = '{KIND}' AND state NOT IN ('failed', 'abandoned') ORDER BY id"
    ):
        if _identity(read_average_plan(plant.ledger, row.id)) == _identity(plan):
            return row.id
    commit = get_live_commit(plant.workspace.repository)
    parent = SegmentRow.get(plant.ledger, sources[-1].segment)
    steps = (sources[-1].step, sources[-1].step)
    same = parent.select_fields(PARENT_COLUMNS)
    with plant.ledger.begin() as tx:
        detail = {"average": plan}
        return insert_planned_segment(
            tx, plant.workspace, KIND, steps, detail, parent=parent.id, code_commit=commit, **same
        )


def read_average_plan(ledger: Ledger, number: int) -> dict[str, Any]:
    """The rule and the checkpoints of an average segment, as they were planned."""
    sql = "SELECT detail FROM events WHERE kind = 'segment_planned' AND subject = :subject"
    plan = dict(ledger.read(sql, subject=str(Subject("segment", number)))[0]["detail"]["average"])
    return plan | {"sources": [make_paths_absolute(dict(source), ledger.root) for source in plan["sources"]]}


def _identity(plan: dict[str, Any]) -> tuple[str, list[str]]:
    return plan["rule"], [source["id"] for source in plan["sources"]]


# -- making ------------------------------------------------------------------------------------------------------------
def run_average(plant: Plant, row: SegmentRow) -> dict[str, Any]:
    """Make the averaged checkpoint and record it; returns the segment's result. Safe to repeat.

    Raises: SegmentError, naming the log, when a checkpoint is damaged or has other shapes; InputError when the held-out loss
    cannot be measured.
    """
    from trainer.contract.checkpoint.format import format_checkpoint_name, hash_manifest

    plan = read_average_plan(plant.ledger, row.id)
    folder = claim_segment_folder(plant, row)
    code = LiveCode.check_out_commit(plant, row.code_commit)
    parts: list[dict[str, Any]] = [dict(source) for source in plan["sources"]]
    measured: dict[str, Any] = {}
    with plant.progress.task(
        Message("training.averaging", "the weights of {checkpoints} checkpoints are averaged", checkpoints=len(parts)),
        None,
    ) as task:
        if plan["rule"] == "held-out-loss":
            try:
                advance = lambda n: task.advance(n, "held-out loss")
                measured = _measure(plant, row, code, parts, advance)
            except (InputError, ConfigError) as error:
                mark_segment_failed(plant.ledger, row, str(error))
                raise
        else:
            for part in parts:
                part["weight"] = 1 / len(parts)
        task.advance(0, "averaging")
        weights = ",".join(repr(part["weight"]) for part in parts)
        paths = [part["path"] for part in parts]
        arguments = [str(folder / "checkpoints"), *paths, "--weights", weights]
        made = code.run_python(
            "-m", "trainer.tools.average", *arguments, writable=[folder], readonly=list(map(Path, paths))
        )
        remove_links_and_pipes(folder, plant.progress)
        _succeeded(plant, row, made)
    path = folder / "checkpoints" / format_checkpoint_name(row.last_step)
    result = {
        "state": "done",
        "last_step": row.last_step,
        "checkpoint": str(path),
        "manifest_sha256": hash_manifest(path),
        "averaged": {"rule": plan["rule"], "sources": parts, **measured},
    }
    write_atomically(folder / "result.json", json.dumps(result, indent=1))
    record_segment_done(plant.ledger, row, folder, result)
    return result


def _measure(
    plant: Plant, row: SegmentRow, code: LiveCode, parts: list[dict[str, Any]], advance: ProgressCallback
) -> dict[str, Any]:
    """Add the keys ``loss`` and ``weight`` to each part; returns the noise and the documents of the measurement."""
    ruler = load_held_out_loss_meter(plant)
    scratch = Path(row.folder) / "export"
    noise = 0.0
    for part in parts:
        remove_path(scratch)
        scratch.mkdir()
        arguments = ["trainer.contract.checkpoint.export", part["path"], str(scratch)]
        made = code.run_python("-m", *arguments, writable=[scratch], readonly=[Path(part["path"])])
        remove_links_and_pipes(scratch, plant.progress)
        _succeeded(plant, row, made)
        if part is parts[-1]:
            part["loss"], noise = ruler.measure_loss_and_noise(scratch, advance)
        else:
            part["loss"] = ruler.measure_loss(scratch, advance)
    remove_path(scratch)
    for part, weight in zip(parts, compute_averaging_weights([part["loss"] for part in parts], noise), strict=True):
        part["weight"] = weight
    return {"noise": noise, "documents": ruler.document_counts, "shares": ruler.shares}


def _succeeded(plant: Plant, row: SegmentRow, done: subprocess.CompletedProcess[str]) -> None:
    """Raises: SegmentError when the program failed; its output is in the segment's log."""
    if done.returncode:
        with open(plant.workspace.logs / f"segment-{row.id:05d}.log", "a") as log:
            log.write(done.stderr)
        raise_trainer_failure(plant, row, done.returncode, None)


ProgressCallback = Callable[[float], None]


@dataclass(frozen=True)
class HeldOutLossMeter:
    """Measures the held-out loss of an export as one number: a weighted mean over domains."""

    texts: list[ScoredText]
    shares: dict[str, float]  # the weight of each domain; they sum to one
    policy: EvalPolicy

    def measure_loss(self, export: Path, advance: ProgressCallback = lambda _: None) -> float:
        """Bits per byte of an export. Raises: ExportError; InputError when the loss is not finite."""
        return self._measure(ReferenceModel.load(export), advance, export)[0]

    def measure_loss_and_noise(self, export: Path, advance: ProgressCallback = lambda _: None) -> tuple[float, float]:
        """The loss, and how far a second measurement of the same weights may be from it (``measure_noise_floor``)."""
        model = ReferenceModel.load(export)
        loss, items = self._measure(model, advance, export)
        noise = measure_noise_floor(model, self.texts, items, self.policy, advance)
        return loss, sum(share * noise[domain] for domain, share in self.shares.items())

    def _measure(self, model: ReferenceModel, advance: ProgressCallback, export: Path) -> tuple[float, list[EvalItem]]:
        items = score_bits_per_byte(model, self.texts, self.policy, advance)
        bits = compute_bits_per_byte_by_domain(items)
        loss = sum(share * bits[domain] for domain, share in self.shares.items())
        if not math.isfinite(loss):
            raise InputError("training.loss_not_finite", "The held-out loss of {export} is not finite.", export=export)
        return loss, items

    @property
    def document_counts(self) -> dict[str, int]:
        """The number of measured documents of each domain."""
        return {domain: sum(text.document.domain == domain for text in self.texts) for domain in sorted(self.shares)}


def load_held_out_loss_meter(plant: Plant) -> HeldOutLossMeter:
    """Return a ``HeldOutLossMeter`` over the held-out documents (dev half) of the domains in the release policy's target.

    Raises: InputError when no such document is held out; ConfigError.
    """
    policy = EvalPolicy.load(plant.workspace.policy_path("evals.yaml"))
    weights = ReleasePolicy.load(plant.workspace.policy_path("gates/release.yaml")).target.weights
    tokenizer, token_bytes = Tokenizer.load(plant.workspace.tokenizer), TokenBytes.load(plant.workspace.tokenizer)
    dev = select_held_out_documents(plant.ledger, policy.documents_per_domain, sealed=False)
    weight_of = {d.domain: weights.get(d.domain, 0.0) if weights else 1.0 for d in dev}
    texts = encode_documents(dev, tokenizer, token_bytes, policy.document_bytes)
    texts = [text for text in texts if weight_of[text.document.domain] > 0]
    shares = {domain: weight_of[domain] for domain in sorted({text.document.domain for text in texts})}
    if not shares:
        raise InputError(
            "training.no_held_out_documents",
            "No held-out document of the dev half has a domain that counts for the target in policies/gates/release.yaml. "
            "Ingest more documents.",
        )
    total = sum(shares.values())
    return HeldOutLossMeter(texts, {domain: weight / total for domain, weight in shares.items()}, policy)
