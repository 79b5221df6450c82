"""The model loop from the command line: ``init``, ``tune``, ``run``, ``train``, ``certify``, ``anneal``, ``average``, ``evaluate``,
``release``."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.cli.app import DEFAULT, AsJson, Where, app, open_workspace, person, print_json
from factory.core.errors import InputError
from factory.ledger.plant import Plant

if TYPE_CHECKING:
    from factory.ledger.ledger import Ledger


@app.command()
def init(
    where: Where = DEFAULT,
    preset: Annotated[
        str,
        typer.Option(help="laptop, one-gpu or eight-gpus: recipe, vocabulary and data policy that fit one another."),
    ] = "",
    recipe: Annotated[str, typer.Option(help="A recipe of policies/recipes/ (default: demo).")] = "",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face tokenizer.json, or its folder (default: the first ingest trains one)."),
    ] = None,
    vocabulary: Annotated[
        int,
        typer.Option(
            help="Entries of the vocabulary, of recipe and tokenizer both (default: the recipe's).", show_default=False
        ),
    ] = 0,
    repository: Annotated[
        str, typer.Option(help="Git repository whose code is trained with and patched (default: this factory's own).")
    ] = "",
    tune: Annotated[bool, typer.Option(help="Time the registered kernels on this machine (as 'factory tune').")] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Allow what is too large for this machine: another machine will train.")
    ] = False,
) -> None:
    """Make a workspace: one folder that holds all state of one factory. Safe to run again."""
    from factory.core.console import Terminal
    from factory.presets.making import InitOptions, make

    code = Path(repository).resolve() if repository else None
    workspace = make(where, InitOptions(preset, recipe, vocabulary, tokenizer, force), code)
    if tune:
        from factory.training.tuning import tune_if_new

        tune_if_new(workspace, Terminal())
    print(f"workspace ready at {workspace.root}")
    if Path(os.environ.get("FACTORY_HOME") or DEFAULT).resolve() != workspace.root:
        print(f"so that later commands find it: export FACTORY_HOME={shlex.quote(str(workspace.root))}")
    print(f"next: drop shards into {workspace.inbox} and run 'factory run --once', or 'factory ingest PATH'")


@app.command()
def tune(
    where: Where = DEFAULT,
    seconds: Annotated[float, typer.Option(min=1, help="Stop timing after this long.")] = 60.0,
    show: Annotated[
        str, typer.Option(help="Print what was found for a class of machine ('all': every class), and time nothing.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Time every registered kernel that is right on this machine, at the recipe's shapes. What policies/kernels.yaml leaves to
    'auto' is the fastest of them from the next segment on; the segment before it certifies the change."""
    from factory.computing.tuned_kernels import describe, every, read
    from factory.core.progress import SILENT
    from factory.training.tuning import tune as measure

    workspace, _, terminal = open_workspace(where)
    if show:
        found = [tuning for _, tuning in every(workspace, "" if show == "all" else show)]
    else:
        found = [read(measure(workspace, SILENT if as_json else terminal, seconds))]
    if as_json:
        print_json(found)
        return
    for tuning in found:
        for line in describe(tuning):
            terminal.line(line)
    if not found:
        terminal.line("nothing is tuned yet: run 'factory tune'")


@app.command()
def run(
    where: Where = DEFAULT,
    once: Annotated[bool, typer.Option("--once", help="Stop when there is nothing left to do.")] = False,
) -> None:
    """The daemon: ingest what lands in the inbox, train, evaluate, gate, release; again and again. Stop it with Ctrl-C, kill it at will."""
    from factory.core.console import Terminal
    from factory.duties.runner import run as run_daemon
    from factory.duties.steady import patiently
    from factory.watching.log import LoggedProgress
    from factory.watching.metrics import serving

    def start() -> None:
        workspace, ledger, terminal = open_workspace(where)
        terminal.keeps_on = not once
        with serving(workspace) as port:
            progress = LoggedProgress(workspace, terminal)
            if port:
                progress.line(f"  numbers for Prometheus: http://127.0.0.1:{port}/metrics")
            run_daemon(Plant(workspace, ledger, progress), once=once)

    if once:
        start()
    else:
        patiently(start, Terminal().line)


@app.command()
def train(
    where: Where = DEFAULT,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of this segment (default: the recipe's).")] = None,
) -> None:
    """Train the trunk for one more segment over all ingested shards."""
    from factory.core.workspace import MODEL_LOOP
    from factory.duties.training import train as train_segment
    from factory.repairs.mending import with_mending
    from factory.retrying.asking import refuse_paused
    from factory.retrying.tries import open_segment
    from factory.training.planning import plan_trunk

    workspace, ledger, terminal = open_workspace(where)
    with workspace.lock(MODEL_LOOP):
        refuse_paused(ledger)
        waiting = open_segment(ledger)
        if waiting:
            terminal.line(f"  segment {waiting} was interrupted: it is finished first")
            train_segment(Plant(workspace, ledger, terminal), waiting)
        plan = lambda: plan_trunk(Plant(workspace, ledger, terminal), steps)
        train_segment(Plant(workspace, ledger, terminal), with_mending(Plant(workspace, ledger, terminal), plan))


@app.command()
def certify(
    where: Where = DEFAULT,
    take: Annotated[
        int | None,
        typer.Option("--accept", help="Let this segment start with the code as it is; recorded with your name."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What changes of the code did to training: old and new code run on the same data, and the difference held against seed noise."""
    from factory.training.certifying import accept, every_certificate

    workspace, ledger, terminal = open_workspace(where)
    if take is not None:  # one transaction: works while the daemon runs
        accept(Plant(workspace, ledger), take, person())
    found = every_certificate(ledger)
    if as_json:
        print_json(found)
        return
    if not found:
        terminal.line("  no certificate yet: the first is made when the code's commit changes between two segments")
    for row in found:
        state = {"promote": "certified", "hold": "not certified", "reject": "NOT CERTIFIED"}[row["outcome"]]
        state += f", accepted by {row['accepted']['by']}" if row["accepted"] else ""
        facts = row["evidence"]
        if row["gate"] == "preflight":
            what = f"preflight of {facts['commit'][:12]}, {facts['seconds']:.0f} s; {facts['file']}"
            terminal.line(f"segment {row['segment']}: {state}  ({what})")
            for reason in row["reasons"]:
                terminal.line(f"    {reason}")
            continue
        ran = (
            f", {facts['steps']} steps from {facts['first_step']}, {len(facts['seeds'])} seeds"
            if facts["steps"]
            else ""
        )
        terminal.line(
            f"segment {row['segment']}: {state}  ({facts['old_commit'][:12]} → {facts['new_commit'][:12]}{ran}; {facts['file']})"
        )
        for reason in row["reasons"]:
            terminal.line(f"    {reason}")


@app.command()
def anneal(where: Where = DEFAULT) -> None:
    """Branch off the trunk with a decaying rate: yields a candidate."""
    from factory.core.workspace import MODEL_LOOP
    from factory.duties.releasing import unexported
    from factory.duties.training import train as train_segment
    from factory.repairs.mending import with_mending
    from factory.retrying.asking import refuse_paused
    from factory.retrying.tries import open_segment
    from factory.training.exporting import export_candidate
    from factory.training.planning import plan_anneal

    workspace, ledger, terminal = open_workspace(where)
    with workspace.lock(MODEL_LOOP):
        refuse_paused(ledger)
        waiting = open_segment(ledger)
        if waiting:
            train_segment(Plant(workspace, ledger, terminal), waiting)
        number = next(iter(unexported(ledger)), None)  # an anneal that was cut short is finished, not done twice
        if number is None:
            plan = lambda: plan_anneal(Plant(workspace, ledger, terminal))
            number = with_mending(Plant(workspace, ledger, terminal), plan)
            train_segment(Plant(workspace, ledger, terminal), number)
        terminal.line(f"  candidate {export_candidate(Plant(workspace, ledger), number)}")


@app.command()
def average(
    where: Where = DEFAULT,
    last: Annotated[
        int | None,
        typer.Option(min=2, help="How many of the newest kept checkpoints (default: up to 5, as there are)."),
    ] = None,
    by_held_out_loss: Annotated[
        bool, typer.Option("--by-held-out-loss", help="Weigh each checkpoint by its loss on held-out documents.")
    ] = False,
    segment: Annotated[
        int | None, typer.Option(help="Segment whose checkpoints are averaged (default: the newest trunk segment).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Average kept checkpoints of one run: yields a candidate, like an anneal does, without training. Safe to repeat."""
    from factory.core.progress import SILENT
    from factory.core.workspace import MODEL_LOOP
    from factory.duties.training import train as make
    from factory.ledger.rows import SegmentRow
    from factory.training.averaging import plan_average
    from factory.training.exporting import export_candidate

    workspace, ledger, terminal = open_workspace(where)
    with workspace.lock(MODEL_LOOP):
        number = plan_average(
            Plant(workspace, ledger), "held-out-loss" if by_held_out_loss else "uniform", segment, last
        )
        make(Plant(workspace, ledger, SILENT if as_json else terminal), number)
        candidate = export_candidate(Plant(workspace, ledger), number)
    if as_json:
        result = SegmentRow.get(ledger, number).result or {}
        print_json({"candidate": candidate, "segment": number, "averaged": result["averaged"]})
    else:
        terminal.line(f"  candidate {candidate}: judge it with 'factory evaluate {candidate}'")


@app.command()
def evaluate(
    candidate: Annotated[int | None, typer.Argument(help="Candidate number (default: the newest).")] = None,
    where: Where = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Measure a candidate on held-out documents and judge it against the champion. While the daemon runs, it does so in its next pass."""
    from factory.cli.core.beside_daemon import hold_or_ask
    from factory.core.progress import SILENT
    from factory.duties.releasing import judge
    from factory.ledger.rows import EvaluationRow, VerdictRow
    from factory.show.catching_up import catch_up

    workspace, ledger, terminal = open_workspace(where)
    plant = Plant(workspace, ledger, SILENT if as_json else terminal)
    number = _candidate(ledger, candidate)
    with ExitStack() as held:
        if said := hold_or_ask(held, Plant(workspace, ledger), [f"judge {number}"]):
            print_json({"candidate": number, "says": said}) if as_json else terminal.line(f"  {said}")
            return
        verdict = judge(plant, number)
        catch_up(plant)
    if as_json:
        evaluation, row = EvaluationRow.newest(ledger, number), VerdictRow.get(ledger, verdict)
        shown = {"evaluation": evaluation and evaluation.summary, "verdict": row.with_evidence(ledger)}
        print_json({"candidate": number, **shown})


@app.command()
def release(
    candidate: Annotated[int | None, typer.Argument(help="Candidate number (default: the newest).")] = None,
    where: Where = DEFAULT,
    rollback: Annotated[int | None, typer.Option(help="Make this older release champion again.")] = None,
    bundle: Annotated[
        int | None, typer.Option(help="Write this release as a folder that others can check with 'factory verify'.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The bundle's folder (default: bundles/ of the workspace).")] = None,
    data: Annotated[bool, typer.Option("--data", help="With the documents whose licence allows it.")] = False,
    traces: Annotated[bool, typer.Option("--traces", help="With metrics and the checkpoints that are kept.")] = False,
    key: Annotated[
        Path | None,
        typer.Option(help="Private key to sign with (PEM; default: the workspace's own, made at first use)."),
    ] = None,
    licence: Annotated[
        str,
        typer.Option(
            "--licence", "--license", help="Licence of the weights, as an SPDX expression (default: NOASSERTION)."
        ),
    ] = "",
) -> None:
    """Release a candidate that the gate promoted (this is the approval, where the policy requires one), roll back, or bundle a release."""
    from factory.bundles.wish import Wish
    from factory.cli.releases.bundle import write as write_bundle
    from factory.ledger.rows import champion
    from factory.release.checks import newest_verdict
    from factory.release.releases import release as release_verdict
    from factory.release.releases import rollback as roll_back
    from factory.show.catching_up import catch_up

    asked = [
        name for name, value in (("CANDIDATE", candidate), ("--rollback", rollback), ("--bundle", bundle)) if value is not None
    ]  # fmt: skip
    if len(asked) > 1:
        raise InputError(f"one at a time: {' and '.join(asked)} were given; nothing was released")
    if bundle is None and (out or data or traces or key or licence):
        raise InputError(
            "--out, --data, --traces, --key and --licence are of a bundle: --bundle N says of which release; nothing was released"
        )
    # Releases have a lock of their own: this works while the daemon runs.
    workspace, ledger, terminal = open_workspace(where)
    if bundle is not None:
        write_bundle(Plant(workspace, ledger), terminal, bundle, Wish(out, data, traces, key, licence or Wish.licence))
        return
    if rollback is not None:
        roll_back(Plant(workspace, ledger), rollback)
        catch_up(Plant(workspace, ledger, terminal))
        terminal.line(f"  release {rollback} is champion again")
        return
    verdict = newest_verdict(ledger, _candidate(ledger, candidate))
    done = release_verdict(Plant(workspace, ledger, terminal), verdict.id, approved_by=person())
    catch_up(Plant(workspace, ledger, terminal))
    best = champion(ledger)
    state = "is champion" if best and best.number == done else "is published, but another one is champion (--rollback)"
    terminal.line(f"  release {done} {state}")


def _candidate(ledger: Ledger, number: int | None) -> int:
    """The candidate of that number, or the newest. Raises: InputError."""
    from factory.ledger.rows import CandidateRow

    newest = CandidateRow.first(ledger, "ORDER BY id DESC")
    if newest is None:
        raise InputError("there is no candidate yet: 'factory run' makes one once there are shards to train on")
    return (newest if number is None else CandidateRow.get(ledger, number)).id
