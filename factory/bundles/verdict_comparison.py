"""Compares a bundle's recorded verdict with this judge's verdict on the same policy and evidence.

The same version of the judge must give the same text. Another version may give reasons in other words. It may not give another outcome or another
champion, nor another number in a sentence that both versions give. The smallest visible gain may differ: it is an estimate that decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from factory.bundles.files import layout
from factory.bundles.files.folder import BundleError, escape_unprintable, find_first_json_difference
from factory.gates.release.guards import ESTIMATE_CODES
from factory.gates.release.judge import HOLD, PROMOTE, Verdict
from factory.gates.release.judge_version import JudgeVersion, compute_judge_version
from factory.gates.release.recorded_verdict import find_reason_not_overridable
from kernels.contract.message import Message

NUMBER = re.compile(r"[+−-]?\d+(?:\.\d+)?")
SHA256 = re.compile(r"[0-9a-f]{64}")
NAMED = 3  # reasons quoted in a message
OVERRIDE = {"by", "why", "sha256", "evidence_sha256"}


@dataclass(frozen=True)
class VerdictComparison:
    """A recorded verdict, the content of verdict.json, and this judge's new verdict. ``against``: the champion that the new verdict compares with."""

    recorded: Mapping[str, Any]
    again: Verdict
    against: str | None
    evidence_sha256: str = ""

    @cached_property
    def override(self) -> dict[str, str] | None:
        """The override of a held release, with its author and reason; None without an override. Raises: BundleError."""
        told = self.recorded.get("override")
        if told is None:
            return None
        if not isinstance(told, dict) or told.keys() != OVERRIDE or not all(isinstance(v, str) for v in told.values()):
            raise BundleError(
                "verdict_comparison.odd_override", "{file}: key 'override' must have exactly these keys, each a text: {keys}",
                file=layout.VERDICT, keys=OVERRIDE,
            )  # fmt: skip
        return told

    @cached_property
    def recorded_judge_version(self) -> JudgeVersion | None:
        """The recorded version of the judge; None if an older factory wrote the verdict, or if someone removed the key. Raises: BundleError."""
        told = self.recorded.get("judge")
        if told is None:
            return None
        well = isinstance(told, dict) and told.keys() == {"sha256", "version"}
        if not well or not isinstance(told["version"], str) or not SHA256.fullmatch(str(told["sha256"])):
            raise BundleError(
                "verdict_comparison.odd_judge",
                "{file}: key 'judge' must have a SHA-256 and a version, both texts",
                file=layout.VERDICT,
            )
        return JudgeVersion(**told)

    @property
    def is_same_judge(self) -> bool:
        """Whether this version of the judge gave the recorded verdict."""
        return (
            self.recorded_judge_version is not None
            and self.recorded_judge_version.sha256 == compute_judge_version().sha256
        )

    @cached_property
    def reasons_not_repeated(self) -> tuple[str, ...]:
        """The recorded reasons that this judge does not give in the same words. Raises: BundleError."""
        told = self.recorded.get("reasons")
        if not isinstance(told, list) or not all(isinstance(reason, str) for reason in told):
            raise BundleError(
                "verdict_comparison.odd_reasons",
                "{file}: key 'reasons' must be a list of sentences",
                file=layout.VERDICT,
            )
        return tuple(reason for reason in told if reason not in self.again.reasons)

    def find_problems(self) -> list[Message]:
        """Return the problems of the recorded verdict; [] if it is valid. Raises: BundleError if it cannot be read."""
        here: dict[str, Any] = {"outcome": self.again.outcome, "against": self.against}
        if self.is_same_judge:
            here["reasons"] = [str(reason) for reason in self.again.reasons]
        told = {key: self.recorded.get(key) for key in here}
        found: list[Message] = []
        if problem := find_first_json_difference(told, here):
            found.append(
                Message(
                    "verdict_comparison.other_verdict", "A new judgement gives outcome {outcome}. The recorded verdict differs: {problem}",
                    outcome=self.again.outcome, problem=problem,
                )
            )  # fmt: skip
        if not self.is_same_judge and (number := self._other_number()):
            found.append(number)
        if found:
            return found if self.is_same_judge else [*found, self._judges()]
        if self.override is not None:
            return self._override_problems(self.override)
        if self.again.outcome == PROMOTE:
            return []
        return [
            Message(
                "verdict_comparison.not_released",
                "The verdict is {outcome}, which allows no release",
                outcome=self.again.outcome,
            )
        ]

    def _override_problems(self, told: dict[str, str]) -> list[Message]:
        """Return the problems of a person's override; [] if it is valid."""
        if self.again.outcome != HOLD:
            return [
                Message(
                    "verdict_comparison.not_held",
                    "The verdict is {outcome}. A person can override only the verdict 'hold'",
                    outcome=self.again.outcome,
                )
            ]
        if not told["by"].strip() or not told["why"].strip():
            return [Message("verdict_comparison.empty_override", "The override must name a person and a reason")]
        if (told["sha256"], told["evidence_sha256"]) != (self.recorded.get("subject_sha256"), self.evidence_sha256):
            return [
                Message(
                    "verdict_comparison.override_of_other", "The override is for another model or for other evidence"
                )
            ]
        if reason := find_reason_not_overridable(self.again.found.missing):
            return [
                Message(
                    "verdict_comparison.not_overridable",
                    "Nobody can override the reason for this hold: {reason}",
                    reason=escape_unprintable(reason, 300),
                )
            ]
        return []

    def describe_verdict(self) -> Message:
        """Return a message about a valid verdict: its outcome, and whether another version of the judge gave it."""
        outcome = Message("verdict_comparison.promoted", "the outcome is 'promote'")
        if over := self.override:
            outcome = Message(
                "verdict_comparison.overridden",
                "the outcome is 'hold', which {by} overrode ({why})",
                by=escape_unprintable(over["by"]),
                why=escape_unprintable(over["why"], 500),
            )
        if self.is_same_judge:
            return Message(
                "verdict_comparison.same",
                "In a new judgement, {outcome}. All reasons are the same as recorded",
                outcome=outcome,
            )
        if not self.reasons_not_repeated:
            return Message(
                "verdict_comparison.same_by_other_judge", "In a new judgement, {outcome}. All reasons are the same as recorded. {judges}",
                outcome=outcome, judges=self._judges(),
            )  # fmt: skip
        return Message(
            "verdict_comparison.other_words",
            "In a new judgement, {outcome}. All numbers are the same as recorded. {judges}. In "
            "{differing} of {reasons} reasons, the text differs from the recorded text. Other texts are allowed. Recorded: {first}",
            outcome=outcome,
            judges=self._judges(),
            differing=len(self.reasons_not_repeated),
            reasons=len(self.recorded["reasons"]),
            first=[escape_unprintable(reason) for reason in self.reasons_not_repeated[:NAMED]],
        )

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""
        by = self.recorded_judge_version.to_json() if self.recorded_judge_version else None
        facts = {"same": self.is_same_judge, "recorded": by, "here": compute_judge_version().to_json()}
        return facts | {"worded_otherwise": [] if self.is_same_judge else list(self.reasons_not_repeated)}

    def _judges(self) -> Message:
        """Return a message with the two versions of the judge."""
        here = _named(compute_judge_version())
        if self.recorded_judge_version is None:
            return Message(
                "verdict_comparison.unknown_judge",
                "The bundle does not name the version of its judge. This factory's judge is version {here}",
                here=here,
            )
        return Message(
            "verdict_comparison.other_judge", "The bundle's judge was version {recorded}. The judge here is version {here}",
            recorded=_named(self.recorded_judge_version), here=here,
        )  # fmt: skip

    def _other_number(self) -> Message | None:
        """Return a message about the first deciding sentence that both verdicts give with different numbers; None without such a sentence."""
        ours = {NUMBER.sub("#", one): str(one) for one in self.again.reasons if one.code not in ESTIMATE_CODES}
        for reason in self.reasons_not_repeated:
            if own := ours.get(NUMBER.sub("#", reason)):
                return Message(
                    "verdict_comparison.other_number",
                    "A new judgement gives a reason with other numbers. Recorded: {recorded!r}. Expected: {expected!r}",
                    recorded=escape_unprintable(reason, 300), expected=own,
                )  # fmt: skip
        return None


def _named(by: JudgeVersion) -> str:
    return f"{escape_unprintable(by.version)}, sha256 {by.sha256[:12]}"
