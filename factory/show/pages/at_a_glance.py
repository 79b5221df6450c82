"""What a release manager asks first of a candidate, on one screen: what is better, what is worse, how sure, what it was trained on, what to do."""

from __future__ import annotations

from typing import Any

from agents.core.pages import number
from factory.gates.release.licences import NONE
from factory.gates.release.reasons import is_to_do
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow, VerdictRow
from factory.show.pages.provenance import made_of
from factory.show.pages.release_facts import BETTER, TARGET, WORSE, interval
from factory.show.pages.release_pictures import AgainstChampion, mapping

MOST = 6  # shares that are named


def at_a_glance(
    ledger: Ledger, found: AgainstChampion, verdict: VerdictRow | None, release: ReleaseRow | None
) -> dict[str, str]:
    """Question → answer."""
    return _compared(found) | {
        "Trained on": _trained_on(ledger, found.candidate.segment),
        "What to do": _to_do(found.candidate.id, verdict, release),
    }


def _compared(found: AgainstChampion) -> dict[str, str]:
    gains = {name: interval(stored) for name, stored in sorted(mapping(found.evidence.get("guards")).items())}
    named = lambda wanted: "; ".join(
        _change(found, name) for name, gain in gains.items() if gain and wanted(gain["shows"])
    )
    if not any(gains.values()):
        return {"Compared": "with nothing: there was no champion, or it was not measured on the same documents"}
    unclear = named(lambda shows: shows not in (BETTER, WORSE))
    return {
        "Better": named(lambda shows: shows == BETTER) or "nothing was shown to be",
        "Worse": named(lambda shows: shows == WORSE) or "nothing was shown to be",
        **({"Not shown": unclear} if unclear else {}),
        "How sure": _how_sure(mapping(found.evidence.get(TARGET))),
    }


def _change(found: AgainstChampion, name: str) -> str:
    if name == "cloze":
        before, after = found.evidence.get("champion_cloze"), found.evidence.get("cloze")
        return f"cloze {_share(before)} → {_share(after)} right"
    before, after = (mapping(found.evidence.get(key)).get(name) for key in ("champion_bits_per_byte", "bits_per_byte"))
    return f"{name} {number(before)} → {number(after)} bits per byte"


def _how_sure(stored: Any) -> str:
    gain = interval(dict(stored))
    if not gain:
        return "the target was not measured"
    words = f"the gain over all is {gain['gain']:+.3f}, 95 % between {gain['low']:+.3f} and {gain['high']:+.3f}"
    return f"{words}, from {number(stored.get('clusters'))} sources that say as much as {number(stored.get('effective'), 0)} of one size"


def _trained_on(ledger: Ledger, segment: int) -> str:
    made = made_of(ledger, segment)
    domains: dict[str, float] = {}
    for shard in made["shards"]:
        for name, counted in mapping(shard["domains"]).items():
            domains[name] = domains.get(name, 0) + mapping(counted).get("supervised_tokens", 0)
    licences = {name or NONE: count for name, count in made["licences"].items()}
    tokens, steps = sum(shard["tokens"] for shard in made["shards"]), made["segments"][-1]["last_step"]
    shards = f"{number(len(made['shards']))} token shard{'s' if len(made['shards']) != 1 else ''} with {number(tokens)} tokens"
    shares = [
        f"by {name}: {found}" for name, found in (("domain", _shares(domains)), ("licence", _shares(licences))) if found
    ]
    whole = max(1, sum(licences.values()))
    synthetic = [f"{one['maker']} {_share(one['supervised_tokens'] / whole)}" for one in made["synthetic"][:MOST]]
    shares += [f"written by models: {', '.join(synthetic)}"] if synthetic else []
    return "; ".join([f"drawn in {number(steps)} steps from {shards}", *shares])


def _shares(tokens: dict[str, float]) -> str:
    total = sum(tokens.values())
    largest = sorted(tokens.items(), key=lambda one: -one[1])
    named = [f"{name} {_share(count / total)}" for name, count in largest[:MOST]] if total else []
    return ", ".join([*named, *([f"{len(largest) - MOST} more"] if named and len(largest) > MOST else [])])


def _share(value: Any) -> str:
    return f"{value * 100:.1f} %" if isinstance(value, int | float) else "–"


def _to_do(candidate: int, verdict: VerdictRow | None, release: ReleaseRow | None) -> str:
    if release:
        n = release.number
        words = f"'factory release --bundle {n}' hands it on; 'factory provenance --release {n}' names its data; "
        return words + f"'factory releases rollback {n}' makes it champion again, where another one is"
    if verdict is None:
        return f"'factory evaluate {candidate}' judges it"
    if verdict.outcome == "promote":
        return (
            f"where it waits for a person: 'factory releases approve {candidate}' or 'reject {candidate} --why …'; in MLflow the tag approval on "
            "its version of factory-lm"
        )
    todo = [reason for reason in verdict.reasons if is_to_do(reason)]
    return "nothing is released. " + (" ".join(todo) or "The reasons are below.")
