"""The model loop from the command line: ``init``, ``tune``, ``run``, ``train``, ``certify``, ``anneal``, ``average``, ``evaluate``,
``release``, ``serve``."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.cli.app import DEFAULT, Say, Where, app, command, open_plant, person
from factory.core.errors import InputError, nearest
from factory.core.workspace import Workspace
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


@command(app)
def tune(
    plant: Plant,
    say: Say,
    seconds: Annotated[float, typer.Option(min=1, help="Stop timing after this long.")] = 60.0,
) -> None:
    """Time every registered kernel that is right on this machine, at the recipe's shapes. What policies/kernels.yaml leaves to
    'auto' is the fastest of them from the next segment on; the segment before it certifies the change."""
    from factory.computing.tuned_kernels import describe, read
    from factory.training.tuning import tune as measure

    found = read(measure(plant.workspace, plant.progress, seconds))
    say([found], describe(found))


@app.command()
def run(
    where: Where = DEFAULT,
    once: Annotated[bool, typer.Option("--once", help="Stop when there is nothing left to do.")] = False,
) -> None:
    """The daemon: ingest what lands in the inbox, train, evaluate, gate, release; again and again. Stop it with Ctrl-C, kill it at will."""
    from factory.core.console import Terminal
    from factory.duties.back_off import with_retries
    from factory.duties.runner import run as run_daemon
    from factory.status.log import LoggedProgress
    from factory.status.metrics import serving

    def start() -> None:
        plant, terminal = open_plant(where)
        terminal.keeps_on = not once
        with serving(plant.workspace) as port:
            progress = LoggedProgress(plant.workspace, terminal)
            if port:
                progress.line(f"  numbers for Prometheus: http://127.0.0.1:{port}/metrics")
            run_daemon(plant.reporting_to(progress), once=once)

    if once:
        start()
    else:
        with_retries(start, Terminal().line)


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

    plant, terminal = open_plant(where)
    with plant.workspace.lock(MODEL_LOOP):
        refuse_paused(plant.ledger)
        waiting = open_segment(plant.ledger)
        if waiting:
            terminal.line(f"  segment {waiting} was interrupted: it is finished first")
            train_segment(plant, waiting)
        plan = lambda: plan_trunk(plant, steps)
        train_segment(plant, with_mending(plant, plan))


@command(app)
def certify(
    plant: Plant,
    say: Say,
    take: Annotated[
        int | None,
        typer.Option("--accept", help="Let this segment start with the code as it is; recorded with your name."),
    ] = None,
) -> None:
    """What changes of the code did to training: old and new code run on the same data, and the difference held against seed noise."""
    from factory.training.certifying import accept, every_certificate

    if take is not None:  # one transaction: works while the daemon runs
        accept(plant, take, person())
    found = every_certificate(plant.ledger)
    say(found)
    if not found:
        say.line("  no certificate yet: the first is made when the code's commit changes between two segments")
    for row in found:
        state = {"promote": "certified", "hold": "not certified", "reject": "NOT CERTIFIED"}[row["outcome"]]
        state += f", accepted by {row['accepted']['by']}" if row["accepted"] else ""
        facts = row["evidence"]
        if row["gate"] == "preflight":
            what = f"preflight of {facts['commit'][:12]}, {facts['seconds']:.0f} s"
        else:
            what = f"{facts['old_commit'][:12]} → {facts['new_commit'][:12]}"
            if facts["steps"]:
                what += f", {facts['steps']} steps from {facts['first_step']}, {len(facts['seeds'])} seeds"
        say.line(f"segment {row['segment']}: {state}  ({what}; {facts['file']})")
        for reason in row["reasons"]:
            say.line(f"    {reason}")


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

    plant, terminal = open_plant(where)
    with plant.workspace.lock(MODEL_LOOP):
        refuse_paused(plant.ledger)
        waiting = open_segment(plant.ledger)
        if waiting:
            train_segment(plant, waiting)
        number = next(iter(unexported(plant.ledger)), None)  # an anneal that was cut short is finished, not done twice
        if number is None:
            plan = lambda: plan_anneal(plant)
            number = with_mending(plant, plan)
            train_segment(plant, number)
        terminal.line(f"  candidate {export_candidate(plant, number)}")


@command(app)
def average(
    plant: Plant,
    say: Say,
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
) -> None:
    """Average kept checkpoints of one run: yields a candidate, like an anneal does, without training. Safe to repeat."""
    from factory.core.workspace import MODEL_LOOP
    from factory.duties.training import train as make
    from factory.ledger.rows import SegmentRow
    from factory.training.averaging import plan_average
    from factory.training.exporting import export_candidate

    with plant.workspace.lock(MODEL_LOOP):
        number = plan_average(plant, "held-out-loss" if by_held_out_loss else "uniform", segment, last)
        make(plant, number)
        candidate = export_candidate(plant, number)
    result = SegmentRow.get(plant.ledger, number).result or {}
    found = {"candidate": candidate, "segment": number, "averaged": result["averaged"]}
    say(found, f"  candidate {candidate}: judge it with 'factory evaluate {candidate}'")


@command(app)
def evaluate(
    plant: Plant,
    say: Say,
    candidate: Annotated[int | None, typer.Argument(help="Candidate number (default: the newest).")] = None,
) -> None:
    """Measure a candidate on held-out documents and judge it against the champion. While the daemon runs, it does so in its next pass."""
    from factory.cli.core.ask_daemon import hold_or_ask
    from factory.duties.releasing import judge
    from factory.ledger.rows import EvaluationRow, VerdictRow
    from factory.show.catching_up import catch_up

    number = _candidate(plant.ledger, candidate)
    with ExitStack() as held:
        if said := hold_or_ask(held, plant, [f"judge {number}"]):
            say({"candidate": number, "says": said}, f"  {said}")
            return
        verdict = judge(plant, number)
        catch_up(plant)
    evaluation, row = EvaluationRow.newest(plant.ledger, number), VerdictRow.get(plant.ledger, verdict)
    shown = {"evaluation": evaluation and evaluation.summary, "verdict": row.with_evidence(plant.ledger)}
    say({"candidate": number, **shown})


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
    plant, terminal = open_plant(where)
    if bundle is not None:
        from factory.bundles.writing import BundleOptions
        from factory.cli.releases.bundle import write as write_bundle

        write_bundle(plant, bundle, BundleOptions(out, data, traces, key, licence or BundleOptions.licence))
        return
    if rollback is not None:
        roll_back(plant, rollback)
        catch_up(plant)
        terminal.line(f"  release {rollback} is champion again")
        return
    verdict = newest_verdict(plant.ledger, _candidate(plant.ledger, candidate))
    done = release_verdict(plant, verdict.id, approved_by=person())
    catch_up(plant)
    best = champion(plant.ledger)
    state = "is champion" if best and best.number == done else "is published, but another one is champion (--rollback)"
    terminal.line(f"  release {done} {state}")


def _candidate(ledger: Ledger, number: int | None) -> int:
    """The candidate of that number, or the newest. Raises: InputError."""
    from factory.ledger.rows import CandidateRow

    newest = CandidateRow.first(ledger, "ORDER BY id DESC")
    if newest is None:
        raise InputError("there is no candidate yet: 'factory run' makes one once there are shards to train on")
    return (newest if number is None else CandidateRow.get(ledger, number)).id


ENGINES = ("native", "vllm")


@app.command()
def serve(
    where: Where = DEFAULT,
    engine: Annotated[
        str,
        typer.Option(
            help="native: this factory's own, on any machine. vllm: faster on a GPU; 'make serve-env' installs it."
        ),
    ] = "native",
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that others can reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one, which is printed.")] = 8000,
    key: Annotated[
        str,
        typer.Option(envvar="FACTORY_SERVE_KEY", help="What clients must send as bearer token; others see it in 'ps'."),
    ] = "",
) -> None:
    """Serve the champion at an OpenAI-compatible address, and every later champion after it, without losing a request.

    It follows the ledger: a release, or 'factory release --rollback N', starts a second engine beside the first, which is held to the
    export's hash and to what the judge's own model says, takes over, and only then the first one ends. Needs memory for both.
    """
    from factory.serving.engines import native
    from factory.serving.serve import serve as serve_champion
    from factory.serving.vllm import vllm

    if engine not in ENGINES:
        raise InputError(f"--engine: there is no {engine!r}{nearest(engine, ENGINES)}")
    workspace = Workspace.open(where)
    kind = native() if engine == "native" else vllm()
    serve_champion(workspace, kind, host=host, port=port, key=key, say=lambda line: print(line, flush=True))
