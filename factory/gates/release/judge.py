"""``judge(policy, evidence) -> Verdict``: the release decision as a pure function.

A certain reason against rejects; else anything that is missing, not finite or not shown holds; only complete evidence promotes. So removing
evidence never turns a hold or a reject into a promote, and neither does a worse measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from factory.evals.power import TAILS, Needed, cautious, smallest_gain
from factory.evals.probes.checks import CHECKS
from factory.evals.statistics import CLOZE, Gain, holm, spent_at
from factory.gates.release.evidence import FIRST_RELEASE, ReleaseEvidence
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.wording import (
    NAMED,
    another_order,
    noise_used,
    number,
    seen,
    sentence,
    signed,
    spent,
    unguarded,
    unless_held,
    unseen,
)

PROMOTE, HOLD, REJECT = "promote", "hold", "reject"


@dataclass(frozen=True)
class Verdict:
    outcome: str  # PROMOTE | HOLD | REJECT
    reasons: tuple[str, ...]  # sentences, the deciding ones first


def judge(policy: ReleasePolicy, evidence: ReleaseEvidence) -> Verdict:
    """Decide. Pure: the same policy and evidence give the same verdict, word for word."""
    looks = number(evidence.sealed_looks)
    if looks is not None and looks >= policy.sealed_looks_max:
        return Verdict(HOLD, (spent(looks, policy.sealed_looks_max),))
    against, missing, facts = _checks(evidence)
    if looks is None or looks < 0:
        missing.append("How often the sealed half was read before is not known.")
    missing += _basics(policy, evidence)
    if evidence.anomalies is None:
        missing.append("Whether its training had an anomaly was not looked up.")
    missing += [f"Its training went wrong: {words}." for words in evidence.anomalies or ()]
    missing += _licences(policy, evidence)
    if evidence.against is None:
        missing.append("The evidence does not say which champion to compare with.")
    elif evidence.against == FIRST_RELEASE:
        _first_release(policy, evidence, against, missing, facts)
    else:
        _comparison(policy, evidence, against, missing, facts)
    if words := unguarded(evidence):
        facts.append(words)
    if against:
        return Verdict(REJECT, tuple(against + missing + facts))
    if missing:
        return Verdict(HOLD, tuple(missing + facts))
    return Verdict(PROMOTE, tuple(facts))


def _checks(evidence: ReleaseEvidence) -> tuple[list[str], list[str], list[str]]:
    checks = sorted(evidence.checks.items())
    failed = [f"Check {name} failed: {detail}." for name, (ok, detail) in checks if ok is not True and ok is not None]
    absent = sorted(set(CHECKS) - set(evidence.checks))
    unknown = sorted(set(evidence.checks) - set(CHECKS))
    missing = [f"{len(absent)} of {len(CHECKS)} checks were not made: {', '.join(absent)}."] if absent else []
    missing += [f"Check {name} is unknown to the judge." for name in unknown]
    missing += [f"Check {name} could not be made: {detail}." for name, (ok, detail) in checks if ok is None]
    return (
        failed,
        missing,
        [] if failed or missing else [f"All {len(CHECKS)} parity, contamination and smoke checks passed."],
    )


def _basics(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[str]:
    missing = []
    if not evidence.domains:
        missing.append("No domain was measured.")
    for domain in sorted(set(evidence.documents) | set(evidence.bits_per_byte)):
        if domain not in evidence.domains:
            missing.append(f"{domain}: measured, but not a domain of the suite.")
    for domain in evidence.domains:
        count = number(evidence.documents.get(domain))
        if count is None or count < policy.documents_min:
            missing.append(
                f"{domain}: {0 if count is None else count:.0f} held-out documents, at least {policy.documents_min} are needed: the next "
                "shards with documents of it bring some (held_out.least in data.yaml). If none will come, take it out of the suite: 'factory data "
                "remove --document ID' for each of them, or '--source NAME', which takes out all of a source and refuses it from then on."
            )
        if number(evidence.bits_per_byte.get(domain)) is None:
            missing.append(f"{domain}: bits per byte were not measured.")
    if number(evidence.cloze_items) is None:
        missing.append("Cloze was not measured.")
    return missing


def _licences(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[str]:
    share = number(evidence.releasable)
    if share is None or not 0 <= share <= 1:
        return ["The licences of what it was trained on are not known."]
    if 1 - share <= policy.not_releasable_max:
        return []
    shares = {name: number(part) for name, part in evidence.not_releasable.items()}
    named = ", ".join(f"{name} {part:.1%}" for name, part in list(shares.items())[:NAMED] if part is not None)
    disputed = number(evidence.disputed)
    return [
        f"{1 - share:.1%} of the supervised tokens that it was trained on are of documents whose licence does not allow the release of a model, "
        f"at most {policy.not_releasable_max:.1%} is allowed: {named}. If you have the right, say so under licences in data.yaml "
        "('missing' is for documents that name none)."
        + (
            f" {disputed:.1%} came under a licence that allows it, too: the strictest counts until 'factory data settle LICENCE --document ID' "
            "says which is right ('factory data claims' lists them)."
            if disputed
            else ""
        )
    ]


def _first_release(
    policy: ReleasePolicy, evidence: ReleaseEvidence, against: list[str], missing: list[str], facts: list[str]
) -> None:
    floors = policy.first_release
    facts.insert(0, "There is no champion yet: a first release is judged by absolute floors, which no noise widens.")
    for domain in evidence.domains:
        ours, trigram = number(evidence.bits_per_byte.get(domain)), number(evidence.trigram_bits_per_byte.get(domain))
        if trigram is None:
            missing.append(f"{domain}: the byte-trigram baseline was not measured.")
        if ours is None:
            continue
        if ours > floors.bits_per_byte_max:
            against.append(f"{domain}: {ours:.3f} bits per byte, above the ceiling of {floors.bits_per_byte_max:.3f}.")
        if trigram is None:
            continue
        words = f"{domain}: {ours:.3f} bits per byte, byte trigram {trigram:.3f} ({signed(ours - trigram)})"
        if ours < trigram - floors.below_trigram_by:
            facts.append(f"{words}.")
        else:
            needed = f" by more than {floors.below_trigram_by:.3f}" if floors.below_trigram_by else ""
            against.append(f"{words}: it must be below{needed}.")


def _comparison(
    policy: ReleasePolicy, evidence: ReleaseEvidence, against: list[str], missing: list[str], facts: list[str]
) -> None:
    assert evidence.against is not None
    champion = evidence.against.replace(":", " ")
    if evidence.champion_failed:
        found = "; ".join(f"check {name} failed: {detail}" for name, detail in sorted(evidence.champion_failed.items()))
        missing.insert(
            0,
            f"Nothing can be compared with the champion, {champion}: {found}. 'factory release --rollback N' makes an earlier one champion again.",
        )
        return
    for domain, weight in sorted(policy.target.weights.items()):
        if weight > 0 and domain not in evidence.domains:
            missing.append(f"{domain}: a target of the policy without held-out documents.")
    target, look = evidence.target, evidence.look
    words = sentence("target, bits per byte weighted over domains", target, None, None)
    level = spent_at(policy.target.alpha, look) if isinstance(look, int) and look > 0 else 0.0
    lower, upper = (target.bound(level), target.bound(policy.target.alpha / 2, above=True)) if target else (None, None)
    if not level:
        missing.insert(0, f"How many candidates were judged against {champion} before is not known.")
    elif target is None or lower is None or upper is None or not _enough(target, policy.clusters_min):
        missing.insert(0, f"The gain over {champion} could not be measured: {_why(target, policy.clusters_min)}.")
    elif upper < 0:
        against.insert(0, f"Worse than {champion}: {words}.")
        facts.insert(0, _seen(policy, evidence))
    elif lower > 0:
        facts.insert(0, f"Better than {champion}: {words}.")
        facts.insert(1, _seen(policy, evidence))
        facts.insert(2, another_order(policy, evidence, target))
    else:
        missing.insert(0, f"Not shown to be better than {champion}: {words}.")
        missing.insert(1, _seen(policy, evidence))
    _memorising(policy, evidence, missing)
    _guards(policy, evidence, against, missing, facts)
    facts.append(noise_used(evidence))


def _memorising(policy: ReleasePolicy, evidence: ReleaseEvidence, missing: list[str]) -> None:
    """Was it fitted to held-out documents?"""
    rules = policy.memorising
    gap = evidence.halves_gap
    low, high = (gap.bound(rules.alpha / 2), gap.bound(rules.alpha / 2, above=True)) if gap else (None, None)
    sealed, dev = (number(one.gain) if one else None for one in (evidence.on_sealed, evidence.on_dev))
    if low is None or high is None or sealed is None or dev is None:
        missing.append(
            "The gains on the sealed half and on the dev half of what is held out could not be compared: the next shards bring documents of both."
        )
    elif low > rules.halves_margin or high < -rules.halves_margin:
        seen = "it has seen the sealed documents" if low > 0 else "it was fitted to the dev half"
        missing.insert(
            0,
            f"It gains {signed(sealed)} bits per byte on the sealed half and {signed(dev)} on the dev half, which are drawn alike: {seen}.",
        )
    if evidence.watched is None:
        missing.append("Whether the dev half rose alone over the line of candidates was not looked up.")
    elif words := dev_alone(policy, evidence):
        missing.insert(0, words)
    fresh, older = evidence.fresh_documents, evidence.older_documents
    if fresh is None or older is None:
        missing.append("How many held-out documents arrived after its training is not known.")
    elif min(fresh, older) >= policy.documents_min:
        gap, on_fresh = evidence.fresh_gap, evidence.on_fresh
        high = gap.bound(rules.alpha / 2, above=True) if gap else None
        least, new = (on_fresh.bound(rules.alpha / 2), number(on_fresh.gain)) if on_fresh else (None, None)
        if gap is None or high is None or gap.gain is None or new is None or least is None:
            missing.append(
                f"The gain on {fresh} held-out documents that arrived after its training could not be compared."
            )
        elif high < -rules.fresh_margin and least <= 0:  # one that is better on these too has learned
            missing.insert(
                0,
                f"It gains {signed(new)} bits per byte on documents that arrived after its training and {signed(new - gap.gain)} on the others: "
                "it knows those by heart.",
            )


def dev_alone(policy: ReleasePolicy, evidence: ReleaseEvidence) -> str:
    """The reward-hack watch in words: dev up while sealed is not, by one candidate or over several; '': neither is shown."""
    rules, said = policy.memorising, ""
    found = [(evidence.halves_gap, evidence.on_dev, evidence.on_sealed, 1, "the champion")]
    if evidence.rise_since is not None:
        since = f"candidate {evidence.rise_since}"
        found.append((evidence.rise_gap, evidence.rise_dev, evidence.rise_sealed, evidence.watched or 1, since))
    for gap, dev, sealed, looks, since in found:
        high = gap.bound(rules.alpha / 2 / looks, above=True) if gap else None
        low = dev.bound(rules.alpha / 2 / looks) if dev else None
        if high is None or low is None or dev is None or sealed is None or None in (dev.gain, sealed.gain):
            continue
        if high < -rules.halves_margin and low > 0:
            assert dev.gain is not None and sealed.gain is not None
            said = (
                f"Since {since} the dev half, by which candidates are chosen, gained {signed(dev.gain)} bits per byte and the sealed half "
                f"{signed(sealed.gain)}: the line was fitted to the dev half."
            )
    return said


def _guards(
    policy: ReleasePolicy, evidence: ReleaseEvidence, against: list[str], missing: list[str], facts: list[str]
) -> None:
    expected = _guarded(evidence)
    count = len(expected)
    missing += [
        f"{name}: a guard that the suite does not measure." for name in sorted(set(evidence.guards) - set(expected))
    ]
    floor, lost = _floors(policy, evidence, missing)

    def above(name: str, shared: int) -> bool:
        guard = evidence.guards.get(name)
        bound = guard.bound(policy.guards.alpha / shared) if guard else None
        return bound is not None and bound > floor[name]

    shown_above = holm(expected, above)
    for name in expected:
        guard = evidence.guards.get(name)
        ours, theirs = evidence.bits_per_byte.get(name), evidence.champion_bits_per_byte.get(name)
        unit = "bits per byte"
        if name == CLOZE:
            ours, theirs, unit = evidence.cloze, evidence.champion_cloze, "of cloze items right"
        words = sentence(name, guard, (number(theirs), number(ours)), unit)
        allowed = f"a loss of at most {-floor[name]:.3f} is allowed"
        if lost[name]:
            allowed += f", as releases since the best one lost {lost[name]:.3f}"
        upper = guard.bound(policy.guards.alpha / count, above=True) if guard else None
        if (
            guard is None
            or upper is None
            or not _enough(guard, policy.clusters_min)
            or None in (number(theirs), number(ours))
        ):
            missing.append(f"{name}: could not be compared: {_why(guard, policy.clusters_min)}.")
        elif upper < floor[name]:
            against.append(f"Guard violated: {words}; {allowed}.")
        elif not shown_above[name]:
            missing.append(
                f"Guard not shown to hold: {words}; {allowed}, and the bound, corrected for {count} guards, does not exclude a larger loss."
            )
        else:
            facts.append(f"{words}.")


def _floors(
    policy: ReleasePolicy, evidence: ReleaseEvidence, missing: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Of each guard: the gain that its bound must lie above, and what earlier releases lost there."""
    floor: dict[str, float] = {}
    lost: dict[str, float] = {}
    for name in _guarded(evidence):
        margin = policy.guards.cloze_margin
        least = 0.0
        if name != CLOZE:
            noise = number(evidence.noise_floor.get(name))
            if noise is None or noise < 0 or noise > policy.guards.noise_floor_max:
                shown = (
                    "was not measured"
                    if noise is None
                    else f"is {noise:.4f} bits per byte, at most {policy.guards.noise_floor_max:.4f} is allowed"
                )
                missing.append(f"{name}: the noise floor {shown}.")
                noise = 0.0
            draws = (
                number(evidence.replica_noise.get(name)) or 0.0
            )  # of the champion's recipe: no candidate can widen it
            draws = min(max(draws, 0.0), policy.guards.noise_floor_max)
            margin, least = max(policy.guards.bits_per_byte_margin, 2 * max(noise, draws)), 2 * noise
        gone = number(evidence.lost.get(name))
        if gone is None or gone < 0:
            missing.append(f"{name}: what earlier releases lost there is not known.")
            gone = margin
        lost[name] = gone
        floor[name] = -max(margin - gone, least)
    return floor, lost


@dataclass(frozen=True)
class Detectable:
    """gain: the smallest, in every domain alike, with which 80 % of candidates are promoted; None: none is. apart: of those that cloze does not
    hold, as its items do not tell how many it does."""

    gain: float | None
    apart: bool = False


def detectable(policy: ReleasePolicy, evidence: ReleaseEvidence) -> Detectable:
    """What this comparison would have shown, were the candidate another one."""
    if evidence.target is None or not evidence.look:
        return Detectable(None)
    target, guards = bounds(policy, evidence, evidence.target, evidence.look)
    otherwise = 1.5 * policy.memorising.alpha  # of both comparisons; one is one-sided
    if CLOZE not in guards:
        return Detectable(smallest_gain([target], otherwise, guards))
    assert evidence.cloze_items
    counted = guards | {CLOZE: cautious(guards[CLOZE], evidence.cloze_items)}
    gain = smallest_gain([target], otherwise, counted)
    if gain is not None or guards[CLOZE].measured.bound(policy.guards.alpha) is None:
        return Detectable(gain)
    return Detectable(smallest_gain([target], otherwise, guards, apart=CLOZE), apart=True)


def bounds(
    policy: ReleasePolicy, evidence: ReleaseEvidence, target: Gain, look: int
) -> tuple[Needed, dict[str, Needed]]:
    """What a promotion has to pass: the target's bound, and the guards', whose level is of all together. No gain in bits per byte moves cloze."""
    floor, _ = _floors(policy, evidence, [])
    guards = {
        name: Needed(evidence.guards.get(name, Gain()), policy.guards.alpha, least, moves=name != CLOZE)
        for name, least in floor.items()
    }
    return Needed(target, spent_at(policy.target.alpha, look), tails=TAILS), guards


def _guarded(evidence: ReleaseEvidence) -> list[str]:
    return [*evidence.domains, *([CLOZE] if evidence.cloze_items else [])]


# -- reading numbers ---------------------------------------------------------------------------------------------------
def _enough(gain: Gain, clusters_min: int) -> bool:
    clusters = number(gain.clusters)
    return clusters is not None and clusters >= clusters_min


def _why(gain: Gain | None, clusters_min: int) -> str:
    if gain is None:
        return "candidate and champion have no items in common"
    clusters = number(gain.clusters)
    if clusters is None or clusters < clusters_min:
        return f"{0 if clusters is None else clusters:.0f} source documents, at least {clusters_min} are needed"
    return "a number is missing or not finite"


def _seen(policy: ReleasePolicy, evidence: ReleaseEvidence) -> str:
    """What the comparison could have shown at all."""
    assert evidence.target is not None and evidence.look is not None
    found, level = detectable(policy, evidence), spent_at(policy.target.alpha, evidence.look)
    looks = f"look {evidence.look} against this champion, so shown at {level:.2%}; {evidence.target.effective:.0f} effective source documents"
    target, guards = bounds(policy, evidence, evidence.target, evidence.look)
    if found.gain is None:
        return f"{unseen(target, guards)} ({looks})."
    if found.apart:
        assert evidence.cloze_items
        return f"{seen(found.gain, unless_held(guards, found.gain, evidence.cloze_items))} ({looks})."
    return f"{seen(found.gain, 'all guards passed')} ({looks})."
