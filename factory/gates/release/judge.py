"""``judge(policy, evidence) -> Verdict``: the release decision as a pure function.

A certain reason against rejects; else anything that is missing, not finite or not shown holds; only complete evidence promotes. So removing
evidence never turns a hold or a reject into a promote, and neither does a worse measurement. A hold says first what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from factory.evals.probes.checks import CHECKS
from factory.evals.statistics import CLOZE, Gain, holm, of_recipe, spent_at
from factory.gates.release.evidence import FIRST_RELEASE, Numbers, ReleaseEvidence, number
from factory.gates.release.guards import (
    aside,
    bounds,
    cloze_guard,
    enough,
    floors,
    groups_needed,
    guarded,
    seen,
    set_aside,
)
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason, to_do
from factory.tasks.comparing import TaskEvidence, reasons

PROMOTE, HOLD, REJECT = "promote", "hold", "reject"
NAMED = 5  # licences, or domains, in a reason


@dataclass
class Found:
    """What speaks of a candidate: ``against`` it, ``missing`` for a promotion, and what was shown."""

    against: list[Reason] = field(default_factory=list)
    missing: list[Reason] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    outcome: str  # PROMOTE | HOLD | REJECT
    reasons: tuple[str, ...]  # sentences, the deciding ones first; of a hold, what to do before them
    found: Found = field(default_factory=Found, compare=False)


def judge(policy: ReleasePolicy, evidence: ReleaseEvidence, tasks: TaskEvidence | None = None) -> Verdict:
    """Decide. Pure: the same policy and evidence give the same verdict, word for word. No verdict gets better by what ``tasks`` show."""
    found = _found(policy, evidence)
    if tasks is not None:
        _tasks(policy, tasks, found)
    against, missing = ([reason.text for reason in reasons] for reasons in (found.against, found.missing))
    if against:
        return Verdict(REJECT, (*against, *missing, *found.facts), found)
    if missing:
        return Verdict(HOLD, (*to_do(found.missing, evidence.candidate), *missing, *found.facts), found)
    return Verdict(PROMOTE, tuple(found.facts), found)


def _found(policy: ReleasePolicy, evidence: ReleaseEvidence) -> Found:
    looks = number(evidence.sealed_looks)
    if looks is not None and looks >= policy.sealed_looks_max:
        words = (
            f"The sealed half of what is held out was read by {looks:.0f} candidates before, at most {policy.sealed_looks_max:.0f} are allowed: "
            "nothing was measured. New shards bring held-out documents that nobody saw (sealed_looks_max in gates/release.yaml)."
        )
        return Found(missing=[Reason("sealed_spent", words, "bring new shards: 'factory ingest PATH'.")])
    found = _checks(evidence)
    if looks is None or looks < 0:
        found.missing.append(Reason("looks_unknown", "How often the sealed half was read before is not known."))
    found.missing += [*_basics(policy, evidence), *of_training(policy, evidence)]
    if evidence.against is None:
        found.missing.append(Reason("no_champion", "The evidence does not say which champion to compare with."))
    elif evidence.against == FIRST_RELEASE:
        _first_release(policy, evidence, found)
    else:
        _comparison(policy, evidence, found)
    if words := unguarded(evidence):
        found.facts.append(words)
    return found


def _tasks(policy: ReleasePolicy, evidence: TaskEvidence, found: Found) -> None:
    shown = reasons(evidence, policy.clusters_min)
    found.against[:0] = [Reason("task_violated", words) for words in shown.against]
    missing = [Reason("task_not_measured", words, evidence.remedies.get(words, "")) for words in shown.not_measured]
    todo = "train on ('factory run'), or allow the task a wider margin (as 'factory config set tasks tasks.NAME.margin 0.05')."
    found.missing[:0] = [*missing, *(Reason("task_not_shown", words, todo) for words in shown.not_shown)]
    found.facts += shown.facts


def _checks(evidence: ReleaseEvidence) -> Found:
    checks = sorted(evidence.checks.items())
    failed = [
        Reason("check_failed", f"Check {name} failed: {detail}.")
        for name, (ok, detail) in checks
        if ok is not True and ok is not None
    ]
    absent = sorted(set(CHECKS) - set(evidence.checks))
    unknown = sorted(set(evidence.checks) - set(CHECKS))
    words = [f"{len(absent)} of {len(CHECKS)} checks were not made: {', '.join(absent)}."] if absent else []
    words += [f"Check {name} is unknown to the judge." for name in unknown]
    words += [f"Check {name} could not be made: {detail}." for name, (ok, detail) in checks if ok is None]
    passed = [] if failed or words else [f"All {len(CHECKS)} parity, contamination and smoke checks passed."]
    return Found(failed, [Reason("check_not_made", one) for one in words], passed)


def _basics(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[Reason]:
    missing = []
    if not evidence.domains:
        missing.append(Reason("no_domain", "No domain was measured.", "bring shards: 'factory ingest PATH'."))
    for domain in sorted(set(evidence.documents) | set(evidence.bits_per_byte)):
        if domain not in evidence.domains:
            missing.append(Reason("no_domain", f"{domain}: measured, but not a domain of the suite."))
    for domain in evidence.domains:
        count = number(evidence.documents.get(domain))
        if count is None:
            missing.append(Reason("not_measured", f"{domain}: how many documents are held out is not known."))
        elif count < policy.documents_min:
            missing.append(
                Reason(
                    "few_documents",
                    f"{domain}: {count:.0f} held-out documents, at least {policy.documents_min} are needed.",
                    f"bring at least {policy.documents_min - count:.0f} more held-out documents of {domain}: the next shards with documents of it "
                    "bring some (held_out.least in data.yaml; 'factory ingest PATH'). If none will come, take it out of the suite: 'factory data "
                    "remove --document ID' for each of them, or '--source NAME', which takes out all of a source and refuses it from then on.",
                )
            )
        if number(evidence.bits_per_byte.get(domain)) is None:
            missing.append(Reason("not_measured", f"{domain}: bits per byte were not measured."))
    if number(evidence.cloze_items) is None:
        missing.append(Reason("not_measured", "Cloze was not measured."))
    return missing


def of_training(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[Reason]:
    """What its training speaks against it, which people may change at any time: open anomalies, and licences."""
    return [*_anomalies(evidence), *_licences(policy, evidence)]


def _anomalies(evidence: ReleaseEvidence) -> list[Reason]:
    if evidence.anomalies is None:
        return [Reason("anomalies_unknown", "Whether its training had an anomaly was not looked up.")]
    todo = (
        "look at the anomaly ('factory anomalies show N'), and answer it: 'factory anomalies accept N' or 'factory anomalies reject N'; what was "
        "rewound is trained again by 'factory run'."
    )
    return [Reason("anomaly", f"Its training went wrong: {words}.", todo) for words in evidence.anomalies]


def _licences(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[Reason]:
    share = number(evidence.releasable)
    if share is None or not 0 <= share <= 1:
        return [Reason("licences_unknown", "The licences of what it was trained on are not known.")]
    if 1 - share <= policy.not_releasable_max:
        return []
    shares = {name: number(part) for name, part in evidence.not_releasable.items()}
    named = ", ".join(f"{name} {part:.1%}" for name, part in list(shares.items())[:NAMED] if part is not None)
    disputed = number(evidence.disputed)
    words = (
        f"{1 - share:.1%} of the supervised tokens that it was trained on are of documents whose licence does not allow the release of a model, "
        f"at most {policy.not_releasable_max:.1%} is allowed: {named}."
    )
    todo = (
        "if you have the right, say so under licences in data.yaml ('missing' is for documents that name none); where a licence is named wrongly, "
        "'factory data relabel --license NAME --to-license RIGHT'; else take the documents out ('factory data remove --license NAME') and train "
        "again."
    )
    if disputed:
        words += (
            f" {disputed:.1%} came under a licence that allows it, too: the strictest counts until 'factory data settle LICENCE --document ID' "
            "says which is right ('factory data claims' lists them)."
        )
    return [Reason("licences", words, todo)]


def _first_release(policy: ReleasePolicy, evidence: ReleaseEvidence, found: Found) -> None:
    least = policy.first_release
    found.facts.insert(
        0, "There is no champion yet: a first release is judged by absolute floors, which no noise widens."
    )
    for domain in evidence.domains:
        ours, trigram = number(evidence.bits_per_byte.get(domain)), number(evidence.trigram_bits_per_byte.get(domain))
        if trigram is None:
            found.missing.append(Reason("not_measured", f"{domain}: the byte-trigram baseline was not measured."))
        if ours is None:
            continue
        if ours > least.bits_per_byte_max:
            words = f"{domain}: {ours:.3f} bits per byte, above the ceiling of {least.bits_per_byte_max:.3f}."
            found.against.append(Reason("above_ceiling", words))
        if trigram is None:
            continue
        words = f"{domain}: {ours:.3f} bits per byte, byte trigram {trigram:.3f} ({signed(ours - trigram)})"
        if ours < trigram - least.below_trigram_by:
            found.facts.append(f"{words}.")
        else:
            needed = f" by more than {least.below_trigram_by:.3f}" if least.below_trigram_by else ""
            found.against.append(Reason("above_trigram", f"{words}: it must be below{needed}."))


def _comparison(policy: ReleasePolicy, evidence: ReleaseEvidence, found: Found) -> None:
    assert evidence.against is not None
    champion = evidence.against.replace(":", " ")
    if evidence.champion_failed:
        failed = "; ".join(
            f"check {name} failed: {detail}" for name, detail in sorted(evidence.champion_failed.items())
        )
        words = f"Nothing can be compared with the champion, {champion}: {failed}."
        todo = "'factory release --rollback N' makes an earlier release champion again."
        found.missing.insert(0, Reason("champion_failed", words, todo))
        return
    for domain, weight in sorted(policy.target.weights.items()):
        if weight > 0 and domain not in evidence.domains:
            words = f"{domain}: a target of the policy without held-out documents."
            todo = f"bring shards with documents of {domain} ('factory ingest PATH'), or take it out of target.weights in gates/release.yaml."
            found.missing.append(Reason("target_domain", words, todo))
    _target(policy, evidence, champion, found)
    _memorising(policy, evidence, found.missing)
    _guards(policy, evidence, found)
    found.facts.append(noise_used(evidence))


def _target(policy: ReleasePolicy, evidence: ReleaseEvidence, champion: str, found: Found) -> None:
    """Is it better?"""
    target, look = evidence.target, evidence.look
    words = sentence("target, bits per byte weighted over domains", target, None, None)
    level = spent_at(policy.target.alpha, look) if isinstance(look, int) and look > 0 else 0.0
    lower, upper = (target.bound(level), target.bound(policy.target.alpha / 2, above=True)) if target else (None, None)
    if not level:
        why = Reason("look_unknown", f"How many candidates were judged against {champion} before is not known.")
        found.missing.insert(0, why)
        return
    if target is None or lower is None or upper is None or not enough(target, policy.clusters_min):
        why = _why(target, policy.clusters_min)
        todo = f"bring shards ('factory ingest PATH') with {why.remedy} document groups." if why.remedy else ""
        found.missing.insert(0, Reason(why.code, f"The gain over {champion} could not be measured: {why.text}.", todo))
        return
    asked = bounds(policy, evidence)
    assert asked is not None and isinstance(look, int)
    gain = asked.smallest_gain()
    apart = set_aside(policy, evidence)
    cloze = None if CLOZE in apart else cloze_guard(policy, evidence)
    power = seen(gain, asked.target, asked.guards, look, cloze)
    if upper < 0:
        found.against.insert(0, Reason("worse", f"Worse than {champion}: {words}."))
        found.facts.insert(0, power)
    elif lower > 0:
        found.facts[:0] = [f"Better than {champion}: {words}.", power, another_order(policy, evidence, target)]
    else:
        own = number(target.gain)
        todo = train_on(own, gain, asked.times_needed(own) if own is not None and own > 0 else None)
        found.missing.insert(0, Reason("not_better", f"Not shown to be better than {champion}: {words}.", todo))
        found.facts.insert(0, power)


def _memorising(policy: ReleasePolicy, evidence: ReleaseEvidence, missing: list[Reason]) -> None:
    """Was it fitted to held-out documents?"""
    rules = policy.memorising
    gap = evidence.halves_gap
    low, high = (gap.bound(rules.alpha / 2), gap.bound(rules.alpha / 2, above=True)) if gap else (None, None)
    sealed, dev = (number(one.gain) if one else None for one in (evidence.on_sealed, evidence.on_dev))
    if low is None or high is None or sealed is None or dev is None:
        words = "The gains on the sealed half and on the dev half of what is held out could not be compared."
        todo = "bring shards, which bring documents of both halves: 'factory ingest PATH'."
        missing.append(Reason("halves_not_compared", words, todo))
    elif low > rules.halves_margin or high < -rules.halves_margin:
        why = "it has seen the sealed documents" if low > 0 else "it was fitted to the dev half"
        words = f"It gains {signed(sealed)} bits per byte on the sealed half and {signed(dev)} on the dev half, which are drawn alike: {why}."
        missing.insert(0, Reason("halves_apart", words, _ANOTHER))
    if evidence.watched is None:
        words = "Whether the dev half rose alone over the line of candidates was not looked up."
        missing.append(Reason("line_unknown", words))
    elif words := dev_alone(policy, evidence):
        missing.insert(0, Reason("dev_alone", words, _ANOTHER))
    fresh, older = evidence.fresh_documents, evidence.older_documents
    if fresh is None or older is None:
        words = "How many held-out documents arrived after its training is not known."
        missing.append(Reason("fresh_unknown", words))
    elif min(fresh, older) >= policy.documents_min:
        gap, on_fresh = evidence.fresh_gap, evidence.on_fresh
        high = gap.bound(rules.alpha / 2, above=True) if gap else None
        least, new = (on_fresh.bound(rules.alpha / 2), number(on_fresh.gain)) if on_fresh else (None, None)
        if gap is None or high is None or gap.gain is None or new is None or least is None:
            words = f"The gain on {fresh} held-out documents that arrived after its training could not be compared."
            missing.append(Reason("fresh_not_compared", words, "bring shards: 'factory ingest PATH'."))
        elif high < -rules.fresh_margin and least <= 0:  # one that is better on these too has learned
            words = (
                f"It gains {signed(new)} bits per byte on documents that arrived after its training and {signed(new - gap.gain)} on the others: "
                "it knows those by heart."
            )
            missing.insert(0, Reason("by_heart", words, _ANOTHER))


_ANOTHER = (
    "train another candidate on more documents, each seen less often ('factory run' after 'factory ingest PATH'; max_epochs of the recipe); look for "
    "copies of held-out documents in what it was trained on ('factory data list')."
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


def _guards(policy: ReleasePolicy, evidence: ReleaseEvidence, found: Found) -> None:
    every, apart = guarded(evidence), set_aside(policy, evidence)
    stand = [name for name in every if name not in apart]
    found.missing += [
        Reason("guard_unknown", f"{name}: a guard that the suite does not measure.")
        for name in sorted(set(evidence.guards) - set(every))
    ]
    floor, lost, unknown = floors(policy, evidence)
    found.missing += unknown
    alpha = policy.guards.alpha

    def above(name: str, shared: int) -> bool:
        guard = evidence.guards.get(name)
        bound = guard.bound(alpha / shared) if guard else None
        return bound is not None and bound > floor[name]

    shown_above = holm(stand, above)
    for name in every:
        guard = evidence.guards.get(name)
        ours, theirs = evidence.bits_per_byte.get(name), evidence.champion_bits_per_byte.get(name)
        unit = "bits per byte"
        if name == CLOZE:
            ours, theirs, unit = evidence.cloze, evidence.champion_cloze, "of cloze items right"
        words = sentence(name, guard, (number(theirs), number(ours)), unit)
        allowed = f"a loss of at most {-floor[name]:.3f} is allowed"
        if lost[name]:
            allowed += f", as releases since the best one lost {lost[name]:.3f}"
        upper = guard.bound(alpha / len(every), above=True) if guard else None
        few = not enough(guard, policy.clusters_min)
        if name in apart:
            assert guard is not None and guard.clusters is not None, "else it stands"
            found.facts.append(aside(name, apart[name], guard.clusters, policy.clusters_min))
        if name in apart and few:
            found.facts.append(f"{words}.")
        elif guard is None or upper is None or few or None in (number(theirs), number(ours)):
            why = _why(guard, policy.clusters_min)
            todo = more_groups(name, why.remedy) if why.remedy and name != CLOZE else ""
            found.missing.append(Reason(why.code, f"{name}: could not be compared: {why.text}.", todo))
        elif upper < floor[name]:
            found.against.append(Reason("guard_violated", f"Guard violated: {words}; {allowed}."))
        elif name in apart and apart[name].tells and (number(guard.gain) or 0.0) < -apart[name].margin:
            words = f"Guard not shown to hold: {words}; a loss of more than {apart[name].margin:.3f} was measured."
            found.missing.append(Reason("guard_not_shown", words, _surer(name, guard, alpha, floor[name])))
        elif name not in apart and not shown_above[name]:
            words = f"Guard not shown to hold: {words}; {allowed}, and the bound, corrected for {len(stand)} guards, does not exclude a larger loss."
            found.missing.append(Reason("guard_not_shown", words, _surer(name, guard, alpha, floor[name])))
        else:
            found.facts.append(f"{words}.")


def _surer(name: str, guard: Gain, alpha: float, floor: float) -> str:
    """What a person does where a guard is not shown to hold."""
    if name == CLOZE:
        return "train on ('factory run'): it is right on fewer cloze items than the champion, or on too few more to be sure."
    needed, groups = groups_needed(guard, alpha, floor), number(guard.effective) or 0.0
    fell = f"train on, on more of {name} (mixture.weights of the recipe): it lost there."
    if needed is not None and needed > groups:
        more = more_groups(name, f"about {needed} (of one size; now {groups:.0f})")
        return f"{fell} Or {more}" if (number(guard.gain) or 0.0) < 0 else more
    return fell


# -- in words ----------------------------------------------------------------------------------------------------------
def _why(gain: Gain | None, clusters_min: int) -> Reason:
    """Why a gain could not be measured; the remedy is how many more document groups are needed."""
    if gain is None:
        return Reason("not_measured", "candidate and champion have no items in common")
    clusters = number(gain.clusters)
    if clusters is None or clusters < 0:
        return Reason("not_measured", "how many document groups it is of is not known")
    if clusters == 1:
        return Reason("few_groups", "one document group has no spread", f"at least {clusters_min - 1} more")
    if clusters < clusters_min:
        more = f"at least {clusters_min - clusters:.0f} more"
        return Reason("few_groups", f"{clusters:.0f} document groups, at least {clusters_min} are needed", more)
    return Reason("not_measured", "a number is missing or not finite")


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
