"""A person's override of a hold: what may be released all the same, by whom and why (``factory releases override N --reason "…"``).

Only what was held because too little was shown (``factory.gates.release.reasons.NOTHING_SHOWN``) may be. The judge is asked again, of the evidence
and the policy that the verdict recorded, so what a person overrides is what was judged; and of the licences and anomalies of its training as they
are now, as people may have changed both since.
"""

from __future__ import annotations

from factory.core.errors import InputError
from factory.gates.release.recorded import held_by, not_overridable
from factory.gates.release.training_now import training_now
from factory.ledger.decisions import REJECTED, decision_on
from factory.ledger.plant import Plant
from factory.ledger.rows import VerdictRow

LONGEST_REASON = 2000


def reason_of(words: str) -> str:
    """A person's reason, on one line. Raises: InputError for one without a letter or digit."""
    why = " ".join("".join(letter if letter.isprintable() else " " for letter in words).split())
    if not any(letter.isalnum() for letter in why):
        raise InputError('an override needs a reason, which stays on record: --reason "…"; nothing was released')
    if len(why) > LONGEST_REASON:
        raise InputError(
            f"a reason has at most {LONGEST_REASON:,} characters, this one has {len(why):,}; nothing was released"
        )
    return why


def override_of(plant: Plant, verdict: VerdictRow, by: str, why: str) -> dict[str, str]:
    """The event's detail. Raises: InputError for a verdict that does not hold, or holds for what no person overrides."""
    name = f"verdict {verdict.id} on {verdict.subject}"
    if (known := decision_on(plant.ledger, verdict)) and known.word == REJECTED:
        raise InputError(f"{name} was {known}; no override of it counts; nothing was released")
    if verdict.outcome != "hold":
        instead = {
            "promote": f"'factory releases approve {verdict.number}' releases it",
            "reject": "it was shown to be worse or broken, and no person overrides that",
        }
        raise InputError(f"{name} is {verdict.outcome!r}, not 'hold': {instead[verdict.outcome]}; nothing was released")
    stored = verdict.evidence(plant.ledger)
    held = held_by(stored, verdict.policy_sha256, name)
    if words := not_overridable(held):
        raise InputError(f"{name} holds for what no person overrides: {words} Nothing was released")
    now = training_now(plant, verdict.number)
    if words := not_overridable(held_by(stored, verdict.policy_sha256, name, **now)):
        raise InputError(
            f"{verdict.subject} would be held now for what no person overrides: {words} 'factory evaluate {verdict.number}' judges it again; "
            "nothing was released"
        )
    return {"sha256": verdict.subject_sha256, "evidence_sha256": str(stored["sha256"]), "by": by, "why": why}
