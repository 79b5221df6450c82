"""``judge(policy, evidence) -> Verdict``: the release decision as a pure function.

A certain reason against a candidate rejects it. Otherwise, evidence that is missing, not finite or not conclusive holds it. Only complete evidence
promotes. So neither removed evidence nor a worse measurement can turn a hold or a reject into a promote. The reasons of a hold begin with the
remedies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from factory.evals.probes.checks import CHECKS
from factory.evals.statistics import CLOZE, Gain, compute_alpha_at_look, run_holm_step_down
from factory.gates.release.evidence import FIRST_RELEASE, ReleaseEvidence, read_finite_number
from factory.gates.release.guards import (
    compute_guard_floors,
    count_groups_to_show_no_loss,
    has_enough_groups,
    list_guard_names,
    list_unreliable_guards,
    make_cloze_guard,
    make_detectable_gain_message,
    make_promotion_bounds,
    make_unused_guard_message,
)
from factory.gates.release.judge_messages import (
    NAMED,
    make_allowed_loss_message,
    make_change_message,
    make_data_order_message,
    make_noise_message,
    make_not_measured_reason,
    make_remedy_to_add_groups,
    make_remedy_to_ingest_documents,
    make_remedy_to_train_longer,
    make_unguarded_domains_message,
)  # fmt: skip
from factory.gates.release.overfitting import add_overfitting_reasons
from factory.gates.release.policy import ReleasePolicy
from factory.gates.release.reasons import Reason, make_reason, make_to_do_lines
from factory.tasks.comparing import TaskEvidence, make_task_reasons
from kernels.contract.message import Message

PROMOTE, HOLD, REJECT = "promote", "hold", "reject"
TARGET = "weighted bits per byte"  # of the domains, as the policy weighs them


@dataclass
class JudgeFindings:
    """``against``: reasons to reject. ``missing``: reasons to hold. ``facts``: results that hold nothing and reject nothing."""

    against: list[Reason] = field(default_factory=list)
    missing: list[Reason] = field(default_factory=list)
    facts: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    outcome: str  # PROMOTE | HOLD | REJECT
    reasons: tuple[Message, ...]  # the reasons that decide come first; the reasons of a hold begin with the remedies
    found: JudgeFindings = field(default_factory=JudgeFindings, compare=False)


def judge(policy: ReleasePolicy, evidence: ReleaseEvidence, tasks: TaskEvidence | None = None) -> Verdict:
    """Return the verdict. Pure: the same policy and evidence give the same verdict, word for word. ``tasks`` can only make the verdict worse."""
    found = _found(policy, evidence)
    if tasks is not None:
        _tasks(policy, tasks, found)
    against, missing = ([one.message for one in part] for part in (found.against, found.missing))
    if against:
        return Verdict(REJECT, (*against, *missing, *found.facts), found)
    if missing:
        return Verdict(HOLD, (*make_to_do_lines(found.missing, evidence.candidate), *missing, *found.facts), found)
    return Verdict(PROMOTE, tuple(found.facts), found)


def _found(policy: ReleasePolicy, evidence: ReleaseEvidence) -> JudgeFindings:
    looks = read_finite_number(evidence.sealed_looks)
    if looks is not None and looks >= policy.sealed_looks_max:
        spent = Message(
            "release.sealed_spent",
            "{looks:.0f} earlier candidates were scored on the sealed half of the held-out documents. At most {most:.0f} are allowed "
            "(sealed_looks_max in gates/release.yaml), so this candidate was not measured. New shards bring held-out documents that are unused.",
            looks=looks, most=policy.sealed_looks_max,
        )  # fmt: skip
        return JudgeFindings(missing=[Reason(spent, make_remedy_to_ingest_documents())])
    found = _checks(evidence)
    if looks is None or looks < 0:
        found.missing.append(
            make_reason(
                "release.looks_unknown",
                "The number of earlier candidates that were scored on the sealed half is not known.",
            )
        )
    found.missing += [*_basics(policy, evidence), *make_training_reasons(policy, evidence)]
    if evidence.against is None:
        found.missing.append(
            make_reason("release.no_champion", "The evidence does not name the champion to compare with.")
        )
    elif evidence.against == FIRST_RELEASE:
        _first_release(policy, evidence, found)
    else:
        _comparison(policy, evidence, found)
    if unguarded_domains := make_unguarded_domains_message(evidence):
        found.facts.append(unguarded_domains)
    return found


def _tasks(policy: ReleasePolicy, evidence: TaskEvidence, found: JudgeFindings) -> None:
    shown = make_task_reasons(evidence, policy.clusters_min)
    remedies = {
        problem: Message("release.remedy_task", "{remedy}", remedy=one) for problem, one in evidence.remedies.items()
    }
    margin = Message(
        "release.remedy_task_not_shown",
        "continue training ('factory run'), or allow the task a wider margin: 'factory config set tasks tasks.NAME.margin 0.05'.",
    )
    found.against[:0] = [make_reason("release.task_violated", "{reason}", reason=one) for one in shown.against]
    found.missing[:0] = [
        *(
            make_reason("release.task_not_measured", "{reason}", reason=one, remedy=remedies.get(one))
            for one in shown.not_measured
        ),
        *(make_reason("release.task_not_shown", "{reason}", reason=one, remedy=margin) for one in shown.not_shown),
    ]
    found.facts += [Message.from_json(fact) for fact in shown.facts]


def _checks(evidence: ReleaseEvidence) -> JudgeFindings:
    checks = sorted(evidence.checks.items())
    failed = [
        Message("release.check_failed", "Check {check} failed: {detail}.", check=name, detail=detail)
        for name, (ok, detail) in checks
        if ok is not True and ok is not None
    ]
    absent = sorted(set(CHECKS) - set(evidence.checks))
    missing = []
    if absent:
        missing.append(
            Message(
                "release.checks_missing",
                "{missing} of {known} checks were not made: {checks}.",
                missing=len(absent),
                known=len(CHECKS),
                checks=absent,
            )  # fmt: skip
        )
    missing += [
        Message("release.check_unknown", "The judge does not know the check {check}.", check=name)
        for name in sorted(set(evidence.checks) - set(CHECKS))
    ]
    missing += [
        Message("release.check_not_made", "Check {check} could not be made: {detail}.", check=name, detail=detail)
        for name, (ok, detail) in checks
        if ok is None
    ]
    passed = Message(
        "release.checks_passed", "All {checks} parity, contamination and smoke checks passed.", checks=len(CHECKS)
    )
    return JudgeFindings(
        [Reason(one) for one in failed], [Reason(one) for one in missing], [] if failed or missing else [passed]
    )


def _basics(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[Reason]:
    missing = []
    if not evidence.domains:
        missing.append(
            make_reason("release.no_domain", "No domain was measured.", remedy=make_remedy_to_ingest_documents())
        )
    for domain in sorted(set(evidence.documents) | set(evidence.bits_per_byte)):
        if domain not in evidence.domains:
            missing.append(
                make_reason(
                    "release.other_domain",
                    "{domain}: the evidence has results of this domain, but the suite does not contain this domain.",
                    domain=domain,
                )
            )
    for domain in evidence.domains:
        count = read_finite_number(evidence.documents.get(domain))
        if count is None:
            missing.append(
                make_reason(
                    "release.documents_unknown",
                    "{domain}: the number of held-out documents is not known.",
                    domain=domain,
                )
            )
        elif count < policy.documents_min:
            missing.append(_few_documents(domain, count, policy.documents_min))
        if read_finite_number(evidence.bits_per_byte.get(domain)) is None:
            missing.append(
                make_reason(
                    "release.bits_per_byte_unknown", "{domain}: bits per byte were not measured.", domain=domain
                )
            )
    if read_finite_number(evidence.cloze_items) is None:
        missing.append(make_reason("release.cloze_unknown", "Cloze was not measured."))
    return missing


def _few_documents(domain: str, count: float, least: int) -> Reason:
    return make_reason("release.few_documents",
            "{domain}: {documents:.0f|document is|documents are} held out. At least {least} are needed.",
            domain=domain, documents=count, least=least, remedy=Message(
            "release.remedy_few_documents",
            "hold out {more:.0f|more document|more documents} of {domain}. Ingest holds out a part of new shards with such documents: 'factory "
            "ingest PATH' (held_out.least in data.yaml). If you have no such documents, remove the held-out documents of {domain}. To "
            "remove one document: 'factory data remove --document ID'. To remove a whole source, which ingest then refuses: 'factory data remove "
            "--source NAME'.",
            domain=domain, more=least - count,
        ))  # fmt: skip


def make_training_reasons(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[Reason]:
    """Return the reasons to hold that people can change after a verdict: open anomalies of the training, and licences."""
    return [*_anomalies(evidence), *_licences(policy, evidence)]


def _anomalies(evidence: ReleaseEvidence) -> list[Reason]:
    if evidence.anomalies is None:
        return [
            make_reason("release.anomalies_unknown", "The evidence does not say whether the training had an anomaly.")
        ]
    remedy = Message(
        "release.remedy_anomaly",
        "look at the anomaly: 'factory anomalies show N'. Then answer it: 'factory anomalies accept N' or 'factory anomalies reject N'. 'factory "
        "run' trains rewound segments again.",
    )
    return [
        make_reason("release.anomaly", "The training had an anomaly: {anomaly}.", anomaly=one, remedy=remedy)
        for one in evidence.anomalies
    ]


def _licences(policy: ReleasePolicy, evidence: ReleaseEvidence) -> list[Reason]:
    share = read_finite_number(evidence.releasable)
    if share is None or not 0 <= share <= 1:
        return [
            make_reason("release.licences_unknown", "The licences of the documents in the training data are not known.")
        ]
    if 1 - share <= policy.not_releasable_max:
        return []
    shares = {
        name: part for name, value in evidence.not_releasable.items() if (part := read_finite_number(value)) is not None
    }
    found = [
        make_reason("release.licences",
                "{share:.1%} of the supervised tokens are from documents whose licence does not allow the release of a model: {named}. At most "
                "{most:.1%} is allowed.",
                share=1 - share, most=policy.not_releasable_max, licences=shares,
                named=[f"{name} {part:.1%}" for name, part in list(shares.items())[:NAMED]], remedy=Message(
                "release.remedy_licences",
                "if you have the right to release the model, say so under licences in data.yaml ('missing' is for documents without a "
                "licence). If a licence is wrong, correct it: 'factory data relabel --license NAME --to-license RIGHT'. Otherwise remove the "
                "documents and train again: 'factory data remove --license NAME'. If an imported model has the licence, 'factory data list' names "
                "the command.",
            ))
    ]  # fmt: skip
    if disputed := read_finite_number(evidence.disputed):
        found.append(
            make_reason("release.licences_disputed",
                    "{share:.1%} of the supervised tokens are from documents with disputed licences: one shard names a licence that forbids the "
                    "release, and another shard names one that allows it. The strictest licence counts until a person settles which is right.",
                    share=disputed, remedy=Message(
                    "release.remedy_licences_disputed",
                    "settle which licence is right: 'factory data settle LICENCE --document ID'. 'factory data claims' lists the documents.",
                ))
        )  # fmt: skip
    return found


def _first_release(policy: ReleasePolicy, evidence: ReleaseEvidence, found: JudgeFindings) -> None:
    least = policy.first_release
    found.facts.insert(
        0,
        Message(
            "release.first_release",
            "This is a first release: there is no champion to compare with. Fixed limits decide, and measured noise does not widen these "
            "limits.",
        ),
    )
    for domain in evidence.domains:
        ours, trigram = (
            read_finite_number(evidence.bits_per_byte.get(domain)),
            read_finite_number(evidence.trigram_bits_per_byte.get(domain)),
        )
        if trigram is None:
            found.missing.append(
                make_reason(
                    "release.trigram_unknown", "{domain}: the byte-trigram baseline was not measured.", domain=domain
                )
            )
        if ours is None:
            continue
        if ours > least.bits_per_byte_max:
            found.against.append(
                make_reason(
                    "release.above_ceiling",
                    "{domain}: the model has {bits_per_byte:.3f} bits per byte. At most {most:.3f} are allowed (first_release.bits_per_byte_max in "
                    "gates/release.yaml).",
                    domain=domain,
                    bits_per_byte=ours,
                    most=least.bits_per_byte_max,
                )
            )
        if trigram is None:
            continue
        compared = Message(
            "release.beside_trigram",
            "{domain}: the model has {bits_per_byte:.3f} bits per byte, and the byte-trigram baseline has {trigram:.3f} (difference {change:+.3f}).",
            domain=domain, bits_per_byte=ours, trigram=trigram, change=ours - trigram,
        )  # fmt: skip
        if ours < trigram - least.below_trigram_by:
            found.facts.append(compared)
        else:
            found.against.append(
                make_reason(
                    "release.above_trigram",
                    "{compared} The model's bits per byte must be lower than the trigram's by more than {least:.3f}.",
                    compared=compared,
                    domain=domain,
                    least=least.below_trigram_by,
                )
            )


def _comparison(policy: ReleasePolicy, evidence: ReleaseEvidence, found: JudgeFindings) -> None:
    assert evidence.against is not None
    champion = evidence.against.replace(":", " ")
    if evidence.champion_failed:
        failed = [
            Message("release.champion_check", "check {check} failed: {detail}", check=name, detail=detail)
            for name, detail in sorted(evidence.champion_failed.items())
        ]
        found.missing.insert(
            0,
            make_reason("release.champion_failed",
                    "The champion, {champion}, cannot be compared with a candidate: {failed}.",
                    champion=champion, failed=failed, remedy=Message(
                    "release.remedy_champion_failed", "make an earlier release champion again: 'factory releases rollback N'."
                )),
        )  # fmt: skip
        return
    for domain, weight in sorted(policy.target.weights.items()):
        if weight > 0 and domain not in evidence.domains:
            found.missing.append(
                make_reason(
                    "release.target_domain",
                    "{domain}: target.weights names this domain, but no document of this domain is held out.",
                    domain=domain,
                    remedy=Message(
                        "release.remedy_target_domain",
                        "bring shards with documents of {domain}: 'factory ingest PATH'. Or take {domain} out of target.weights in "
                        "gates/release.yaml.",
                        domain=domain,
                    ),
                )
            )
    _target(policy, evidence, champion, found)
    add_overfitting_reasons(policy, evidence, found.missing)
    _guards(policy, evidence, found)
    found.facts.append(make_noise_message(evidence))


def _target(policy: ReleasePolicy, evidence: ReleaseEvidence, champion: str, found: JudgeFindings) -> None:
    """Add the finding whether the candidate is better than the champion."""
    target, look = evidence.target, evidence.look
    change = make_change_message(TARGET, target, None, None)
    level = compute_alpha_at_look(policy.target.alpha, look) if isinstance(look, int) and look > 0 else 0.0
    lower, upper = (
        (target.compute_confidence_bound(level), target.compute_confidence_bound(policy.target.alpha / 2, upper=True))
        if target
        else (None, None)
    )
    if not level:
        unknown = Message(
            "release.look_unknown",
            "The number of earlier candidates that were judged against {champion} is not known.",
            champion=champion,
        )
        found.missing.insert(0, Reason(unknown))
        return
    if target is None or lower is None or upper is None or not has_enough_groups(target, policy.clusters_min):
        found.missing.insert(0, _target_not_measured(champion, make_not_measured_reason(target, policy.clusters_min)))
        return
    asked = make_promotion_bounds(policy, evidence)
    assert asked is not None and isinstance(look, int)
    gain = asked.compute_smallest_gain()
    apart = list_unreliable_guards(policy, evidence)
    cloze = None if CLOZE in apart else make_cloze_guard(policy, evidence)
    power = make_detectable_gain_message(gain, asked.target, asked.guards, look, cloze)
    if upper < 0:
        worse = Message(
            "release.worse", "The candidate is worse than {champion}: {change}.", champion=champion, change=change
        )
        found.against.insert(0, Reason(worse))
        found.facts.insert(0, power)
    elif lower > 0:
        better = Message(
            "release.better", "The candidate is better than {champion}: {change}.", champion=champion, change=change
        )
        found.facts[:0] = [better, power, make_data_order_message(policy, evidence, target)]
    else:
        own = read_finite_number(target.gain)
        remedy = make_remedy_to_train_longer(
            own, gain, asked.find_group_growth_factor(own) if own is not None and own > 0 else None
        )
        unsure = Message(
            "release.not_better",
            "The candidate is not shown to be better than {champion}: {change}.",
            champion=champion,
            change=change,
        )
        found.missing.insert(0, Reason(unsure, remedy))
        found.facts.insert(0, power)


def _target_not_measured(champion: str, why: Reason) -> Reason:
    if why.remedy is None:
        return make_reason(
            "release.target_not_measured",
            "The gain over {champion} could not be measured: {why}.",
            champion=champion,
            why=why.message,
        )
    return make_reason("release.target_few_groups",
            "The gain over {champion} could not be measured with so few documents: {why}.",
            champion=champion, why=why.message, remedy=Message(
            "release.remedy_target_groups",
            "bring shards with {more}: 'factory ingest PATH'.",
            more=why.remedy,
        ))  # fmt: skip


def _guards(policy: ReleasePolicy, evidence: ReleaseEvidence, found: JudgeFindings) -> None:
    every, apart = list_guard_names(evidence), list_unreliable_guards(policy, evidence)
    stand = [name for name in every if name not in apart]
    found.missing += [
        make_reason("release.guard_unknown", "{guard}: the suite does not measure this guard.", guard=name)
        for name in sorted(set(evidence.guards) - set(every))
    ]
    floor, lost, unknown = compute_guard_floors(policy, evidence)
    found.missing += unknown
    alpha = policy.guards.alpha

    def above(name: str, shared: int) -> bool:
        guard = evidence.guards.get(name)
        bound = guard.compute_confidence_bound(alpha / shared) if guard else None
        return bound is not None and bound > floor[name]

    shown_above = run_holm_step_down(stand, above)
    for name in every:
        guard = evidence.guards.get(name)
        ours, theirs = evidence.bits_per_byte.get(name), evidence.champion_bits_per_byte.get(name)
        unit = "bits per byte"
        if name == CLOZE:
            ours, theirs, unit = evidence.cloze, evidence.champion_cloze, "of cloze items right"
        change = make_change_message(name, guard, (read_finite_number(theirs), read_finite_number(ours)), unit)
        upper = guard.compute_confidence_bound(alpha / len(every), upper=True) if guard else None
        few = not has_enough_groups(guard, policy.clusters_min)
        if name in apart:
            assert guard is not None and guard.clusters is not None, "else it stands"
            found.facts.append(make_unused_guard_message(name, apart[name], guard.clusters, policy.clusters_min))
        if name in apart and few:
            found.facts.append(_guard_shown(change))
        elif guard is None or upper is None or few or None in (read_finite_number(theirs), read_finite_number(ours)):
            found.missing.append(_guard_not_compared(name, make_not_measured_reason(guard, policy.clusters_min)))
        elif upper < floor[name]:
            violated = Message(
                "release.guard_violated",
                "The candidate lost too much on a guard: {change}. {allowed}",
                guard=name, change=change, allowed=make_allowed_loss_message(-floor[name], lost[name]),
            )  # fmt: skip
            found.against.append(Reason(violated))
        elif (
            name in apart
            and apart[name].is_loss_informative
            and (read_finite_number(guard.gain) or 0.0) < -apart[name].margin
        ):
            measured = Message(
                "release.guard_loss_measured",
                "The candidate may have lost too much on a guard: {change}. The measured loss is more than {margin:.3f}.",
                guard=name, change=change, margin=apart[name].margin,
            )  # fmt: skip
            found.missing.append(Reason(measured, _surer(name, guard, alpha, floor[name])))
        elif name not in apart and not shown_above[name]:
            unsure = Message(
                "release.guard_not_shown",
                "The candidate may have lost too much on a guard: {change}. {allowed} The confidence bound, corrected for "
                "{guards:|guard|guards}, does not exclude a larger loss.",
                guard=name, change=change, allowed=make_allowed_loss_message(-floor[name], lost[name]), guards=len(stand),
            )  # fmt: skip
            found.missing.append(Reason(unsure, _surer(name, guard, alpha, floor[name])))
        else:
            found.facts.append(_guard_shown(change))


def _guard_shown(change: Message) -> Message:
    return Message("release.guard_shown", "{change}.", change=change)


def _guard_not_compared(name: str, why: Reason) -> Reason:
    if why.remedy is None:
        return make_reason(
            "release.guard_not_compared",
            "{guard} could not be compared with the champion's result: {why}.",
            guard=name,
            why=why.message,
        )
    few = Message(
        "release.guard_few_groups", "{guard} has too few documents to compare: {why}.", guard=name, why=why.message
    )
    return Reason(few, None if name == CLOZE else make_remedy_to_add_groups(name, why.remedy))


def _surer(name: str, guard: Gain, alpha: float, floor: float) -> Message:
    """Return the remedy for a guard that may have been violated."""
    if name == CLOZE:
        return Message(
            "release.remedy_cloze",
            "continue training: 'factory run'. The candidate must answer enough cloze items right to exclude a loss.",
        )
    needed, groups = count_groups_to_show_no_loss(guard, alpha, floor), read_finite_number(guard.effective) or 0.0
    fell = Message(
        "release.remedy_domain",
        "train on more documents of {domain}, because the candidate got worse on {domain}: raise the weight of {domain} in mixture.weights of "
        "the recipe.",
        domain=name,
    )
    if needed is None or needed <= groups:
        return fell
    about = Message(
        "release.about_groups",
        "about {needed} equally large document groups (now {groups:.0f})",
        needed=needed,
        groups=groups,
    )
    more = make_remedy_to_add_groups(name, about)
    if (read_finite_number(guard.gain) or 0.0) >= 0:
        return more
    return Message("release.remedy_domain_or_groups", "{train} Or {hold_out}", train=fell, hold_out=more)
