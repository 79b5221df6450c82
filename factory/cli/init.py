"""``factory init``: a workspace, which begins with a recipe or with a public model."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from factory.cli.app import DEFAULT, JsonOption, WorkspaceOption, app, print_json
from factory.core.errors import InputError
from factory.core.workspace import Workspace
from kernels.contract.message import Message


@app.command()
def init(
    where: WorkspaceOption = DEFAULT,
    preset: Annotated[
        str,
        typer.Option(help="laptop, one-gpu or eight-gpus: a recipe, a vocabulary and a data policy that fit together."),
    ] = "",
    recipe: Annotated[str, typer.Option(help="Name of a recipe in policies/recipes/ (default: demo).")] = "",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A Hugging Face tokenizer.json, or its folder (default: the first ingest trains a tokenizer)."
        ),
    ] = None,
    vocabulary: Annotated[
        int,
        typer.Option(
            help="Size of the vocabulary, for the recipe and the tokenizer (default: the recipe's).", show_default=False
        ),
    ] = 0,
    repository: Annotated[
        str, typer.Option(help="Git repository of the training code, which agents patch (default: this factory's own).")
    ] = "",
    tune: Annotated[
        bool, typer.Option(help="Time the registered kernels on this machine, as 'factory tune' does.")
    ] = True,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Allow a model that is too large for this machine, because another machine will train it."
        ),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A model to begin with: a Hugging Face folder (config.json, safetensors, tokenizer.json) or a .gguf file. It becomes release 0.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            help="With --from: positions in a row of training (default: as the model allows, at most 2048).",
            show_default=False,
        ),
    ] = 0,
    licence: Annotated[
        str, typer.Option(help="With --from: the model's licence (default: as its README.md says).", show_default=False)
    ] = "",
    replay: Annotated[
        Path | None,
        typer.Option(
            help="With --from: a folder of documents like those that the model knew. A quarter of the training repeats them.",
            show_default=False,
        ),
    ] = None,
    no_rate_finder: Annotated[
        bool,
        typer.Option(
            "--no-rate-finder",
            help="With --from: keep the learning rate, instead of searching it by a short run before the first training.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a workspace, the folder that holds all state of one factory. Running the command again changes nothing.

    With --from, the workspace begins with a public model. If the command was interrupted, run it again.
    """
    from factory.core.console import Terminal
    from factory.core.progress import SILENT
    from factory.presets.new_workspace import InitOptions, make_workspace

    code = Path(repository).resolve() if repository else None
    terminal = Terminal()
    progress = SILENT if as_json else terminal
    facts: dict[str, Any] = {}
    if model is not None:
        if preset or recipe or tokenizer or vocabulary:
            raise InputError(
                "init.from_and_recipe",
                "--from brings its own recipe, tokenizer and vocabulary. Leave out --preset, --recipe, --tokenizer and --vocabulary.",
            )
        from factory.presets.imported_workspace import ImportOptions, make_imported_workspace

        facts = make_imported_workspace(
            where, ImportOptions(model, context, licence, force, replay, not no_rate_finder), code, progress
        )
        workspace = Workspace.open(Path(facts["workspace"]))
    elif context or licence or replay or no_rate_finder:
        raise InputError(
            "init.only_with_from",
            "--context, --licence, --replay and --no-rate-finder belong to --from. Add --from, or leave them out.",
        )
    else:
        workspace = make_workspace(where, InitOptions(preset, recipe, vocabulary, tokenizer, force), code)
        facts = {"workspace": str(workspace.root), "recipe": str(workspace.recipe_path())}
    if tune:
        from factory.training.tuning import tune_kernels_if_untuned

        tune_kernels_if_untuned(workspace, progress)
    if as_json:
        print_json(facts)
        return
    if model is not None:
        print(
            Message(
                "init.imported",
                "{model} ({architecture}) is release {release} and champion. Licence: {licence}. To ask it: 'factory serve'. Its recipe: {recipe}",
                model=facts["model"],
                architecture=facts["class"],
                release=facts["release"],
                licence=facts["licence"] or "not named",
                recipe=facts["recipe"],
            )
        )
        if not facts["licence"]:
            print(
                Message(
                    "init.no_licence",
                    "No file names the model's licence. Until it is known, no model that is trained from it can be released. To name it, type for "
                    "example: 'factory config set data licences.imported_model Apache-2.0'",
                )
            )
        if facts["new_tokens"]:
            print(
                Message(
                    "init.new_rows",
                    "The chat template writes tokens that the model never had: {tokens}. Their new rows are the mean of all rows, and only training "
                    "gives them a meaning.",
                    tokens=facts["new_tokens"],
                )
            )
    print(Message("init.workspace_ready", "The workspace is ready: {workspace}", workspace=workspace.root))
    if Path(os.environ.get("FACTORY_HOME") or DEFAULT).resolve() != workspace.root:
        print(
            Message(
                "init.set_home",
                "To let later commands find the workspace: export FACTORY_HOME={workspace}",
                workspace=shlex.quote(str(workspace.root)),
            )
        )
    print(
        Message(
            "init.next_step",
            "Next, put shards into {inbox} and type 'factory run --once'. Or ingest files from another folder: 'factory ingest "
            "PATH'",
            inbox=workspace.inbox,
        )
    )
