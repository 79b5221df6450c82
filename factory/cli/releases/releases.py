"""``factory releases``: what a release manager looks at and decides. ``factory.cli`` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from factory.cli.core.options import Say, command, person
from factory.ledger.plant import Plant
from factory.release.gguf.kind import Kind

commands = typer.Typer(
    no_args_is_help=True,
    help="Releases and the candidates that wait: look, compare, approve, reject, roll back, write as GGUF.",
)
Name = Annotated[str, typer.Argument(help="'2' is release 2, 'c3' candidate 3.")]
Candidate = Annotated[int, typer.Argument(min=1, help="The candidate's number, as 'factory releases list' has it.")]
SHOWN_COMMITS = 20


@command(commands, "list")
def list_releases(plant: Plant, say: Say) -> None:
    """Every release, and every candidate that is none: what became of it, the verdict, the gain over the champion of then."""
    from factory.core.moments import local
    from factory.show.pages.release_facts import listed

    found = listed(plant.ledger)
    say(found)
    for row in found:
        name = f"release {row['release']}" if row["release"] else "–"
        judged = (
            f"{row['verdict'] or '–'} {'over ' + row['against'].replace(':', ' ') if row['against'] else ''}".strip()
        )
        mark = "champion" if row["champion"] else ""
        mark += f"  though held, by {row['override']['by']}" if row["override"] else ""
        words = [f"{name:<11} candidate {row['candidate']:<3} {row['state']:<18} {local(row['at'])}", f"{judged:<24}"]
        say.line("  ".join(["", *words, f"{_gain(row['gain']):<42}", mark]).rstrip())
    if not found:
        say.line("  there is no candidate yet")
    for row in found:
        if row["state"] == "waits for approval":
            number = row["candidate"]
            say.line(
                f"  candidate {number} waits: factory releases show c{number}, approve {number}, reject {number} --why …"
            )


@command(commands, "show")
def show_release(plant: Plant, say: Say, name: Name) -> None:
    """One of them: what is better, what is worse, how sure; what it was trained on; who approved; its report; how to serve it."""
    from factory.show.pages.release_facts import shown

    found = shown(plant, name)
    say(found, _lines(found))


def _lines(found: dict[str, Any]) -> list[str]:
    title = (
        f"release {found['release']}: candidate {found['candidate']}"
        if found["release"]
        else f"candidate {found['candidate']}"
    )
    lines = [f"{title}, {found['state']}" + (", champion" if found["champion"] else "")]
    lines += [
        f"  verdict    {found['verdict'] or 'none yet'}"
        + (f" over {found['against'].replace(':', ' ')}" if found["against"] else "")
    ]
    lines += [f"             {reason}" for reason in found["reasons"]]
    measured = {name: gain for name, gain in found["measured"].items() if gain}
    for word in ("better", "worse", "no difference shown"):
        names = [f"{name} {_gain(gain)}" for name, gain in measured.items() if gain["shows"] == word]
        lines += [f"  {word}: {one}" for one in names]
    for row in found["segments"]:
        steps = f"steps {row['first_step']}–{row['last_step']}"
        lines.append(
            f"  segment    {row['id']} {row['kind']}, {steps}, recipe {row['recipe']}, code {row['code_commit'][:12]}"
        )
    lines += [
        f"  shard      {row['name']}: {row['documents']:,} documents, {row['tokens']:,} tokens"
        for row in found["shards"]
    ]
    total = max(1, sum(found["licences"].values()))
    for name, tokens in sorted(found["licences"].items(), key=lambda one: -one[1]):
        lines.append(f"  licence    {name or 'none named'}: {tokens:,} supervised tokens, {tokens / total:.1%}")
    for one in found["synthetic"]:
        share = one["supervised_tokens"] / total
        lines.append(f"  synthetic  by {one['maker']}: {one['supervised_tokens']:,} supervised tokens, {share:.1%}")
    decision = found["decision"]
    if found["override"]:
        lines.append(f"  overridden by {found['override']['by']}, though it was held: {found['override']['why']}")
    elif decision:
        lines.append(
            f"  decided    {decision['word']} by {decision['by']}" + (f": {decision['why']}" if decision["why"] else "")
        )
    elif found["approved_by"]:
        lines.append(f"  decided    by {found['approved_by']}")
    lines.append(f"  report     {found['report'] or 'none yet'}")
    lines.append(f"  model      {found['export']} (sha256 {found['export_sha256'][:16]}…)")
    if found["serve"]:
        lines.append(f"  serve      {found['serve']}")
    elif found["state"] == "waits for approval":
        number = found["candidate"]
        lines.append(f"  waits      factory releases approve {number}, or factory releases reject {number} --why …")
    return lines


@command(commands, "diff")
def diff_releases(plant: Plant, say: Say, one: Name, other: Name) -> None:
    """What the second is against the first: numbers by domain on the same items, with intervals; recipe keys, data, commits that differ."""
    from factory.show.pages.release_facts import difference

    found = difference(plant, one, other)
    say(found)
    measured, data, code = found["measured"], found["data"], found["code"]
    for name, gain in measured["gains"].items():
        levels = measured["bits_per_byte"].get(name)
        words = f": {_number(levels[0])} → {_number(levels[1])} bits per byte" if levels else ""
        say.line(f"  {name}{words}  {_gain(gain)}" + (f"  {gain['shows']}" if gain else ""))
    if not measured["same_items"]:
        for name, (before, after) in measured["bits_per_byte"].items():
            say.line(f"  {name}: {_number(before)} → {_number(after)} bits per byte")
        say.line("  not measured on the same held-out items: there is no interval, and numbers may not be comparable")
    say.line(f"  steps      {found['steps'][0]} → {found['steps'][1]}")
    for key, (before, after) in found["recipe"].items():
        say.line(f"  recipe     {key}: {before} → {after}")
    say.line(f"  tokens     {data['tokens'][0]:,} → {data['tokens'][1]:,}")
    for word, names in (("added", data["added"]), ("left out", data["left_out"])):
        say.line(f"  data {word}: {', '.join(names) or 'nothing'}")
    same = code["commits"][0] == code["commits"][1]
    say.line(f"  code       {code['commits'][0][:12]}" + (", the same" if same else f" → {code['commits'][1][:12]}"))
    for line in code["between"][:SHOWN_COMMITS]:
        say.line(f"             {line}")
    if len(code["between"]) > SHOWN_COMMITS:
        say.line(f"             and {len(code['between']) - SHOWN_COMMITS} more")


@command(commands, "approve")
def approve_candidate(plant: Plant, say: Say, candidate: Candidate) -> None:
    """Release a candidate that the gate promoted. Recorded with your name; works while the daemon runs."""
    from factory.release.checks import newest_verdict
    from factory.release.releases import release
    from factory.show.catching_up import catch_up

    verdict = newest_verdict(plant.ledger, candidate)
    number = release(plant, verdict.id, approved_by=person())
    catch_up(plant)
    _say_released(plant, say, number, "approved_by", "approved by {}")


@command(commands, "reject")
def reject_candidate(
    plant: Plant,
    say: Say,
    candidate: Candidate,
    why: Annotated[str, typer.Option(help="The reason, kept on record and shown in MLflow.")] = "",
) -> None:
    """Do not release what the gate promoted. Recorded with your name; no approval of the same verdict counts any more."""
    from factory.release.approvals import reject
    from factory.release.checks import newest_verdict
    from factory.show.catching_up import catch_up

    verdict = newest_verdict(plant.ledger, candidate)
    reject(plant, verdict.id, person(), why)
    catch_up(plant)
    say(
        {"candidate": candidate, "verdict": verdict.id, "rejected_by": person(), "why": why},
        f"  candidate {candidate} is rejected (verdict {verdict.id})",
    )


@command(commands, "override")
def override_hold(
    plant: Plant,
    say: Say,
    candidate: Candidate,
    reason: Annotated[
        str, typer.Option(help="Why, kept on record with your name and handed on with the release.")
    ] = "",
) -> None:
    """Release a candidate that the gate holds because too little was shown. Never one that failed a check, or
    whose licences do not allow it."""
    from factory.release.releases import override
    from factory.show.catching_up import catch_up

    number = override(plant, candidate, person(), reason)
    catch_up(plant)
    _say_released(plant, say, number, "overridden_by", "released by {}, though it was held")


def _say_released(plant: Plant, say: Say, number: int, key: str, words: str) -> None:
    """``words``: by whom; of one that was released before, who did it then."""
    from factory.ledger.rows import ReleaseRow, champion

    best, row = champion(plant.ledger), ReleaseRow.get(plant.ledger, number)
    is_champion = best is not None and best.number == number
    found = {"release": number, "candidate": row.candidate, "champion": is_champion, key: row.approved_by}
    now = "is champion" if is_champion else "is published, but another one is champion"
    say(found, f"  release {number} {now}; {words.format(row.approved_by)}")


@command(commands, "rollback")
def roll_back(
    plant: Plant,
    say: Say,
    number: Annotated[
        int | None, typer.Argument(min=1, help="The release's number (default: the one that the champion replaced).")
    ] = None,
) -> None:
    """Make an older release champion again: what is served follows at once."""
    from factory.release.releases import release_before, rollback
    from factory.show.catching_up import catch_up

    number = number or release_before(plant.ledger)
    rollback(plant, number)
    catch_up(plant)
    say({"champion": number})


@command(commands, "gguf")
def write_gguf(
    plant: Plant,
    say: Say,
    number: Annotated[int, typer.Argument(min=1, help="The release's number.")],
    into: Annotated[Path, typer.Option(help="The file to write, such as release-2.gguf. One that is there is kept.")],
    kind: Annotated[
        Kind | None,
        typer.Option(
            "--type", help="How matrices are stored (default: as the export has them, so that none is rounded)."
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--licence", "--license", help="Of the weights, as an SPDX expression (default: the file names none)."
        ),
    ] = None,
) -> None:
    """Write a release as one GGUF file, for llama.cpp, Ollama and LM Studio. Its export is only read.

    Needs the package gguf: pip install 'llm-factory[gguf]'.
    """
    from factory.release.gguf.writing import write_release

    made = write_release(plant.ledger, number, into, plant.progress, kind, licence)
    found = {"release": number, "file": made.file, "type": made.kind, "architecture": made.architecture}
    say(found | {"tensors": made.tensors, "bytes": made.bytes})
    say.line(
        f"  release {number} is written: {made.file} ({made.architecture}, {made.tensors} tensors, {made.kind}, {made.bytes:,} bytes)"
    )
    say.line(f"  try it with llama-cli -m {made.file}, or with Ollama: a Modelfile with 'FROM {made.file}'")


def _gain(gain: dict[str, Any] | None) -> str:
    """'gain +0.125 (95 %: +0.108 … +0.143)'; below zero it is worse."""
    if gain is None:
        return "gain not measured"
    return f"gain {gain['gain']:+.3f} (95 %: {gain['low']:+.3f} … {gain['high']:+.3f})".replace("-", "−")


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "–"
