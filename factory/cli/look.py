"""Commands that look: ``status``, ``ui``, ``check``; and ``demo``, which shows it all."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated

import typer

from factory.cli.app import DEFAULT, AsJson, Say, Where, app, command, print_json
from factory.core.errors import InputError, WorkspaceError
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant

WATCH_SECONDS = 2.0


@app.command()
def status(
    where: Where = DEFAULT,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """What is in the factory right now, and what waits for you: daemon, training, data, segments, candidates, champion, proposals, disk."""
    from factory.core.moments import with_iso
    from factory.status.status import facts, screen

    workspace = Workspace.open(where)
    while True:
        try:
            found = facts(workspace)
        except WorkspaceError as error:  # locked, or in the middle of an upgrade
            if not watch:
                raise
            typer.echo(str(error), err=True)
        else:
            if watch and not as_json:
                from rich.console import Console

                Console().clear()
            print_json(with_iso(found)) if as_json else print("\n".join(screen(found)))
        if not watch:
            return
        time.sleep(WATCH_SECONDS)


@command(app)
def duties(plant: Plant, say: Say) -> None:
    """What the daemon does, in its order: what is due now, what holds it, what rests after a failure, and when each was last done."""
    from factory.core.moments import with_iso
    from factory.duties.listing import facts, lines

    found = facts(plant)
    say(with_iso(found), lines(found))


@app.command()
def log(
    where: Where = DEFAULT,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="So many of the newest.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """What the daemon said and did: logs/daemon.log. Tracebacks are in logs/errors.log, trainers' words in logs/segment-N.log."""
    from factory.status import log as daemon_log

    workspace = Workspace.open(where)
    show = (lambda entry: json.dumps(entry, ensure_ascii=False)) if as_json else daemon_log.describe
    for entry in daemon_log.follow(workspace, lines) if follow else daemon_log.entries(workspace, lines):
        print(show(entry), flush=True)


@app.command()
def ui(
    where: Where = DEFAULT,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine's own needs --user.")
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A host by which people reach it, as gpu-box, 10.0.0.5:8080 or https://mlflow.example.org (a proxy's); can be "
            "repeated, and any other is refused. Without it: this machine's name and addresses, where --host lets others in.",
        ),
    ] = None,
    user: Annotated[str, typer.Option(help="Ask for a login: this name, and a password that is made once.")] = "",
    show: Annotated[bool, typer.Option("--print", help="Print the command instead of running it.")] = False,
) -> None:
    """Open the MLflow UI on this workspace, and say where to begin: releases, candidates, training, proposals."""
    from factory.core.listening import is_loopback, listen
    from factory.show.mlflow.login import login
    from factory.show.mlflow.names import in_brackets, reached_as
    from factory.show.mlflow.registry import start_pages
    from factory.show.mlflow.store import ui_command

    workspace = Workspace.open(where)
    if not user and not is_loopback(host):
        raise InputError(
            f"--host {host}: whoever reaches MLflow can approve releases: give --user NAME, and people log in"
        )
    names = reached_as(host, name or ())
    if others := [each.host for each in names if not user and not is_loopback(each.host.strip("[]"))]:
        raise InputError(
            f"--name {others[0]}: whoever reaches MLflow can approve releases: give --user NAME, and people log in"
        )
    if not show:
        listen(host, port).close()  # before anything is said or made: MLflow would end much later, behind a traceback
    secrets, password = login(workspace, user) if user else (None, None)
    command, environment = ui_command(workspace, port, host, secrets, name or ())
    if show:
        print(" ".join(command))
        return
    if password:
        print(f"user {user}, password in {password}; put TLS in front of it where the network is not yours", flush=True)
    server = names[0].address(port) if names else f"http://{in_brackets(host)}:{port}"
    if names:
        known = ", ".join(each.host for each in names)
        print(f"reached as {known}; another name or address is refused until it is given with --name", flush=True)
    pages = start_pages(workspace, server)
    print(f"MLflow UI on {server} (Ctrl-C ends it). Begin here:", flush=True)
    for page, address in pages.items():
        print(f"  {page:<11} {address}", flush=True)
    os.execvpe(command[0], command, os.environ | environment)


@app.command()
def check(
    where: Where = DEFAULT,
    deep: Annotated[bool, typer.Option("--deep", help="Hash all of the workspace's work, not a sample of it.")] = False,
    mend: Annotated[
        bool,
        typer.Option("--repair", help="Mend what can be mended: rebuild, replay, restore. Stop 'factory run' first."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What this machine offers, what is in force, what is missing, gone or damaged, and what to do about it.

    What lies in the workspace is compared with the ledger: all of it by size, a sample by its hash. --repair makes a token shard again from
    its raw shard, replays a segment for its checkpoint, exports again, restores the ledger and MLflow's database. What is damaged is moved
    to set-aside/ or backups/, never deleted.
    """
    from factory.core.console import Terminal
    from factory.core.progress import SILENT
    from factory.machine_check import examine

    try:
        workspace: Workspace | None = Workspace.open(where)
    except WorkspaceError as error:
        workspace = None
        if not as_json:
            print(f"  (no workspace: {error})")
    progress = SILENT if as_json else Terminal()
    done: list[str] = []
    if mend and workspace:
        from factory.ledger.ledger import Ledger
        from factory.repairs.mending import repair_all
        from factory.show.catching_up import catch_up

        done = repair_all(workspace, deep, progress)
        catch_up(Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root), progress))
        for line in () if as_json else done:
            print(f"  {line}")
    found = examine(workspace, deep, progress)
    if as_json:
        print_json({"checks": found, "repaired": done} if mend else found)
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
