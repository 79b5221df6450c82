"""The workbench of agents (``agents.core.workbench.Workbench``), through which they do all their work.

Agents read the live commit's files in scope, have implementations measured in the sandbox within a budget of seconds, and ask for earlier
attempts.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from agents.core.proposal import Edit
from agents.core.workbench import (
    AgentWrittenLines,
    EarlierProposal,
    Measurement,
    MeasurementError,
    QuickCheck,
    TryTable,
    UnreadableFileError,
    Variant,
)
from factory.code_loop.try_record import TryRecord, list_earlier_tries, list_lessons
from factory.code_loop.trying import Tries
from factory.core import devices
from factory.core.errors import InputError
from factory.gates.training_start import TrainingStart
from factory.git import repository
from factory.git.scope import AgentsPolicy
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import ProposalRow
from factory.sandbox import sandbox
from factory.sandbox.sandbox import SandboxLimits
from kernels.contract.message import Message

MOST_MORE_SECONDS = (
    120.0  # a measurement that has begun may go on so long after the budget, because a busy machine compiles slowly
)
MOST_TRIES = 12  # earlier tries of a target that are shown, the newest


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
    run: int | None = None  # the run of an agent whose tries the ledger keeps; None: this object keeps them
    tried: list[dict[str, Any]] = field(default_factory=list, init=False)
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

    @property
    def tries(self) -> Tries:
        """What this workbench's run tries, with its record in the ledger."""
        record = TryRecord(self.plant, self.run, self.tried)
        return Tries(self.plant, self.base, self.start, self.agents_policy, self.file_modes, record)

    def check(self, edits: Sequence[Edit], op: str = "") -> QuickCheck:
        """Check edits quickly: the stages scope and static, then in the sandbox the op oracle's first case and an import of other code.

        The check is no verdict: the gate checks everything again, from git. Raises: IsolationError.
        """
        return self.tries.check(edits, op)

    def try_variants(self, variants: Sequence[Variant], op: str = "", target: str = "") -> TryTable:
        """Check variants, and time the correct ones beside the present code. Raises: IsolationError."""
        return self.tries.make_table(variants, op, target)

    def list_earlier_tries(self, target: str) -> list[str]:
        """Return what earlier runs tried on a target, oldest first."""
        return list(list_earlier_tries(self.plant, target, MOST_TRIES))

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
        limits = SandboxLimits(wall_seconds=self.measuring_seconds_left + MOST_MORE_SECONDS)
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
        """Return the judged proposals on a target, or on all targets of a kind (a name that ends with a colon, such as 'quality:'), oldest first.

        After them follow the reasons for which agents declined the target.
        """
        of_kind = lambda name: name.startswith(target) if target.endswith(":") else name == target
        return (
            [
                EarlierProposal(
                    patch_id,
                    row.outcome or "",
                    "; ".join(row.reasons or [])[:500],
                    row.title,
                    row.number in self.closed,
                )
                for row, patch_id in list_judged_proposals(self.plant.ledger)
                if of_kind(row.target)
            ]
            + [  # proposals that could not be judged, and must not be tried again for now
                EarlierProposal(
                    "", "", Message("code_loop.not_judged", "the proposal could not be judged"), row.title, True
                )
                for row in ProposalRow.select(self.plant.ledger, "WHERE state = 'failed' ORDER BY number")
                if row.number in self.closed and of_kind(row.target)
            ]
            + list_lessons(self.plant, target, self.base)
        )


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
