"""The workbench of agents (``agents.core.workbench.Workbench``), through which they do all their work.

Agents read the live commit's files in scope, have implementations measured in the sandbox within a budget of seconds, and ask for earlier
attempts.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml

from agents.core.proposal import Edit
from agents.core.workbench import (
    AgentWrittenLines,
    EarlierProposal,
    Measurement,
    MeasurementError,
    QuickCheck,
    UnreadableFileError,
)
from factory.computing.tuned_kernels import KERNELS
from factory.core import devices
from factory.core.errors import InputError
from factory.core.path_removal import remove_path
from factory.gates.patch.changed_ops import (
    ChangedOp,
    find_changed_ops,
    find_sections_of_other_devices,
    find_unknown_ops,
)
from factory.gates.patch.policy import PatchPolicy
from factory.gates.patch.source_rules import find_source_problems as source_problems
from factory.gates.patch.stages.oracle import run_quick_check
from factory.gates.training_start import TrainingStart
from factory.git import repository
from factory.git.scope import AgentsPolicy, FileChange, find_scope_problems
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message

# This program imports the modules named in argv. Its last line of output is the error, if there is one.
IMPORT = ";".join(
    (
        "import importlib",
        "import os",
        "import sys",
        "sys.path[0] = os.getcwd()",
        "list(map(importlib.import_module, sys.argv[1:]))",
    )
)


NOTHING_TO_TIME = Message(
    "code_loop.nothing_to_time",
    "nothing was timed, because the patch chooses no other implementation of an op in policies/kernels.yaml",
)


class OutOfScopeError(InputError, UnreadableFileError):
    """An agent asked for a file that agents may not read."""


@dataclass
class LiveWorkbench:
    """A workbench for one proposal on one base commit."""

    plant: Plant
    base: str
    start: TrainingStart
    spent: float = 0.0  # seconds of measuring
    count: int = 1  # number of proposals that the workbench serves; each may measure for the policy's seconds
    profile: int | None = None  # the id of the line profile to work from; None: a new profile is made
    closed: frozenset[int] = frozenset()  # proposals whose targets agents leave alone
    by: str = ""  # who began the runs of the agents (``agent_runs.AgentRuns.by``)
    written: dict[str, list[AgentWrittenLines]] = field(
        default_factory=dict
    )  # by path: a cache of the lines that agents wrote

    @cached_property
    def agents_policy(self) -> AgentsPolicy:
        return AgentsPolicy.load(self.plant.workspace.policy_path("agents.yaml"))

    @cached_property
    def file_modes(self) -> dict[str, str]:
        return repository.read_file_modes(self.plant.workspace.repository, self.base)

    @cached_property
    def proposals_by_commit(self) -> dict[str, ProposalRow]:
        """The proposals that have a commit, by commit."""
        rows = ProposalRow.select(self.plant.ledger, 'WHERE "commit" IS NOT NULL ORDER BY number')
        return {str(row.commit): row for row in rows}

    @property
    def measuring_seconds_left(self) -> float:
        """The seconds of measuring that remain."""
        return self.agents_policy.measure_seconds * self.count - self.spent

    def files(self, patchable: bool = False) -> list[str]:
        """Return the paths of the live code's files that agents may read. ``patchable``: only those that agents may patch."""
        wanted = self.agents_policy.is_patchable if patchable else self.agents_policy.is_shown
        return sorted(filter(wanted, self.file_modes))

    def read(self, path: str) -> str:
        """Return the text of a file of the live code. Raises: OutOfScopeError for a file that is not in scope."""
        self._refuse(path)
        return repository.read_file_text(self.plant.workspace.repository, self.base, path)

    def find_agent_written_lines(self, path: str) -> list[AgentWrittenLines]:
        """Return the ranges of lines in a file of the live code that come from proposals. Raises: OutOfScopeError."""
        self._refuse(path)
        if path not in self.written:
            found = []
            changed = (
                repository.list_last_commits_of_lines(self.plant.workspace.repository, self.base, path)
                if self.proposals_by_commit
                else []
            )
            for row, group in itertools.groupby(
                enumerate(changed, 1), lambda line: self.proposals_by_commit.get(line[1])
            ):
                numbers = [number for number, _ in group]
                if row is not None:
                    found.append(AgentWrittenLines(numbers[0], numbers[-1], row.agent, row.number))
            self.written[path] = found
        return self.written[path]

    def _refuse(self, path: str) -> None:
        if not self.agents_policy.is_shown(path) or path not in self.file_modes:
            raise OutOfScopeError("code_loop.not_readable", "{path!r} is not a file that agents may read.", path=path)

    def check(self, edits: Sequence[Edit], op: str = "", timed: bool = False) -> QuickCheck:
        """Check edits quickly: the stages scope and static, then in the sandbox the op oracle's first case or, for other code, an import.

        The check is no verdict: the gate checks everything again, from git. ``timed``: also time the ops whose implementation the edits change.
        Raises: IsolationError.
        """
        if timed and self.measuring_seconds_left < 1:
            problem = Message("code_loop.no_timing_left", "the time for measuring is used up: make the proposal now")
            return QuickCheck("budget", (problem,))
        changes = repository.convert_edits_to_changes(self.file_modes, [(edit.path, edit.new_text) for edit in edits])
        if found := find_scope_problems(self.agents_policy, changes, self.file_modes):
            return QuickCheck("scope", tuple(found))
        baseline = repository.checkout_live_code(self.plant.workspace, self.base)
        for change in changes:
            base = (baseline / change.path).read_bytes() if change.path in self.file_modes else None
            refused = source_problems(change, base)
            if change.path == KERNELS:
                refused += find_unknown_ops(change.content) + find_sections_of_other_devices(base, change.content)
            if refused:
                return QuickCheck("static", tuple(refused))
        with devices.hold_device():
            began, spent = time.monotonic(), self.spent
            checked = self._checked(baseline, changes, op, timed)
            if timed:
                self.spent = spent + time.monotonic() - began
            return checked

    def _checked(self, baseline: Path, changes: Sequence[FileChange], op: str, timed: bool) -> QuickCheck:
        work = self.plant.workspace.root / "cache" / f"check-{threading.get_native_id()}"
        remove_path(work)  # the folder of a process that was killed here
        try:
            candidate = work / "code"
            shutil.copytree(baseline, candidate, ignore=shutil.ignore_patterns(".git", "__pycache__"))
            for change in changes:
                (candidate / change.path).parent.mkdir(parents=True, exist_ok=True)
                (candidate / change.path).write_bytes(change.content or b"")
            return self._run(baseline, candidate, work, [change.path for change in changes], op, timed)
        finally:
            remove_path(work)

    def _run(self, baseline: Path, candidate: Path, work: Path, paths: list[str], op: str, timed: bool) -> QuickCheck:
        device = devices.get_device_kind()
        before, after = ((folder / KERNELS).read_bytes() for folder in (baseline, candidate))
        ops = find_changed_ops(before, after, paths, device, self.start.kernels)
        quick = [changed for changed in ops if changed.op == op or changed.before != changed.after]
        policy = PatchPolicy.load(self.plant.workspace.policy_path("gates/patch.yaml")).oracle
        if quick:
            once = policy.patience.model_copy(
                update={"again": 1.0}
            )  # one try is enough here: the agent can check again, and the gate tries twice
            policy = policy.model_copy(update={"cases": policy.cases[:1], "patience": once})
            found = run_quick_check(policy, quick, self.start.recipe["precision"], baseline, candidate, work / "oracle")
            if found["state"] != "passed":
                return QuickCheck("oracle", tuple(found["reasons"]))
            return QuickCheck("oracle", (), self._times(candidate, work / "times", ops) if timed else ())
        names = [path.removesuffix(".py").replace("/", ".") for path in paths if path.endswith(".py")]
        command = [sys.executable, "-c", IMPORT, *names]
        limits = SandboxLimits(wall_seconds=policy.patience.least_seconds)
        done = sandbox.run_in_sandbox(
            command, output=work / "import", readonly=[candidate], cwd=candidate, limits=limits
        )
        broken = Message(
            "code_loop.no_import", "the changed files cannot be imported: {why}", why=done.describe_ending()
        )
        problems = () if done.ok else (broken,)
        return QuickCheck("import", problems, (NOTHING_TO_TIME,) if timed and done.ok else ())

    def _times(self, candidate: Path, folder: Path, ops: Sequence[ChangedOp]) -> tuple[str, ...]:
        """Return lines with the times that the candidate's code reports. ``folder``: the code may write there, and nothing else reads it."""
        words = []
        for changed in ops:
            if changed.before == changed.after:
                continue
            try:
                timed = self._bench(candidate, folder, changed.op, changed.after, changed.before, {})
            except MeasurementError as error:
                words.append(error.message)
            else:
                words.append(
                    Message(
                        "code_loop.timed",
                        "{op}: outside the training step, {after} is {ratio:.3f}x as fast as {before} (lower quartile "
                        "{low:.3f}x; {ms:.2f} ms against {before_ms:.2f} ms)",
                        op=changed.op,
                        after=changed.after,
                        before=changed.before,
                        ratio=timed.ratio,
                        low=timed.ratio_low,
                        ms=timed.seconds * 1e3,
                        before_ms=timed.against_seconds * 1e3,
                    )
                )
        return tuple(words) or (NOTHING_TO_TIME,)

    def measure(self, op: str, implementation: str, against: str, rows: int = 0) -> Measurement:
        """Time an implementation against another: run ``kernels.contract.bench`` of the live code, in the sandbox, on the recipe's shapes.

        ``rows``: the rows of a micro-batch; 0 for the recipe's. Raises: MeasurementError.
        """
        code = repository.checkout_live_code(self.plant.workspace, self.base)
        title = Message(
            "code_loop.timing",
            "timing {implementation} of {op} outside the training step",
            op=op,
            implementation=implementation,
        )
        with devices.hold_device(), self.plant.progress.task(title):
            # The next call uses the kernels again that this call compiles.
            folder = self.plant.workspace.root / "cache" / f"workbench{devices.get_device_folder_suffix()}"
            try:
                measured = self._bench(
                    code, folder, op, implementation, against, {"micro_sequences": rows} if rows else {}
                )
            except MeasurementError as error:
                if self.measuring_seconds_left >= 1:
                    self.plant.print_line(Message("code_loop.not_measured_here", "  {problem}", problem=error.message))
                raise
        names = {"op": op, "implementation": implementation}
        if rows:
            ms = measured.seconds * 1e3
            self.plant.print_line(
                Message(
                    "code_loop.rows_timed",
                    "  {op}: outside the training step, {implementation} takes {ms:.1f} ms for {rows} rows",
                    **names,
                    ms=ms,
                    rows=rows,
                )
            )
        else:
            self.plant.print_line(
                Message(
                    "code_loop.measured",
                    "  {op}: outside the training step, {implementation} is {ratio:.2f}x as fast as {against}",
                    **names,
                    ratio=measured.ratio,
                    against=against,
                )
            )
        return measured

    def _bench(
        self, code: Path, output: Path, op: str, implementation: str, against: str, batch: dict[str, int]
    ) -> Measurement:
        """Run ``kernels.contract.bench`` of a checkout in a sandbox that may write only in ``output``. Raises: MeasurementError."""
        if self.measuring_seconds_left < 1:
            raise MeasurementError(
                "code_loop.no_seconds_left",
                "{op}: {implementation} is not measured, because the time for measuring is used up",
                op=op,
                implementation=implementation,
            )
        output.mkdir(parents=True, exist_ok=True)
        recipe = output.with_name(f"{output.name}-recipe.yaml")  # where an agent's code cannot write
        recipe.write_text(yaml.safe_dump(self.start.recipe | {"batch": self.start.recipe["batch"] | batch}))
        command = [sys.executable, "-m", "kernels.contract.bench", "--op", op, "--implementation", implementation]
        command += ["--against", against, "--recipe", str(recipe), "--device", devices.get_device_kind()]
        limits = SandboxLimits(wall_seconds=self.measuring_seconds_left)
        done = sandbox.run_in_sandbox(command, output=output, readonly=[code, recipe], cwd=code, limits=limits)
        self.spent += done.seconds
        if (measured := parse_measurement(done.stdout)) is None:
            raise MeasurementError(
                "code_loop.not_measured",
                "{op}: {implementation} could not be measured: {why}",
                op=op,
                implementation=implementation,
                why=done.describe_ending(),
            )
        return measured

    def list_earlier_proposals(self, target: str) -> list[EarlierProposal]:
        """Return the judged proposals on a target, or on all targets of a kind (a name that ends with a colon, such as 'quality:'), oldest first."""
        of_kind = lambda name: name.startswith(target) if target.endswith(":") else name == target
        return [
            EarlierProposal(
                patch_id, row.outcome or "", "; ".join(row.reasons or [])[:500], row.title, row.number in self.closed
            )
            for row, patch_id in list_judged_proposals(self.plant.ledger)
            if of_kind(row.target)
        ] + [  # proposals that could not be judged, and must not be tried again for now
            EarlierProposal(
                "", "", Message("code_loop.not_judged", "the proposal could not be judged"), row.title, True
            )
            for row in ProposalRow.select(self.plant.ledger, "WHERE state = 'failed' ORDER BY number")
            if row.number in self.closed and of_kind(row.target)
        ]


def parse_measurement(output: str) -> Measurement | None:
    """Return the measurement that ``kernels.contract.bench`` printed; None for any other text, which untrusted code may have printed."""
    try:
        found = json.loads(output)
        return Measurement(*(float(found[key]) for key in ("seconds", "against_seconds", "ratio", "ratio_low")))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def list_judged_proposals(ledger: Ledger) -> list[tuple[ProposalRow, str]]:
    """Return (proposal, id of its patch) for each judged proposal, oldest first."""
    judged = ProposalRow.select(ledger, "WHERE verdict IS NOT NULL ORDER BY number")
    return [(row, row.read_evidence(ledger).get("patch_id") or "") for row in judged]
