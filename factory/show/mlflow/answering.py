"""Answers what people say in MLflow: the tag ``approval`` = ``approved`` or ``rejected`` on a candidate's version or a proposal's run.

Each word about a candidate is answered in the tag ``approval_answer``: released as which release, rejected, or refused and why. What is refused
turns the tag to ``refused``, so that the same word given again is heard again. A word counts only on the version of the candidate as the ledger
has it, and about its newest verdict; whatever else a version says of itself is not believed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from factory.core.errors import InputError
from factory.ledger.decisions import APPROVED, REFUSED, REJECTED, undecided
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, Subject, VerdictRow
from factory.ledger.writing import record_once
from factory.release.approvals import APPROVAL_TAG, how_to_answer, reject, waits
from factory.release.checks import newest_verdict
from factory.release.releases import release
from factory.show.mlflow.outages import TrackingError, shown
from factory.show.mlflow.registry import MODEL, find_version
from factory.show.mlflow.releases import PENDING, REASON_TAG, decided, set_tags, show_releases
from factory.show.mlflow.runs import Tracking
from factory.show.mlflow.store import mlflow_errors

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

BY_TAG = "approval_by"  # who gave the word, where MLflow has people log in
IN_MLFLOW = "mlflow"
REFUSED_WORD = "refused"
QUIET = frozenset({"", PENDING, REFUSED_WORD})


class ApprovalAnswers:
    """One process's look at the tags: ``look`` every few seconds, also while a segment trains. It costs one search."""

    def __init__(self, plant: Plant) -> None:
        self.plant, self.ledger, self.progress = plant, plant.ledger, plant.progress
        self.tracking = Tracking.open(plant)
        self._asked = False

    def look(self) -> list[str]:
        """Answer every word that waits for an answer; returns a line on each. What MLflow cannot take now is answered at a later look.

        Raises: ConfigError; WorkspaceError.
        """
        if VerdictRow.first(self.ledger, "WHERE gate = 'release'") is None:
            return []  # no candidate was judged, so MLflow need not be imported
        return shown(self.progress.line, self._answer_all) or []

    def look_and_ask(self) -> None:
        """``look``; at the first time, also say which candidates wait already. (Of others it is said when they are judged.)"""
        self.look()
        for verdict in () if self._asked else undecided(self.ledger):
            if waits(self.plant, verdict):
                self.progress.line(f"  {how_to_answer(verdict.number)}")
        self._asked = True

    def _answer_all(self) -> list[str]:
        client = self.tracking.client
        with mlflow_errors("reading approvals"):
            found = client.search_model_versions(f"name = '{MODEL}'")
        spoken = [one for one in found if _word(one) not in QUIET]
        lines = [self._answer(one) for one in sorted(spoken, key=lambda one: int(one.version))]
        if spoken:  # a segment may train for hours before the daemon's next pass
            with suppress(InputError, TrackingError):  # the duty 'show' says it
                show_releases(self.plant, self.tracking)
        return [line for line in lines if line]

    def _answer(self, version: ModelVersion) -> str:
        word, name = _word(version), f"version {version.version} of {MODEL}"
        why, by = version.tags.get(REASON_TAG, "").strip(), _by(version)
        try:
            verdict = self._judged(version)
            known = decided(self.ledger, verdict)
            if known is None or known[0] != word:
                answer = self._obey(word, verdict, by, why)
                known = decided(self.ledger, verdict) or (word, answer)
                line = f"{name}: {known[1]}"
            else:
                line = ""
        except InputError as error:
            known, line = (REFUSED_WORD, f"refused: {error}"), f"{word!r} on {name} was refused: {error}"
            detail = {"word": word, "by": by, "version": str(version.version), "why": str(error)}
            record_once(self.ledger, REFUSED, Subject("candidate", _number(version)), detail)
        set_tags(self.tracking, str(version.version), dict(version.tags), *known)
        if line:
            self.progress.line(f"  {line}")
        return line

    def _judged(self, version: ModelVersion) -> VerdictRow:
        """The verdict that a version's reader had before them. Raises: InputError when that is not the newest one on what would be released."""
        number = _number(version)
        row = CandidateRow.get(self.ledger, number)
        if version.tags.get("export_sha256") != row.export_sha256:
            raise InputError(f"version {version.version} is of another export than that of candidate {number}")
        with mlflow_errors("finding a version"):
            mine = find_version(self.tracking.client, number, row.export_sha256)
        if mine is None or str(mine.version) != str(version.version):
            raise InputError(f"candidate {number} is version {mine and mine.version}, not version {version.version}")
        verdict = newest_verdict(self.ledger, number)
        if (seen := version.tags.get("verdict_id")) != str(verdict.id):
            raise InputError(
                f"verdict {seen} on {verdict.subject} is out of date: verdict {verdict.id} says {verdict.outcome!r}; look at it first"
            )
        return verdict

    def _obey(self, word: str, verdict: VerdictRow, by: str, why: str) -> str:
        if word == APPROVED:
            number = release(self.plant, verdict.id, approved_by=by)
            return f"released as {number}, for which the policy was enough"
        if word == REJECTED:
            reject(self.plant, verdict.id, by, why)
            return REJECTED
        raise InputError(f"{word[:40]!r} is no answer: {APPROVAL_TAG} is {APPROVED!r} or {REJECTED!r}")


def follow_proposals(plant: Plant) -> int:
    """Carry out what people decided in MLflow, or the policy decides, about proposals that wait; returns how many were settled."""
    from factory.code_loop.approvals import follow

    tracking = Tracking.open(plant)
    return follow(plant, lambda number: shown(plant.progress.line, partial(tracking.proposal_word, number)))


def _word(version: ModelVersion) -> str:
    return str(version.tags.get(APPROVAL_TAG, "")).strip().lower()


def _by(version: ModelVersion) -> str:
    """Who gave the word: as far as MLflow knows it."""
    name = str(version.tags.get(BY_TAG, "")).strip()[:100]
    return f"{name} ({IN_MLFLOW})" if name else IN_MLFLOW


def _number(version: ModelVersion) -> int:
    """Of a version's candidate. Anybody may have written the tag. 0: it names none."""
    words = str(version.tags.get("candidate", ""))
    return int(words) if words.isascii() and words.isdecimal() and len(words) < 10 else 0
