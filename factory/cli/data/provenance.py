"""``factory provenance``: from a document to every release, and back."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Annotated, Any

import typer

from factory.cli.core.options import Say, command
from factory.core.errors import InputError
from factory.ledger.plant import Plant

commands = typer.Typer()
STEPS_SHOWN = 8


@command(commands)
def provenance(
    plant: Plant,
    say: Say,
    document: Annotated[str | None, typer.Option(help="What became of the document with this id or key?")] = None,
    release: Annotated[int | None, typer.Option(help="What was this release made of?")] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="With --release: each of its documents, a line of JSON each.")
    ] = False,
) -> None:
    """Follow a document to the steps and releases that were trained on it, or a release back to its runs, shards, documents and licences."""
    from factory.show.pages.provenance import documents_of_release, of_document, of_release

    if (document is None) == (release is None) or (documents and release is None):
        raise InputError("name one: --document ID or --release N (with --documents: its documents)")
    found: Any
    if document is not None:
        found = of_document(plant.ledger, document)
        lines = _document_lines(found)
    elif documents:
        for row in documents_of_release(plant.ledger, int(release or 0)):
            print(json.dumps(row, ensure_ascii=False))
        return
    else:
        found = of_release(plant.ledger, int(release or 0))
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
            lines.append("  licence   the strictest of these counts ('factory data claims')")
        if taken := row["removal"]:
            why = f": {taken['why']}" if taken["why"] else ""
            text = (
                "; its text is erased"
                if taken["state"] == "erased"
                else "; its text is still to be erased"
                if taken["erase"]
                else ""
            )
            lines.append(f"  removed   by {taken['by']} (removal {taken['number']}){why}{text}")
        if row.get("matched_document"):
            lines.append(f"  matched   {row['matched_document']['id']} ({row['matched']})")
        if row["token_shard"]:
            lines.append(
                f"  tokens    {row['tokens']} ({row['supervised_tokens']} with loss) in token shard {row['token_shard']}"
            )
        for segment, seen in groupby(row["seen"], key=lambda one: one["segment"]):
            lines.append(f"  segment {segment} was trained on it at {_steps(list(seen))}")
        if row["steps_unknown"]:
            lines.append(f"  steps     not known: {row['steps_unknown']}")
        if row["token_shard"] and not row["seen"] and not row["steps_unknown"]:
            lines.append(f"  segments  none was trained on it yet (data plans of {_numbers(row['segments'])} hold it)")
        if row["token_shard"]:
            how = "may have seen it" if row["steps_unknown"] else "saw it"
            seen_by = [
                f"{one['release']} ({one['times']} ×)" if one["times"] else str(one["release"])
                for one in row["releases"]
            ]
            lines.append(f"  releases  {', '.join(seen_by) + ' ' + how if seen_by else 'none saw it'}")
    return lines


def _steps(seen: list[dict[str, Any]]) -> str:
    steps = sorted({one["step"] for one in seen})
    epochs = sorted({one["epoch"] + 1 for one in seen})
    shown = ", ".join(map(str, steps[:STEPS_SHOWN])) + (f" … {steps[-1]}" if len(steps) > STEPS_SHOWN else "")
    return f"step{'s' if len(steps) > 1 else ''} {shown} (epoch {_numbers(epochs)} of its domain)"


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
            f"  segment {row['id']} {row['kind']} steps {row['first_step']}–{row['last_step']}, recipe {row['recipe']}, "
            f"code {row['code_commit'][:12]}, data plan {row['data_plan'][:12]}{run}"
        )
        if "averaged" in row:
            from factory.ledger.status import describe_average

            lines.append(f"    {describe_average(row['averaged'])}")
    for row in found["shards"]:
        gone = f", {row['removed']:,} of them removed since" if row["removed"] else ""
        lines.append(
            f"  shard {row['name']} (generation {row['generation']}): token shard {row['id']}, {row['documents']:,} documents{gone}, "
            f"{row['tokens']:,} tokens"
        )
        for licence in row["licences"]:
            lines.append(
                f"    licence {licence['license'] or 'none named'}: {licence['documents']:,} documents, "
                f"{licence['supervised_tokens']:,} supervised tokens"
            )
    total = max(1, sum(found["licences"].values()))
    for name, tokens in sorted(found["licences"].items(), key=lambda one: -one[1]):
        lines.append(f"  licence {name or 'none named'}: {tokens:,} supervised tokens, {tokens / total:.1%}")
    conflicts = found["licence_conflicts"]
    if conflicts["documents"]:
        counts = f"{conflicts['documents']:,} documents with {conflicts['supervised_tokens']:,} supervised tokens"
        what = f"{counts} came under other licences too"
        lines.append(f"  LICENCES IN CONFLICT: {what}; the strictest counts ('factory data claims')")
    return [*lines, *_synthetic_lines(found, total)]


def _synthetic_lines(found: dict[str, Any], total: int) -> list[str]:
    """What models wrote of its training data, and what it wrote itself. ``total``: its supervised tokens."""
    lines = []
    for one in found["synthetic"]:
        of = "" if one["release"] is None else f"; release {one['release']} of this factory"
        share = f"{one['supervised_tokens'] / total:.1%}"
        counts = f"{one['supervised_tokens']:,} supervised tokens, {share}, in {one['documents']:,} documents"
        lines.append(f"  synthetic, by {one['maker']}: {counts}{of}")
    if own := sum(one["supervised_tokens"] for one in found["synthetic"] if one["release"] is not None):
        lines.append(f"  TRAINED ON OUR OWN RELEASES' WORDS: {own / total:.1%} of its supervised tokens")
    if wrote := found["wrote"]["documents"]:
        read_by = f"releases {_numbers(found['wrote']['releases'])}" if found["wrote"]["releases"] else "no release yet"
        lines.append(f"  wrote {wrote:,} training documents, in the data of {read_by}")
    return lines
