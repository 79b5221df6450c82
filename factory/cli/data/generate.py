"""The command ``factory generate``: lets a model write documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from factory.cli.core.options import AnswerPrinter, register_command
from factory.ledger.plant import Plant
from kernels.contract.message import Message

commands = typer.Typer()


@register_command(commands)
def generate(
    plant: Plant,
    say: AnswerPrinter,
    release: Annotated[int | None, typer.Option(help="The release that writes (default: the champion).")] = None,
    endpoint: Annotated[
        str,
        typer.Option(
            help="Base URL of an OpenAI-compatible server that writes instead, such as https://host/v1; its key is OPENAI_API_KEY."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="With --endpoint: the model's name at that server.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: JSON lines with 'prompt' or 'messages' (and 'domain', 'source', 'license'), or one text per line. "
            "Default: openings of this workspace's training documents, never of held-out ones."
        ),
    ] = None,
    domain: Annotated[str | None, typer.Option(help="Use only openings of documents of this domain.")] = None,
    opening_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Number of tokens in an opening.")] = 32,
    count: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Number of documents (default: one per prompt of the file, or 100 with openings).",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most tokens to write for one document.")] = 256,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=2.0,
            help="Sampling temperature; 0: always the most likely token (default: 0.8, with --replay 1).",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed for choosing openings and sampling tokens. The same seed gives the same documents."
        ),
    ] = 0,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license",
            help="Licence of the written documents, if you have the rights. A stricter licence of an opening or prompt is kept.",
        ),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Let a release write without prompts what it knows, for the domain 'replay' of a later mixture.",
        ),
    ] = False,
    inbox: Annotated[
        bool, typer.Option("--inbox", help="Put the shard into the inbox; the factory ingests it from there.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written; write nothing.")] = False,
) -> None:
    """Write a shard of synthetic documents with the champion, another release, or an LLM behind an endpoint.

    Each row names its writer in synthetic_by: release and hash of its weights, or model and address. So provenance and model cards can
    tell how much of a later release is synthetic. Without --license, a document has the licence of its opening or prompt. If the command
    is stopped or killed, run it again: it continues.

    The shard is written to generated/ in the workspace. Nothing is trained on it until it is ingested, with --inbox or by 'factory ingest
    FILE'. Ingest removes duplicates, drops documents that quote held-out ones, and filters the shard like any other.
    """
    from factory.synthetic.generating import GenerationRequest, plan_generation
    from factory.synthetic.generating import generate_shard as write

    usual = 1.0 if replay else 0.8
    request = GenerationRequest(
        release, endpoint, model, prompts, domain, opening_tokens, count, tokens, usual if temperature is None else temperature, seed,
        licence or None, replay,
    )  # fmt: skip
    if dry_run:
        what = plan_generation(plant, request)
        said = what.summarise() | {"goes_on": what.is_resumed}
        say(said, _planned(said))
        return
    made = write(plant, request, inbox=inbox)
    say(made.to_json())
    ends = ", ".join(f"{n} {ENDS[end]}" for end, n in sorted(made.ends.items()) if end in ENDS)
    say.print_line(f"  {made.documents:,} documents by {made.written_by} in {made.path}{f' ({ends})' if ends else ''}")
    if not made.ends:
        say.print_line(Message("generate.exists", "  This shard was written before, so the command wrote nothing."))
    if inbox:
        say.print_line(f"  inbox: {made.inbox}")
    else:
        say.print_line(
            Message("generate.not_in_inbox", "  To train on this shard, run the same command with '--inbox'.")
        )


ENDS = {
    "length": "cut off at --tokens",
    "empty": "dropped: empty",
    "refused": "dropped: prompt refused",
    "taken out": "dropped: opening removed",
}


def _planned(said: dict[str, Any]) -> list[str]:
    parts = lambda counts: ", ".join(f"{name or 'none named'} {count:,}" for name, count in counts.items())
    facts = {"writer": said["written_by"], "count": said["count"], "prompts": said["prompts"]}
    openings = Message(
        "generate.from_openings",
        "  {writer} would write {count:,|document|documents} from {prompts:,|opening|openings} of training documents.",
        **facts,
    )
    prompts = Message(
        "generate.from_prompts",
        "  {writer} would write {count:,|document|documents} from {prompts:,|prompt|prompts} of the prompts file.",
        **facts,
    )
    lines = [openings if said["openings"] else prompts]
    continues = Message("generate.continues", "  The command would continue a run that was interrupted.")
    lines += [continues] if said["goes_on"] else []
    return [*lines, f"  by domain: {parts(said['domains'])}", f"  by licence: {parts(said['licences'])}"]
