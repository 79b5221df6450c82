"""``factory demo --from MODEL``: a public model is imported, trained further on Python's documentation, judged against itself, served and exported.

The commands' own functions and the daemon's duties do the work. Scripted are only the text, the sizes and the question. The text has three domains,
and none is downloaded: ``docs``, the documentation of this Python's standard library, is what the model shall learn; ``english``, what the installed
packages say about themselves, is what it must not forget, and a quarter of each batch; ``untrained-english``, the same of other packages, is in no
batch, and only measured: what the model forgets of text that nobody repeats. After a kill, the same command continues.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agents.core.yaml_edit import set_yaml_value
from factory.backups.backups import make_or_open_ledger
from factory.computing.compute_settings import choose_compute_settings, format_kernels_file
from factory.computing.tuned_kernels import open_live_kernels_file
from factory.core.console import Terminal
from factory.core.errors import FactoryError, InputError
from factory.core.launching import run_in_background_process, run_python
from factory.core.served_note import find_served_champion
from factory.core.workspace import MODEL_LOOP, Workspace, find_checkout_root
from factory.demo.demo import measure_step_rate, prepare_demo_folder, send_new_files_to_inbox, write_smaller_policy
from factory.demo.import_demo_size import ContinuingSize, check_continuing_minutes, plan_continuing
from factory.demo.public_model import find_public_model
from factory.duties.runner import run_duty_pass
from factory.git.repository import get_live_commit
from factory.ingest.inbox import ingest_and_move, list_complete_files
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.imported_model import find_import, read_import_plan
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.show.pages.release_facts import read_release_details
from kernels.contract.files import write_atomically
from kernels.contract.message import Message

CONTEXT, ROWS = 512, 4  # positions of a row, rows of a step
ENGLISH_SHARE = 0.25  # of the tokens of a batch
OPENING = Message("import_demo.opens", "In Python, the function json.dumps")
QUESTION = Message("import_demo.asks", "In Python, what does the function json.dumps do?")
ANSWER_TOKENS = 80
SERVE_SECONDS = 300.0  # for the engine to start, and for an answer
COMPARED_TOKENS = 128  # whose logits are compared after the export
# So many that a model of 135 million weights is measured in minutes by the judge's fp32 model on two cores. The shipped policy has 60 documents.
EVALS = {
    "documents_per_domain": 24, "dev_documents_per_domain": 8, "document_bytes": 512, "noise_documents_per_domain": 6,
    "cloze_items_per_domain": 8, "chat_samples": 1, "parity_documents": 8,
}  # fmt: skip
SIZED = "cache/import-demo.json"  # the measured step and the chosen steps; written when the recipe is
LOSSES = "cache/import-demo-losses.txt"


@dataclass
class _Clock:
    """The seconds of each part of this run, for the summary."""

    began: float
    parts: list[tuple[str, float]]

    def end(self, part: str) -> None:
        self.parts.append((part, time.monotonic() - self.began - sum(seconds for _, seconds in self.parts)))


def run_import_demo(folder: Path, terminal: Terminal, model: str, *, minutes: float, fresh: bool = False) -> None:
    """Run the demo with a model, as ``find_public_model`` takes it.

    Raises: InputError for a model that cannot be used; WorkspaceError for a folder with files that no demo made.
    """
    clock = _Clock(time.monotonic(), [])
    check_continuing_minutes(minutes)
    root = folder.expanduser().resolve()
    prepare_demo_folder(root, fresh)
    terminal.print_heading(Message("import_demo.step_import", "1  Import the model: it becomes release 0"))
    place, licence = find_public_model(model, root / "cache", terminal)
    facts = make_imported_workspace(root, ImportOptions(place, licence=licence), None, terminal)
    workspace = Workspace.open(root)
    plant = Plant(workspace, make_or_open_ledger(workspace), terminal)
    terminal.line(
        Message(
            "import_demo.imported",
            "  {model} ({architecture}), licence {licence}",
            model=facts["model"],
            architecture=facts["class"],
            licence=facts["licence"] or "not named",
        )
    )
    clock.end("import")
    with workspace.hold_lock(MODEL_LOOP):
        files = _write_corpus(workspace, terminal)
        terminal.print_heading(
            Message("import_demo.step_loss", "2  Compare the trainer's loss on English text with that of transformers")
        )
        for line in _compare_losses(workspace, place, files["english"], terminal):
            terminal.line(f"  {line}")
        clock.end("compare losses")
        terminal.print_heading(
            Message("import_demo.step_ingest", "3  Ingest documentation, and English text as a guard")
        )
        _write_data_policy(workspace)
        send_new_files_to_inbox(plant, list(files.values()))
        for path in list_complete_files(plant, settle_seconds=0.0):
            ingest_and_move(plant, path)
        clock.end("ingest")
        terminal.print_heading(
            Message("import_demo.step_measure", "4  Measure the time of a step, and choose the number of steps")
        )
        _choose_steps(plant, terminal, minutes, clock)
        clock.end("measure a step")
        terminal.print_heading(
            Message("import_demo.step_train", "5  Train further, anneal, measure both models, and judge the candidate")
        )
        run_duty_pass(plant, settle=0.0)
        clock.end("train and judge")
    found = read_release_details(plant, "c2")
    terminal.print_heading(Message("import_demo.step_serve", "6  Serve the champion, and ask it"))
    for line in _ask(workspace):
        terminal.line(f"  {line}")
    clock.end("serve and ask")
    terminal.print_heading(Message("import_demo.step_export", "7  Load the export with transformers"))
    terminal.line(_compare_export(Path(found["export"]), files["docs-00"]))
    clock.end("load the export")
    terminal.print_heading(Message("import_demo.step_summary", "8  What happened"))
    for line in _summarise(plant, found, clock):
        terminal.line(line)


def _write_corpus(workspace: Workspace, terminal: Terminal) -> dict[str, Path]:
    """Write the shards of the three domains once; returns them by name."""
    from factory.corpus import write_corpus, write_english_shards

    folder = workspace.root / "cache" / "corpus"
    if not folder.exists():
        aside = folder.with_name("corpus.part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write_corpus(aside, terminal)
        write_english_shards(aside / "english.jsonl", aside / "untrained-english.jsonl")
        os.rename(aside, folder)
    names = ("docs-00", "docs-01", "english", "untrained-english")  # a demo that an older factory began has no last one
    return {name: path for name in names if (path := folder / f"{name}.jsonl").exists()}


def _compare_losses(workspace: Workspace, place: Path, english: Path, terminal: Terminal) -> list[str]:
    """Lines with both losses on English text, from the source's own files. Raises: FactoryError if the two programs depart."""
    from factory.training.importing import open_import_source

    kept = workspace.root / LOSSES
    if kept.exists():
        return kept.read_text("utf-8").splitlines()
    with ExitStack() as held:
        title = Message("import_demo.compares", "the trainer and transformers compute the same text")
        held.enter_context(terminal.task(title))
        source = held.enter_context(open_import_source(place))
        text = Path(held.enter_context(tempfile.TemporaryDirectory()), "english.txt")
        text.write_text("\n\n".join(_read_texts(english)), "utf-8")
        done = run_python(find_checkout_root(), "-m", "trainer.tools.divergence", str(source.folder), str(text))
    if done.returncode:
        raise FactoryError(
            "import_demo.departs", "The trainer does not compute what transformers computes from these files: {lines}",
            lines=(done.stdout.strip() or done.stderr.strip()).splitlines()[-3:],
        )  # fmt: skip
    lines = done.stdout.strip().splitlines()[-2:]
    write_atomically(kept, "\n".join(lines))
    return lines


def _read_texts(shard: Path) -> Iterable[str]:
    with open(shard, encoding="utf-8") as rows:
        yield from (json.loads(row)["text"] for row in rows)


def _write_data_policy(workspace: Workspace) -> None:
    """Hold out whole modules of the documentation, and enough documents of each domain for a verdict."""
    path = workspace.root / "policies" / "data.yaml"
    text = set_yaml_value(path.read_text("utf-8"), ("domains", "docs", "group"), "source")
    write_atomically(path, set_yaml_value(text, ("held_out", "share"), 0.1))


def _choose_steps(plant: Plant, terminal: Terminal, minutes: float, clock: _Clock) -> None:
    """Measure a step of this model on this machine, and write the recipe and the evaluation's policy, once."""
    from factory.training.tuning import tune_kernels_if_untuned
    from trainer.contract.recipe import Recipe

    workspace = plant.workspace
    kept = workspace.root / SIZED
    if kept.exists():
        return
    write_smaller_policy(workspace, "evals.yaml", EVALS)
    raw = _write_recipe(plant, None)
    tune_kernels_if_untuned(workspace, terminal)  # at the sizes of this recipe
    recipe = Recipe.parse(raw)
    with open_live_kernels_file(workspace) as (_, kernels):
        resolved, computing, notes = choose_compute_settings(workspace, recipe, kernels)
    for note in notes:
        terminal.line(f"  {note}")
    commit = get_live_commit(workspace.repository)
    measured = measure_step_rate(
        workspace,
        terminal,
        raw | {"precision": resolved.precision},
        recipe.name,
        format_kernels_file(computing),
        commit,
    )
    terminal.line(
        Message(
            "import_demo.measured",
            "  a step of {tokens:,} tokens in {precision}: {seconds:.2f} s, {rate:,.0f} tokens/s",
            tokens=recipe.tokens_per_step,
            precision=resolved.precision,
            seconds=measured["step_s"],
            rate=measured["tokens_per_s"],
        )
    )
    size = plan_continuing(
        minutes, time.monotonic() - clock.began, measured["start_s"], measured["step_s"], recipe.tokens_per_step
    )
    terminal.line(
        Message(
            "import_demo.chosen",
            "  For {minutes:g} minutes: {trunk} steps of continuing and {anneal} of annealing, with the rate {rate:.1e}. "
            "Expected: {expected:.1f} minutes.",
            minutes=minutes,
            trunk=size.trunk,
            anneal=size.anneal,
            rate=recipe.optimizer.lr,
            expected=size.seconds / 60,
        )
    )
    _write_recipe(plant, size)
    write_atomically(kept, json.dumps(measured))


def _write_recipe(plant: Plant, size: ContinuingSize | None) -> dict[str, Any]:
    raw = make_demo_recipe(plant, size)
    comment = Message("import_demo.recipe_comment", "# 'factory demo --from' chose these sizes for this machine.\n")
    write_atomically(plant.workspace.own_recipe_path(), comment + yaml.safe_dump(raw, sort_keys=False))
    return raw


def make_demo_recipe(plant: Plant, size: ContinuingSize | None) -> dict[str, Any]:
    """The recipe of continuing, with rows of at most ``CONTEXT`` tokens, a small batch with its rate, and English text in each batch."""
    from factory.training.continuing_recipe import compute_continuing_rate, make_continuing_recipe
    from models.spec import ModelSpec

    row = find_import(plant.ledger)
    assert row is not None
    plan = read_import_plan(plant.ledger, row.id)
    spec = ModelSpec.model_validate(plan["spec"])
    raw: dict[str, Any] = yaml.safe_load(
        make_continuing_recipe(plant.workspace.config.recipe, spec, row.recipe_json, plan["name"], CONTEXT).text
    )
    raw["mixture"]["weights"] = {"docs": 1 - ENGLISH_SHARE, "english": ENGLISH_SHARE}
    raw["batch"] = {"sequences": ROWS, "micro_sequences": ROWS}
    raw["optimizer"]["lr"] = float(f"{compute_continuing_rate(spec.parameters, ROWS * raw['model']['context']):.2g}")
    if size:
        steps = {"first": size.trunk, "later": size.trunk}
        raw["schedule"] |= {"trunk_steps": steps, "anneal_steps": size.anneal, "warmup_steps": size.warmup}
    return raw


def _ask(workspace: Workspace) -> list[str]:
    """Start ``factory serve``, ask it, and end it; returns question and answer as lines. A model without a chat template continues a text.

    Raises: FactoryError if the server does not answer in time, or refuses the question.
    """
    is_chat = Tokenizer.load(workspace.tokenizer).chat_template is not None
    question = QUESTION if is_chat else OPENING
    words = [sys.executable, "-m", "factory", "serve", "--port", "0", "--workspace", str(workspace.root)]
    log = workspace.logs / "demo-serve.log"
    environment = os.environ | {"PYTHONPATH": str(find_checkout_root())}
    with run_in_background_process(words, workspace.root, log, environment) as server:
        url, name, release = _wait_until(
            lambda: find_served_champion(workspace, ""), lambda: server.poll() is not None, log
        )
        body = {"model": name, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        body |= {"messages": [{"role": "user", "content": question}]} if is_chat else {"prompt": question}
        asked = urllib.request.Request(
            f"{url}/{'chat/' * is_chat}completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                asked, timeout=SERVE_SECONDS
            ) as answer:
                choice = json.loads(answer.read())["choices"][0]
        except urllib.error.HTTPError as error:
            raise FactoryError(
                "import_demo.refused", "'factory serve' refuses the question: {why}. See {log}.", log=log,
                why=error.read().decode("utf-8", "replace")[:400],
            ) from error  # fmt: skip
        reply = choice["message"]["content"] if is_chat else choice["text"]
    return [
        Message("import_demo.question", "asked release {release}: {question}", release=release, question=question),
        *(f"  {line}" for line in str(reply).strip().splitlines()),
    ]


def _wait_until(
    look: Callable[[], tuple[str, str, int]], is_over: Callable[[], bool], log: Path
) -> tuple[str, str, int]:
    """Call ``look`` until it raises no InputError. Raises: FactoryError if the server ended, or after ``SERVE_SECONDS``."""
    until = time.monotonic() + SERVE_SECONDS
    while True:
        try:
            return look()
        except InputError as error:
            if is_over() or time.monotonic() > until:
                raise FactoryError(
                    "import_demo.not_served", "'factory serve' does not answer ({why}). See {log}.", why=error, log=log
                ) from error
        time.sleep(0.5)


def _compare_export(export: Path, shard: Path) -> str:
    """Load an export with transformers, and compare its logits with the judge's model. Raises: FactoryError if they differ."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from factory.evals.reference_model import ReferenceModel

    tokenizer = AutoTokenizer.from_pretrained(export)
    ids = tokenizer(" ".join(text for text, _ in zip(_read_texts(shard), range(4), strict=False)))["input_ids"]
    tokens_BT = torch.tensor([ids[:COMPARED_TOKENS]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)(tokens_BT).logits
    difference = (theirs - ReferenceModel.load(export).logits(tokens_BT)).abs().max().item()
    if not difference <= 1e-3 * max(1.0, theirs.abs().max().item()):
        raise FactoryError(
            "import_demo.export_departs",
            "transformers computes other logits from {export} than the judge's model: they differ by {difference:.1e}.",
            export=export, difference=difference,
        )  # fmt: skip
    return Message(
        "import_demo.export_same",
        "  {export}: the logits of {tokens} tokens differ from the judge's by at most {difference:.1e}",
        export=export,
        tokens=tokens_BT.numel(),
        difference=difference,
    )


def _summarise(plant: Plant, found: dict[str, Any], clock: _Clock) -> list[str]:
    """Lines for a person: bits per byte by domain before and after, the verdict with its reasons, speed and times."""
    before, after = found["champion_bits_per_byte"], found["bits_per_byte"]
    lines: list[str] = [
        Message(
            "import_demo.bits", "    held-out bits per byte {columns}",
            columns=f"{'release 0':>12}{'candidate 2':>14}{'change':>10}",
        )
    ]  # fmt: skip
    for domain in sorted(after):
        lines.append(
            f"      {domain:<20}{before[domain]:>12.4f}{after[domain]:>14.4f}{after[domain] - before[domain]:>+10.4f}"
            if isinstance(before.get(domain), float) and isinstance(after[domain], float)
            else f"      {domain:<20}{'–':>12}"
        )
    lines.append(f"    verdict: {str(found['verdict']).upper()}")
    lines += [f"      {reason}" for reason in found["reasons"]]
    for one in found["segments"]:
        row = SegmentRow.get(plant.ledger, one["id"])
        speed = ((row.result or {}).get("speed") or {}).get("tokens_per_s")
        if isinstance(speed, float):
            lines.append(
                Message(
                    "import_demo.segment",
                    "    segment {segment} {kind}: steps {first} to {last}, {rate:,.0f} tokens/s in {precision}",
                    segment=row.id,
                    kind=row.kind,
                    first=one["first_step"],
                    last=one["last_step"],
                    rate=speed,
                    precision=row.recipe_json["precision"],
                )
            )
    parts = [f"{name} {seconds:.0f}" for name, seconds in clock.parts]
    lines.append(
        Message(
            "import_demo.times",
            "    seconds of this run: {parts}; in all {minutes:.1f} minutes",
            parts=parts,
            minutes=(time.monotonic() - clock.began) / 60,
        )
    )
    return lines
