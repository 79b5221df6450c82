"""Picks the change of the recipe with the largest predicted gain that the gate has not rejected, and writes the proposal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agents.core.proposal import QUALITY, Edit, Proposal
from agents.core.workbench import EarlierProposal, Workbench
from agents.core.yaml_edit import change_recipe_value, format_yaml_value
from agents.recipe_scout.changes import RecipeChange, RejectedDirections, suggest_changes
from agents.recipe_scout.training_record import TrainingRecord
from kernels.contract.message import Message
from trainer.contract.errors import RecipeError

AGENT = "recipe-scout"
REFUSED = "reject"  # a proposal that was held for lack of evidence may be tried again
DISCOURAGED = 0.5  # factor on a prediction for each rejection on its key


def propose_change(record: TrainingRecord, workbench: Workbench) -> Proposal | None:
    """The most promising change as a proposal, or None if no change is predicted to gain what the gate asks for."""
    text = workbench.read(record.path)
    rate_tried = find_rejected_directions(
        record.recipe.optimizer.lr, workbench.list_earlier_proposals(f"{QUALITY}:optimizer.lr")
    )
    ranked = []
    for change in suggest_changes(record, rate_tried):
        history = workbench.list_earlier_proposals(f"{QUALITY}:{change.key}")
        rejected = sum(attempt.outcome == REFUSED for attempt in history)
        worth = change.gain * DISCOURAGED**rejected
        if worth < record.least_gain or not record.may_change(change.key) or _waits(change, history):
            continue
        try:
            new_text, _ = change_recipe_value(text, change.path, change.new)
        except RecipeError:
            continue  # an invalid value, such as a batch that its micro-batches do not divide
        drafted = _write(record, change, worth, new_text, history)
        if not any(attempt.patch_id == drafted.patch_id and attempt.outcome == REFUSED for attempt in history):
            ranked.append(drafted)
    return max(ranked, key=lambda proposal: proposal.predicted_gain, default=None)


def _waits(change: RecipeChange, history: Sequence[EarlierProposal]) -> bool:
    """True if the key is closed, or if the gate promoted another change from its present value (which waits for approval, or was reverted)."""
    begins = f": {change.key} {format_yaml_value(change.old)} → "
    return any(attempt.closed or (attempt.outcome == "promote" and begins in attempt.title) for attempt in history)


def find_rejected_directions(value: float, history: Sequence[EarlierProposal]) -> RejectedDirections:
    """The directions from ``value`` in which the gate rejected changes, read from titles that ``RecipeChange.title`` made."""
    higher = lower = False
    rejected = [attempt for attempt in history if attempt.outcome == REFUSED]
    for attempt in rejected:
        found = re.search(r" ([0-9.e+-]+) → ([0-9.e+-]+)$", attempt.title)
        if not found:
            continue
        try:
            old, new = (float(part) for part in found.groups())
        except ValueError:
            continue
        if abs(old - value) <= 1e-3 * abs(value):
            higher, lower = higher or new > old, lower or new < old
    return RejectedDirections(higher, lower, len(rejected))


def _write(
    record: TrainingRecord, change: RecipeChange, gain: float, text: str, history: Sequence[EarlierProposal]
) -> Proposal:
    before = [
        Message(
            "recipe_scout.attempt",
            "{title} (outcome: {outcome}; reason: {reason})",
            title=one.title,
            outcome=one.outcome,
            reason=one.reason[:160],
        )
        for one in history[-3:]
    ]
    earlier = (
        Message("recipe_scout.tried", " Earlier proposals for this key: {attempts}.", attempts="; ".join(before))
        if before
        else ""
    )
    hypothesis = Message(
        "recipe_scout.hypothesis",
        "At step {step}: {why}. Prediction: in the gate's runs, {change} lowers the loss on held-out documents by "
        "{gain:.4f} bits per byte (mean over domains, after each run's final anneal). {refuted}{earlier}",
        step=record.step,
        why=change.why,
        change=change.title,
        gain=gain,
        refuted=describe_refuting_result(gain),
        earlier=earlier,
    )
    title = f"recipe {record.recipe.name}: {change.title}"
    return Proposal(AGENT, f"{QUALITY}:{change.key}", title, hypothesis, gain, (Edit(record.path, text),))


def describe_refuting_result(gain: float) -> Message:
    """The results of the gate's runs that would refute a predicted gain in bits per byte."""
    return Message(
        "recipe_scout.refuted",
        "The change is refuted if the gain is not larger than the noise between seeds, or if a domain gets "
        "worse. The prediction is refuted if the gain is less than {half:.4f}.",
        half=gain / 2,
    )
