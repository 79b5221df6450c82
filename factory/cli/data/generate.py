"""``factory generate``: documents that a model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from factory.cli.core.options import Say, command
from factory.ledger.plant import Plant

commands = typer.Typer()


@command(commands)
def generate(
    plant: Plant,
    say: Say,
    release: Annotated[int | None, typer.Option(help="This release writes (default: the champion).")] = None,
    endpoint: Annotated[
        str, typer.Option(help="A base URL like https://host/v1 of any OpenAI-compatible server; key: OPENAI_API_KEY.")
    ] = "",
    model: Annotated[str, typer.Option(help="With --endpoint: the model's name there.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with 'prompt' or 'messages' (and 'domain', 'source', 'license'), or a text a line. "
            "Default: openings of this workspace's training documents, never of held-out ones."
        ),
    ] = None,
    domain: Annotated[str | None, typer.Option(help="Openings of documents of this domain alone.")] = None,
    opening_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens of an opening.")] = 32,
    count: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000_000, help="Documents (default: one for each prompt of the file, or 100 openings)."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most as many are written for each.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: always the likeliest token.")] = 0.8,
    seed: Annotated[
        int, typer.Option(help="Chooses openings and draws tokens: the same again, another other ones.")
    ] = 0,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license",
            help="Of what is written, if you have the rights in it. An opening or a prompt with a stricter one keeps its own.",
        ),
    ] = None,
    inbox: Annotated[bool, typer.Option("--inbox", help="Put the shard into the inbox, where it is ingested.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
) -> None:
    """Write a shard of synthetic documents with the champion, another release, or any endpoint.

    Each row names who wrote it (synthetic_by: release and hash of its weights, or model and address), so that provenance and model cards
    can tell how much of a later release is synthetic, and by whom. Without --license a document has the licence of what it begins with, or
    none: it is releasable only if that is. Stopped or killed, the same command goes on where it was.

    The shard lies in generated/ of the workspace. Nothing trains on it until it is ingested: 'factory generate … --inbox', or 'factory
    ingest FILE', which deduplicates it, drops what quotes held-out documents, and filters it as any other shard.
    """
    from factory.synthetic.generating import GenerationRequest, plan
    from factory.synthetic.generating import generate as write

    request = GenerationRequest(
        release, endpoint, model, prompts, domain, opening_tokens, count, tokens, temperature, seed, licence or None
    )
    if dry_run:
        what = plan(plant, request)
        said = what.says() | {"goes_on": what.began}
        say(said, _planned(said))
        return
    made = write(plant, request, inbox=inbox)
    say(made.to_json())
    ends = ", ".join(f"{n} {ENDS[end]}" for end, n in sorted(made.ends.items()) if end in ENDS)
    say.line(f"  {made.documents:,} documents by {made.written_by} in {made.path}{f' ({ends})' if ends else ''}")
    if not made.ends:
        say.line("  it was there already: nothing was written again")
    further = (
        f"inbox: {made.inbox}" if inbox else "put it into the inbox ('--inbox' does so) to have training data of it"
    )
    say.line(f"  {further}")


ENDS = {
    "length": "cut off at --tokens",
    "empty": "left out: empty",
    "refused": "left out: the model refused the prompt",
    "taken out": "left out: the document of their opening was taken out meanwhile",
}


def _planned(said: dict[str, Any]) -> list[str]:
    parts = lambda counts: ", ".join(f"{name or 'none named'} {count:,}" for name, count in counts.items())
    how = "openings of training documents" if said["openings"] else "prompts of the file"
    lines = [f"  {said['written_by']} would write {said['count']:,} documents from {said['prompts']:,} {how}"]
    lines += ["  a run that was cut off: it would go on"] if said["goes_on"] else []
    return [*lines, f"  by domain: {parts(said['domains'])}", f"  by licence: {parts(said['licences'])}"]
