"""Makes the messages that several reasons of the release judge share."""

from __future__ import annotations

from collections.abc import Sequence

from factory.evals.statistics import CLOZE, Gain, add_training_noise
from factory.gates.release.evidence import Numbers, ReleaseEvidence, read_finite_number
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason, make_reason
from kernels.contract.message import Message

NAMED = 5  # the most licences or domains that a message names


def make_remedy_to_ingest_documents() -> Message:
    """Return the remedy for problems that new documents of any kind solve."""
    return Message("release.remedy_bring_shards", "bring new shards: 'factory ingest PATH'.")


def make_remedy_to_train_another_candidate() -> Message:
    """Return the remedy for a candidate that was fitted to held-out documents."""
    return Message(
        "release.remedy_memorised",
        "train another candidate on more documents, with fewer repetitions of each (max_epochs of the recipe): 'factory ingest PATH', then "
        "'factory run'. Look for copies of held-out documents in the training data: 'factory data list'.",
    )


def make_allowed_loss_message(loss: float, lost: float) -> Message:
    """Return the message about the loss that a guard still allows. ``lost``: the loss of earlier releases, which is subtracted already."""
    if lost:
        return Message(
            "release.loss_left",
            "A loss of at most {loss:.3f} is allowed, because the releases since the best release already lost {lost:.3f}.",
            loss=loss, lost=lost,
        )  # fmt: skip
    return Message("release.loss_allowed", "A loss of at most {loss:.3f} is allowed.", loss=loss)


def make_not_measured_reason(gain: Gain | None, clusters_min: int) -> Reason:
    """Return the reason that a gain could not be measured. Its remedy is the missing number of document groups, or None."""
    if gain is None:
        return make_reason("release.no_common_items", "candidate and champion have no items in common")
    clusters = read_finite_number(gain.clusters)
    if clusters is None or clusters < 0:
        return make_reason("release.groups_unknown", "the number of document groups is not known")
    if clusters < clusters_min:
        more = Message(
            "release.more_groups",
            "at least {more:.0f|more document group|more document groups}",
            more=clusters_min - clusters,
        )
        if clusters == 1:
            return make_reason(
                "release.one_group",
                "there is only one document group, so the noise between groups is not known",
                remedy=more,
            )
        few = Message(
            "release.few_groups",
            "there are only {groups:.0f|document group|document groups}, and at least {least} are needed",
            groups=clusters, least=clusters_min,
        )  # fmt: skip
        return Reason(few, more)
    return make_reason("release.number_unknown", "a measured number is missing or not finite")


def make_change_message(
    name: str, gain: Gain | None, levels: tuple[float | None, float | None] | None, unit: str | None
) -> Message:
    """'code: 1.920 → 1.840 bits per byte (change −0.080, 95 % interval from −0.100 to −0.060)'. A loss that falls is a negative change."""
    before, after = levels or (None, None)
    change, low, high = (
        (
            read_finite_number(gain.gain),
            gain.compute_confidence_bound(0.025),
            gain.compute_confidence_bound(0.025, upper=True),
        )
        if gain
        else (None, None, None)
    )
    values = None
    if before is not None and after is not None:
        values = Message(
            "release.before_and_after",
            "{name}: {before:.3f} → {after:.3f} {unit}",
            name=name, before=before, after=after, unit=unit,
        )  # fmt: skip
    if change is None or low is None or high is None:
        return values or Message("release.not_compared", "{name}: the change is not known", name=name)
    if name != CLOZE:
        change, low, high = -change, -high, -low
    return Message(
        "release.change",
        "{shown} (change {change:+.3f}, 95 % interval from {low:+.3f} to {high:+.3f})",
        shown=values or name, name=name, change=change, low=low, high=high,
    )  # fmt: skip


def make_data_order_message(policy: ReleasePolicy, evidence: ReleaseEvidence, target: Gain) -> Message:
    """Return a message whether the gain is larger than the effect of another data order.

    It decides nothing, because a release publishes these weights, not the recipe.
    """
    runs, noise = evidence.replicas, read_finite_number(evidence.replica_target)
    if not isinstance(runs, int) or runs < 2 or noise is None or noise < 0:
        return Message(
            "release.order_unknown",
            "The effect of another data order was not measured (replicas in gates/release.yaml). The data order may have caused a part of the "
            "gain.",
        )
    effect = Message(
        "release.order_effect",
        "Another order of the same data changes the target by {noise:.4f} bits per byte (standard deviation of {runs} trainings).",
        noise=noise, runs=runs,
    )  # fmt: skip
    lower = add_training_noise(target, noise, runs).compute_confidence_bound(policy.target.alpha / 2)
    if lower is not None and lower > 0:
        return Message(
            "release.gain_beyond_order",
            "{effect} The gain over the champion is larger than this effect, so the recipe or the data caused the gain.",
            effect=effect,
        )
    return Message(
        "release.gain_within_order",
        "{effect} The gain over the champion is not clearly larger than this effect. These weights are better, but the data order may be the "
        "cause, not the recipe or the data.",
        effect=effect,
    )


def make_remedy_to_add_groups(domain: str, more: Message) -> Message:
    """Return the remedy for a domain with too few document groups."""
    return Message(
        "release.remedy_groups",
        "hold out {more} of {domain}. To add documents of {domain}: 'factory ingest PATH'. If all documents have the same source, make each "
        "document a group of its own: 'factory data relabel --domain {domain} --group document'.",
        domain=domain, more=more,
    )  # fmt: skip


def make_remedy_to_train_longer(gain: float | None, seen_gain: float | None, times: float | None) -> Message:
    """Return the remedy for a candidate that is not shown to be better. ``seen_gain``: the gain that the comparison can detect. ``times``: the
    factor by which the number of groups must grow to detect ``gain``.

    >>> print(make_remedy_to_train_longer(0.005, 0.016, 9.4))
    continue training ('factory run'), because this comparison can detect only a gain of at least 0.016 bits per byte in every domain. Or bring \
shards ('factory ingest PATH'): with 9.4 times as many held-out document groups, the comparison can detect a gain of 0.005 bits per byte.
    """
    known = (
        Message(
            "release.detects",
            "this comparison can detect only a gain of at least {gain:.3f} bits per byte in every domain",
            gain=seen_gain,
        )
        if seen_gain
        else Message("release.detects_nothing", "this comparison cannot detect any gain")
    )
    if gain is None or gain <= 0:
        return Message(
            "release.remedy_no_gain",
            "continue training ('factory run'), or change the data or the recipe. The candidate gained nothing, and {known}.",
            known=known,
        )
    train = Message("release.remedy_train_on", "continue training ('factory run'), because {known}.", known=known)
    if times is None or times <= 1:
        return train
    return Message(
        "release.remedy_train_on_or_bring",
        "{train} Or bring shards ('factory ingest PATH'): with {times:.1f} times as many held-out document groups, the comparison can detect a "
        "gain of {gain:.3f} bits per byte.",
        train=train, times=times, gain=gain,
    )  # fmt: skip


def make_noise_message(evidence: ReleaseEvidence) -> Message:
    """Return the message about the noise that widens the guards' margins: that of the measurement, and that of the data order.

    >>> print(make_noise_message(ReleaseEvidence(domains=("code",), noise_floor={"code": 0.0005}, replicas=3, replica_noise={"code": 0.0042})))
    The noise of the measurement, in bits per byte: code 0.0005. Noise from the data order, measured in 3 trainings: code 0.0042.
    >>> print(make_noise_message(ReleaseEvidence(domains=("code",), noise_floor={"code": 0.0005})))
    The noise of the measurement, in bits per byte: code 0.0005. The noise from the data order is not known, because no replicas were measured yet.
    """
    floor, order = dict(evidence.noise_floor), dict(evidence.replica_noise)
    measurement = Message(
        "release.noise_of_measurement",
        "The noise of the measurement, in bits per byte: {named}.",
        named=_each(evidence.domains, floor), noise_floor=floor,
    )  # fmt: skip
    if not isinstance(evidence.replicas, int) or evidence.replicas < 2:
        return Message(
            "release.noise_of_order_unknown",
            "{measurement} The noise from the data order is not known, because no replicas were measured yet.",
            measurement=measurement,
        )
    return Message(
        "release.noise",
        "{measurement} Noise from the data order, measured in {runs} trainings: {named}.",
        measurement=measurement, runs=evidence.replicas, named=_each(evidence.domains, order), replica_noise=order,
    )  # fmt: skip


def make_unguarded_domains_message(evidence: ReleaseEvidence) -> Message | None:
    """Return the message about domains that the candidate was trained on but that the suite does not contain. None: there are no such domains.

    >>> print(make_unguarded_domains_message(ReleaseEvidence(domains=("code",), trained_on={"code": 0.9696, "law": 0.03, "notes": 0.0004})))
    No guard protects these domains (with their shares of the supervised tokens): law 3.0%, notes under 0.1%. The candidate was trained on \
documents of these domains, but no sealed document of these domains is held out. So nothing would show a loss. Ingest holds out a part of new shards \
with such documents (held_out.least in data.yaml). Or remove the documents of the domain: 'factory data remove'.
    """
    shares = {
        name: read_finite_number(share) or 0.0
        for name, share in evidence.trained_on.items()
        if name not in evidence.domains
    }
    known = sorted((-share, name) for name, share in shares.items() if share > 0)
    if not known:
        return None
    shown = [f"{-share:.1%}" if share <= -0.001 else "under 0.1%" for share, _ in known[:NAMED]]
    named = [f"{name} {words}" for (_, name), words in zip(known, shown, strict=False)]
    more = [f"{len(known) - NAMED} more"] if len(known) > NAMED else []
    return Message(
        "release.unguarded",
        "No guard protects these domains (with their shares of the supervised tokens): {named}. The candidate was trained on documents of these "
        "domains, but no sealed document of these domains is held out. So nothing would show a loss. Ingest holds out a part of new shards with such "
        "documents (held_out.least in data.yaml). Or remove the documents of the domain: 'factory data remove'.",
        named=[*named, *more], shares={name: -share for share, name in known},
    )  # fmt: skip


def _each(domains: Sequence[str], noise: Numbers) -> list[str]:
    shown = {domain: read_finite_number(noise.get(domain)) for domain in domains}
    return [f"{domain} {'?' if value is None else format(value, '.4f')}" for domain, value in shown.items()]
