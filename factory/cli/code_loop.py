"""The commands of the code loop: ``factory propose``, ``factory audit``, and ``factory proposals`` (list, show, approve, reject, revert, rejudge,
combine)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from factory.core.time_formats import convert_times_to_iso
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant
from factory.ledger.rows import SqlReader
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.code_loop.judging_again import JudgedAgain

proposals_app = typer.Typer(
    help="Patches that agents proposed: list and show them, approve, reject or revert one, judge held ones again.",
    rich_markup_mode=None,
    invoke_without_command=True,
)
app.add_typer(proposals_app, name="proposals")


MODELS = ("kernel-engineer", "recipe-scout")  # agents that may be a language model
SETTLED = ("approved", "merged-with", "rejected", "reverted", "superseded")


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
    from factory.code_loop.held_proposals import ProposalDescents, describe_judging_again
    from factory.core.verdict_lines import format_verdict_lines
    from factory.ledger.reader import LedgerReader
    from factory.ledger.rows import ProposalRow

    db = LedgerReader(workspace)
    row = ProposalRow.get(db, number)
    waits, descents = _read_waits(workspace, db).get(number), ProposalDescents(db)
    if as_json:
        print_json(
            vars(row)
            | {
                "again_of": descents.find_repeated(number),
                "sum_of": descents.list_parts(number),
                "judge_again": convert_times_to_iso(waits),
                "evidence": row.read_evidence(db) or None,
            }
        )
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
    if parts := descents.list_parts(number):
        print(Message("code_loop.sum_of", "  sum of      proposals {parts}", parts=parts))
    if repeated := descents.find_repeated(number):
        print(Message("code_loop.again_of", "  repeats     proposal {proposal}", proposal=repeated))
    settled = f", {row.state}" if row.state in SETTLED else ""
    outcome, *said = format_verdict_lines(
        (row.outcome or row.state).upper() + settled,
        row.reasons or [],
        number,
        row.report,
    )
    print(f"  verdict     {outcome}")
    for line in said:
        print(f"    {line}")
    if waits:
        print(f"  again       {describe_judging_again(waits, time.time())}")
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


def _read_waits(workspace: Workspace, db: SqlReader) -> dict[int, dict[str, Any]]:
    """Return the held proposals that can be judged again, by their numbers."""
    from factory.code_loop.held_proposals import read_judging_again_facts

    return {one["proposal"]: one for one in read_judging_again_facts(db, workspace)}


@proposals_app.command("list")
def list_proposals(context: typer.Context, where: WorkspaceOption = DEFAULT, as_json: JsonOption = False) -> None:
    """List all proposals, one line each. A line below a held proposal says when and why it is judged again."""
    _list_proposals(_named(context, where), as_json)


def _named(context: typer.Context, where: Path) -> Path:
    """Return the workspace given after the subcommand or, without one, the workspace given after ``proposals``."""
    return where if where != DEFAULT else context.obj


def _list_proposals(where: Path, as_json: bool) -> None:
    from factory.code_loop.held_proposals import ProposalDescents, describe_judging_again
    from factory.ledger.reader import LedgerReader
    from factory.ledger.rows import ProposalRow

    workspace = Workspace.open(where)
    db = LedgerReader(workspace)
    listed, waits = ProposalRow.select(db), _read_waits(workspace, db)
    if as_json:
        descents = ProposalDescents(db)
        print_json(
            [
                row.select_fields("number agent title branch state predicted_gain outcome")
                | {
                    "again_of": descents.find_repeated(row.number),
                    "sum_of": descents.list_parts(row.number),
                    "judge_again": convert_times_to_iso(waits.get(row.number)),
                }
                for row in listed
            ]
        )
        return
    for row in listed:
        state = row.state if row.state in SETTLED else row.outcome or row.state
        print(f"{row.number:>4}  {state:<11} {row.branch}  {row.title}")
        if one := waits.get(row.number):
            print(f"      {describe_judging_again(one, time.time())}")
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


Numbers = Annotated[list[int] | None, typer.Argument(help="Numbers of proposals, as 'factory proposals' prints them.")]


@proposals_app.command("rejudge")
def rejudge_proposals(
    context: typer.Context,
    numbers: Numbers = None,
    every: Annotated[
        bool, typer.Option("--all", help="All proposals that only noise, a time limit or a missing device held.")
    ] = False,
    where: WorkspaceOption = DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Judge held proposals again now, without waiting for a quiet hour. Each gets a new number, and a new verdict.

    If the code changed since, the patch is first moved on top of the live code. Each judgement of the same patch is another try: it must show
    the gain more clearly than the one before.
    """
    from factory.code_loop.judging_again import judge_every_held_patch_again, judge_proposals_again

    if bool(numbers) == every:
        raise InputError(
            "code_loop.which_again",
            "Name the proposals to judge again, or add '--all'. To see which are held: 'factory proposals'.",
        )
    plant, terminal = open_plant(_named(context, where), as_json)
    with plant.workspace.hold_lock("code-loop"):
        if every:
            done, refused = judge_every_held_patch_again(plant)
        else:
            done, refused = judge_proposals_again(plant, numbers or ()), []
    _show_judged(plant, [one.judged_as for one in done], as_json)
    if as_json:
        print_json({"judged": [_judged_again(plant, one) for one in done], "refused": refused})
        return
    for one in refused:
        terminal.line(f"  {one['why']}")
    if not done and not refused:
        terminal.line(
            Message(
                "code_loop.none_held",
                "  No proposal waits to be judged again: none was held only by noise, a time limit or a missing device.",
            )
        )


@proposals_app.command("combine")
def combine_held_proposals(
    context: typer.Context,
    numbers: Annotated[list[int], typer.Argument(help="Two or more held proposals, each for a target of its own.")],
    where: WorkspaceOption = DEFAULT,
    as_json: JsonOption = False,
) -> None:
    """Judge several held proposals as one patch, their sum. A gain that is too small to be seen in one of them may be clear in the sum.

    Each must have passed everything but the clarity of its timing, and they may not change the same file. If the sum is merged, they are merged
    with it. If it is held or rejected, they stay as they are. The same sum is judged once.
    """
    from factory.code_loop.combining import combine_proposals
    from factory.ledger.rows import ProposalRow

    plant, _ = open_plant(_named(context, where), as_json)
    with plant.workspace.hold_lock("code-loop"):
        number = combine_proposals(plant, numbers)
    _show_judged(plant, [number], as_json)
    if as_json:
        row = ProposalRow.get(plant.ledger, number)
        print_json({"sum_of": sorted(set(numbers))} | row.select_fields("number outcome reasons state"))


def _judged_again(plant: Plant, one: JudgedAgain) -> dict[str, Any]:
    from factory.ledger.rows import ProposalRow

    return one.to_json() | ProposalRow.get(plant.ledger, one.judged_as).select_fields("outcome reasons state")


def _show_judged(plant: Plant, numbers: Sequence[int], as_json: bool) -> None:
    """Show newly judged proposals in MLflow and, unless ``as_json``, print them."""
    from factory.show.unshown_items import show_unshown_items

    show_unshown_items(plant)
    for number in () if as_json else numbers:
        _show_proposal(plant.workspace, number, False)


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
