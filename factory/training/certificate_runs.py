"""The runs behind a certificate: N steps under the old code and the new, and under the old code with other seeds.

All runs of one commit share one trainer process (``python -m trainer --wait``), which runs from that commit's own worktree.
They lie below the segment's folder, and a killed factory goes on where it was: a finished run is not run again, a run cut
short resumes. They take (3 + seeds) × N steps, and as many checkpoints on disk until the verdict stands. Nothing here judges.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factory.computing import computing
from factory.core.errors import SegmentError
from factory.core.faults import cannot_be_read_now, is_of_no_file
from factory.core.launching import EXIT_DISK_FULL, LOG_BYTES, exit_code, failure_line, forget_exit
from factory.core.left_files import count_lines, parse_object, read_object, read_tail, read_text
from factory.core.progress import Progress
from factory.core.removal import remove
from factory.core.workspace import Workspace
from factory.git.repository import CheckoutError, RepositoryError, changes
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import with_contents
from factory.ledger.rows import SegmentRow
from factory.retrying.endings import HUNG, KILLED, OUT_OF_MEMORY, Ending, ending_of, oom_kills
from factory.retrying.policy import RetryPolicy
from factory.retrying.watchdog import UsualTimes, Watchdog
from factory.runs.folders import checkpoint_bytes, clear, folder_lock, refuse_full, result_of, write_spec
from factory.runs.live_code import LiveCode, ended, read_by, start_trainer, stop_trainer
from factory.training.certificate import SERIES, TRAINED_WITH, CertificateEvidence, CertificatePolicy, Series, Trace
from factory.training.planning import plan_of
from factory.training.segment_folder import spec_of
from kernels.contract.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

POLL_SECONDS = 1.0
MAYBE_THE_MACHINES = (HUNG, KILLED, OUT_OF_MEMORY)  # they say nothing about the code, unless they come again and again
EXIT_WRONG_INPUT = 2  # the trainer cannot run this spec, recipe, data or checkpoint
Spec = dict[str, Any]


def changed_files(repository: Path, old: str, new: str) -> list[str]:
    """Files that training reads and that differ between two commits. Raises: RepositoryError."""
    return [change.path for change in changes(repository, old, new) if change.path.startswith(TRAINED_WITH)]


def gather(
    plant: Plant,
    row: SegmentRow,
    parent: SegmentRow,
    policy: CertificatePolicy,
) -> CertificateEvidence:
    """Run what has to be run. Raises: SegmentError when the trainer was stopped or the disk is full, CheckoutError, and what a fault of the
    machine makes of it: begin again then."""
    evidence = CertificateEvidence(parent.code_commit, row.code_commit, [])
    try:
        files = changed_files(plant.workspace.repository, parent.code_commit, row.code_commit)
        changed = files + computing.changed(parent, row)
        if not changed:
            return evidence
        sides = {name: LiveCode.of(plant, side.code_commit) for name, side in (("old", parent), ("new", row))}
    except RepositoryError as error:
        if isinstance(error, CheckoutError) or is_of_no_file(error):
            raise
        return replace(evidence, changed=["(unknown)"], old_failed=str(error))
    what = f"{parent.code_commit[:12]} → {row.code_commit[:12]}, {len(files)} files" if files else ""
    what = "; ".join(filter(None, (what, *changed[len(files) :])))
    plant.progress.line(
        f"  what training runs changed since segment {parent.id} ({what}): a certificate is needed before segment "
        f"{row.id} starts"
    )
    steps = min(policy.steps, row.last_step - row.first_step)
    plan = with_contents(plant.ledger, plan_of(plant.ledger, row))
    seeds = tuple(seed_of(plan, number) for number in range(policy.seeds))
    evidence = replace(evidence, changed=changed, first_step=row.first_step, steps=steps, seeds=seeds)
    scratch = Path(row.folder) / "certificate"
    for basis, spec in bases(plant.ledger, row, parent, steps).items():
        evidence = replace(evidence, basis=basis, old_failed="")
        runs = Runs(plant.workspace, scratch, basis, spec, plant.progress, parent, row)
        again = [] if runs.other_precision else ["again"]
        code, line = runs.run("old", sides["old"], parent.code_commit, ["pair", *again, *map(str, seeds)])
        if code == 0:
            break
        evidence = replace(evidence, old_failed=line)
        if code != EXIT_WRONG_INPUT:
            return evidence
    else:
        return evidence
    code, line = runs.run("new", sides["new"], row.code_commit, ["pair"])
    if code:
        evidence = replace(evidence, new_failed=line)
    return compare(evidence, Path(spec["initial_checkpoint"]), runs)


def seed_of(plan: dict[str, Any], number: int) -> int:
    """The seed of a noise run: of what is in the data plan, wherever it lies, so that a killed factory goes on with its runs
    and the same data gives the same noise on every machine."""
    shards = sorted(shard["id"] for shard in plan["token_shards"])
    return int(hashlib.sha256(f"{plan['seed']}/{shards}/{number}".encode()).hexdigest()[:7], 16)


def bases(ledger: Ledger, row: SegmentRow, parent: SegmentRow, steps: int) -> dict[Any, Spec]:
    """What to run both codes on, best first: as the segment will run, else as its parent ran.

    The second is for a segment whose recipe or data plan has keys that the old code cannot read. An anneal is squeezed
    into ``steps`` steps, so that all of its schedule is run.
    """
    spec = spec_of(ledger, row) | {"last_step": row.first_step + steps}
    plain = {key: spec[key] for key in ("kind", "first_step", "last_step", "initial_checkpoint")}
    before = {
        "recipe": parent.recipe_json,
        "data_plan": with_contents(ledger, plan_of(ledger, parent)),
        "restart_data": True,
    }
    return {"segment": spec, "parent": plain | before}


class Runs:
    """The runs on one basis, in folders ``<basis>/<side>/<run>``.

    Each side computes as its own segment does. Where the precision changes, the old one may be a hundred times as slow on this
    machine: only the pair is run in it, once; the old code's other seeds, which the noise is measured over, run in the new one.
    """

    def __init__(
        self,
        workspace: Workspace,
        scratch: Path,
        basis: str,
        spec: Spec,
        progress: Progress,
        old: SegmentRow,
        new: SegmentRow,
    ) -> None:
        self.workspace, self.scratch, self.basis, self.spec, self.progress = workspace, scratch, basis, spec, progress
        self.steps = spec["last_step"] - spec["first_step"]
        self.rows = {"old": old, "new": new}
        self.precision = {side: row.recipe_json["precision"] for side, row in self.rows.items()}
        self.other_precision = self.precision["old"] != self.precision["new"]

    def folder(self, side: str, name: str) -> Path:
        return self.scratch / self.basis / side / name

    def run(self, side: str, code: LiveCode, commit: str, names: Sequence[str]) -> tuple[int, str]:
        """(exit code, the trainer's last line): 0 when every run left its result. ``names``: 'pair', 'again' or a seed."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        specs = {self.folder(side, name): self._spec_of(side, name) | {"code_commit": commit} for name in names}
        return train_all(self.workspace, code, self.scratch, specs, f"certificate, {side} code", self.progress)

    def _spec_of(self, side: str, name: str) -> Spec:
        kernels = computing.write_kernels(self.scratch, self.rows[side].computing, f"kernels-{side}.yaml")
        same_run = name in ("pair", "again")
        precision = self.precision[side if same_run else "new"]
        spec = self.spec | {"kernels": kernels, "recipe": self.spec["recipe"] | {"precision": precision}}
        if same_run:
            return spec
        return spec | {"data_plan": spec["data_plan"] | {"seed": int(name)}, "restart_data": True}


def train_all(
    workspace: Workspace,
    code: LiveCode,
    scratch: Path,
    specs: Mapping[Path, Spec],
    title: str,
    progress: Progress,
    *,
    starts: Mapping[Path, Path] | None = None,
    count: int | None = None,
) -> tuple[int, str]:
    """Run segments below ``scratch`` one after the other in one trainer: (exit code, its last line), 0 when every run left its result.

    specs: segment.json by folder. starts: a checkpoint of its own that a folder begins with. count: ranks, as ``start_trainer`` has it.
    A run that has its result is not run again. Raises: SegmentError when it was stopped or killed, hung, had too little memory, or the disk is
    full; not the last time of as many in turn, without a new result, as ``policies/retries.yaml`` has tries.
    """
    folders = list(specs)
    with folder_lock(scratch) as lock:  # a trainer of a killed factory may still write its last checkpoint
        clear(scratch, progress)
        reads: set[Path] = set()
        for folder, spec in specs.items():
            _prepare(folder, spec, (starts or {}).get(folder))
            reads |= set(read_by(spec))
        log = folders[0].parent / f"{folders[0].name}.log"
        steps = sum(spec["last_step"] - spec["first_step"] for spec in specs.values())
        with open(log, "wb") as out, progress.task(title, steps) as task:
            for folder in folders:
                forget_exit(folder)
            words = ["--wait", *map(str, folders)]
            largest = max((spec["recipe"] for spec in specs.values()), key=checkpoint_bytes)
            refuse_full(scratch, largest, title)
            process = start_trainer(
                workspace, code, words, writable=folders, readonly=sorted(reads), out=out, lock=lock, count=count
            )
            policy = RetryPolicy.load(workspace.policy("retries.yaml"))
            dog = Watchdog(policy, UsualTimes(), process.pid, scratch, starts_often=True)
            done = made = 0
            kills, over, hung = oom_kills(), False, ""
            try:
                while not over and not hung:
                    over = ended(process, POLL_SECONDS)
                    now = sum(count_lines(folder / "metrics.jsonl") for folder in folders)
                    task.advance(now - done, code.folder.name[:12])
                    made, done = made + max(0, now - done), now
                    hung = "" if over else dog.look(made)
            except BaseException:
                stop_trainer(process)
                raise
            if hung:
                stop_trainer(process)
        clear(scratch, progress)
    exit_status, line = exit_code(process.wait(), folders), failure_line(log)
    ending = ending_of(exit_status, line, read_tail(log, LOG_BYTES).decode(errors="replace"), kills)
    if hung:
        ending = Ending(HUNG, f"hung and was killed: {hung}")
    if exit_status == EXIT_DISK_FULL:
        refuse_full(scratch, largest, title, line)
    if ending.kind in MAYBE_THE_MACHINES or exit_status == EXIT_DISK_FULL:
        ends = _count_end(log.with_suffix(".ends"), folders)
        if ends < policy.tries:
            raise SegmentError(
                f"{title}: its trainer {ending.says} (log: {log}). Run the same command again to go on: {ends} of {policy.tries} tries "
                "without a new result"
            )
        return exit_status or 1, f"{policy.tries} times, it {ending.says}"
    if exit_status == 0 and not all((folder / "result.json").exists() for folder in folders):
        return 1, "it ended without a result"
    return exit_status, f"exit {exit_status}: {line or 'nothing'}" if exit_status else ""


def _count_end(path: Path, folders: Sequence[Path]) -> int:
    """How often in turn, this time included, the runs ended without a new result and for what may be the machine's fault."""
    results = sum((folder / "result.json").exists() for folder in folders)
    try:
        before = read_object(path)
        count = before["count"] if before["results"] == results else 0
    except (SegmentError, LookupError):
        count = 0
    write_atomically(path, json.dumps({"results": results, "count": count + 1}))
    return int(count) + 1


def _prepare(folder: Path, spec: Spec, start: Path | None = None) -> None:
    """The run's folder, kept when it was begun with the same spec; else made, with a copy of the checkpoint ``start``."""
    try:
        known = json.loads((folder / "segment.json").read_text())
    except (OSError, ValueError) as error:
        if cannot_be_read_now(error):
            raise
        known = None
    if known != json.loads(json.dumps(spec)):
        remove(folder)
        folder.mkdir(parents=True)
        if start is not None:
            shutil.copytree(start, folder / "checkpoints" / start.name)
        write_spec(folder, spec)


# -- what the runs left ------------------------------------------------------------------------------------------------
def compare(evidence: CertificateEvidence, start: Path, runs: Runs) -> CertificateEvidence:
    """Fill in the traces and the distances between weights. Holds the weights of three runs at a time.

    Raises: what a fault of the machine makes of it, which says nothing about the runs.
    """
    from trainer.contract.checkpoint.format import load
    from trainer.contract.errors import TrainerError

    try:
        origin = load(start).model
        old, old_weights = _read(runs.folder("old", "pair"), origin, evidence)
        again, weights = old, old_weights
        if not runs.other_precision:
            again, weights = _read(runs.folder("old", "again"), origin, evidence)
        apart_again = _distance(old_weights, weights)
        others, apart_seeds = _read_seeds(evidence, origin, runs)
    except (SegmentError, TrainerError, OSError, ValueError, KeyError) as error:
        if is_of_no_file(error):
            raise
        return replace(evidence, old_failed=f"what it left cannot be read: {error}")
    evidence = replace(evidence, old=old, again=again, others=others, apart_again=apart_again, apart_seeds=apart_seeds)
    if evidence.new_failed:
        return evidence
    try:
        new, weights = _read(runs.folder("new", "pair"), origin, evidence)
    except (SegmentError, TrainerError, OSError, ValueError, KeyError) as error:
        if is_of_no_file(error):
            raise
        return replace(evidence, new_failed=f"what it left cannot be read: {error}")
    return replace(evidence, new=new, apart=_distance(old_weights, weights))


def _read(folder: Path, origin: dict[str, Tensor], evidence: CertificateEvidence) -> tuple[Trace, dict[str, Tensor]]:
    """Raises: SegmentError, ValueError, KeyError, OSError, TrainerError when something is missing or of another shape."""
    from trainer.contract.checkpoint.format import load

    result = result_of(folder, evidence.first_step + evidence.steps)
    loaded = load(Path(result["checkpoint"]))
    shapes = {name: tensor.shape for name, tensor in loaded.model.items()}
    if shapes != {name: tensor.shape for name, tensor in origin.items()}:
        raise ValueError("its weights have other names or shapes than the checkpoint's")
    moved = {name: float((tensor.double() - origin[name].double()).norm()) for name, tensor in loaded.model.items()}
    optimizer = {name: float(t.double().norm()) for name, t in loaded.optimizer.items() if t.is_floating_point()}
    return Trace(_series(folder / "metrics.jsonl", evidence), moved, optimizer), loaded.model


def _series(path: Path, evidence: CertificateEvidence) -> dict[str, Series]:
    """The series of metrics.jsonl, a value a step of the run; what is not there or no number is None."""
    found: dict[str, dict[int, float]] = {}
    for line in read_text(path).splitlines():
        record = parse_object(line, path)
        for name in SERIES:
            value = record.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, {})[int(record["step"])] = float(value)
    steps = range(evidence.first_step, evidence.first_step + evidence.steps)
    return {name: [values.get(step) for step in steps] for name, values in found.items()}


def _read_seeds(
    evidence: CertificateEvidence, origin: dict[str, Tensor], runs: Runs
) -> tuple[tuple[Trace, ...], float]:
    """The traces, and the root mean square of the distance of the weights over all pairs.

    Σ over pairs ‖aᵢ − aⱼ‖² = k Σ‖aᵢ‖² − ‖Σ aᵢ‖²: so one run's weights at a time are enough.
    """
    traces = []
    squares, count = 0.0, len(evidence.seeds)
    sums = {name: tensor.double() * 0 for name, tensor in origin.items()}
    for seed in evidence.seeds:
        trace, weights = _read(runs.folder("old", str(seed)), origin, evidence)
        traces.append(trace)
        for name, tensor in weights.items():
            moved = tensor.double() - origin[name].double()
            squares += float(moved.square().sum())
            sums[name] += moved
    pairs = count * squares - math.fsum(float(total.square().sum()) for total in sums.values())
    return tuple(traces), math.sqrt(max(0.0, pairs) / (count * (count - 1) / 2))


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return math.sqrt(math.fsum(float((a[name].double() - b[name].double()).square().sum()) for name in a))
