"""The verdict that a bundle records beside the one that this factory's judge gives of the same policy and evidence.

The same code says the same, word for word. Another version of it may word a reason otherwise; what decides, it may not say otherwise: outcome,
champion, and the numbers of a sentence that both say. What gain would have been seen decides nothing, and is an estimate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from factory.bundles.files import layout
from factory.bundles.files.folder import BundleError, difference, shown
from factory.gates.release.guards import ESTIMATES
from factory.gates.release.judge import HOLD, PROMOTE, Verdict
from factory.gates.release.judged_by import JudgedBy, judged_by
from factory.gates.release.recorded import not_overridable

NUMBER = re.compile(r"[+−-]?\d+(?:\.\d+)?")
SHA256 = re.compile(r"[0-9a-f]{64}")
NAMED = 3  # reasons in a message
OVERRIDE = {"by", "why", "sha256", "evidence_sha256"}


@dataclass(frozen=True)
class TwoVerdicts:
    """``recorded``: what ``verdict.json`` holds; ``again`` and ``against``: what is judged here."""

    recorded: Mapping[str, Any]
    again: Verdict
    against: str | None
    evidence_sha256: str = ""

    @cached_property
    def override(self) -> dict[str, str] | None:
        """Who released it though it was held, and why. Raises: BundleError."""
        told = self.recorded.get("override")
        if told is None:
            return None
        if not isinstance(told, dict) or told.keys() != OVERRIDE or not all(isinstance(v, str) for v in told.values()):
            raise BundleError(f"{layout.VERDICT}: override: expected {', '.join(sorted(OVERRIDE))}")
        return told

    @cached_property
    def by(self) -> JudgedBy | None:
        """Whose judge the record names; None: none, as of an older factory, or of one who took it out. Raises: BundleError."""
        told = self.recorded.get("judge")
        if told is None:
            return None
        well = isinstance(told, dict) and told.keys() == {"sha256", "version"}
        if not well or not isinstance(told["version"], str) or not SHA256.fullmatch(str(told["sha256"])):
            raise BundleError(f"{layout.VERDICT}: judge: expected the SHA-256 of a judge's code, and its version")
        return JudgedBy(**told)

    @property
    def same_judge(self) -> bool:
        """Was it judged by the code that judges here?"""
        return self.by is not None and self.by.sha256 == judged_by().sha256

    @cached_property
    def otherwise(self) -> tuple[str, ...]:
        """Recorded reasons that are not given here, word for word. Raises: BundleError."""
        told = self.recorded.get("reasons")
        if not isinstance(told, list) or not all(isinstance(reason, str) for reason in told):
            raise BundleError(f"{layout.VERDICT}: reasons: expected sentences")
        return tuple(reason for reason in told if reason not in self.again.reasons)

    def problems(self) -> list[str]:
        """What speaks against the record. Raises: BundleError for one that cannot be read."""
        here: dict[str, Any] = {"outcome": self.again.outcome, "against": self.against}
        if self.same_judge:
            here["reasons"] = [str(reason) for reason in self.again.reasons]
        told = {key: self.recorded.get(key) for key in here}
        found = [f"judged again, it is {here['outcome']}: {words}"] if (words := difference(told, here)) else []
        if not self.same_judge and (words := self._other_numbers()):
            found.append(f"judged again, a number is another: {words}")
        if found:
            return found if self.same_judge else [*found, self._judges()]
        if self.override is not None:
            return self._override_problems(self.override)
        return [] if here["outcome"] == PROMOTE else [f"the verdict is {here['outcome']}: nothing was to be released"]

    def _override_problems(self, told: dict[str, str]) -> list[str]:
        """What speaks against a person's override."""
        if self.again.outcome != HOLD:
            return [f"the verdict is {self.again.outcome}, and only a hold can be overridden"]
        if not told["by"].strip() or not told["why"].strip():
            return ["the override names nobody, or no reason"]
        if (told["sha256"], told["evidence_sha256"]) != (self.recorded.get("subject_sha256"), self.evidence_sha256):
            return ["the override is of another model, or of other evidence"]
        words = not_overridable(self.again.found.missing)
        return [f"it is held for what no person overrides: {shown(words, 300)}"] if words else []

    def words(self) -> str:
        """What is said where nothing speaks against it."""
        it_is = "it is promoted"
        if over := self.override:
            it_is = f"it is held, with an override by {shown(over['by'])} ({shown(over['why'], 500)})"
        if self.same_judge:
            return f"judged again, {it_is}, in the same words"
        if not self.otherwise:
            return f"judged again, {it_is}, in the same words; {self._judges()}"
        said = "; ".join(shown(reason) for reason in self.otherwise[:NAMED])
        return (
            f"judged again, {it_is}, on the same numbers; {self._judges()}: {len(self.otherwise)} of {len(self.recorded['reasons'])} "
            f"reasons are worded otherwise here, which is not held against it: {said}"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON for programs."""
        by = self.by.to_json() if self.by else None
        facts = {"same": self.same_judge, "recorded": by, "here": judged_by().to_json()}
        return facts | {"worded_otherwise": [] if self.same_judge else list(self.otherwise)}

    def _judges(self) -> str:
        here = f"here it is {_named(judged_by())}"
        if self.by is None:
            return f"which version of the judge gave the verdict is not recorded, {here}"
        return f"another version of the judge gave the verdict, {_named(self.by)}, {here}"

    def _other_numbers(self) -> str:
        """A sentence that both say, but for its numbers, and that may decide; '': none."""
        ours = {NUMBER.sub("#", one): str(one) for one in self.again.reasons if one.code not in ESTIMATES}
        for reason in self.otherwise:
            if own := ours.get(NUMBER.sub("#", reason)):
                return f"{shown(reason, 300)!r}, expected {own!r}"
        return ""


def _named(by: JudgedBy) -> str:
    return f"{shown(by.version)}, sha256 {by.sha256[:12]}"
