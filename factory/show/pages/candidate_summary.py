"""The summary of a candidate for a release manager: what is better, what is worse, how sure this is, the training data, and what to do."""

from __future__ import annotations

from typing import Any

from agents.core.pages import format_number
from factory.gates.release.reasons import is_to_do_line
from factory.gates.release.trained_licences import NONE
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow, VerdictRow
from factory.show.pages.provenance import read_training_data_of_segment
from factory.show.pages.release_facts import BETTER, TARGET, WORSE, compute_gain_with_interval
from factory.show.pages.release_pictures import ChampionComparison, dict_or_empty
from kernels.contract.message import Message

MOST = 6  # at most this many shares are named


def summarise_candidate(
    ledger: Ledger, found: ChampionComparison, verdict: VerdictRow | None, release: ReleaseRow | None
) -> dict[str, str]:
    """The summary, as ``{question: answer}``."""
    return _compared(found) | {
        "Trained on": _trained_on(ledger, found.candidate.segment),
        "What to do": _to_do(found.candidate.id, verdict, release),
    }


def _compared(found: ChampionComparison) -> dict[str, str]:
    gains = {
        name: compute_gain_with_interval(stored)
        for name, stored in sorted(dict_or_empty(found.evidence.get("guards")).items())
    }
    named = lambda wanted: "; ".join(
        _change(found, name) for name, gain in gains.items() if gain and wanted(gain["shows"])
    )
    if not any(gains.values()):
        return {
            "Compared": Message(
                "candidate_summary.not_compared",
                "no comparison, because there was no champion, or the champion was not measured on the same documents",
            )
        }
    unclear = named(lambda shows: shows not in (BETTER, WORSE))
    return {
        "Better": named(lambda shows: shows == BETTER)
        or Message("candidate_summary.none_better", "no measured value is better than the champion's beyond doubt"),
        "Worse": named(lambda shows: shows == WORSE)
        or Message("candidate_summary.none_worse", "no measured value is worse than the champion's beyond doubt"),
        **({"Not shown": unclear} if unclear else {}),
        "How sure": _how_sure(dict_or_empty(found.evidence.get(TARGET))),
    }


def _change(found: ChampionComparison, name: str) -> str:
    if name == "cloze":
        before, after = found.evidence.get("champion_cloze"), found.evidence.get("cloze")
        return f"cloze {_share(before)} → {_share(after)} right"
    before, after = (
        dict_or_empty(found.evidence.get(key)).get(name) for key in ("champion_bits_per_byte", "bits_per_byte")
    )
    return f"{name} {format_number(before)} → {format_number(after)} bits per byte"


def _how_sure(stored: Any) -> str:
    gain = compute_gain_with_interval(dict(stored))
    if not gain:
        return Message("candidate_summary.not_measured", "The total gain was not measured.")
    return Message(
        "candidate_summary.gain",
        "The total gain is {gain:+.3f} (95 % interval: {low:+.3f} to {high:+.3f}). It was measured on {sources} sources of "
        "unequal size, which count like {effective} sources of equal size.",
        gain=gain["gain"],
        low=gain["low"],
        high=gain["high"],
        sources=format_number(stored.get("clusters")),
        effective=format_number(stored.get("effective"), 0),
    )


def _trained_on(ledger: Ledger, segment: int) -> str:
    made = read_training_data_of_segment(ledger, segment)
    domains: dict[str, float] = {}
    for shard in made["shards"]:
        for name, counted in dict_or_empty(shard["domains"]).items():
            domains[name] = domains.get(name, 0) + dict_or_empty(counted).get("supervised_tokens", 0)
    licences = {name or NONE: count for name, count in made["licences"].items()}
    tokens, steps = sum(shard["tokens"] for shard in made["shards"]), made["segments"][-1]["last_step"]
    drawn = Message(
        "candidate_summary.trained_on",
        "{steps} training steps on {shards:,|token shard|token shards} with {tokens} tokens",
        steps=format_number(steps),
        shards=len(made["shards"]),
        tokens=format_number(tokens),
    )
    shares = [
        f"by {name}: {found}" for name, found in (("domain", _shares(domains)), ("licence", _shares(licences))) if found
    ]
    whole = max(1, sum(licences.values()))
    synthetic = [f"{one['maker']} {_share(one['supervised_tokens'] / whole)}" for one in made["synthetic"][:MOST]]
    shares += [f"written by models: {', '.join(synthetic)}"] if synthetic else []
    return "; ".join([drawn, *shares])


def _shares(tokens: dict[str, float]) -> str:
    total = sum(tokens.values())
    largest = sorted(tokens.items(), key=lambda one: -one[1])
    named = [f"{name} {_share(count / total)}" for name, count in largest[:MOST]] if total else []
    return ", ".join([*named, *([f"{len(largest) - MOST} more"] if named and len(largest) > MOST else [])])


def _share(value: Any) -> str:
    return f"{value * 100:.1f} %" if isinstance(value, int | float) else "–"


def _to_do(candidate: int, verdict: VerdictRow | None, release: ReleaseRow | None) -> str:
    if release:
        return Message(
            "candidate_summary.released",
            "To make a bundle for other people: 'factory release --bundle {release}'. To see its data: 'factory provenance --release {release}'. "
            "To make the release champion again: 'factory releases rollback {release}'.",
            release=release.number,
        )
    if verdict is None:
        return Message(
            "candidate_summary.judge", "To judge the candidate: 'factory evaluate {candidate}'", candidate=candidate
        )
    if verdict.outcome == "promote":
        return Message(
            "candidate_summary.decide",
            "If the candidate waits for your decision: 'factory releases approve {candidate}' or 'factory releases reject "
            "{candidate} --why …'. Or set the tag approval in MLflow, on the candidate's version of the model factory-lm.",
            candidate=candidate,
        )
    todo = [reason for reason in verdict.reasons if is_to_do_line(reason)]
    return "Nothing is released. " + (" ".join(todo) or "The reasons are below.")
