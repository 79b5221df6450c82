"""Commands of the model loop: ``factory tune``, ``run``, ``train``, ``certify``, ``anneal``, ``average``, ``evaluate``, ``release`` and ``serve``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factory.cli.app import (
    DEFAULT,
    AnswerPrinter,
    WorkspaceOption,
    app,
    get_current_user,
    open_plant,
    register_command,
)
from factory.core.errors import InputError, suggest_name
from factory.core.workspace import MODEL_LOOP, Workspace
from factory.ledger.plant import Plant
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.ledger.ledger import Ledger


@register_command(app)
def tune(
    plant: Plant,
    say: AnswerPrinter,
    seconds: Annotated[float, typer.Option(min=1, help="Stop timing after this many seconds.")] = 60.0,
    rate: Annotated[
        bool,
        typer.Option(
            "--rate",
            help="Search the learning rate instead, by a short run with a rising rate, and write it into the recipe.",
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=8, max=1000, help="With --rate: steps of that run.")] = 64,
) -> None:
    """Time every registered kernel that gives correct results on this machine, at the recipe's shapes.

    From the next segment on, each op that policies/kernels.yaml sets to 'auto' uses the fastest kernel. A certificate checks that the
    change does not alter training.
    """
    if rate:
        from factory.training.rate_finder import describe_found_rate, find_rate, write_rate

        with plant.workspace.hold_lock(MODEL_LOOP):
            searched = find_rate(plant, steps)
            file = write_rate(plant, searched)
        say([vars(searched) | {"recipe": str(file)}], describe_found_rate(searched, file))
        return
    from factory.computing.tuned_kernels import describe_tuning, read_tuning
    from factory.training.tuning import tune_kernels as measure

    found = read_tuning(measure(plant.workspace, plant.progress, seconds))
    say([found], describe_tuning(found))


@app.command()
def run(
    where: WorkspaceOption = DEFAULT,
    once: Annotated[bool, typer.Option("--once", help="Stop when nothing is left to do.")] = False,
) -> None:
    """Run the daemon: ingest files from the inbox, train, evaluate, judge and release, over and over.

    Stop the daemon with Ctrl-C. You can also kill the daemon at any moment: it continues when you start it again.
    """
    from factory.core.console import Terminal
    from factory.duties.back_off import retry_during_faults
    from factory.duties.runner import run_daemon as run_daemon
    from factory.status.daemon_log import LoggedProgress
    from factory.status.metrics import serve_metrics

    def start() -> None:
        plant, terminal = open_plant(where)
        terminal.keeps_on = not once
        with serve_metrics(plant.workspace) as port:
            progress = LoggedProgress(plant.workspace, terminal)
            if port:
                progress.line(
                    Message(
                        "model_loop.metrics_address",
                        "  Prometheus can read the factory's metrics at http://127.0.0.1:{port}/metrics",
                        port=port,
                    )
                )
            run_daemon(plant.with_progress(progress), once=once)

    if once:
        start()
        _say_that_data_are_missing(Workspace.open(where))
    else:
        retry_during_faults(start, Terminal().line)


def _say_that_data_are_missing(workspace: Workspace) -> None:
    from factory.ledger.reader import LedgerReader
    from factory.status.status import read_newest_trunk_forecast

    ahead = read_newest_trunk_forecast(LedgerReader(workspace))
    if ahead and ahead["missing_tokens"]:
        print(
            Message(
                "model_loop.little_data",
                "Training waits for data: at least {tokens:,} more tokens are needed. Ingest more: 'factory ingest PATH'. To train on less, lower "
                "schedule.anneal_steps, or batch.sequences with batch.micro_sequences, in {file}",
                tokens=ahead["missing_tokens"], file=workspace.recipe_path(),
            )
        )  # fmt: skip


@app.command()
def train(
    where: WorkspaceOption = DEFAULT,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps to train (default: the recipe's).")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            help="A key of the recipe's model that differs from the last segment's, such as rope_theta. Repeat the option for several keys."
        ),
    ] = None,
    no_rate_finder: Annotated[
        bool,
        typer.Option(
            "--no-rate-finder",
            help="Keep the learning rate of an imported model, instead of searching it by a short run before its first training.",
        ),
    ] = False,
) -> None:
    """Train the trunk for one more segment, on all ingested shards."""
    from factory.core.workspace import MODEL_LOOP
    from factory.duties.training import train_segment as train_segment
    from factory.repairs.repairing import call_and_repair_on_failure
    from factory.retrying.daemon_requests import refuse_while_paused
    from factory.retrying.trainer_deaths import find_open_segment
    from factory.training.planning import plan_trunk
    from factory.training.rate_finder import find_rate_if_due

    plant, terminal = open_plant(where)
    with plant.workspace.hold_lock(MODEL_LOOP):
        refuse_while_paused(plant.ledger)
        waiting = find_open_segment(plant.ledger)
        if waiting:
            terminal.line(
                Message(
                    "model_loop.finishes_segment",
                    "  Segment {segment} was interrupted. The factory finishes it first.",
                    segment=waiting,
                )
            )
            train_segment(plant, waiting)

        def plan() -> int:
            find_rate_if_due(plant, steps, change or (), not no_rate_finder)
            return plan_trunk(plant, steps, change or ())

        train_segment(plant, call_and_repair_on_failure(plant, plan))


@register_command(app)
def certify(
    plant: Plant,
    say: AnswerPrinter,
    take: Annotated[
        int | None,
        typer.Option("--accept", help="Let this segment start without a certificate. The ledger keeps your name."),
    ] = None,
) -> None:
    """List the certificates of code changes: old and new code trained on the same data, and their difference compared with seed noise."""
    from factory.training.certifying import accept_code, list_certificates

    if take is not None:  # one transaction, so it works while the daemon runs
        accept_code(plant, take, get_current_user())
    found = list_certificates(plant.ledger)
    say(found)
    if not found:
        say.print_line(
            Message(
                "model_loop.no_certificate",
                "  No certificate was made yet. The first certificate is made when the code's commit changes between two segments.",
            )
        )
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
        say.print_line(f"segment {row['segment']}: {state}  ({what}; {facts['file']})")
        for reason in row["reasons"]:
            say.print_line(f"    {reason}")


@app.command()
def anneal(where: WorkspaceOption = DEFAULT) -> None:
    """Train an anneal branch off the trunk, with a decaying learning rate, and export it as a candidate."""
    from factory.core.workspace import MODEL_LOOP
    from factory.duties.releasing import find_unexported_segments
    from factory.duties.training import train_segment as train_segment
    from factory.repairs.repairing import call_and_repair_on_failure
    from factory.retrying.daemon_requests import refuse_while_paused
    from factory.retrying.trainer_deaths import find_open_segment
    from factory.training.exporting import export_candidate
    from factory.training.planning import plan_anneal

    plant, terminal = open_plant(where)
    with plant.workspace.hold_lock(MODEL_LOOP):
        refuse_while_paused(plant.ledger)
        waiting = find_open_segment(plant.ledger)
        if waiting:
            train_segment(plant, waiting)
        number = next(
            iter(find_unexported_segments(plant.ledger)), None
        )  # an anneal that was trained but not exported is only exported
        if number is None:
            plan = lambda: plan_anneal(plant)
            number = call_and_repair_on_failure(plant, plan)
            train_segment(plant, number)
        terminal.line(f"  candidate {export_candidate(plant, number)}")


@register_command(app)
def average(
    plant: Plant,
    say: AnswerPrinter,
    last: Annotated[
        int | None,
        typer.Option(min=2, help="How many of the newest kept checkpoints to average (default: up to 5)."),
    ] = None,
    by_held_out_loss: Annotated[
        bool, typer.Option("--by-held-out-loss", help="Weight each checkpoint by its loss on held-out documents.")
    ] = False,
    segment: Annotated[
        int | None, typer.Option(help="The segment whose checkpoints are averaged (default: the newest trunk segment).")
    ] = None,
    with_release: Annotated[
        int | None,
        typer.Option(
            "--with-release",
            min=0,
            help="Average the newest trained candidate, or the end of --segment, with this release. Held-out documents choose the weights.",
        ),
    ] = None,
) -> None:
    """Average kept checkpoints of one segment, or a trained model and a release, and export the result as a candidate. Safe to repeat."""
    from factory.core.workspace import MODEL_LOOP
    from factory.duties.training import train_segment as make
    from factory.ledger.rows import SegmentRow
    from factory.training.averaging import WeightingRule, plan_average
    from factory.training.exporting import export_candidate

    if with_release is not None and (last is not None or by_held_out_loss):
        raise InputError(
            "model_loop.release_average_options",
            "--with-release averages two checkpoints and chooses their weights itself. Nothing was averaged. Leave out --last and "
            "--by-held-out-loss.",
        )
    rule: WeightingRule = "held-out-loss" if by_held_out_loss else "uniform"
    with plant.workspace.hold_lock(MODEL_LOOP):
        number = plan_average(plant, rule if with_release is None else "release", segment, last, with_release)
        make(plant, number)
        candidate = export_candidate(plant, number)
    result = SegmentRow.get(plant.ledger, number).result or {}
    found = {"candidate": candidate, "segment": number, "averaged": result["averaged"]}
    said = Message(
        "model_loop.averaged",
        "  Candidate {candidate} is the average of the checkpoints. To judge the candidate: 'factory evaluate {candidate}'",
        candidate=candidate,
    )
    say(found, [*_list_release_averages(found["averaged"]), said])


def _list_release_averages(averaged: dict[str, Any]) -> list[str]:
    """A line for each measured average of a release; none for another rule."""
    return [
        Message(
            "model_loop.release_average",
            "  release × {weight:.1f}: mean {mean:.4f} bits per byte ({domains}){worse}",
            weight=row["release_weight"],
            mean=row["mean"],
            domains=[f"{domain} {bits:.4f}" for domain, bits in row["bits_per_byte"].items()],
            worse=Message(
                "model_loop.worse_than_release", ", worse than the release in {domains}", domains=list(row["lost"])
            )
            if row["lost"]
            else "",
        )
        for row in averaged.get("table", ())
    ]


@register_command(app)
def evaluate(
    plant: Plant,
    say: AnswerPrinter,
    candidate: Annotated[int | None, typer.Argument(help="Candidate number (default: the newest).")] = None,
) -> None:
    """Measure a candidate on held-out documents and judge it against the champion.

    While the daemon runs, this command asks the daemon to do this in its next pass.
    """
    from factory.cli.core.ask_daemon import take_lock_or_ask_daemon
    from factory.duties.releasing import judge_one_candidate
    from factory.ledger.rows import EvaluationRow, VerdictRow
    from factory.show.unshown_items import show_unshown_items

    number = _candidate(plant.ledger, candidate)
    with ExitStack() as held:
        if said := take_lock_or_ask_daemon(held, plant, [f"judge {number}"]):
            say({"candidate": number, "says": said}, f"  {said}")
            return
        verdict = judge_one_candidate(plant, number)
        show_unshown_items(plant)
    evaluation, row = EvaluationRow.find_newest(plant.ledger, number), VerdictRow.get(plant.ledger, verdict)
    shown = {"evaluation": evaluation and evaluation.summary, "verdict": row.read_with_evidence(plant.ledger)}
    say({"candidate": number, **shown})


@app.command()
def release(
    candidate: Annotated[int | None, typer.Argument(help="Candidate number (default: the newest).")] = None,
    where: WorkspaceOption = DEFAULT,
    rollback: Annotated[int | None, typer.Option(help="Make this older release champion again.")] = None,
    bundle: Annotated[
        int | None,
        typer.Option(help="Write this release as a folder (a bundle) that others can check with 'factory verify'."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The bundle's folder (default: bundles/ of the workspace).")] = None,
    data: Annotated[
        bool, typer.Option("--data", help="Include in the bundle the documents whose licence allows it.")
    ] = False,
    traces: Annotated[
        bool, typer.Option("--traces", help="Include in the bundle the metrics and the kept checkpoints.")
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option(help="Private key that signs the bundle (PEM; default: the workspace's own, made at first use)."),
    ] = None,
    licence: Annotated[
        str,
        typer.Option(
            "--licence", "--license", help="Licence of the weights, as an SPDX expression (default: NOASSERTION)."
        ),
    ] = "",
) -> None:
    """Release a candidate that the gate promoted, roll back to an older release, or write a release as a bundle.

    Where the policy requires a person's approval, this command gives it.
    """
    from factory.ledger.rows import find_champion
    from factory.release.checks import get_newest_verdict
    from factory.release.releases import release_candidate as release_verdict
    from factory.release.releases import roll_back_to_release as roll_back
    from factory.show.unshown_items import show_unshown_items

    asked = [
        name for name, value in (("CANDIDATE", candidate), ("--rollback", rollback), ("--bundle", bundle)) if value is not None
    ]  # fmt: skip
    if len(asked) > 1:
        raise InputError(
            "model_loop.several_asked",
            "{options} exclude one another. Nothing was released. Give only one of them.",
            options=" and ".join(asked),
        )
    if bundle is None and (out or data or traces or key or licence):
        raise InputError(
            "model_loop.no_bundle_number",
            "--out, --data, --traces, --key and --licence describe a bundle. Nothing was released. Add the release's number: '--bundle N'",
        )
    # Releases have a lock of their own: this works while the daemon runs.
    plant, terminal = open_plant(where)
    if bundle is not None:
        from factory.bundles.writing import BundleOptions
        from factory.cli.releases.bundle import write_and_print_bundle as write_bundle

        write_bundle(plant, bundle, BundleOptions(out, data, traces, key, licence or BundleOptions.licence))
        return
    if rollback is not None:
        roll_back(plant, rollback)
        show_unshown_items(plant)
        terminal.line(Message("model_loop.rolled_back", "  Release {release} is champion again.", release=rollback))
        return
    verdict = get_newest_verdict(plant.ledger, _candidate(plant.ledger, candidate))
    done = release_verdict(plant, verdict.id, approved_by=get_current_user())
    show_unshown_items(plant)
    best = find_champion(plant.ledger)
    if best and best.number == done:
        terminal.line(Message("model_loop.is_champion", "  Release {release} is champion.", release=done))
        return
    terminal.line(
        Message(
            "model_loop.not_champion",
            "  Release {release} is published, but release {champion} is champion. To make release {release} champion: 'factory "
            "release --rollback {release}'",
            release=done,
            champion=best.number if best else None,
        )
    )


def _candidate(ledger: Ledger, number: int | None) -> int:
    """Return the candidate with this number or, for None, the newest candidate. Raises: InputError."""
    from factory.ledger.rows import CandidateRow

    newest = CandidateRow.find_first(ledger, "ORDER BY id DESC")
    if newest is None:
        raise InputError(
            "model_loop.no_candidate",
            "There is no candidate yet. The factory makes a candidate when it has shards to train on. To start the factory: "
            "'factory run'",
        )
    return (newest if number is None else CandidateRow.get(ledger, number)).id


ENGINES = ("native", "vllm")


@app.command()
def serve(
    where: WorkspaceOption = DEFAULT,
    engine: Annotated[
        str,
        typer.Option(
            help="native: this factory's own engine, for any machine. vllm: faster on a GPU; 'make serve-env' installs vllm."
        ),
    ] = "native",
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address that other machines can reach needs --key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on. 0: any free port; the command prints it.")
    ] = 8000,
    key: Annotated[
        str,
        typer.Option(
            envvar="FACTORY_SERVE_KEY",
            help="The bearer token that clients must send. 'ps' shows this option to other users.",
        ),
    ] = "",
) -> None:
    """Serve the champion by an OpenAI-compatible API. When the champion changes, switch to the new champion without losing a request.

    At a release or a rollback, a second engine starts beside the first. The factory checks the hash of the new export and
    compares the second engine's answers with the judge's own model. Then the second engine takes over, and the first engine ends.
    The machine needs memory for both engines.
    """
    from factory.serving.engines import make_native_engine_kind
    from factory.serving.serve import serve_champion as serve_champion
    from factory.serving.vllm import make_vllm_engine_kind

    if engine not in ENGINES:
        raise InputError(
            "model_loop.no_engine",
            "--engine: no engine is named {engine!r}{nearest}",
            engine=engine,
            nearest=suggest_name(engine, ENGINES),
        )
    workspace = Workspace.open(where)
    kind = make_native_engine_kind() if engine == "native" else make_vllm_engine_kind()
    serve_champion(workspace, kind, host=host, port=port, key=key, say=lambda line: print(line, flush=True))
