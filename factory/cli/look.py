"""Commands that show the state of the factory: ``factory status``, ``duties``, ``log``, ``ui`` and ``check``; and ``factory demo``."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated

import typer

from factory.cli.app import DEFAULT, AnswerPrinter, JsonOption, WorkspaceOption, app, print_json, register_command
from factory.core.errors import InputError, WorkspaceError
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from kernels.contract.message import Message

WATCH_SECONDS = 2.0


@app.command()
def status(
    where: WorkspaceOption = DEFAULT,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print the status again every two seconds, until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the factory's state and everything that waits for you: daemon, training, data, segments, candidates, champion, proposals, disk."""
    from factory.core.time_formats import convert_times_to_iso
    from factory.status.status import format_status_lines, read_status_facts

    workspace = Workspace.open(where)
    while True:
        try:
            found = read_status_facts(workspace)
        except WorkspaceError as error:  # the ledger is locked, or is being upgraded
            if not watch:
                raise
            typer.echo(str(error), err=True)
        else:
            if watch and not as_json:
                from rich.console import Console

                Console().clear()
            print_json(convert_times_to_iso(found)) if as_json else print("\n".join(format_status_lines(found)))
        if not watch:
            return
        time.sleep(WATCH_SECONDS)


@register_command(app)
def duties(plant: Plant, say: AnswerPrinter) -> None:
    """List the daemon's duties, in the order of their priority.

    The list shows whether a duty is due now, what holds the duty back, until when the duty rests after a failure, and when the duty was
    last done.
    """
    from factory.core.time_formats import convert_times_to_iso
    from factory.duties.listing import collect_duty_facts, format_duty_list

    found = collect_duty_facts(plant)
    say(convert_times_to_iso(found), format_duty_list(found))


@app.command()
def log(
    where: WorkspaceOption = DEFAULT,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the newest entries to print.")] = 40,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Then print new entries as they come, until Ctrl-C.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the daemon's log, logs/daemon.log. Tracebacks are in logs/errors.log, and the output of trainers is in logs/segment-N.log."""
    from factory.status import daemon_log

    workspace = Workspace.open(where)
    show = (lambda entry: json.dumps(entry, ensure_ascii=False)) if as_json else daemon_log.format_log_entry
    for entry in (
        daemon_log.follow_log_entries(workspace, lines) if follow else daemon_log.read_log_entries(workspace, lines)
    ):
        print(show(entry), flush=True)


@app.command()
def ui(
    where: WorkspaceOption = DEFAULT,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5000,
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address that other machines can reach needs --user.")
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A host name or address that people type to reach the UI, such as gpu-box, 10.0.0.5:8080 or the proxy's "
            "https://mlflow.example.org. Can be repeated; every other name is refused. Default, if --host lets other machines in: this "
            "machine's name and addresses.",
        ),
    ] = None,
    user: Annotated[
        str, typer.Option(help="Require a login with this user name. The password is made once and kept in a file.")
    ] = "",
    show: Annotated[bool, typer.Option("--print", help="Print the command instead of running it.")] = False,
) -> None:
    """Serve the MLflow UI of this workspace, and print the pages to begin with: releases, candidates, training, proposals."""
    from factory.core.listening_socket import is_loopback, open_listening_socket
    from factory.show.mlflow.host_names import bracket_ipv6, choose_server_names
    from factory.show.mlflow.login import create_mlflow_login
    from factory.show.mlflow.registry import list_start_page_addresses
    from factory.show.mlflow.store import make_mlflow_ui_command

    workspace = Workspace.open(where)
    if not user and not is_loopback(host):
        raise _login_needed("--host", host)
    names = choose_server_names(host, name or ())
    if others := [each.host for each in names if not user and not is_loopback(each.host.strip("[]"))]:
        raise _login_needed("--name", others[0])
    if not show:
        open_listening_socket(
            host, port
        ).close()  # a port in use is an error now; MLflow itself would end later, with a traceback
    secrets, password = create_mlflow_login(workspace, user) if user else (None, None)
    command, environment = make_mlflow_ui_command(workspace, port, host, secrets, name or ())
    if show:
        print(" ".join(command))
        return
    if password:
        said = Message(
            "look.ui_login",
            "Log in as {user} with the password in {file}. If others use this network, put a TLS proxy in front of MLflow.",
            user=user,
            file=password,
        )
        print(said, flush=True)
    server = names[0].make_mlflow_url(port) if names else f"http://{bracket_ipv6(host)}:{port}"
    if names:
        said = Message(
            "look.ui_names",
            "MLflow answers to these names: {names}. To allow another name or address: 'factory ui --name NAME'",
            names=[each.host for each in names],
        )
        print(said, flush=True)
    pages = list_start_page_addresses(workspace, server)
    print(
        Message(
            "look.ui_address", "The MLflow UI is at {address}. Ctrl-C stops it. Begin with these pages:", address=server
        ),
        flush=True,
    )
    for page, address in pages.items():
        print(f"  {page:<11} {address}", flush=True)
    os.execvpe(command[0], command, os.environ | environment)


def _login_needed(flag: str, host: str) -> InputError:
    return InputError(
        "look.login_needed",
        "{flag} {host}: other machines could reach MLflow at this address and approve releases. To require a login, add "
        "'--user NAME'",
        flag=flag,
        host=host,
    )


@app.command()
def check(
    where: WorkspaceOption = DEFAULT,
    deep: Annotated[bool, typer.Option("--deep", help="Hash all files of the workspace, not only a sample.")] = False,
    mend: Annotated[
        bool,
        typer.Option(
            "--repair", help="Repair what can be repaired: rebuild, replay or restore files. Stop 'factory run' first."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and the workspace: report missing and damaged parts, and how to correct each.

    The files of the workspace are compared with the ledger: all of them by size, a sample by hash. --repair makes a token shard again
    from its raw shard, replays a segment to get its checkpoint, exports a candidate again, and restores the ledger and MLflow's database.
    Damaged files are moved to set-aside/ or backups/ and never deleted.
    """
    from factory.core.console import Terminal
    from factory.core.progress import SILENT
    from factory.machine_check import run_checks

    try:
        workspace: Workspace | None = Workspace.open(where)
    except WorkspaceError as error:
        workspace = None
        if not as_json:
            print(
                Message(
                    "look.no_workspace", "  The check covers only the machine, not a workspace: {reason}", reason=error
                )
            )
    progress = SILENT if as_json else Terminal()
    done: list[str] = []
    if mend and workspace:
        from factory.ledger.ledger import Ledger
        from factory.repairs.repairing import repair_all_damage
        from factory.show.unshown_items import show_unshown_items

        done = repair_all_damage(workspace, deep, progress)
        show_unshown_items(Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root), progress))
        for line in () if as_json else done:
            print(f"  {line}")
    found = run_checks(workspace, deep, progress)
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
    where: WorkspaceOption = DEFAULT,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="About how long the demo may take (default: 6; with --from: 15). A faster machine trains more in that time.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--from",
            help="Train a public model further instead: 'smollm2' or 'gemma3-270m', which are downloaded, or your folder, .gguf file or wheel.",
            show_default=False,
        ),
    ] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete the workspace of an earlier demo and start again.")
    ] = False,
) -> None:
    """Run the whole factory once on this machine, on real text (the Python standard library).

    The demo measures how fast the machine is. Then it chooses the model's size, the number of steps and the size of the evaluation so that
    the run takes about the given minutes. With --from, it imports a model, trains it further on Python's documentation, judges it against itself,
    serves it and loads its export with transformers.
    """
    from factory.core.console import Terminal

    if model:
        from factory.demo.import_demo import run_import_demo
        from factory.demo.import_demo_size import DEFAULT_MINUTES

        run_import_demo(where, Terminal(), model, minutes=DEFAULT_MINUTES if minutes is None else minutes, fresh=fresh)
        return
    from factory.demo import demo, demo_size

    demo.run_demo(where, Terminal(), minutes=demo_size.DEFAULT_MINUTES if minutes is None else minutes, fresh=fresh)
