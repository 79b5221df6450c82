"""Carries out approvals and rejections that people give in MLflow: the tag ``approval`` on a candidate's version or a proposal's run.

A person sets the tag to ``approved`` or ``rejected``. The factory answers in the tag ``approval_answer``: released, rejected, or refused with the
reason. After a refusal the tag is ``refused``, so that a person can set it again. A tag counts only on the version with the candidate's export from
the ledger, and only for the newest verdict. Other tags of a version are not trusted.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from factory.core.errors import InputError
from factory.ledger.decisions import APPROVED, REFUSED, REJECTED, list_undecided_verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, Subject, VerdictRow
from factory.ledger.writing import record_event_once
from factory.release.approvals import (
    APPROVAL_TAG,
    describe_waiting_candidate,
    is_decision_by_person_needed,
    record_rejection,
)
from factory.release.checks import get_newest_verdict
from factory.release.releases import release_candidate
from factory.show.mlflow.outages import TrackingError, show_unless_outage
from factory.show.mlflow.registry import MODEL, find_candidate_version
from factory.show.mlflow.releases import PENDING, REASON_TAG, make_decision_tags, set_approval_tags, show_releases
from factory.show.mlflow.runs import MlflowTracking
from factory.show.mlflow.store import convert_mlflow_errors
from kernels.contract.message import Message

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

BY_TAG = "approval_by"  # the person who set the tag, where people log in to MLflow
IN_MLFLOW = "mlflow"
REFUSED_WORD = "refused"
QUIET = frozenset({"", PENDING, REFUSED_WORD})


class ApprovalResponder:
    """Answers approvals in MLflow. Call ``answer_new_decisions`` every few seconds, also while a segment trains; each call costs one search."""

    def __init__(self, plant: Plant) -> None:
        self.plant, self.ledger, self.progress = plant, plant.ledger, plant.progress
        self.tracking = MlflowTracking.open(plant)
        self._asked = False

    def answer_new_decisions(self) -> list[str]:
        """Answer every approval or rejection that has no answer yet; returns a line for each. If MLflow is away, a later call answers.

        Raises: ConfigError; WorkspaceError.
        """
        if VerdictRow.find_first(self.ledger, "WHERE gate = 'release'") is None:
            return []  # no candidate was judged yet, so MLflow need not be imported
        return show_unless_outage(self.progress.line, self._answer_all) or []

    def answer_and_announce_decisions(self) -> None:
        """Call ``answer_new_decisions``. The first call also prints which candidates wait already.

        The daemon announces later ones when they are judged.
        """
        self.answer_new_decisions()
        for verdict in () if self._asked else list_undecided_verdicts(self.ledger):
            if is_decision_by_person_needed(self.plant, verdict):
                self.progress.line(f"  {describe_waiting_candidate(verdict.subject_number)}")
        self._asked = True

    def _answer_all(self) -> list[str]:
        client = self.tracking.client
        with convert_mlflow_errors("reading approvals"):
            found = client.search_model_versions(f"name = '{MODEL}'")
        spoken = [one for one in found if _word(one) not in QUIET]
        lines = [self._answer(one) for one in sorted(spoken, key=lambda one: int(one.version))]
        if spoken:  # show the result now, because the daemon's next pass may be hours away
            with suppress(InputError, TrackingError):  # the duty 'show' reports these errors
                show_releases(self.plant, self.tracking)
        return [line for line in lines if line]

    def _answer(self, version: ModelVersion) -> str:
        word, name = _word(version), f"version {version.version} of {MODEL}"
        why, by = version.tags.get(REASON_TAG, "").strip(), _by(version)
        try:
            verdict = self._judged(version)
            known = make_decision_tags(self.ledger, verdict)
            if known is None or known[0] != word:
                answer = self._obey(word, verdict, by, why)
                known = make_decision_tags(self.ledger, verdict) or (word, answer)
                line = f"{name}: {known[1]}"
            else:
                line = ""
        except InputError as error:
            line = Message(
                "approval_answers.refused",
                "The factory refused the tag value {word!r} on {version}: {reason}",
                word=word,
                version=name,
                reason=error,
            )
            known = REFUSED_WORD, f"refused: {error}"
            detail = {"word": word, "by": by, "version": str(version.version), "why": str(error)}
            record_event_once(self.ledger, REFUSED, Subject("candidate", _number(version)), detail)
        set_approval_tags(self.tracking, str(version.version), dict(version.tags), *known)
        if line:
            self.progress.line(f"  {line}")
        return line

    def _judged(self, version: ModelVersion) -> VerdictRow:
        """The verdict that the person saw on this version. Raises: InputError if it is not the newest verdict on the export to be released."""
        number = _number(version)
        row = CandidateRow.get(self.ledger, number)
        if version.tags.get("export_sha256") != row.export_sha256:
            raise InputError(
                "approval_answers.other_export",
                "The export of version {version} is not the export of candidate {candidate}.",
                version=version.version,
                candidate=number,
            )
        with convert_mlflow_errors("finding a version"):
            mine = find_candidate_version(self.tracking.client, number, row.export_sha256)
        if mine is None or str(mine.version) != str(version.version):
            raise InputError(
                "approval_answers.other_version",
                "Candidate {candidate} is version {its_version}, not version {version}.",
                candidate=number,
                its_version=mine and mine.version,
                version=version.version,
            )
        verdict = get_newest_verdict(self.ledger, number)
        if (seen := version.tags.get("verdict_id")) != str(verdict.id):
            raise InputError(
                "approval_answers.old_verdict",
                "The answer in the tag is for verdict {seen} on {subject}. The newest verdict is verdict {verdict}: {outcome!r}. "
                "Look at the newest verdict, and then answer again.",
                seen=seen,
                subject=verdict.subject,
                verdict=verdict.id,
                outcome=verdict.outcome,
            )
        return verdict

    def _obey(self, word: str, verdict: VerdictRow, by: str, why: str) -> str:
        if word == APPROVED:
            number = release_candidate(self.plant, verdict.id, approved_by=by)
            return Message(
                "approval_answers.released_by_policy",
                "released by the policy as release {release}, without an approval",
                release=number,
            )
        if word == REJECTED:
            record_rejection(self.plant, verdict.id, by, why)
            return REJECTED
        raise InputError(
            "approval_answers.unknown_word",
            "The value {word!r} of the tag {tag} is unknown. Set the tag to {approved!r} or {rejected!r}.",
            word=word[:40],
            tag=APPROVAL_TAG,
            approved=APPROVED,
            rejected=REJECTED,
        )


def carry_out_proposal_decisions(plant: Plant) -> int:
    """Carry out decisions about waiting proposals, by people in MLflow or by the policy. Returns the number of settled proposals."""
    from factory.code_loop.approvals import settle_waiting_proposals

    tracking = MlflowTracking.open(plant)
    return settle_waiting_proposals(
        plant, lambda number: show_unless_outage(plant.progress.line, partial(tracking.read_proposal_decision, number))
    )


def _word(version: ModelVersion) -> str:
    return str(version.tags.get(APPROVAL_TAG, "")).strip().lower()


def _by(version: ModelVersion) -> str:
    """The person who set the tag, if MLflow knows the name."""
    name = str(version.tags.get(BY_TAG, "")).strip()[:100]
    return f"{name} ({IN_MLFLOW})" if name else IN_MLFLOW


def _number(version: ModelVersion) -> int:
    """The number of a version's candidate, from a tag that anybody may have written. 0: the tag has no valid number."""
    words = str(version.tags.get("candidate", ""))
    return int(words) if words.isascii() and words.isdecimal() and len(words) < 10 else 0
