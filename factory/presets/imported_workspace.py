"""Makes a workspace from a public model: the model is its champion, release 0, and the start of its first trunk segment."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.core.yaml_edit import set_yaml_value
from factory.backups.backups import make_or_open_ledger
from factory.core.errors import InputError
from factory.core.progress import Progress
from factory.core.workspace import MODEL_LOOP, Workspace, WorkspaceConfig, find_checkout_root
from factory.ingest.installing import list_missing_tokens
from factory.ingest.replay_corpus import find_replay_corpus
from factory.ingest.rules.policy import REPLAY_DOMAIN
from factory.ledger.imported_model import ImportedLicence, find_imported_licence, read_import_plan
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow
from factory.presets.new_workspace import FROM, install_tokenizer, open_tokenizer, refuse_code_without_trainer
from factory.presets.presets import Hardware, estimate_memory_here, explain_why_recipe_is_too_large
from factory.release.imported_release import release_imported_model
from factory.training.continuing_recipe import MICRO_TOKENS, make_continuing_recipe, make_recipe_name
from factory.training.exporting import export_candidate
from factory.training.import_source import ImportRefusedError, ImportSource
from factory.training.importing import (
    open_import_source,
    plan_import,
    read_new_rows,
    refuse_full_disk,
    refuse_other_import,
    run_import,
)
from kernels.contract.message import Message
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

# Filters of the domain 'replay': wide, because its documents may be of any kind, such as code and chats.
REPLAY_RULES = {"min_alphabetic": 0.2, "max_line": 20_000}
# A training takes at most this share of a device's memory if a smaller micro-batch achieves it, because the judge and the kernels' timing need
# memory at the same time.
USUAL_SHARE = 0.5
SHORTEST_CONTEXT = 128  # that a refusal advises


@dataclass(frozen=True)
class ImportOptions:
    """Options of ``factory init --from``."""

    place: Path  # a folder, or a .gguf file
    context: int = 0  # positions in a row; 0: as the model allows, within limits
    licence: str = ""  # that a person states; '': as the folder names it
    force: bool = False  # allow a model that is too large for this machine
    replay: Path | None = None  # a folder of documents that stand for what the model knew
    find_rate: bool = True  # search the rate before the first training


def make_imported_workspace(
    root: Path, options: ImportOptions, repository: Path | None, progress: Progress
) -> dict[str, Any]:
    """Make a workspace from a model, or finish an import that was interrupted. A second call with the same model changes nothing.

    Returns facts about the import: workspace, model, recipe, checkpoint, licence, release. Everything is checked before the first file is written.

    Raises: InputError, ConfigError, WorkspaceError or RepositoryError.
    """
    root = root.expanduser().resolve()
    with ExitStack() as held:
        task = held.enter_context(
            progress.task(Message("imported_workspace.reads", "read {place}", place=options.place.name), 1)
        )
        source = held.enter_context(open_import_source(options.place, task.advance))
        task.advance(0.0, str(Message("imported_workspace.tries", "trying its tokenizer")))
        tokenizer = held.enter_context(open_tokenizer(source.folder, FROM, add_missing_tokens=True))
        new_rows = list_missing_tokens(source.folder)
        if (known := tokenizer.vocab_size - len(new_rows)) > source.spec.vocab_size:
            raise ImportRefusedError(
                "imported_workspace.large_vocabulary",
                "--from: the tokenizer has {tokens:,} tokens, but the model's embedding has only {rows:,} rows. Use the tokenizer's files and "
                "the weights of one model. If you added tokens, give the model rows for them first: transformers' "
                "resize_token_embeddings({tokens}), then save_pretrained().",
                tokens=known, rows=source.spec.vocab_size,
            )  # fmt: skip
        source = source.add_new_rows(new_rows)
        if (root / "factory.yaml").exists():
            workspace = Workspace.open(root)
            _refuse_other_workspace(workspace, options, source)
            _refuse_other_replay(workspace, options)
        else:
            if repository:
                refuse_code_without_trainer(repository)
            recipe, policies = _plan_workspace(root, options, source)
            config = WorkspaceConfig(
                recipe=recipe,
                repository=str(repository) if repository else "",
                import_from=str(options.place.expanduser().resolve()),
                find_rate=options.find_rate,
            )
            workspace = Workspace.create(root, config, policies)
        held.enter_context(workspace.hold_lock(MODEL_LOOP))
        plant = Plant(workspace, make_or_open_ledger(workspace), progress)
        refuse_other_import(plant.ledger, source)
        install_tokenizer(plant, tokenizer)
        licence = (
            ImportedLicence(options.licence, "--licence", source.licence.text) if options.licence else source.licence
        )
        segment = plan_import(plant, source, options.place, licence)
        row = SegmentRow.get(plant.ledger, segment)
        if row.state != "done":
            run_import(plant, row, source)
        number = release_imported_model(plant, export_candidate(plant, segment))
    return describe_import(plant.workspace, plant.ledger, segment, number)


def describe_import(workspace: Workspace, ledger: Ledger, segment: int, release: int) -> dict[str, Any]:
    """Facts about a finished import, as JSON-ready values."""
    row, plan = SegmentRow.get(ledger, segment), read_import_plan(ledger, segment)
    result = row.result or {}
    return {
        "workspace": str(workspace.root),
        "model": plan["name"],
        "family": plan["family"],
        "class": plan["class"],
        "licence": plan["licence"]["name"] or None,
        "files": plan["files"],
        "new_tokens": [row.token for row in read_new_rows(plan)],
        "recipe": str(workspace.recipe_path()),
        "checkpoint": result.get("checkpoint"),
        "release": release,
    }


def _plan_workspace(root: Path, options: ImportOptions, source: ImportSource) -> tuple[str, dict[str, str]]:
    """(the recipe's name, the text of each policy file of the new workspace). Raises: InputError, ConfigError."""
    if options.context and not 8 <= options.context <= source.spec.context:
        raise InputError(
            "imported_workspace.context", "--context: {context} is not between 8 and {most}, the positions that the model allows.",
            context=options.context, most=source.spec.context,
        )  # fmt: skip
    if options.replay is not None and not options.replay.expanduser().is_dir():
        raise InputError(
            "imported_workspace.no_replay", "--replay: {folder} is no folder. Nothing was made.", folder=options.replay
        )
    shipped = find_checkout_root() / "policies"
    name = make_recipe_name(source.name)
    if (shipped / "recipes" / f"{name}.yaml").exists():
        name = f"{name}-imported"
    machine = Hardware.of_this_machine()
    text, recipe = _write_recipe(name, options, source, machine)
    if not options.force and (why := explain_why_recipe_is_too_large(recipe, machine)):
        shorter = _find_fitting_context(recipe, machine)
        raise InputError(
            "imported_workspace.too_large",
            "--from: this machine is too small to train {model}. {reason} {advice}'factory plan --from {place}' says whether recomputation, LoRA or "
            "frozen weights fit. For these, and if another machine will train the model, add '--force', and write the plan's keys into the recipe.",
            model=source.name,
            reason=why,
            place=options.place,
            advice=Message("imported_workspace.shorter", "It fits with '--context {context}'. ", context=shorter) if shorter else "",
        )  # fmt: skip
    refuse_full_disk(next(folder for folder in (root, *root.parents) if folder.is_dir()), source)
    own = root / "policies" / "data.yaml"
    policy = (own if own.exists() else shipped / "data.yaml").read_text(encoding="utf-8")
    data = set_yaml_value(policy, ("tokenizer", "vocab_size"), source.spec.vocab_size)
    if options.replay is not None:
        data = set_yaml_value(data, ("replay_corpus",), str(options.replay.expanduser().resolve()))
        for key, value in REPLAY_RULES.items():
            data = set_yaml_value(data, ("domains", REPLAY_DOMAIN, key), value)
    return name, {f"recipes/{name}.yaml": text, "data.yaml": data}


def _write_recipe(name: str, options: ImportOptions, source: ImportSource, machine: Hardware) -> tuple[str, Recipe]:
    """The recipe's text, and what it says: with the largest micro-batch that leaves memory for the rest of the factory, or else with one row."""
    tokens = MICRO_TOKENS
    while True:
        made = make_continuing_recipe(
            name,
            source.spec,
            source.dtype_keys,
            source.name,
            options.context or None,
            replay=options.replay is not None,
            micro_tokens=tokens,
        )
        try:
            recipe = Recipe.parse(read_yaml(made.text, f"{name}.yaml", RecipeError), f"{name}.yaml")
        except RecipeError as error:
            raise ImportRefusedError(
                "imported_workspace.recipe",
                "--from: this factory cannot train {model}: {reason}",
                model=source.name,
                reason=error.message,
            ) from None
        try:
            fits = estimate_memory_here(recipe, machine) <= USUAL_SHARE * machine.device_memory
        except RecipeError:  # the machine's GPUs cannot share a step, which no smaller micro-batch changes
            fits = True
        if fits or recipe.batch.micro_sequences == 1:
            return made.text, recipe
        tokens //= 2


def _find_fitting_context(recipe: Recipe, machine: Hardware) -> int:
    """The longest of the halved contexts with which a recipe fits on a machine; 0 if none does."""
    context = recipe.model.context // 2
    while context >= SHORTEST_CONTEXT:
        model = recipe.model.model_copy(update={"context": context})
        if not explain_why_recipe_is_too_large(recipe.model_copy(update={"model": model}), machine):
            return context
        context //= 2
    return 0


def _refuse_other_replay(workspace: Workspace, options: ImportOptions) -> None:
    """Raises: InputError if an existing workspace has another replay corpus, because a person may have changed its recipe since."""
    if options.replay is not None and find_replay_corpus(workspace) != options.replay.expanduser().resolve():
        raise InputError(
            "imported_workspace.other_replay",
            "--replay: this workspace was made without {folder}. Write 'replay_corpus: {folder}' into {policy}, and the weight {domain} into "
            "mixture.weights of the recipe.", folder=options.replay, policy=workspace.policy_path("data.yaml"), domain=REPLAY_DOMAIN,
        )  # fmt: skip


def _refuse_other_workspace(workspace: Workspace, options: ImportOptions, source: ImportSource) -> None:
    """Raises: ImportRefusedError if an existing workspace was not made from this model."""
    there = workspace.config.import_from
    if not there:
        raise ImportRefusedError(
            "imported_workspace.no_import", "--from: {workspace} is a workspace already, and not from a model. Give a new folder.",
            workspace=workspace.root,
        )  # fmt: skip
    ledger = make_or_open_ledger(workspace)
    refuse_other_import(ledger, source)
    if not ledger.read("SELECT id FROM segments LIMIT 1") and Path(there) != options.place.expanduser().resolve():
        raise ImportRefusedError(
            "imported_workspace.other_place",
            "--from: {workspace} was begun with {place}, and that import is not finished. Import {place}, or give a new folder for the workspace.",
            workspace=workspace.root, place=there,
        )  # fmt: skip
    context = Recipe.load(workspace.recipe_path()).model.context
    recorded = find_imported_licence(ledger)
    for option, asked, held in (
        ("--context", options.context or context, context),
        ("--licence", options.licence or None, recorded and recorded.name),
    ):
        if asked is not None and held is not None and asked != held:
            raise ImportRefusedError(
                "imported_workspace.other_option",
                "{option} {asked}: {workspace} was imported with {held}. Give a new folder for the workspace.",
                option=option, asked=asked, workspace=workspace.root, held=held or Message("imported_workspace.none", "none"),
            )  # fmt: skip
    if workspace.config.find_rate and not options.find_rate:
        raise ImportRefusedError(
            "imported_workspace.rate_finder",
            "--no-rate-finder: {workspace} was made without this option. To keep the learning rate, write 'find_rate: false' into {file}, or add "
            "--no-rate-finder to 'factory train'.", workspace=workspace.root, file=workspace.root / "factory.yaml",
        )  # fmt: skip
