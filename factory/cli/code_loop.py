"""The code loop from the command line: ``propose``, ``proposals`` and what people decide about them, ``audit``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from factory.cli.app import DEFAULT, AsJson, Say, Where, app, command, open_plant, person, print_json
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from factory.ledger.plant import Plant

proposals_app = typer.Typer(
    help="The patches that agents proposed, and the verdict on each.",
    rich_markup_mode=None,
    invoke_without_command=True,
)
app.add_typer(proposals_app, name="proposals")


MODELS = ("kernel-engineer", "recipe-scout")  # agents that may be a language model
SETTLED = ("approved", "rejected", "reverted", "superseded")


@app.command()
def propose(
    where: Where = DEFAULT,
    agent: Annotated[
        str,
        typer.Option(
            help="Which agent proposes: 'kernel-engineer' (an LLM) or 'search' (none) make the step faster; 'recipe-scout' (with an LLM "
            "or without) makes the model learn more. By default one that makes the step faster."
        ),
    ] = "",
    endpoint: Annotated[
        str,
        typer.Option(
            help="Where the LLM is: a base URL (OpenAI-compatible); 'champion': our own release, served by 'factory serve'; files:FOLDER to "
            "answer by hand; 'none': no LLM, whatever is configured."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="The LLM's name there; agents.yaml's when not given.")] = "",
    target: Annotated[
        str, typer.Option(help="What to improve: an op, or file:line of the profile; a key of the recipe.")
    ] = "",
    interactive: Annotated[bool, typer.Option("--interactive", help="Ask me between rounds.")] = False,
    count: Annotated[
        int, typer.Option(min=1, max=64, help="So many proposals, each of another target, drafted side by side.")
    ] = 1,
) -> None:
    """The code loop, once: profile the training step, propose a patch on a git branch, let the patch gate judge it.

    With an endpoint (--endpoint, llm.endpoint in policies/agents.yaml, or OPENAI_BASE_URL; the key is OPENAI_API_KEY) the
    kernel engineer proposes, otherwise the search proposer. With --agent recipe-scout changed values of the recipe are
    judged by what they learn. Killed at any moment, the same command goes on. Several (--count) wait for the model
    together; what is timed has its GPU, or the CPU, alone.
    """
    from agents.kernel_engineer.draft import AGENT
    from factory.code_loop.agent_runs import AgentOptions, wants_model
    from factory.code_loop.proposing import propose as propose_patch
    from factory.show.catching_up import catch_up

    plant, terminal = open_plant(where)
    options = AgentOptions(endpoint, model, target, _ask if interactive else None)
    if not agent:
        agent = AGENT if wants_model(plant.workspace, options) else "search"
        if agent != AGENT:
            terminal.line("  no LLM endpoint is configured: the search proposer is used")
    try:
        with plant.workspace.lock("code-loop"):
            numbers = propose_patch(plant, agent=agent, options=options, count=count)
    finally:  # what was judged before an error, too
        catch_up(plant)
    for number in numbers:
        _show_proposal(plant.workspace, number, False)


def _ask(question: str) -> str:
    """A person's answer. Raises: InputError at the end of the input; the run is kept."""
    print(question, flush=True)
    try:
        return input("> ")
    except EOFError:
        raise InputError("standard input ended before an answer: run the same command again to go on") from None


def _show_proposal(workspace: Workspace, number: int, as_json: bool) -> None:
    from agents.core.proposal import gain_words
    from agents.core.untrusted import one_line
    from factory.ledger.reader import Reader
    from factory.ledger.rows import ProposalRow

    db = Reader(workspace)
    row = ProposalRow.get(db, number)
    if as_json:
        print_json(vars(row) | {"evidence": row.evidence(db) or None})
        return
    gain = f" (predicted {gain_words(row.target, row.predicted_gain)})" if row.predicted_gain else ""
    print(
        f"proposal {row.number} by {row.agent} on branch {row.branch}\n  target      {row.target}\n"
        f"  change      {row.title}\n  hypothesis  {row.hypothesis}{gain}"
    )
    settled = f", {row.state}" if row.state in SETTLED else ""
    print(f"  verdict     {(row.outcome or row.state).upper()}{settled}")
    for reason in row.reasons or []:
        print(f"    {one_line(reason, 1000)}")
    if row.agent in MODELS:
        spent = "SELECT COUNT(*) AS n, SUM(e.tokens) AS tokens, SUM(e.usd) AS usd FROM exchanges e JOIN agent_runs a ON a.id = e.run "
        cost = db.read(spent + "WHERE a.proposal = :number", number=number)[0]
        if cost["n"]:
            print(f"  LLM         {cost['n']} exchanges, {cost['tokens'] or 0:,} tokens, {cost['usd'] or 0:.4f} USD")
    if row.outcome == "promote" and row.state == "judged":
        print(f"  merge it    factory proposals approve {row.number}")
    print(f"  see it      git -C {workspace.repository} show {row.branch}\n  report      {row.report}")


@proposals_app.callback()
def proposals_default(context: typer.Context, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """The patches that agents proposed, and the verdict on each."""
    context.obj = where
    if context.invoked_subcommand is None:
        _list_proposals(where, as_json)


@proposals_app.command("list")
def proposals_list(context: typer.Context, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """All proposals, a line each."""
    _list_proposals(_named(context, where), as_json)


def _named(context: typer.Context, where: Path) -> Path:
    """The workspace named after the subcommand, or else after ``proposals``."""
    return where if where != DEFAULT else context.obj


def _list_proposals(where: Path, as_json: bool) -> None:
    from factory.ledger.reader import Reader
    from factory.ledger.rows import ProposalRow

    listed = ProposalRow.select(Reader(Workspace.open(where)))
    if as_json:
        print_json([row.only("number agent title branch state predicted_gain outcome") for row in listed])
        return
    for row in listed:
        state = row.state if row.state in SETTLED else row.outcome or row.state
        print(f"{row.number:>4}  {state:<10} {row.branch}  {row.title}")
    if not listed:
        print("no proposals yet: run 'factory propose'")


@proposals_app.command("show")
def proposals_show(context: typer.Context, number: int, where: Where = DEFAULT, as_json: AsJson = False) -> None:
    """One proposal: hypothesis, prediction, evidence, verdict."""
    _show_proposal(Workspace.open(_named(context, where)), number, as_json)


Number = Annotated[int, typer.Argument(help="The proposal's number, as 'factory proposals' lists it.")]
Why = Annotated[str, typer.Option(help="The reason, for the ledger.")]


@proposals_app.command("approve")
def proposals_approve(context: typer.Context, number: Number, where: Where = DEFAULT) -> None:
    """Merge a proposal that the gate promotes into the checked-out branch of the repository.

    The approval is of exactly the patch that was judged. If the code moved on since, the gate judges it again first.
    """
    from factory.code_loop.approvals import approve

    _decide(context, where, number, lambda plant: approve(plant, number, person()))


@proposals_app.command("reject")
def proposals_reject(context: typer.Context, number: Number, where: Where = DEFAULT, why: Why = "") -> None:
    """Reject a judged proposal, whatever its verdict. Its branch stays."""
    from factory.code_loop.approvals import reject

    _decide(context, where, number, lambda plant: reject(plant.ledger, number, person(), why))


@proposals_app.command("revert")
def proposals_revert(context: typer.Context, number: Number, where: Where = DEFAULT, why: Why = "") -> None:
    """Undo an approved proposal with a commit of its own."""
    from factory.code_loop.approvals import revert

    _decide(context, where, number, lambda plant: revert(plant, number, person(), why))


def _decide(context: typer.Context, where: Path, number: int, decision: Callable[[Plant], object]) -> None:
    """Carry out a person's decision under the code loop's lock, and show it in MLflow."""
    from factory.show.catching_up import catch_up

    plant, _ = open_plant(_named(context, where))
    with plant.workspace.lock("code-loop"):
        decision(plant)
    catch_up(plant)
    _show_proposal(plant.workspace, number, False)


@command(app)
def audit(
    plant: Plant,
    say: Say,
    segment: Annotated[
        int | None, typer.Option(help="Audit this segment now, even if its last tries could not be measured.")
    ] = None,
) -> None:
    """Replay the windows of finished segments that wait for it, without the patches that agents wrote; list all that was found.

    The daemon does this by itself when there is nothing else to do; while it runs, it does what is asked for here in its next pass. A difference
    opens a proposal that undoes the patch.
    """
    from factory.audit.auditing import audit
    from factory.audit.drawing import every_audit, waiting
    from factory.audit.policy import AuditPolicy
    from factory.cli.core.ask_daemon import hold_or_ask
    from factory.code_loop.reverting import open_reverts
    from factory.ledger.rows import SegmentRow
    from factory.show.catching_up import catch_up

    numbers = (
        waiting(plant.ledger, AuditPolicy.load(plant.workspace.policy("gates/audit.yaml")))
        if segment is None
        else [segment]
    )
    if numbers:
        with ExitStack() as held:
            wanted = [f"audit {SegmentRow.get(plant.ledger, number).id}" for number in numbers]
            if said := hold_or_ask(held, plant, wanted):
                say({"segments": numbers, "says": said}, f"  {said}")
                return
            for number in numbers:
                audit(plant, number)
            open_reverts(plant)
            catch_up(plant)
    found = every_audit(plant.ledger)
    say(found)
    for row in found:
        verdict = row["verdict"]
        state = (
            {"promote": "agrees", "hold": "not measured", "reject": "DIFFERS"}[verdict["outcome"]]
            if verdict
            else "waits"
        )
        patches = ", ".join(map(str, row["patches"]))
        say.line(f"segment {row['segment']}, steps {row['first']}–{row['last']}, without proposals {patches}: {state}")
        for reason in verdict["reasons"] if verdict else ():
            say.line(f"    {reason}")
    if not found:
        say.line("  no window was drawn yet: the first is when a segment trains with a patch that an agent wrote")
