"""``factory releases``: what a release manager looks at and decides. ``factory.cli`` registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from factory.cli.core.options import DEFAULT, AsJson, Where, open_workspace, person, print_json
from factory.ledger.plant import Plant
from factory.release.gguf.kind import Kind

commands = typer.Typer(
    no_args_is_help=True,
    help="Releases and the candidates that wait: look, compare, approve, reject, roll back, write as GGUF.",
)
Name = Annotated[str, typer.Argument(help="'2' is release 2, 'c3' candidate 3.")]
Candidate = Annotated[int, typer.Argument(min=1, help="The candidate's number, as 'factory releases list' has it.")]
SHOWN_COMMITS = 20


@commands.command("list")
def list_releases(where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """Every release, and every candidate that is none: what became of it, the verdict, the gain over the champion of then."""
    from factory.retrying.asking import local
    from factory.show.pages.release_facts import listed

    _, ledger, terminal = open_workspace(where)
    found = listed(ledger)
    if as_json:
        print_json(found)
        return
    for row in found:
        name = f"release {row['release']}" if row["release"] else "–"
        judged = (
            f"{row['verdict'] or '–'} {'over ' + row['against'].replace(':', ' ') if row['against'] else ''}".strip()
        )
        mark = "champion" if row["champion"] else ""
        mark += f"  though held, by {row['override']['by']}" if row["override"] else ""
        words = [f"{name:<11} candidate {row['candidate']:<3} {row['state']:<18} {local(row['at'])}", f"{judged:<24}"]
        terminal.line("  ".join(["", *words, f"{_gain(row['gain']):<42}", mark]).rstrip())
    if not found:
        terminal.line("  there is no candidate yet")
    for row in found:
        if row["state"] == "waits for approval":
            number = row["candidate"]
            terminal.line(
                f"  candidate {number} waits: factory releases show c{number}, approve {number}, reject {number} --why …"
            )


@commands.command("show")
def show_release(name: Name, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """One of them: what is better, what is worse, how sure; what it was trained on; who approved; its report; how to serve it."""
    from factory.show.pages.release_facts import shown

    workspace, ledger, terminal = open_workspace(where)
    found = shown(Plant(workspace, ledger), name)
    if as_json:
        print_json(found)
        return
    for line in _lines(found):
        terminal.line(line)


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


@commands.command("diff")
def diff_releases(one: Name, other: Name, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """What the second is against the first: numbers by domain on the same items, with intervals; recipe keys, data, commits that differ."""
    from factory.show.pages.release_facts import difference

    workspace, ledger, terminal = open_workspace(where)
    found = difference(Plant(workspace, ledger), one, other)
    if as_json:
        print_json(found)
        return
    measured, data, code = found["measured"], found["data"], found["code"]
    for name, gain in measured["gains"].items():
        levels = measured["bits_per_byte"].get(name)
        words = f": {_number(levels[0])} → {_number(levels[1])} bits per byte" if levels else ""
        terminal.line(f"  {name}{words}  {_gain(gain)}" + (f"  {gain['shows']}" if gain else ""))
    if not measured["same_items"]:
        for name, (before, after) in measured["bits_per_byte"].items():
            terminal.line(f"  {name}: {_number(before)} → {_number(after)} bits per byte")
        terminal.line(
            "  not measured on the same held-out items: there is no interval, and numbers may not be comparable"
        )
    terminal.line(f"  steps      {found['steps'][0]} → {found['steps'][1]}")
    for key, (before, after) in found["recipe"].items():
        terminal.line(f"  recipe     {key}: {before} → {after}")
    terminal.line(f"  tokens     {data['tokens'][0]:,} → {data['tokens'][1]:,}")
    for word, names in (("added", data["added"]), ("left out", data["left_out"])):
        terminal.line(f"  data {word}: {', '.join(names) or 'nothing'}")
    same = code["commits"][0] == code["commits"][1]
    terminal.line(
        f"  code       {code['commits'][0][:12]}" + (", the same" if same else f" → {code['commits'][1][:12]}")
    )
    for line in code["between"][:SHOWN_COMMITS]:
        terminal.line(f"             {line}")
    if len(code["between"]) > SHOWN_COMMITS:
        terminal.line(f"             and {len(code['between']) - SHOWN_COMMITS} more")


@commands.command("approve")
def approve_candidate(candidate: Candidate, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """Release a candidate that the gate promoted. Recorded with your name; works while the daemon runs."""
    from factory.core.progress import SILENT
    from factory.ledger.rows import ReleaseRow, champion
    from factory.release.checks import newest_verdict
    from factory.release.releases import release
    from factory.show.catching_up import catch_up

    workspace, ledger, terminal = open_workspace(where)
    verdict = newest_verdict(ledger, candidate)
    plant = Plant(workspace, ledger, SILENT if as_json else terminal)
    number = release(plant, verdict.id, approved_by=person())
    catch_up(plant)
    best, by = champion(ledger), ReleaseRow.get(ledger, number).approved_by
    is_champion = best is not None and best.number == number
    if as_json:
        print_json({"release": number, "candidate": candidate, "champion": is_champion, "approved_by": by})
    else:
        terminal.line(
            f"  release {number} {'is champion' if is_champion else 'is published, but another one is champion'}; approved by {by}"
        )


@commands.command("reject")
def reject_candidate(
    candidate: Candidate,
    where: Where = DEFAULT,
    why: Annotated[str, typer.Option(help="The reason, kept on record and shown in MLflow.")] = "",
    as_json: AsJson = False,
) -> None:
    """Do not release what the gate promoted. Recorded with your name; no approval of the same verdict counts any more."""
    from factory.core.progress import SILENT
    from factory.release.approvals import reject
    from factory.release.checks import newest_verdict
    from factory.show.catching_up import catch_up

    workspace, ledger, terminal = open_workspace(where)
    verdict = newest_verdict(ledger, candidate)
    plant = Plant(workspace, ledger, SILENT if as_json else terminal)
    reject(plant, verdict.id, person(), why)
    catch_up(plant)
    if as_json:
        print_json({"candidate": candidate, "verdict": verdict.id, "rejected_by": person(), "why": why})
    else:
        terminal.line(f"  candidate {candidate} is rejected (verdict {verdict.id})")


@commands.command("override")
def override_hold(
    candidate: Candidate,
    where: Where = DEFAULT,
    reason: Annotated[
        str, typer.Option(help="Why, kept on record with your name and handed on with the release.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Release a candidate that the gate holds because too little was shown. Never one that failed a check, or
    whose licences do not allow it."""
    from factory.core.progress import SILENT
    from factory.ledger.rows import ReleaseRow, champion
    from factory.release.releases import override
    from factory.show.catching_up import catch_up

    workspace, ledger, terminal = open_workspace(where)
    plant = Plant(workspace, ledger, SILENT if as_json else terminal)
    number = override(plant, candidate, person(), reason)
    catch_up(plant)
    best, by = champion(ledger), ReleaseRow.get(ledger, number).approved_by  # of one that was released before: who did
    is_champion = best is not None and best.number == number
    if as_json:
        print_json({"release": number, "candidate": candidate, "champion": is_champion, "overridden_by": by})
    else:
        now = "is champion" if is_champion else "is published, but another one is champion"
        terminal.line(f"  release {number} {now}; released by {by}, though it was held")


@commands.command("rollback")
def roll_back(
    number: Annotated[
        int | None, typer.Argument(min=1, help="The release's number (default: the one that the champion replaced).")
    ] = None,
    where: Where = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Make an older release champion again: what is served follows at once."""
    from factory.core.progress import SILENT
    from factory.release.releases import release_before, rollback
    from factory.show.catching_up import catch_up

    workspace, ledger, terminal = open_workspace(where)
    number = number or release_before(ledger)
    plant = Plant(workspace, ledger, SILENT if as_json else terminal)
    rollback(plant, number)
    catch_up(plant)
    if as_json:
        print_json({"champion": number})


@commands.command("gguf")
def write_gguf(
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
    where: Where = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Write a release as one GGUF file, for llama.cpp, Ollama and LM Studio. Its export is only read.

    Needs the package gguf: pip install 'llm-factory[gguf]'.
    """
    from factory.core.progress import SILENT
    from factory.release.gguf.writing import write_release

    _, ledger, terminal = open_workspace(where)
    made = write_release(ledger, number, into, SILENT if as_json else terminal, kind, licence)
    if as_json:
        found = {"release": number, "file": made.file, "type": made.kind, "architecture": made.architecture}
        print_json(found | {"tensors": made.tensors, "bytes": made.bytes})
        return
    terminal.line(
        f"  release {number} is written: {made.file} ({made.architecture}, {made.tensors} tensors, {made.kind}, {made.bytes:,} bytes)"
    )
    terminal.line(f"  try it with llama-cli -m {made.file}, or with Ollama: a Modelfile with 'FROM {made.file}'")


def _gain(gain: dict[str, Any] | None) -> str:
    """'gain +0.125 (95 %: +0.108 … +0.143)'; below zero it is worse."""
    if gain is None:
        return "gain not measured"
    return f"gain {gain['gain']:+.3f} (95 %: {gain['low']:+.3f} … {gain['high']:+.3f})".replace("-", "−")


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "–"
