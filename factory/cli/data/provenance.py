"""The command ``factory provenance``: shows the releases that were trained on a document, or the documents of a release."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Annotated, Any

import typer

from factory.cli.core.options import AnswerPrinter, register_command
from factory.core.errors import InputError
from factory.ledger.plant import Plant
from kernels.contract.message import Message

commands = typer.Typer()
STEPS_SHOWN = 8


@register_command(commands)
def provenance(
    plant: Plant,
    say: AnswerPrinter,
    document: Annotated[
        str | None, typer.Option(help="Show what happened to the document with this id or key.")
    ] = None,
    release: Annotated[
        int | None, typer.Option(help="Show the runs, shards, documents and licences that this release was made from.")
    ] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="With --release: print each of its documents as one line of JSON.")
    ] = False,
) -> None:
    """Trace a document to the steps and releases that were trained on it, or a release to its runs, shards, documents and licences."""
    from factory.show.pages.provenance import list_release_documents, read_document_provenance, read_release_provenance

    if (document is None) == (release is None) or (documents and release is None):
        raise InputError(
            "provenance.no_subject",
            "Give exactly one of --document ID and --release N. --documents needs --release.",
        )
    found: Any
    if document is not None:
        found = read_document_provenance(plant.ledger, document)
        lines = _document_lines(found)
    elif documents:
        for row in list_release_documents(plant.ledger, int(release or 0)):
            print(json.dumps(row, ensure_ascii=False))
        return
    else:
        found = read_release_provenance(plant.ledger, int(release or 0))
        lines = _release_lines(found)
    say(found, lines)


def _document_lines(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in found:
        lines.append(
            f"{row['id']} ({row['domain']}, {row['license'] or 'no licence given'}) row {row['row']} of {row['shard_name']}, key {row['key']}"
        )
        if row["synthetic_by"]:
            lines.append(f"  synthetic, made by {row['synthetic_by']}")
        rule = f" by rule {row['rule']}" if row["rule"] and not row["removal"] else ""
        fate = row["fate"] + rule + (f": {row['detail']}" if row["detail"] else "")
        lines.append(f"  fate      {fate}")
        for claim in row["licence_claims"]:
            aside = ", set aside" if claim["aside"] else ""
            lines.append(f"  claimed   {claim['license'] or 'no licence'} in {claim['shard']} ({claim['key']}{aside})")
        if row["licence_claims"]:
            lines.append(
                Message(
                    "provenance.claims",
                    "  licence   the strictest of these claims counts. To see all claims: 'factory data claims'",
                )
            )
        if taken := row["removal"]:
            why = f": {taken['why']}" if taken["why"] else ""
            text = "; text erased" if taken["state"] == "erased" else "; text not erased yet" if taken["erase"] else ""
            lines.append(f"  removed   by {taken['by']} (removal {taken['number']}){why}{text}")
        if row.get("matched_document"):
            lines.append(f"  matched   {row['matched_document']['id']} ({row['matched']})")
        if row["token_shard"]:
            lines.append(
                Message(
                    "provenance.tokens",
                    "  tokens    {tokens}, in token shard {token_shard}. The loss counts {supervised} of them",
                    tokens=row["tokens"],
                    supervised=row["supervised_tokens"],
                    token_shard=row["token_shard"],
                )
            )
        for segment, seen in groupby(row["seen"], key=lambda one: one["segment"]):
            lines.append(_seen_in(segment, list(seen)))
        if row["steps_unknown"]:
            lines.append(f"  steps     unknown: {row['steps_unknown']}")
        if row["token_shard"] and not row["seen"] and not row["steps_unknown"]:
            lines.append(
                Message(
                    "provenance.not_trained_on",
                    "  steps     none yet. The document is in the data plans of these segments: {segments}",
                    segments=_numbers(row["segments"]),
                )
            )
        if row["token_shard"]:
            how = "perhaps trained on it" if row["steps_unknown"] else "trained on it"
            seen_by = [
                f"{one['release']} ({one['times']} ×)" if one["times"] else str(one["release"])
                for one in row["releases"]
            ]
            lines.append(f"  releases  {', '.join(seen_by) + ' ' + how if seen_by else 'none trained on it'}")
    return lines


def _seen_in(segment: int, seen: list[dict[str, Any]]) -> Message:
    steps = sorted({one["step"] for one in seen})
    epochs = sorted({one["epoch"] + 1 for one in seen})
    shown = ", ".join(map(str, steps[:STEPS_SHOWN])) + (f" … {steps[-1]}" if len(steps) > STEPS_SHOWN else "")
    return Message(
        "provenance.trained_on",
        "  segment {segment} was trained on this document in {count:,|step|steps}: {steps} (in epoch {epochs} of the domain)",
        segment=segment,
        count=len(steps),
        steps=shown,
        epochs=_numbers(epochs),
    )


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _release_lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"release {found['release']['number']}: candidate {found['release']['candidate']}, {found['verdict']['outcome']}"
    ]
    lines += [f"    {reason}" for reason in found["verdict"]["reasons"]]
    lines += [f"  MARKED: {words}" for words in found["marks"]]
    for row in found["segments"]:
        run = f", MLflow run {row['run']}" if row["run"] else ""
        lines.append(
            Message(
                "provenance.segment",
                "  segment {segment} {kind} steps {first}–{last}, recipe {recipe}, code {commit}, data plan {data_plan}{run}",
                segment=row["id"],
                kind=row["kind"],
                first=row["first_step"],
                last=row["last_step"],
                recipe=row["recipe"],
                commit=row["code_commit"][:12],
                data_plan=row["data_plan"][:12],
                run=run,
            )
        )
        if "averaged" in row:
            from factory.ledger.status import describe_average

            lines.append(f"    {describe_average(row['averaged'])}")
    for row in found["shards"]:
        removed = f" ({row['removed']:,} removed since)" if row["removed"] else ""
        lines.append(
            Message(
                "provenance.shard",
                "  shard {shard} (generation {generation}): token shard {token_shard}, {documents:,|document|documents}{removed}, {tokens:,} tokens",
                shard=row["name"],
                generation=row["generation"],
                token_shard=row["id"],
                documents=row["documents"],
                removed=removed,
                tokens=row["tokens"],
            )
        )
        for licence in row["licences"]:
            lines.append(
                Message(
                    "provenance.shard_licence",
                    "    licence {licence}: {documents:,|document|documents}, {tokens:,} supervised tokens",
                    licence=licence["license"] or "none named",
                    documents=licence["documents"],
                    tokens=licence["supervised_tokens"],
                )
            )
    total = max(1, sum(found["licences"].values()))
    for name, tokens in sorted(found["licences"].items(), key=lambda one: -one[1]):
        lines.append(f"  licence {name or 'none named'}: {tokens:,} supervised tokens, {tokens / total:.1%}")
    conflicts = found["licence_conflicts"]
    if conflicts["documents"]:
        lines.append(
            Message(
                "provenance.conflicts",
                "  LICENCE CONFLICTS: {documents:,|document|documents} with {tokens:,} supervised tokens also came with other licences. "
                "The strictest licence counts. To see the claims: 'factory data claims'",
                documents=conflicts["documents"],
                tokens=conflicts["supervised_tokens"],
            )
        )
    return [*lines, *_synthetic_lines(found, total)]


def _synthetic_lines(found: dict[str, Any], total: int) -> list[str]:
    """Return lines about training data that models wrote, and about data that this release wrote. ``total``: supervised tokens of the release."""
    lines: list[str] = []
    for one in found["synthetic"]:
        lines.append(
            Message(
                "provenance.synthetic",
                "  synthetic, by {maker}{release}: {tokens:,} supervised tokens, {share:.1%}, in {documents:,|document|documents}",
                maker=one["maker"],
                release="" if one["release"] is None else f" (our release {one['release']})",
                tokens=one["supervised_tokens"],
                share=one["supervised_tokens"] / total,
                documents=one["documents"],
            )
        )
    if own := sum(one["supervised_tokens"] for one in found["synthetic"] if one["release"] is not None):
        lines.append(
            Message(
                "provenance.own_writing",
                "  OUR OWN RELEASES WROTE {share:.1%} of the supervised tokens of this release.",
                share=own / total,
            )
        )
    if wrote := found["wrote"]["documents"]:
        read_by = f"releases {_numbers(found['wrote']['releases'])}" if found["wrote"]["releases"] else "no release yet"
        lines.append(
            Message(
                "provenance.wrote",
                "  this release wrote {documents:,|training document|training documents}, which are in the data of "
                "{releases}",
                documents=wrote,
                releases=read_by,
            )
        )
    return lines
