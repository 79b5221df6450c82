"""Finds the release judge's reasons that a candidate was fitted to held-out documents."""

from __future__ import annotations

from factory.gates.release.evidence import ReleaseEvidence, read_finite_number
from factory.gates.release.judge_messages import make_remedy_to_ingest_documents, make_remedy_to_train_another_candidate
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason, make_reason
from kernels.contract.message import Message


def add_overfitting_reasons(policy: ReleasePolicy, evidence: ReleaseEvidence, missing: list[Reason]) -> None:
    """Add to ``missing`` the reasons that the candidate was fitted to held-out documents, or that this is not known."""
    rules = policy.memorising
    gap = evidence.halves_gap
    low, high = (
        (gap.compute_confidence_bound(rules.alpha / 2), gap.compute_confidence_bound(rules.alpha / 2, upper=True))
        if gap
        else (None, None)
    )
    sealed, dev = (read_finite_number(one.gain) if one else None for one in (evidence.on_sealed, evidence.on_dev))
    if low is None or high is None or sealed is None or dev is None:
        missing.append(
            make_reason(
                "release.halves_not_compared",
                "The gains on the sealed half and the dev half of the held-out documents could not be compared.",
                remedy=make_remedy_to_ingest_documents(),
            )
        )
    elif low > rules.halves_margin:
        missing.insert(
            0,
            make_reason("release.sealed_seen",
                    "The candidate gains {sealed:+.3f} bits per byte on the sealed half and {dev:+.3f} on the dev half. An honest "
                    "model gains equally on both, so the candidate was trained on sealed documents.",
                    sealed=sealed, dev=dev, remedy=make_remedy_to_train_another_candidate()),
        )  # fmt: skip
    elif high < -rules.halves_margin:
        missing.insert(
            0,
            make_reason("release.dev_fitted",
                    "The candidate gains {sealed:+.3f} bits per byte on the sealed half and {dev:+.3f} on the dev half. An honest "
                    "model gains equally on both, so the candidate was fitted to the dev half.",
                    sealed=sealed, dev=dev, remedy=make_remedy_to_train_another_candidate()),
        )  # fmt: skip
    if evidence.watched is None:
        missing.append(
            make_reason(
                "release.line_unknown",
                "The evidence does not say whether only the dev half improved over successive candidates.",
            )
        )
    elif alone := find_gain_on_dev_half_only(policy, evidence):
        missing.insert(0, Reason(alone, make_remedy_to_train_another_candidate()))
    _fresh(policy, evidence, missing)


def _fresh(policy: ReleasePolicy, evidence: ReleaseEvidence, missing: list[Reason]) -> None:
    """Add a reason if the candidate knows documents that arrived before its training better than new documents, or if this is not known."""
    rules = policy.memorising
    fresh, older = evidence.fresh_documents, evidence.older_documents
    if fresh is None or older is None:
        missing.append(
            make_reason(
                "release.fresh_unknown",
                "The number of held-out documents that arrived after the training is not known.",
            )
        )
    elif min(fresh, older) >= policy.documents_min:
        gap, on_fresh = evidence.fresh_gap, evidence.on_fresh
        high = gap.compute_confidence_bound(rules.alpha / 2, upper=True) if gap else None
        least, new = (
            (on_fresh.compute_confidence_bound(rules.alpha / 2), read_finite_number(on_fresh.gain))
            if on_fresh
            else (None, None)
        )
        if gap is None or high is None or gap.gain is None or new is None or least is None:
            missing.append(
                make_reason(
                    "release.fresh_not_compared",
                    "The gain on the {documents} held-out documents that arrived after the training could not be compared.",
                    documents=fresh,
                    remedy=make_remedy_to_ingest_documents(),
                )
            )
        elif high < -rules.fresh_margin and least <= 0:  # a candidate that is better on new documents too has learned
            missing.insert(
                0,
                make_reason("release.by_heart",
                        "The candidate gains {fresh:+.3f} bits per byte on documents that arrived after its training, and {older:+.3f} on older "
                        "documents. The candidate has memorised the older documents.",
                        fresh=new, older=new - gap.gain, remedy=make_remedy_to_train_another_candidate()),
            )  # fmt: skip


def find_gain_on_dev_half_only(policy: ReleasePolicy, evidence: ReleaseEvidence) -> Message | None:
    """Return the message that the dev half improved without the sealed half, in one candidate or over several. Else None."""
    rules, said = policy.memorising, None
    found = [(evidence.halves_gap, evidence.on_dev, evidence.on_sealed, 1, "the champion")]
    if evidence.rise_since is not None:
        since = f"candidate {evidence.rise_since}"
        found.append((evidence.rise_gap, evidence.rise_dev, evidence.rise_sealed, evidence.watched or 1, since))
    for gap, dev, sealed, looks, since in found:
        high = gap.compute_confidence_bound(rules.alpha / 2 / looks, upper=True) if gap else None
        low = dev.compute_confidence_bound(rules.alpha / 2 / looks) if dev else None
        if high is None or low is None or dev is None or sealed is None or None in (dev.gain, sealed.gain):
            continue
        if high < -rules.halves_margin and low > 0:
            said = Message(
                "release.dev_alone",
                "Compared with {since}, the candidate gains {dev:+.3f} bits per byte on the dev half and {sealed:+.3f} on the sealed half. People "
                "and agents choose candidates by the dev half, so successive candidates were fitted to the dev half.",
                since=since, dev=dev.gain, sealed=sealed.gain,
            )  # fmt: skip
    return said
