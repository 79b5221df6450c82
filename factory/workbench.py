"""The workbench that agents are handed (``agents.workbench.Workbench``): all that they see of the world and may ask for.

They read files in scope as the live commit holds them, have approved implementations measured in the sandbox within a
budget of seconds, and ask what was tried before.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sqlalchemy as sa
import yaml

from agents.workbench import Attempt, Measurement, MeasurementError, ReadError
from factory import repository, sandbox
from factory.errors import InputError
from factory.gates.patch_scope import AgentsPolicy
from factory.gates.patch_training import Start
from factory.ledger import Ledger, proposals, verdicts
from factory.progress import Progress
from factory.sandbox import Limits
from factory.workspace import Workspace


class OutOfScopeError(InputError, ReadError):
    """What an agent asked to read is not for agents."""


@dataclass
class Bench:
    """A workbench for one proposal on one base commit."""

    workspace: Workspace
    ledger: Ledger
    base: str
    start: Start
    progress: Progress
    spent: float = 0.0  # seconds of measuring

    @cached_property
    def agents(self) -> AgentsPolicy:
        return AgentsPolicy.load(self.workspace.policy("agents.yaml"))

    def read(self, path: str) -> str:
        """A file of the live code that lies in scope. Raises: OutOfScopeError for any other."""
        in_scope = any(rule.covers(path) for rule in self.agents.scope)
        if not in_scope or path not in repository.modes(self.workspace.repository, self.base):
            raise OutOfScopeError(f"{path!r} is not a file that agents may read")
        return repository.file_text(self.workspace.repository, self.base, path)

    def measure(self, op: str, implementation: str, against: str) -> Measurement:
        """``kernels.bench`` of approved code, in the sandbox, on the recipe's shapes. Raises: MeasurementError."""
        left = self.agents.measure_seconds - self.spent
        if left < 1:
            raise MeasurementError(f"the {self.agents.measure_seconds:g} seconds for measuring are spent")
        folder = (
            self.workspace.root / "cache" / "workbench"
        )  # compiled code of approved kernels, kept for the next time
        folder.mkdir(parents=True, exist_ok=True)
        recipe = folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(self.start.recipe))
        code = repository.checkout_live(self.workspace, self.base)
        command = [sys.executable, "-m", "kernels.bench", "--op", op, "--implementation", implementation]
        command += ["--against", against, "--recipe", str(recipe)]
        done = sandbox.run(command, output=folder, readonly=[code], cwd=code, limits=Limits(wall_seconds=left))
        self.spent += done.seconds
        try:
            found = json.loads(done.stdout)
            keys = ("seconds", "against_seconds", "ratio", "ratio_low")
            measured = Measurement(*(float(found[key]) for key in keys))
        except (ValueError, KeyError, TypeError) as error:
            self.progress.line(f"  {op}: {implementation} could not be measured: {done.why()}")
            raise MeasurementError(f"{op}: {implementation}: {done.why()}") from error
        self.progress.line(f"  {op}: {implementation} is {measured.ratio:.2f}x as fast as {against}, alone")
        return measured

    def history(self, target: str) -> list[Attempt]:
        """Judged proposals on a target, oldest first."""
        rows = [row for row in history(self.ledger) if row["target"] == target]
        return [Attempt(row["patch_id"] or "", row["outcome"], "; ".join(row["reasons"])[:500]) for row in rows]


def history(ledger: Ledger) -> list[dict[str, Any]]:
    """Judged proposals, oldest first: what was tried, on what, and what came of it."""
    columns = [proposals.c[name] for name in ("number", "agent", "target", "title", "predicted_gain")]
    rows = ledger.rows(
        sa.select(*columns, verdicts.c.outcome, verdicts.c.reasons, verdicts.c.evidence)
        .join(verdicts, verdicts.c.id == proposals.c.verdict)
        .order_by(proposals.c.number)
    )
    for row in rows:
        evidence = row.pop("evidence") or {}
        row |= {"gain": (evidence.get("gain") or {}).get("ratio"), "patch_id": evidence.get("patch_id")}
    return rows
