"""Numbers of a release's evidence, and how its verdict says them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from factory.evals.power import MOST, MOST_FAILED, POWER, Needed, ScoredGuard, stepped
from factory.evals.statistics import CLOZE, Gain, of_recipe
from factory.gates.release.evidence import Numbers, ReleaseEvidence
from factory.gates.release.policy import ReleasePolicy

NAMED = 5  # licences, or domains, in a reason
SEEN = "would have been seen with"  # of a sentence that decides nothing


def number(value: float | int | None) -> float | None:
    """The value when it is a finite number, else None: NaN is not evidence."""
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def sentence(name: str, gain: Gain | None, levels: tuple[float | None, float | None] | None, unit: str | None) -> str:
    """'code: 1.920 → 1.840 bits per byte (−0.080, 95 % between −0.100 and −0.060)': the change as a reader sees it, not the gain."""
    words = name
    if levels is not None and None not in levels:
        words += f": {levels[0]:.3f} → {levels[1]:.3f} {unit}"
    if gain is None:
        return words
    change, low, high = number(gain.gain), gain.bound(0.025), gain.bound(0.025, above=True)
    if change is None or low is None or high is None:
        return words
    if name == CLOZE:
        return f"{words} ({signed(change)}, 95 % between {signed(low)} and {signed(high)})"
    return f"{words} ({signed(-change)}, 95 % between {signed(-high)} and {signed(-low)})"


def spent(looks: float, most: float) -> str:
    return (
        f"The sealed half of what is held out was read by {looks:.0f} candidates before, at most {most:.0f} are allowed: nothing was measured. "
        "New shards bring held-out documents that nobody saw (sealed_looks_max in gates/release.yaml)."
    )


def another_order(policy: ReleasePolicy, evidence: ReleaseEvidence, target: Gain) -> str:
    """Is the gain one of recipe and data, or of this draw? For the reader: what is released are these weights."""
    runs, noise = evidence.replicas, number(evidence.replica_target)
    if not isinstance(runs, int) or runs < 2 or noise is None or noise < 0:
        return (
            "How far another order of the same data moves a model was not measured: the gain is that of these weights, whatever they owe to "
            "their draw (replicas in gates/release.yaml)."
        )
    words = f"Another order of the same data moves the target by {noise:.4f} bits per byte (standard deviation of {runs} trainings)"
    lower = of_recipe(target, noise, runs).bound(policy.target.alpha / 2)
    if lower is not None and lower > 0:
        return f"{words}: the gain is beyond that, so it is one of recipe or data."
    return f"{words}: these weights are better, but the gain is within that noise and may be this draw's, not the recipe's or the data's."


def seen(gain: float | None, target: Needed, guards: Mapping[str, Needed], look: int, cloze: ScoredGuard | None) -> str:
    """The gain that is promoted with 80 %, and beside it how often cloze, where it stands, lets a model through that is as good there.

    >>> target = Needed(Gain(0.1, 0.009, 40, 38.2), 0.025)
    >>> print(seen(0.0284, target, {}, 1, ScoredGuard(90, 40.0, 0.24, 0.15, 0.05)))
    A gain of 0.028 in every domain would have been seen with 80 % (look 1 against this champion, so at 2.50 %; 38 document groups of one size). \
Cloze lets 89 of 100 models through that are as good there.
    >>> print(seen(None, Needed(Gain(0.1, 0.9, 3, 2.1), 0.025), {}, 1, None))
    No gain would have been seen with 80 %: of the largest that there is, 45 % pass the bound of the target (look 1 against this champion, so at \
2.50 %; 2 document groups of one size).
    """
    effective = target.measured.effective or 0.0
    looks = f"look {look} against this champion, so at {target.level:.2%}; {effective:.0f} document groups of one size"
    looks = looks.replace("%", " %")
    if gain is None:
        return f"No gain {SEEN} {100 * POWER:.0f} %: {_why_none(target, guards)} ({looks})."
    words = f"A gain of {gain:.3f} in every domain {SEEN} {100 * POWER:.0f} % ({looks})."
    if cloze is not None:
        words += f" Cloze lets {100 * cloze.passed:.0f} of 100 models through that are as good there."
    return words


def _why_none(target: Needed, guards: Mapping[str, Needed]) -> str:
    """The bound that even the largest gain passes least often."""
    needed = {"the target": target} | {name: one for name, one in stepped(guards, MOST).items() if one.moves}
    chances = {name: one.chance(MOST) for name, one in needed.items()}
    name = min(chances, key=lambda one: chances[one])
    if needed[name].measured.bound(needed[name].level) is None:
        return f"{name} could not be compared"
    return f"of the largest that there is, {100 * chances[name]:.0f} % pass the bound of {name}"


def aside(name: str, known: ScoredGuard, clusters: float, clusters_min: int, unit: str = "items") -> str:
    """That a guard is set aside, and the size that it needs.

    >>> print(aside("cloze", ScoredGuard(36, 30.0, 0.24, 0.15, 0.05), 30, 8))
    cloze is set aside: of 100 models that are as good there, 36 items hold 44, and at most 20 are allowed. About 68 items are needed. It holds only \
where a loss of more than 0.150 is measured, as of 3 in 100 such models, and rejects where one is shown.
    >>> print(aside("cloze", ScoredGuard(36, 3.0, 0.24, 0.15, 0.05), 3, 8))
    cloze is set aside: 36 items of 3 document groups, and 8 groups are needed. It informs alone.
    """
    if clusters < clusters_min:
        groups = "1 document group" if clusters == 1 else f"{clusters:.0f} document groups"
        return f"{name} is set aside: {known.items} {unit} of {groups}, and {clusters_min} groups are needed. It informs alone."
    held = 100 * (1 - known.passed)
    needed = known.needed()
    size = f"About {needed} {unit} are needed." if needed else f"No number of {unit} is enough for its margin."
    return (
        f"{name} is set aside: of 100 models that are as good there, {known.items} {unit} hold {held:.0f}, and at most {100 * MOST_FAILED:.0f} "
        f"are allowed. {size} {known.still}"
    )


def more_groups(domain: str, more: str) -> str:
    """What a person does to get more document groups of a domain."""
    return (
        f"hold out {more} document groups of {domain}: 'factory ingest PATH' with new documents of it; where one source names all that there is, "
        f"'factory data relabel --domain {domain} --group document'."
    )


def train_on(gain: float | None, seen_gain: float | None, times: float | None) -> str:
    """What a person does about a candidate that is not shown to be better.

    >>> print(train_on(0.005, 0.016, 9.4))
    train on ('factory run'): a gain of 0.016 in every domain is seen. Or bring shards ('factory ingest PATH'): 9.4 times as many held-out document \
groups show one of 0.005.
    >>> print(train_on(-0.002, 0.016, None))
    train on ('factory run'), or change data or recipe: it gained nothing, and a gain of 0.016 in every domain is seen.
    """
    known = f"a gain of {seen_gain:.3f} in every domain is seen" if seen_gain else "these documents show no gain"
    if gain is None or gain <= 0:
        return f"train on ('factory run'), or change data or recipe: it gained nothing, and {known}."
    words = f"train on ('factory run'): {known}."
    if times is None or times <= 1:
        return words
    return f"{words} Or bring shards ('factory ingest PATH'): {times:.1f} times as many held-out document groups show one of {gain:.3f}."


def noise_used(evidence: ReleaseEvidence) -> str:
    """What noise widens the guards' margins, and where it is from.

    >>> noise_used(ReleaseEvidence(domains=("code",), noise_floor={"code": 0.0005}, replicas=3, replica_noise={"code": 0.0042}))
    'Noise of the measurement, bits per byte: code 0.0005; of another order of the same data, by 3 trainings: code 0.0042.'
    >>> noise_used(ReleaseEvidence(domains=("code",), noise_floor={"code": 0.0005}))
    'Noise of the measurement, bits per byte: code 0.0005; of another order of the same data: none, as no replicas were measured yet.'
    """
    measurement = _each(evidence.domains, evidence.noise_floor)
    words = f"Noise of the measurement, bits per byte: {measurement}; of another order of the same data"
    if not isinstance(evidence.replicas, int) or evidence.replicas < 2:
        return f"{words}: none, as no replicas were measured yet."
    return f"{words}, by {evidence.replicas} trainings: {_each(evidence.domains, evidence.replica_noise)}."


def unguarded(evidence: ReleaseEvidence) -> str:
    """The domains that it was trained on and the suite has no document of; '': none.

    >>> print(unguarded(ReleaseEvidence(domains=("code",), trained_on={"code": 0.9696, "law": 0.03, "notes": 0.0004})))
    Not guarded: law (3.0% of the supervised tokens), notes (under 0.1%): trained on, and no sealed document is held out, so nobody sees what \
becomes of it. The next shards with documents of it bring some (held_out.least in data.yaml); or take it out: 'factory data remove'.
    """
    shares = {name: number(share) or 0.0 for name, share in evidence.trained_on.items() if name not in evidence.domains}
    known = sorted((-share, name) for name, share in shares.items() if share > 0)
    if not known:
        return ""
    shown = [f"{-share:.1%}" if share <= -0.001 else "under 0.1%" for share, _ in known[:NAMED]]
    shown[0] += " of the supervised tokens"
    named = ", ".join(f"{name} ({words})" for (_, name), words in zip(known, shown, strict=False))
    more = f" and {len(known) - NAMED} more" if len(known) > NAMED else ""
    return (
        f"Not guarded: {named}{more}: trained on, and no sealed document is held out, so nobody sees what becomes of it. The next shards with "
        "documents of it bring some (held_out.least in data.yaml); or take it out: 'factory data remove'."
    )


def _each(domains: Sequence[str], noise: Numbers) -> str:
    shown = {domain: number(noise.get(domain)) for domain in domains}
    return ", ".join(f"{domain} {'?' if value is None else format(value, '.4f')}" for domain, value in shown.items())


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
