"""The ``factory`` command. Every command imports what it needs when it runs, so that ``--help`` and ``status`` answer at once."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factory.errors import FactoryError, InputError, WorkspaceError, nearest
from factory.workspace import Config, Workspace

if TYPE_CHECKING:
    from factory.console import Terminal
    from factory.ledger import Ledger

app = typer.Typer(
    help="A factory for language models: data shards come in, gated model releases come out, and its own code is measured and improved.\n\n"
    "Start with 'factory demo' (everything once, on this machine), or 'factory init' and drop shards into the inbox.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
proposals_app = typer.Typer(help="The patches that agents proposed, and what the gate said of each.", rich_markup_mode=None, invoke_without_command=True)
app.add_typer(proposals_app, name="proposals")

Where = Annotated[Path, typer.Option("--workspace", "-w", envvar="FACTORY_HOME", help="The factory's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
DEFAULT = Path("workspace")


def _open(where: Path) -> tuple[Workspace, Ledger, Terminal]:
    from factory.console import Terminal
    from factory.ledger import Ledger

    workspace = Workspace.open(where)
    return workspace, Ledger.open(workspace.ledger_url), Terminal()


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


@app.command()
def init(
    where: Where = DEFAULT,
    recipe: Annotated[str, typer.Option(help="A recipe of policies/recipes/.")] = "demo",
    repository: Annotated[str, typer.Option(help="Git repository whose code is trained with and patched (default: this factory's own).")] = "",
) -> None:
    """Make a workspace: one folder that holds all state of one factory. Safe to run again."""
    from factory.ledger import Ledger

    known = {path.stem for path in Path(__file__).resolve().parent.parent.glob("policies/recipes/*.yaml")}
    if recipe not in known and not (where / "policies" / "recipes" / f"{recipe}.yaml").exists():
        raise InputError(f"no recipe {recipe!r}{nearest(recipe, known)}")
    workspace = Workspace.create(where, Config(recipe=recipe, repository=str(Path(repository).resolve()) if repository else ""))
    Ledger.create(workspace.ledger_url)
    print(f"workspace ready at {workspace.root}\nnext: drop shards into {workspace.inbox} and run 'factory run --once', or 'factory ingest PATH'")


@app.command()
def ingest(paths: Annotated[list[Path], typer.Argument(help="Shards: .jsonl (.gz, .zst), .parquet, plain text or code files, or folders of them.")], where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """Turn shards into clean, deduplicated, tokenised documents, each with a fate on record."""
    from factory.daemon import LOCK, describe_shard
    from factory.ingest.chain import ingest_shard
    from factory.progress import SILENT

    workspace, ledger, terminal = _open(where)
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"{path}: no such file")
        files += sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")) if path.is_dir() else [path]
    reports = []
    with workspace.lock(LOCK):
        for path in files:
            report = ingest_shard(workspace, ledger, path, SILENT if as_json else terminal)
            reports.append(vars(report))
            if not as_json:
                terminal.line(describe_shard(report.name, report.state, report.rows, report.counts, report.reason))
    if as_json:
        _print_json(reports)


@app.command()
def run(where: Where = DEFAULT, once: Annotated[bool, typer.Option("--once", help="Stop when there is nothing left to do.")] = False) -> None:
    """The daemon: ingest what lands in the inbox, train, evaluate, gate, release; again and again. Stop it with Ctrl-C, kill it at will."""
    from factory.daemon import run as run_daemon

    workspace, ledger, terminal = _open(where)
    run_daemon(workspace, ledger, terminal, once=once)


@app.command()
def train(where: Where = DEFAULT, steps: Annotated[int | None, typer.Option(min=1, help="Steps of this segment (default: what the recipe says).")] = None) -> None:
    """Train the trunk for one more segment over all ingested shards."""
    from factory.daemon import LOCK, observe
    from factory.daemon import train as train_segment
    from factory.training import plan_trunk

    workspace, ledger, terminal = _open(where)
    with workspace.lock(LOCK):
        number = observe(workspace, ledger).open_segment or plan_trunk(workspace, ledger, steps)
        train_segment(workspace, ledger, number, terminal)


@app.command()
def anneal(where: Where = DEFAULT) -> None:
    """Branch off the trunk with a decaying rate: yields a candidate."""
    from factory.daemon import LOCK, observe
    from factory.daemon import train as train_segment
    from factory.training import export_candidate, plan_anneal

    workspace, ledger, terminal = _open(where)
    with workspace.lock(LOCK):
        waiting = observe(workspace, ledger).open_segment
        if waiting:
            train_segment(workspace, ledger, waiting, terminal)
        number = plan_anneal(workspace, ledger)
        train_segment(workspace, ledger, number, terminal)
        terminal.line(f"  candidate {export_candidate(workspace, ledger, number)}")


def _candidate(workspace: Workspace, number: int | None) -> int:
    from factory.listing import rows

    known = [row["id"] for row in rows(workspace, "SELECT id FROM candidates ORDER BY id")]
    if not known:
        raise InputError("there is no candidate yet: run 'factory train' and 'factory anneal', or 'factory run --once'")
    if number is None:
        return int(known[-1])
    if number not in known:
        raise InputError(f"no candidate {number}; there are: {', '.join(map(str, known))}")
    return number


@app.command()
def evaluate(candidate: Annotated[int | None, typer.Argument(help="Candidate number (default: the newest).")] = None, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """Measure a candidate on held-out documents and judge it against the champion."""
    from factory.daemon import LOCK, judge
    from factory.ledger import evaluations, sa, verdicts
    from factory.progress import SILENT

    workspace, ledger, terminal = _open(where)
    number = _candidate(workspace, candidate)
    with workspace.lock(LOCK):
        verdict = judge(workspace, ledger, number, SILENT if as_json else terminal)
    if as_json:
        newest = sa.select(evaluations.c.summary).where(evaluations.c.candidate == number).order_by(evaluations.c.id.desc()).limit(1)
        _print_json({"candidate": number, "evaluation": (ledger.one(newest) or {}).get("summary"), "verdict": ledger.one(sa.select(verdicts).where(verdicts.c.id == verdict))})


@app.command()
def release(
    candidate: Annotated[int | None, typer.Argument(help="Candidate number (default: the newest).")] = None,
    where: Where = DEFAULT,
    rollback: Annotated[int | None, typer.Option(help="Make this older release champion again.")] = None,
) -> None:
    """Release a candidate that the gate promoted (this is the approval, where the policy asks for one), or roll back."""
    from factory.daemon import LOCK
    from factory.ledger import sa, verdicts
    from factory.releases import release as release_verdict
    from factory.releases import rollback as roll_back

    workspace, ledger, terminal = _open(where)
    with workspace.lock(LOCK):
        if rollback is not None:
            roll_back(workspace, ledger, rollback)
            terminal.line(f"  release {rollback} is champion again")
            return
        number = _candidate(workspace, candidate)
        last = sa.select(verdicts).where(verdicts.c.gate == "release", verdicts.c.subject == f"candidate:{number}").order_by(verdicts.c.id.desc()).limit(1)
        verdict = ledger.one(last)
        if verdict is None:
            raise InputError(f"candidate {number} has not been judged: run 'factory evaluate {number}'")
        terminal.line(f"  release {release_verdict(workspace, ledger, verdict['id'], terminal)} published")


@app.command()
def profile(where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """Time every line of the training step, forward and backward, and show the hottest."""
    from factory.listing import rows
    from factory.progress import SILENT
    from factory.proposing import profile as profile_step

    workspace, ledger, terminal = _open(where)
    with workspace.lock("code-loop"):
        number = profile_step(workspace, ledger, SILENT if as_json else terminal)
    path = Path(rows(workspace, "SELECT path FROM profiles WHERE id = :id", id=number)[0]["path"])
    if as_json:
        print(path.read_text())
        return
    from agents.line_profiler.report import table

    terminal.console.print(table(json.loads(path.read_text())))
    terminal.line(f"  all of it: {path}")


@app.command()
def propose(where: Where = DEFAULT, agent: Annotated[str, typer.Option(help="Who proposes: 'search' needs no LLM.")] = "search") -> None:
    """The code loop, once: profile the training step, propose a patch on a git branch, let the patch gate judge it."""
    from factory.proposing import propose as propose_patch

    workspace, ledger, terminal = _open(where)
    with workspace.lock("code-loop"):
        number = propose_patch(workspace, ledger, terminal, agent=agent)
    if number is not None:
        _show_proposal(workspace, number, False)


def _show_proposal(workspace: Workspace, number: int, as_json: bool) -> None:
    from factory.listing import rows

    sql = "SELECT p.*, v.outcome, v.reasons, v.evidence FROM proposals p LEFT JOIN verdicts v ON v.id = p.verdict WHERE p.number = :number"
    found = rows(workspace, sql, number=number)
    if not found:
        known = [str(row["number"]) for row in rows(workspace, "SELECT number FROM proposals ORDER BY number")]
        raise InputError(f"no proposal {number}; there {'are: ' + ', '.join(known) if known else 'is none yet: run factory propose'}")
    row = found[0]
    if as_json:
        _print_json(row)
        return
    gain = f" (predicted {row['predicted_gain']:.2f}× on the whole step)" if row["predicted_gain"] else ""
    print(f"proposal {row['number']} by {row['agent']} on branch {row['branch']}\n  target      {row['target']}\n  change      {row['title']}\n  hypothesis  {row['hypothesis']}{gain}")
    print(f"  verdict     {(row['outcome'] or row['state']).upper()}")
    for reason in row["reasons"] or []:
        print(f"    {reason}")
    print(f"  see it      git -C {workspace.repository} show {row['branch']}\n  report      {row['report']}")


@proposals_app.callback()
def proposals_default(context: typer.Context, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """The patches that agents proposed, and what the gate said of each."""
    context.obj = where
    if context.invoked_subcommand is None:
        proposals_list(where, as_json)


@proposals_app.command("list")
def proposals_list(where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """All proposals, a line each."""
    from factory.listing import rows

    found = rows(
        Workspace.open(where),
        "SELECT p.number, p.agent, p.title, p.branch, p.state, p.predicted_gain, v.outcome FROM proposals p LEFT JOIN verdicts v ON v.id = p.verdict ORDER BY p.number",
    )
    if as_json:
        _print_json(found)
        return
    for row in found:
        print(f"{row['number']:>4}  {row['outcome'] or row['state']:<8} {row['branch']}  {row['title']}")
    if not found:
        print("no proposals yet: run 'factory propose'")


@proposals_app.command("show")
def proposals_show(number: int, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """One proposal: hypothesis, prediction, evidence, verdict."""
    _show_proposal(Workspace.open(where), number, as_json)


@app.command()
def provenance(
    document: Annotated[str | None, typer.Option(help="What became of the document with this id or key?")] = None,
    release: Annotated[int | None, typer.Option(help="What was this release made of?")] = None,
    where: Where = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Follow a document to the releases trained on it, or a release back to its shards."""
    from factory.provenance import of_document, of_release

    if (document is None) == (release is None):
        raise InputError("name one: --document ID or --release N")
    _, ledger, _ = _open(where)
    found: Any = of_document(ledger, document) if document is not None else of_release(ledger, int(release or 0))
    if as_json:
        _print_json(found)
        return
    print("\n".join(_document_lines(found) if document is not None else _release_lines(found)))


def _document_lines(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in found:
        lines.append(f"{row['id']} ({row['domain']}, {row['license'] or 'no licence given'}) row {row['row']} of {row['shard_name']}")
        fate = row["fate"] + (f" by rule {row['rule']}" if row["rule"] else "") + (f": {row['detail']}" if row["detail"] else "")
        lines.append(f"  fate      {fate}")
        if row.get("matched_document"):
            lines.append(f"  matched   {row['matched_document']['id']} ({row['matched']})")
        if row["token_shard"]:
            lines.append(f"  tokens    {row['tokens']} ({row['supervised_tokens']} with loss) in token shard {row['token_shard']}")
        lines.append(f"  segments  {', '.join(map(str, row['segments'])) or 'none'}    releases {', '.join(map(str, row['releases'])) or 'none'}")
    return lines


def _release_lines(found: dict[str, Any]) -> list[str]:
    lines = [f"release {found['release']['number']}: candidate {found['release']['candidate']}, {found['verdict']['outcome']}"]
    lines += [f"    {reason}" for reason in found["verdict"]["reasons"]]
    for row in found["segments"]:
        lines.append(f"  segment {row['id']} {row['kind']} steps {row['first_step']}–{row['last_step']}, recipe {row['recipe']}, code {row['code_commit'][:12]}, data plan {row['data_plan'][:12]}")
    for row in found["shards"]:
        lines.append(f"  shard {row['name']} (generation {row['generation']}): {row['documents']:,} documents, {row['tokens']:,} tokens")
    return lines


@app.command()
def status(where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """What is in the factory right now: data, segments, candidates, champion, proposals."""
    from factory.status import screen, snapshot

    facts = snapshot(Workspace.open(where))
    if as_json:
        _print_json(facts)
    else:
        print("\n".join(screen(facts)))


@app.command()
def ui(
    where: Where = DEFAULT,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 5000,
    show: Annotated[bool, typer.Option("--print", help="Print the command instead of running it.")] = False,
) -> None:
    """Open the MLflow UI on this workspace: runs, the registered model, verdict tags, reports."""
    from factory.tracking import ui_command

    command, environment = ui_command(Workspace.open(where), port)
    if show:
        print(" ".join(command))
        return
    print(f"MLflow UI on http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
    os.execvpe(command[0], command, os.environ | environment)


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
        _print_json(found)
    else:
        for row in found:
            print(f"  {'–' if row['ok'] is None else '✓' if row['ok'] else '✗'} {row['check']:<13} {row['detail']}")
    if any(row["ok"] is False for row in found):
        raise typer.Exit(1)


@app.command()
def demo(
    where: Where = DEFAULT,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw an earlier demo's workspace away and begin again.")] = False,
) -> None:
    """Run the whole factory once, on this machine, on real text (the Python standard library). About six minutes on two cores."""
    from factory.console import Terminal
    from factory.demo import run_demo

    run_demo(where, Terminal(), fresh=fresh)


def main() -> None:
    """The entry point: a ``FactoryError`` is one clear message, a full disk too; anything else is a bug and keeps its traceback."""
    try:
        app()
    except FactoryError as error:
        print(f"factory: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("factory: stopped; run the same command again to go on", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except Exception as error:
        if _disk_full(error):
            print("factory: the disk is full; nothing recorded was lost: free some space and run the same command again", file=sys.stderr)
            sys.exit(74)
        raise


def _disk_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if "database or disk is full" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
