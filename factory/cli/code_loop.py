"""The commands of the code loop: ``factory propose``, ``factory proposals`` (list, show, approve, reject, revert) and ``factory audit``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from factory.cli.app import (
    DEFAULT,
    AnswerPrinter,
    JsonOption,
    WorkspaceOption,
    app,
    get_current_user,
    open_plant,
    print_json,
    register_command,
)
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from kernels.contract.message import Message

proposals_app = typer.Typer(
    help="Patches that agents proposed: list and show them, approve, reject or revert one.",
    rich_markup_mode=None,
    invoke_without_command=True,
)
app.add_typer(proposals_app, name="proposals")


MODELS = ("kernel-engineer", "recipe-scout")  # agents that may be a language model
SETTLED = ("approved", "rejected", "reverted", "superseded")


@app.command()
def propose(
    where: WorkspaceOption = DEFAULT,
    agent: Annotated[
        str,
        typer.Option(
            help="The agent. 'kernel-engineer' (with an LLM) and 'search' (without an LLM) make the training step faster. 'recipe-scout' (with "
            "or without an LLM) changes the recipe so that the model learns more. Default: kernel-engineer with an LLM, else search."
        ),
    ] = "",
    endpoint: Annotated[
        str,
        typer.Option(
            help="The LLM: the base URL of an OpenAI-compatible server; 'champion' for our own release, served by 'factory serve'; "
            "files:FOLDER to answer by hand; 'none' for no LLM, even if one is configured."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="The LLM's name at that server (default: the one in agents.yaml).")] = "",
    target: Annotated[
        str, typer.Option(help="What to improve: an op, a file:line of the profile, or a key of the recipe.")
    ] = "",
    interactive: Annotated[bool, typer.Option("--interactive", help="Ask me questions between rounds.")] = False,
    count: Annotated[
        int,
        typer.Option(min=1, max=64, help="How many proposals to draft at the same time, each for a different target."),
    ] = 1,
) -> None:
    """Run the code loop once: profile the training step, propose a patch on a git branch, and let the patch gate judge it.

    An LLM's endpoint is --endpoint, llm.endpoint in policies/agents.yaml, or OPENAI_BASE_URL; its key is OPENAI_API_KEY. With an
    endpoint the kernel engineer proposes, otherwise the agent 'search'. With --agent recipe-scout, proposals change the recipe and are
    judged by how much the model learns. If the command is killed, run it again: it continues. With --count, several proposals wait for
    the LLM at the same time; timing runs one at a time on the GPU or CPU.
    """
    from agents.kernel_engineer.draft import AGENT
    from factory.code_loop.agent_runs import AgentOptions, needs_language_model
    from factory.code_loop.proposing import make_proposals as propose_patch
    from factory.show.unshown_items import show_unshown_items

    plant, terminal = open_plant(where)
    options = AgentOptions(endpoint, model, target, _ask if interactive else None)
    if not agent:
        agent = AGENT if needs_language_model(plant.workspace, options) else "search"
        if agent != AGENT:
            terminal.line(
                Message(
                    "cli.no_llm_endpoint",
                    "  No LLM endpoint is configured. Therefore the search proposer, which needs no LLM, makes the proposal.",
                )
            )
    try:
        with plant.workspace.hold_lock("code-loop"):
            numbers = propose_patch(plant, agent=agent, options=options, count=count)
    finally:  # also shows what was judged before an error
        show_unshown_items(plant)
    for number in numbers:
        _show_proposal(plant.workspace, number, False)


def _ask(question: str) -> str:
    """Print a question and return the person's answer. Raises: InputError at the end of standard input. The run is kept then."""
    print(question, flush=True)
    try:
        return input("> ")
    except EOFError:
        raise InputError(
            "code_loop.no_answer",
            "Standard input ended before an answer came. To continue, run the same command again.",
        ) from None


def _show_proposal(workspace: Workspace, number: int, as_json: bool) -> None:
    from agents.core.proposal import format_gain
    from agents.core.untrusted import fold_to_one_line
    from factory.ledger.reader import LedgerReader
    from factory.ledger.rows import ProposalRow

    db = LedgerReader(workspace)
    row = ProposalRow.get(db, number)
    if as_json:
        print_json(vars(row) | {"evidence": row.read_evidence(db) or None})
        return
    gain = f" (predicted {format_gain(row.target, row.predicted_gain)})" if row.predicted_gain else ""
    print(
        Message(
            "cli.proposal",
            "proposal {number} by {agent} on branch {branch}\n  target      {target}\n  change      {title}\n  hypothesis  {hypothesis}{gain}",
            number=row.number,
            agent=row.agent,
            branch=row.branch,
            target=row.target,
            title=row.title,
            hypothesis=row.hypothesis,
            gain=gain,
        )
    )
    settled = f", {row.state}" if row.state in SETTLED else ""
    print(f"  verdict     {(row.outcome or row.state).upper()}{settled}")
    for reason in row.reasons or []:
        print(f"    {fold_to_one_line(reason, 1000)}")
    if row.agent in MODELS:
        spent = "SELECT COUNT(*) AS n, SUM(e.tokens) AS tokens, SUM(e.usd) AS usd FROM exchanges e JOIN agent_runs a ON a.id = e.run "
        cost = db.read(spent + "WHERE a.proposal = :number", number=number)[0]
        if cost["n"]:
            print(
                Message(
                    "code_loop.llm_cost",
                    "  LLM         {exchanges:,|exchange|exchanges}, {tokens:,|token|tokens}, {usd:.4f} USD",
                    exchanges=cost["n"],
                    tokens=cost["tokens"] or 0,
                    usd=cost["usd"] or 0.0,
                )
            )
    if row.outcome == "promote" and row.state == "judged":
        print(
            Message("code_loop.merge_proposal", "  to merge    factory proposals approve {number}", number=row.number)
        )
    print(
        Message(
            "code_loop.see_proposal",
            "  to see      git -C {repository} show {branch}\n  report      {report}",
            repository=workspace.repository,
            branch=row.branch,
            report=row.report,
        )
    )


@proposals_app.callback()
def list_without_subcommand(
    context: typer.Context, where: WorkspaceOption = DEFAULT, as_json: JsonOption = False
) -> None:
    """List the patches that agents proposed, with the verdict on each."""
    context.obj = where
    if context.invoked_subcommand is None:
        _list_proposals(where, as_json)


@proposals_app.command("list")
def list_proposals(context: typer.Context, where: WorkspaceOption = DEFAULT, as_json: JsonOption = False) -> None:
    """List all proposals, one line each."""
    _list_proposals(_named(context, where), as_json)


def _named(context: typer.Context, where: Path) -> Path:
    """Return the workspace given after the subcommand or, without one, the workspace given after ``proposals``."""
    return where if where != DEFAULT else context.obj


def _list_proposals(where: Path, as_json: bool) -> None:
    from factory.ledger.reader import LedgerReader
    from factory.ledger.rows import ProposalRow

    listed = ProposalRow.select(LedgerReader(Workspace.open(where)))
    if as_json:
        print_json([row.select_fields("number agent title branch state predicted_gain outcome") for row in listed])
        return
    for row in listed:
        state = row.state if row.state in SETTLED else row.outcome or row.state
        print(f"{row.number:>4}  {state:<10} {row.branch}  {row.title}")
    if not listed:
        print(
            Message("code_loop.no_proposals", "No agent has proposed a patch yet. To get a proposal: 'factory propose'")
        )


@proposals_app.command("show")
def show_proposal(
    context: typer.Context, number: int, where: WorkspaceOption = DEFAULT, as_json: JsonOption = False
) -> None:
    """Show one proposal: its hypothesis, predicted gain, evidence and verdict."""
    _show_proposal(Workspace.open(_named(context, where)), number, as_json)


Number = Annotated[int, typer.Argument(help="The proposal's number, as 'factory proposals' prints it.")]
Why = Annotated[str, typer.Option(help="The reason; the ledger keeps it.")]


@proposals_app.command("approve")
def approve_proposal(context: typer.Context, number: Number, where: WorkspaceOption = DEFAULT) -> None:
    """Merge a proposal that the patch gate promoted into the checked-out branch of the repository.

    You approve exactly the patch that was judged. If the code changed since the verdict, the gate judges the patch again first.
    """
    from factory.code_loop.approvals import merge_promoted_proposal

    _decide(context, where, number, lambda plant: merge_promoted_proposal(plant, number, get_current_user()))


@proposals_app.command("reject")
def reject_proposal(context: typer.Context, number: Number, where: WorkspaceOption = DEFAULT, why: Why = "") -> None:
    """Reject a judged proposal, whatever its verdict is. Its branch is kept."""
    from factory.code_loop.approvals import reject_judged_proposal

    _decide(context, where, number, lambda plant: reject_judged_proposal(plant.ledger, number, get_current_user(), why))


@proposals_app.command("revert")
def revert_proposal(context: typer.Context, number: Number, where: WorkspaceOption = DEFAULT, why: Why = "") -> None:
    """Undo an approved proposal by a new commit."""
    from factory.code_loop.approvals import revert_approved_proposal

    _decide(context, where, number, lambda plant: revert_approved_proposal(plant, number, get_current_user(), why))


def _decide(context: typer.Context, where: Path, number: int, decision: Callable[[Plant], object]) -> None:
    """Carry out a person's decision while holding the code loop's lock. Then show the result in MLflow, and print the proposal."""
    from factory.show.unshown_items import show_unshown_items

    plant, _ = open_plant(_named(context, where))
    with plant.workspace.hold_lock("code-loop"):
        decision(plant)
    show_unshown_items(plant)
    _show_proposal(plant.workspace, number, False)


@register_command(app)
def audit(
    plant: Plant,
    say: AnswerPrinter,
    segment: Annotated[
        int | None, typer.Option(help="Audit this segment now, even if its last audits measured nothing.")
    ] = None,
) -> None:
    """Check that merged patches did not change training: replay steps of finished segments without the agents' patches, and compare.

    Prints all audits. A difference opens a proposal that undoes the patch. The daemon audits by itself when it has nothing else to do.
    While the daemon runs, this command asks the daemon to audit in its next pass.
    """
    from factory.audit.audit_segment import audit_segment
    from factory.audit.audit_windows import find_due_audits, list_audits
    from factory.audit.policy import AuditPolicy
    from factory.cli.core.ask_daemon import take_lock_or_ask_daemon
    from factory.code_loop.reverting import propose_reverts_of_blamed_patches
    from factory.ledger.rows import SegmentRow
    from factory.show.unshown_items import show_unshown_items

    numbers = (
        find_due_audits(plant.ledger, AuditPolicy.load(plant.workspace.policy_path("gates/audit.yaml")))
        if segment is None
        else [segment]
    )
    if numbers:
        with ExitStack() as held:
            wanted = [f"audit {SegmentRow.get(plant.ledger, number).id}" for number in numbers]
            if said := take_lock_or_ask_daemon(held, plant, wanted):
                say({"segments": numbers, "says": said}, f"  {said}")
                return
            for number in numbers:
                audit_segment(plant, number)
            propose_reverts_of_blamed_patches(plant)
            show_unshown_items(plant)
    found = list_audits(plant.ledger)
    say(found)
    for row in found:
        verdict = row["verdict"]
        state = (
            {"promote": "agrees", "hold": "not measured", "reject": "DIFFERS"}[verdict["outcome"]]
            if verdict
            else "waits"
        )
        say.print_line(
            Message(
                "code_loop.audit",
                "segment {segment}, steps {first}–{last}, replayed without proposals {patches}: {state}",
                segment=row["segment"],
                first=row["first"],
                last=row["last"],
                patches=row["patches"],
                state=state,
            )
        )
        for reason in verdict["reasons"] if verdict else ():
            say.print_line(f"    {reason}")
    if not found:
        say.print_line(
            Message(
                "code_loop.no_audit",
                "  No audit is planned yet. The first audit is planned when a segment trains with a patch that an agent wrote.",
            )
        )
