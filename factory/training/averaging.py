"""Candidates that are averages: the newest kept checkpoints of one run, all alike or weighted by held-out loss.

An average is a segment of kind 'average': it trains nothing, hangs below the newest checkpoint's segment, and leaves a
checkpoint in its folder. So lineage, provenance, tracking, export and the gate treat its candidate like any other. What is
averaged stands in the event that planned it; a killed factory finds the segment open and makes it again.
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
from factory.core.removal import remove
from factory.evals.policy import EvalPolicy
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import held_out_documents
from factory.evals.tasks import EvalItem, ScoredText, bits_per_byte, encode_documents, noise_floor, ratio_bits
from factory.evals.token_bytes import TokenBytes
from factory.gates.release.policy import ReleasePolicy
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.places import located
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from factory.runs.folders import clear
from factory.runs.live_code import LiveCode
from factory.training.planning import last_segment, plan_segment
from factory.training.segment_folder import claim, failed, give_up, record_done
from kernels.contract.files import write_atomically

KIND = "average"
AT_MOST = 5  # checkpoints, by default
Rule = Literal["uniform", "held-out-loss"]


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk."""

    id: str  # SHA-256 of its manifest
    segment: int
    step: int
    path: str


def softmax_weights(losses: Sequence[float], noise: float) -> list[float]:
    """Shares that fall with the loss: softmax(−loss / τ), τ = max(standard deviation of the losses, noise).

    A Boltzmann weight at the losses' own scale, as Akaike weights are at a fixed one (Burnham and Anderson 2002, §2.9):
    the unit of the loss does not matter, and no checkpoint is ever thrown away (the losses of K checkpoints span at most
    √(2K) standard deviations, so the least share is e^−√(2K) of the largest). Losses that differ by less than the
    measurement's ``noise`` weigh almost the same. Equal losses give equal shares.
    """
    mean = math.fsum(losses) / len(losses)
    temperature = max(math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / len(losses)), noise)
    if temperature <= 0:
        return [1 / len(losses)] * len(losses)
    raised = [math.exp((min(losses) - loss) / temperature) for loss in losses]
    return [part / math.fsum(raised) for part in raised]


# -- choosing and planning ---------------------------------------------------------------------------------------------
def kept(ledger: Ledger, segment: SegmentRow) -> list[Source]:
    """The checkpoints on disk that may be averaged with a segment's newest one, oldest first.

    Of an anneal: its own. Of a trunk: also those of the trunk before it, back to where the recipe was another.
    """
    from trainer.contract.checkpoint.format import manifest_sha256, steps_in

    found: dict[Path, Source] = {}
    row = segment
    while row.recipe_sha256 == segment.recipe_sha256:
        if row.kind == segment.kind:
            listed = ledger.read("SELECT path FROM checkpoints WHERE segment = :segment", segment=row.id)
            own = {path.resolve(): step for step, path in steps_in(Path(row.folder) / "checkpoints")}
            own |= {Path(r["path"]).resolve(): int(Path(r["path"]).name.rpartition("-")[2]) for r in listed}
            for path, step in own.items():
                if path not in found and (path / "manifest.json").is_file():
                    found[path] = Source(manifest_sha256(path), row.id, step, str(path))
        if segment.kind == "anneal" or row.parent is None:
            break
        row = SegmentRow.get(ledger, row.parent)
    return sorted(found.values(), key=lambda source: source.step)


def choose(ledger: Ledger, segment: int | None, last: int | None) -> list[Source]:
    """What to average, oldest first: the newest ``last`` checkpoints of a segment, or as many as there are up to ``AT_MOST``.

    Raises: InputError that lists the checkpoints, when there are too few.
    """
    if segment is None:
        row = last_segment(ledger, "trunk")
        if row is None:
            raise InputError("there is no finished trunk segment to average in: run 'factory train' first")
    else:
        trained = SegmentRow.select(ledger, "WHERE kind <> 'average' AND state = 'done' ORDER BY id")
        row = next((one for one in trained if one.id == segment), None)
        if row is None:
            known = ", ".join(str(one.id) for one in trained)
            raise InputError(f"no finished segment {segment}; there are: {known or 'none'}")
    there = kept(ledger, row)
    wanted = last if last is not None else min(AT_MOST, len(there))
    if wanted < 2 or len(there) < wanted:
        steps = ", ".join(str(source.step) for source in there) or "none"
        raise InputError(
            f"an average needs {wanted if last is not None else 'two'} checkpoints; segment {row.id} and the trunk before it, "
            f"with the same recipe, have those of steps: {steps}. Take fewer (--last), at least 2, or raise the recipe's "
            "keep_checkpoints"
        )
    return there[-wanted:]


def plan_average(plant: Plant, rule: Rule, segment: int | None = None, last: int | None = None) -> int:
    """Record the average as a segment to be run; returns its id. The same rule and checkpoints give the same segment."""
    from factory.git.repository import live_commit

    sources = choose(plant.ledger, segment, last)
    listed = [asdict(source) | {"path": plant.ledger.inside(source.path)} for source in sources]
    plan = {"rule": rule, "sources": listed}
    for row in SegmentRow.select(
        plant.ledger, f"WHERE kind = '{KIND}' AND state NOT IN ('failed', 'abandoned') ORDER BY id"
    ):
        if _identity(planned(plant.ledger, row.id)) == _identity(plan):
            return row.id
    commit = live_commit(plant.workspace.repository)
    parent = SegmentRow.get(plant.ledger, sources[-1].segment)
    steps = (sources[-1].step, sources[-1].step)
    same = parent.only("generation recipe recipe_json recipe_sha256 data_plan")
    with plant.ledger.begin() as tx:
        detail = {"average": plan}
        return plan_segment(tx, plant.workspace, KIND, steps, detail, parent=parent.id, code_commit=commit, **same)


def planned(ledger: Ledger, number: int) -> dict[str, Any]:
    """What an average segment is made of, as it was planned."""
    sql = "SELECT detail FROM events WHERE kind = 'segment_planned' AND subject = :subject"
    plan = dict(ledger.read(sql, subject=str(Subject("segment", number)))[0]["detail"]["average"])
    return plan | {"sources": [located(dict(source), ledger.root) for source in plan["sources"]]}


def _identity(plan: dict[str, Any]) -> tuple[str, list[str]]:
    return plan["rule"], [source["id"] for source in plan["sources"]]


# -- making ------------------------------------------------------------------------------------------------------------
def run_average(plant: Plant, row: SegmentRow) -> dict[str, Any]:
    """Make the averaged checkpoint and record it; returns the segment's result. Safe to repeat.

    Raises: SegmentError when a checkpoint is damaged or does not fit (its log is named); InputError when the held-out loss
    cannot be measured.
    """
    from trainer.contract.checkpoint.format import manifest_sha256, name_of

    plan = planned(plant.ledger, row.id)
    folder = claim(plant, row)
    code = LiveCode.of(plant, row.code_commit)
    parts: list[dict[str, Any]] = [dict(source) for source in plan["sources"]]
    measured: dict[str, Any] = {}
    with plant.progress.task(f"averaging {len(parts)} checkpoints", None) as task:
        if plan["rule"] == "held-out-loss":
            try:
                advance = lambda n: task.advance(n, "held-out loss")
                measured = _measure(plant, row, code, parts, advance)
            except (InputError, ConfigError) as error:
                give_up(plant.ledger, row, str(error))
                raise
        else:
            for part in parts:
                part["weight"] = 1 / len(parts)
        task.advance(0, "averaging")
        weights = ",".join(repr(part["weight"]) for part in parts)
        paths = [part["path"] for part in parts]
        words = [str(folder / "checkpoints"), *paths, "--weights", weights]
        made = code.run("-m", "trainer.tools.average", *words, writable=[folder], readonly=list(map(Path, paths)))
        clear(folder, plant.progress)
        _succeeded(plant, row, made)
    path = folder / "checkpoints" / name_of(row.last_step)
    result = {
        "state": "done",
        "last_step": row.last_step,
        "checkpoint": str(path),
        "manifest_sha256": manifest_sha256(path),
        "averaged": {"rule": plan["rule"], "sources": parts, **measured},
    }
    write_atomically(folder / "result.json", json.dumps(result, indent=1))
    record_done(plant.ledger, row, folder, result)
    return result


def _measure(
    plant: Plant, row: SegmentRow, code: LiveCode, parts: list[dict[str, Any]], advance: Advance
) -> dict[str, Any]:
    """Give each part its loss and weight; returns what they were measured on."""
    ruler = held_out_ruler(plant)
    scratch = Path(row.folder) / "export"
    noise = 0.0
    for part in parts:
        remove(scratch)
        scratch.mkdir()
        words = ["trainer.contract.checkpoint.export", part["path"], str(scratch)]
        made = code.run("-m", *words, writable=[scratch], readonly=[Path(part["path"])])
        clear(scratch, plant.progress)
        _succeeded(plant, row, made)
        if part is parts[-1]:
            part["loss"], noise = ruler.loss_and_noise(scratch, advance)
        else:
            part["loss"] = ruler.loss(scratch, advance)
    remove(scratch)
    for part, weight in zip(parts, softmax_weights([part["loss"] for part in parts], noise), strict=True):
        part["weight"] = weight
    return {"noise": noise, "documents": ruler.documents, "shares": ruler.shares}


def _succeeded(plant: Plant, row: SegmentRow, done: subprocess.CompletedProcess[str]) -> None:
    """Raises: SegmentError when the program failed; its words are in the segment's log."""
    if done.returncode:
        with open(plant.workspace.logs / f"segment-{row.id:05d}.log", "a") as log:
            log.write(done.stderr)
        failed(plant, row, done.returncode, None)


Advance = Callable[[float], None]


@dataclass(frozen=True)
class Ruler:
    """Held-out documents, and how their losses become one number."""

    texts: list[ScoredText]
    shares: dict[str, float]  # of each domain in the number; they sum to one
    policy: EvalPolicy

    def loss(self, export: Path, advance: Advance = lambda _: None) -> float:
        """Bits per byte of an export. Raises: ExportError; InputError when the loss is not finite."""
        return self._measure(ReferenceModel.load(export), advance, export)[0]

    def loss_and_noise(self, export: Path, advance: Advance = lambda _: None) -> tuple[float, float]:
        """The loss, and how far a second measurement of the same weights may lie from it (``tasks.noise_floor``)."""
        model = ReferenceModel.load(export)
        loss, items = self._measure(model, advance, export)
        noise = noise_floor(model, self.texts, items, self.policy, advance)
        return loss, sum(share * noise[domain] for domain, share in self.shares.items())

    def _measure(self, model: ReferenceModel, advance: Advance, export: Path) -> tuple[float, list[EvalItem]]:
        items = bits_per_byte(model, self.texts, self.policy, advance)
        bits = ratio_bits(items)
        loss = sum(share * bits[domain] for domain, share in self.shares.items())
        if not math.isfinite(loss):
            raise InputError(f"{export}: its held-out loss is not finite")
        return loss, items

    @property
    def documents(self) -> dict[str, int]:
        """How many are measured, a domain."""
        return {domain: sum(text.document.domain == domain for text in self.texts) for domain in sorted(self.shares)}


def held_out_ruler(plant: Plant) -> Ruler:
    """The dev half's documents of the domains that the release policy's target names.

    Raises: InputError when nothing of them is held out; ConfigError.
    """
    policy = EvalPolicy.load(plant.workspace.policy("evals.yaml"))
    weights = ReleasePolicy.load(plant.workspace.policy("gates/release.yaml")).target.weights
    tokenizer, token_bytes = Tokenizer.load(plant.workspace.tokenizer), TokenBytes.load(plant.workspace.tokenizer)
    dev = held_out_documents(plant.ledger, policy.documents_per_domain, sealed=False)
    wanted = {d.domain: weights.get(d.domain, 0.0) if weights else 1.0 for d in dev}
    texts = encode_documents(dev, tokenizer, token_bytes, policy.document_bytes)
    texts = [text for text in texts if wanted[text.document.domain] > 0]
    shares = {domain: wanted[domain] for domain in sorted({text.document.domain for text in texts})}
    if not shares:
        raise InputError(
            "nothing in the dev half of what is held out is of the domains that the release policy's target names: ingest more documents"
        )
    total = sum(shares.values())
    return Ruler(texts, {domain: weight / total for domain, weight in shares.items()}, policy)
