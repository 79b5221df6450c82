"""The command ``factory releases``: lists, shows, compares, approves and rejects releases and candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from factory.cli.core.options import AnswerPrinter, get_current_user, register_command
from factory.ledger.plant import Plant
from factory.release.gguf.gguf_type import GgufType
from kernels.contract.message import Message

commands = typer.Typer(
    no_args_is_help=True,
    help="Releases and candidates: list, show, compare, approve, reject, override, roll back, write as GGUF.",
)
ReleaseName = Annotated[str, typer.Argument(help="A release or a candidate: '2' is release 2, 'c3' is candidate 3.")]
Candidate = Annotated[int, typer.Argument(min=1, help="The candidate's number, as 'factory releases list' prints it.")]
SHOWN_COMMITS = 20


@register_command(commands, "list")
def list_releases(plant: Plant, say: AnswerPrinter) -> None:
    """List every release and every other candidate: its state, its verdict, and its gain over the champion at that time."""
    from factory.core.time_formats import format_local_time
    from factory.show.pages.release_facts import list_releases

    found = list_releases(plant.ledger)
    say(found)
    for row in found:
        name = f"release {row['release']}" if row["release"] is not None else "–"
        judged = (
            f"{row['verdict'] or '–'} {'over ' + row['against'].replace(':', ' ') if row['against'] else ''}".strip()
        )
        mark = "champion" if row["champion"] else ""
        mark += f"  though held, by {row['override']['by']}" if row["override"] else ""
        words = [
            f"{name:<11} candidate {row['candidate']:<3} {row['state']:<18} {format_local_time(row['at'])}",
            f"{judged:<24}",
        ]
        say.print_line("  ".join(["", *words, f"{_gain(row['gain']):<42}", mark]).rstrip())
    if not found:
        say.print_line(Message("releases.no_candidate", "  There is no candidate yet."))
    for row in found:
        if row["state"] == "waits for approval":
            number = row["candidate"]
            say.print_line(
                Message(
                    "releases.waits",
                    "  Candidate {candidate} waits for your decision: 'factory releases show c{candidate}', then "
                    "'factory releases approve {candidate}' or 'factory releases reject {candidate} --why …'",
                    candidate=number,
                )
            )


@register_command(commands, "show")
def show_release(plant: Plant, say: AnswerPrinter, name: ReleaseName) -> None:
    """Show a release or a candidate: gains and losses with their intervals, training data, approval, and report.

    For a release, the command to serve it is shown too.
    """
    from factory.show.pages.release_facts import read_release_details

    found = read_release_details(plant, name)
    say(found, _lines(found))


def _lines(found: dict[str, Any]) -> list[str]:
    title = (
        f"release {found['release']}: candidate {found['candidate']}"
        if found["release"] is not None
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
    if found["against"] is None and found["bits_per_byte"]:
        values = [
            f"{domain} {value:.3f}"
            for domain, value in sorted(found["bits_per_byte"].items())
            if isinstance(value, float)
        ]
        lines.append(Message("releases.bits_per_byte", "  measured   bits per byte: {values}", values=values))
    if imported := found["imported"]:
        lines.append(
            Message(
                "releases.imported",
                "  imported   from {name} ({architecture}), licence {licence}",
                name=imported["name"],
                architecture=imported["class"],
                licence=imported["licence"] or "not named",
            )
        )
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
        lines.append(
            Message(
                "releases.synthetic",
                "  synthetic  by {maker}: {tokens:,} supervised tokens, {share:.1%}",
                maker=one["maker"],
                tokens=one["supervised_tokens"],
                share=share,
            )
        )
    decision = found["decision"]
    if found["override"]:
        lines.append(
            Message(
                "releases.overridden",
                "  {person} overrode the gate's verdict 'hold': {reason}",
                person=found["override"]["by"],
                reason=found["override"]["why"],
            )
        )
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
        lines.append(
            Message(
                "releases.to_decide",
                "  to decide  factory releases approve {candidate}, or factory releases reject {candidate} --why …",
                candidate=number,
            )
        )
    return lines


@register_command(commands, "diff")
def diff_releases(plant: Plant, say: AnswerPrinter, one: ReleaseName, other: ReleaseName) -> None:
    """Compare two releases or candidates: gains by domain on the same items with intervals, and differences of recipe, data and code."""
    from factory.show.pages.release_facts import compare_releases

    found = compare_releases(plant, one, other)
    say(found)
    measured, data, code = found["measured"], found["data"], found["code"]
    for name, gain in measured["gains"].items():
        levels = measured["bits_per_byte"].get(name)
        words = f": {_number(levels[0])} → {_number(levels[1])} bits per byte" if levels else ""
        say.print_line(f"  {name}{words}  {_gain(gain)}" + (f"  {gain['shows']}" if gain else ""))
    if not measured["same_items"]:
        for name, (before, after) in measured["bits_per_byte"].items():
            say.print_line(f"  {name}: {_number(before)} → {_number(after)} bits per byte")
        say.print_line(
            Message(
                "releases.other_items",
                "  The two candidates were measured on different held-out items. Therefore their numbers may not be "
                "comparable, and no interval is computed.",
            )
        )
    say.print_line(f"  steps      {found['steps'][0]} → {found['steps'][1]}")
    for key, (before, after) in found["recipe"].items():
        say.print_line(f"  recipe     {key}: {before} → {after}")
    say.print_line(f"  tokens     {data['tokens'][0]:,} → {data['tokens'][1]:,}")
    for word, names in (("added", data["added"]), ("left out", data["left_out"])):
        say.print_line(f"  data {word}: {', '.join(names) or 'nothing'}")
    same = code["commits"][0] == code["commits"][1]
    say.print_line(
        f"  code       {code['commits'][0][:12]}" + (", the same" if same else f" → {code['commits'][1][:12]}")
    )
    for line in code["between"][:SHOWN_COMMITS]:
        say.print_line(f"             {line}")
    if len(code["between"]) > SHOWN_COMMITS:
        say.print_line(f"             and {len(code['between']) - SHOWN_COMMITS} more")


@register_command(commands, "approve")
def approve_candidate(plant: Plant, say: AnswerPrinter, candidate: Candidate) -> None:
    """Release a candidate that the gate promoted. The ledger keeps your name. The command works while the daemon runs."""
    from factory.release.checks import get_newest_verdict
    from factory.release.releases import release_candidate
    from factory.show.unshown_items import show_unshown_items

    verdict = get_newest_verdict(plant.ledger, candidate)
    number = release_candidate(plant, verdict.id, approved_by=get_current_user())
    show_unshown_items(plant)
    _say_released(plant, say, number, "approved_by", "approved by")


@register_command(commands, "reject")
def reject_candidate(
    plant: Plant,
    say: AnswerPrinter,
    candidate: Candidate,
    why: Annotated[str, typer.Option(help="The reason; the ledger keeps it, and MLflow shows it.")] = "",
) -> None:
    """Reject a candidate that the gate promoted. The ledger keeps your name, and later approvals of the same verdict do not count."""
    from factory.release.approvals import record_rejection
    from factory.release.checks import get_newest_verdict
    from factory.show.unshown_items import show_unshown_items

    verdict = get_newest_verdict(plant.ledger, candidate)
    record_rejection(plant, verdict.id, get_current_user(), why)
    show_unshown_items(plant)
    say(
        {"candidate": candidate, "verdict": verdict.id, "rejected_by": get_current_user(), "why": why},
        Message(
            "releases.rejected",
            "  Candidate {candidate} is rejected (verdict {verdict}).",
            candidate=candidate,
            verdict=verdict.id,
        ),
    )


@register_command(commands, "override")
def override_hold(
    plant: Plant,
    say: AnswerPrinter,
    candidate: Candidate,
    reason: Annotated[
        str, typer.Option(help="The reason. The ledger keeps it with your name, and the release carries it.")
    ] = "",
) -> None:
    """Release a candidate that the gate holds only because its gain is not shown clearly enough.

    A candidate that failed a check, or whose licences do not allow a release, cannot be released this way.
    """
    from factory.release.releases import release_held_candidate
    from factory.show.unshown_items import show_unshown_items

    number = release_held_candidate(plant, candidate, get_current_user(), reason)
    show_unshown_items(plant)
    _say_released(plant, say, number, "overridden_by", "overridden by")


def _say_released(plant: Plant, say: AnswerPrinter, number: int, key: str, how: str) -> None:
    """Print a release's state. ``how``: 'approved by' or 'overridden by', which the name of the person follows."""
    from factory.ledger.rows import ReleaseRow, find_champion

    best, row = find_champion(plant.ledger), ReleaseRow.get(plant.ledger, number)
    is_champion = best is not None and best.number == number
    found = {"release": number, "candidate": row.candidate, "champion": is_champion, key: row.approved_by}
    facts = {"release": number, "how": how, "person": row.approved_by}
    if is_champion:
        say(found, Message("releases.champion", "  Release {release} is champion, {how} {person}.", **facts))
        return
    published = Message(
        "cli.release_published",
        "  Release {release} is published, {how} {person}. The champion is still release {champion}.",
        champion=best.number if best else None,
        **facts,
    )
    say(found, published)


@register_command(commands, "rollback")
def roll_back(
    plant: Plant,
    say: AnswerPrinter,
    number: Annotated[
        int | None,
        typer.Argument(min=0, help="The release's number (default: the release that the champion replaced)."),
    ] = None,
) -> None:
    """Make an older release champion again. 'factory serve' switches to it at once."""
    from factory.release.releases import find_release_replaced_by_champion, roll_back_to_release
    from factory.show.unshown_items import show_unshown_items

    number = number or find_release_replaced_by_champion(plant.ledger)
    roll_back_to_release(plant, number)
    show_unshown_items(plant)
    say({"champion": number})


@register_command(commands, "gguf")
def write_gguf(
    plant: Plant,
    say: AnswerPrinter,
    number: Annotated[int, typer.Argument(min=0, help="The release's number.")],
    into: Annotated[
        Path, typer.Option(help="The file to write, such as release-2.gguf. An existing file is not overwritten.")
    ],
    kind: Annotated[
        GgufType | None,
        typer.Option(
            "--type",
            help="Number type of the stored matrices (default: that of the export, so that nothing is rounded).",
        ),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--licence",
            "--license",
            help="Licence of the weights, as an SPDX expression (default: no licence in the file).",
        ),
    ] = None,
) -> None:
    """Write a release as one GGUF file, for llama.cpp, Ollama and LM Studio. The release itself does not change.

    Needs the package gguf: pip install 'llm-factory[gguf]'.
    """
    from factory.release.gguf.writing import write_release_gguf

    made = write_release_gguf(plant.ledger, number, into, plant.progress, kind, licence)
    found = {"release": number, "file": made.file, "type": made.kind, "architecture": made.architecture}
    say(found | {"tensors": made.tensors, "bytes": made.bytes})
    written = Message(
        "releases.gguf_written",
        "  Release {release} is written to {file} ({architecture}, {tensors} tensors, {type}, {bytes:,} bytes).",
        **found,
        tensors=made.tensors,
        bytes=made.bytes,
    )
    say.print_line(written)
    say.print_line(
        Message(
            "releases.try_gguf",
            "  To try the file: 'llama-cli -m {file}'. For Ollama, write a Modelfile with 'FROM {file}'.",
            file=made.file,
        )
    )


def _gain(gain: dict[str, Any] | None) -> str:
    """Return a text such as 'gain +0.125 (95 %: +0.108 … +0.143)'. A gain below zero is a loss."""
    if gain is None:
        return "gain not measured"
    return f"gain {gain['gain']:+.3f} (95 %: {gain['low']:+.3f} … {gain['high']:+.3f})".replace("-", "−")


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "–"
