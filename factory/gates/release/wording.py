"""Numbers of a release's evidence, and how its verdict says them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from factory.evals.power import MOST, POWER, SURE, Needed, cautious, stepped
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


def seen(gain: float, words: str) -> str:
    """The gain that is promoted with 80 %, and which guards that counts."""
    return f"A gain of {gain:.3f} in every domain {SEEN} {100 * POWER:.0f} %, {words}"


def unless_held(guards: Mapping[str, Needed], gain: float, items: int) -> str:
    """Why cloze is not counted in, and what is known of it.

    >>> print(unless_held({CLOZE: Needed(Gain(-0.04, 0.06, 27, 10.4), 0.05, -0.15, moves=False)}, 0.06, 27))
    cloze aside: a gain in bits per byte is not counted on to move it, and its 27 items tell too little of how often it holds a candidate that is \
as good as the champion there (about 71 % pass by their standard error, 0.060; at least 39 % do, with 95 %; a loss of 0.150 must be excluded)
    """
    cloze = stepped(guards, gain)[CLOZE]
    return (
        f"{CLOZE} aside: a gain in bits per byte is not counted on to move it, and its {items} items tell too little of how often it holds a "
        f"candidate that is as good as the champion there (about {100 * cloze.chance(gain):.0f} % pass by their standard error, "
        f"{cloze.measured.error:.3f}; at least {100 * cautious(cloze, items).chance(gain):.0f} % do, with {100 * SURE:.0f} %; a loss of "
        f"{-cloze.floor:.3f} must be excluded)"
    )


def unseen(target: Needed, guards: Mapping[str, Needed]) -> str:
    """Why no gain can be said to be promoted with 80 %, however large: by the bound that is then passed least often.

    >>> print(unseen(Needed(Gain(0.1, 0.9, 3, 2.1), 0.025), {}))
    Of no gain in bits per byte, however large, can it be said that 80 % are promoted: of the largest that there is, about 45 % pass the bound of \
the target (standard error 0.900 from 2 effective source documents). So more of the good ones are held; one that is promoted has passed every \
bound at its full level
    """
    needed = {"the target": target} | stepped(guards, MOST)
    compared = {
        name: bound for name, bound in needed.items() if bound.moves or bound.measured.bound(bound.level) is None
    }
    chances = {name: bound.chance(MOST) for name, bound in compared.items()}
    name = min(chances, key=lambda one: chances[one])
    measured = needed[name].measured
    words = f"Of no gain in bits per byte, however large, can it be said that {100 * POWER:.0f} % are promoted"
    if measured.bound(needed[name].level) is None:
        return f"{words}: {name} could not be compared"
    words += (
        f": of the largest that there is, about {100 * chances[name]:.0f} % pass the bound of {name} (standard error {measured.error:.3f} from "
        f"{measured.effective:.0f} effective source documents)"
    )
    return f"{words}. So more of the good ones are held; one that is promoted has passed every bound at its full level"


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
