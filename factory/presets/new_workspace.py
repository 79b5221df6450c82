"""Makes a workspace whose recipe, vocabulary, tokenizer and data policy fit together and fit this machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from agents.core.yaml_edit import set_yaml_value
from factory.backups.backups import make_or_open_ledger
from factory.core.errors import ConfigError, InputError, suggest_name
from factory.core.workspace import Workspace, WorkspaceConfig, find_checkout_root
from factory.git.git_store import read_tree_entries
from factory.git.repository import LIVE_FOLDERS, RepositoryError, get_live_commit
from factory.ingest import ledger_rows
from factory.ingest.installing import install_model_tokenizer, prepare_tokenizer
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import Tokenizer, write_tokenizer_files
from factory.ingest.vocabulary_size import is_padded_size, pad_size
from factory.ledger.ledger import tokenizers
from factory.ledger.plant import Plant
from factory.presets.presets import PRESETS, Hardware, explain_why_recipe_is_too_large, find_largest_fitting_preset
from kernels.contract.message import Message
from kernels.contract.strict_yaml import read_yaml
from models.adapters.config_reader import ModelFilesError
from models.files.safetensors_file import refuse_lfs_pointer
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

LARGEST = 1 << 28  # most bytes of a tokenizer.json
# A tokenizer.json can make its library abort the process or take all memory. Therefore a process of its own tries it first.
TRY_TOKENIZER = Path(__file__).with_name("try_tokenizer.py")
TRY_SECONDS = 300.0
FROM = "--from"  # the option whose tokenizer is a model's own


@contextmanager
def open_tokenizer(
    file_or_folder: Path, option: str = "--tokenizer", add_missing_tokens: bool = False
) -> Iterator[Tokenizer]:
    """Load a person's tokenizer into a temporary folder: a tokenizer.json, or a model's folder with its chat template. The temporary folder exists
    during the ``with`` block.

    ``option``: the name of the option that gave it, for messages. ``add_missing_tokens``: give ids to the special tokens that the chat template
    writes and the vocabulary lacks; without it they are an error.

    Raises: InputError if the tokenizer cannot be used.
    """
    path = file_or_folder / "tokenizer.json" if file_or_folder.is_dir() else file_or_folder
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(
                "presets.large_tokenizer",
                "{option}: {file} is larger than {most} MiB, so the file cannot be a tokenizer.",
                option=option,
                file=path,
                most=LARGEST >> 20,
            )
        refuse_lfs_pointer(path)
        text = path.read_text(encoding="utf-8")
    except ModelFilesError as error:
        raise InputError(error.message) from None
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError) and (path.parent / "tokenizer.model").is_file():
            raise InputError(
                "presets.only_sentencepiece",
                "{option}: {folder} has a tokenizer.model of SentencePiece, but no tokenizer.json. The model's tokenizer_config.json must lie beside "
                "it, because that file names the tokenizer's class. To convert the tokenizer, install sentencepiece and protobuf with pip. Then type "
                "python -c 'import sys, transformers; transformers.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' {place}",
                option=option,
                folder=path.parent,
                place=shlex.quote(str(path.parent)),
            ) from None
        raise InputError(
            "presets.unreadable_tokenizer",
            "{option}: {file} cannot be read: {reason}. Give a tokenizer.json, or a folder with this file.",
            option=option,
            file=path,
            reason=error,
        ) from None
    _refuse_crashing_tokenizer(path, option)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = file_or_folder
        if not file_or_folder.is_dir():  # the file alone, whatever lies beside it
            source = folder / "given"
            source.mkdir()
            (source / "tokenizer.json").write_text(text, encoding="utf-8")
        try:
            tokenizer, _ = prepare_tokenizer(source, folder, add_missing_tokens)
        except InputError as error:
            said = str(error).replace(str(source / "tokenizer.json"), str(path)).replace(str(source), str(path.parent))
            raise InputError(
                "presets.bad_tokenizer",
                "{option}: {reason}. {advice}",
                option=option,
                reason=said,
                advice=_advise(option),
            ) from None
        if tokenizer.is_own and tokenizer.has_id_gaps():
            raise InputError(
                "presets.tokenizer_gaps",
                "{option}: the token ids in {file} have gaps. All ids from 0 to {last} must exist. {advice}",
                option=option,
                file=path,
                last=tokenizer.vocab_size - 1,
                advice=_advise(option),
            )
        yield tokenizer


def _advise(option: str) -> Message:
    """What to do about a tokenizer that cannot be used. A model is bound to its own."""
    if option == FROM:
        return Message(
            "presets.models_tokenizer", "The model needs its own tokenizer. Use the tokenizer's files as the model's makers published them."
        )  # fmt: skip
    return Message(
        "presets.own_tokenizer", "Without {option}, the factory trains a tokenizer on your data.", option=option
    )


def _refuse_crashing_tokenizer(path: Path, option: str) -> None:
    """Raises: InputError if loading and using the tokenizer ends a process, or takes too much memory or time."""
    command = [sys.executable, "-I", str(TRY_TOKENIZER), str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TRY_SECONDS)
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        died = done.returncode < 0 or "PanicException" in said[-1] or "MemoryError" in said[-1]
        problem = said[0][:200] if died else ""  # an ordinary exception is told by the tokenizer's reader
    except subprocess.TimeoutExpired:
        problem = Message("presets.slow_tokenizer", "it took longer than {seconds:.0f} s", seconds=TRY_SECONDS)
    if problem:
        raise InputError(
            "presets.crashing_tokenizer",
            "{option}: {file} cannot be used: {problem}. Give the tokenizer.json of the model's makers.",
            option=option,
            file=path,
            problem=problem,
        )


def install_tokenizer(plant: Plant, tokenizer: Tokenizer) -> None:
    """Copy ``tokenizer`` into the workspace and record it, so that the first ingest trains none. A second call with the same one changes nothing.

    Raises: InputError if the workspace has another tokenizer.
    """
    recorded = plant.ledger.select_first(sa.select(tokenizers))
    if recorded and recorded["sha256"] != tokenizer.sha256:
        raise InputError(
            "presets.other_tokenizer",
            "--tokenizer: {workspace} already has another tokenizer, and the ingested data uses the ids of that "
            "tokenizer. Give a new folder for the workspace.",
            workspace=plant.workspace.root,
        )
    if not tokenizer.is_own:
        install_model_tokenizer(tokenizer.folder, plant)
        return
    write_tokenizer_files(
        (tokenizer.folder / "tokenizer.json").read_text(encoding="utf-8"),
        bool(tokenizer.bos),
        plant.workspace.tokenizer,
    )
    with plant.ledger.begin() as tx:
        ledger_rows.write_tokenizer(
            tx, Tokenizer.load(plant.workspace.tokenizer), plant.ledger.to_stored_path(plant.workspace.tokenizer)
        )


SAMPLE_BYTES = 1500  # training text of a tokenizer, in bytes for each entry of the vocabulary, as in the shipped policy


@dataclass(frozen=True)
class InitOptions:
    """Options of ``factory init``. An option that was not given is '', 0 or None."""

    preset: str = ""
    recipe: str = ""
    vocabulary: int = 0
    tokenizer: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class NewWorkspace:
    """The plan of a workspace that does not exist yet."""

    recipe: str  # name of the recipe
    policies: dict[str, str]  # text of each policy file that differs from the shipped one, by its path in policies/


def make_workspace(folder: Path, options: InitOptions, repository: Path | None) -> Workspace:
    """Make a workspace, or open the existing one if it matches ``options``. ``repository``: the training code; None: the factory's own code.

    Raises: InputError, ConfigError, WorkspaceError or RepositoryError. Then no file was made.
    """
    root = folder.expanduser().resolve()
    with ExitStack() as held:
        given = held.enter_context(open_tokenizer(options.tokenizer)) if options.tokenizer else None
        if (root / "factory.yaml").exists():
            workspace = Workspace.open(root)
            _refuse_other(workspace, options, given, repository)
        else:
            if repository:
                refuse_code_without_trainer(repository)
            start = plan_workspace(options, given, root, repository or find_checkout_root(), Hardware.of_this_machine())
            config = WorkspaceConfig(recipe=start.recipe, repository=str(repository) if repository else "")
            workspace = Workspace.create(root, config, start.policies)
        ledger = make_or_open_ledger(workspace)
        if given is not None:
            install_tokenizer(Plant(workspace, ledger), given)
    return workspace


def refuse_code_without_trainer(repository: Path) -> None:
    """Raises: InputError if ``repository`` is not a folder, not a git checkout, has no commit, or does not contain the training code."""
    way = Message("presets.give_repository", "Give a clone of the factory's repository, or leave --repository out.")
    if not repository.is_dir():
        raise InputError(
            "presets.no_repository", "--repository: {folder} is not a folder. {way}", folder=repository, way=way
        )
    try:
        commit = get_live_commit(repository)
    except RepositoryError as error:
        raise InputError("presets.bad_repository", "--repository: {reason}", reason=error) from error
    there = {path.partition("/")[0] for path in read_tree_entries(repository, commit)}
    if missing := [folder for folder in LIVE_FOLDERS if folder not in there]:
        raise InputError(
            "presets.other_code",
            "--repository {repository}: commit {commit} has no folder {folder}/. {way}",
            repository=repository,
            commit=commit[:12],
            folder=missing[0],
            way=way,
        )


def _refuse_other(workspace: Workspace, asked: InitOptions, given: Tokenizer | None, repository: Path | None) -> None:
    """Raises: InputError if an existing workspace does not match ``asked``: its data and models depend on its present settings."""
    there = workspace.config.recipe
    if (wanted := asked.preset or asked.recipe) not in ("", there):
        raise InputError(
            "presets.other_recipe",
            "{workspace} is already a workspace with recipe {recipe}. Give a new folder for {wanted}, or change 'recipe' in the factory.yaml of "
            "this workspace.",
            workspace=workspace.root,
            recipe=there,
            wanted=wanted,
        )
    if repository and repository.resolve() != workspace.repository.resolve():
        raise InputError(
            "presets.other_repository",
            "--repository {wanted}: {workspace} is already a workspace with repository {repository}. Give a new "
            "folder for the workspace, or change 'repository' in the factory.yaml of this workspace.",
            wanted=repository,
            workspace=workspace.root,
            repository=workspace.repository,
        )
    source = workspace.recipe_path()
    size = _parsed(source.read_text(encoding="utf-8"), source).model.vocab_size
    if asked.vocabulary not in (0, size):
        raise InputError(
            "presets.other_vocabulary",
            "--vocabulary {wanted}: {workspace} is already a workspace with a vocabulary of {size:,} entries. Give a "
            "new folder for the workspace.",
            wanted=asked.vocabulary,
            workspace=workspace.root,
            size=size,
        )
    if given is not None and not is_padded_size(size, given.vocab_size):
        raise InputError(
            "presets.tokenizer_size",
            "--tokenizer: the tokenizer has {entries:,} entries, but model.vocab_size is {size:,} in {file}. Give a "
            "new folder for the workspace.",
            entries=given.vocab_size,
            size=size,
            file=source,
        )


def plan_workspace(
    options: InitOptions, own_tokenizer: Tokenizer | None, root: Path, repository: Path, machine: Hardware
) -> NewWorkspace:
    """Return the files of a new workspace. ``own_tokenizer``: a person's own tokenizer. A policy that is already in ``root`` is not changed.

    Raises: InputError or ConfigError if the files do not fit together. The error names file and key, and says what to do.
    """
    shipped = find_checkout_root() / "policies"
    if options.preset and options.preset not in PRESETS:
        raise InputError(
            "presets.no_preset",
            "No preset is named {preset!r}{nearest}",
            preset=options.preset,
            nearest=suggest_name(options.preset, PRESETS),
        )
    if options.preset and options.recipe not in ("", options.preset):
        raise InputError(
            "presets.preset_and_recipe",
            "--preset {preset} has its own recipe. Give --preset or --recipe, not both.",
            preset=options.preset,
        )
    name = options.preset or options.recipe or "demo"
    policies: dict[str, str] = {}

    source = _recipe_file(name, root, repository)
    text = source.read_text(encoding="utf-8")
    recipe = _parsed(text, source)
    size = _vocabulary(options, own_tokenizer, recipe)
    if size != recipe.model.vocab_size:
        own = root / "policies" / "recipes" / f"{name}.yaml"
        if own.exists():
            raise InputError(
                "presets.recipe_vocabulary",
                "{file}: model.vocab_size is {size}. Change the value to {wanted}, or give --vocabulary {size}.",
                file=own,
                size=recipe.model.vocab_size,
                wanted=size,
            )
        text = set_yaml_value(text, ("model", "vocab_size"), size)
        recipe, policies[f"recipes/{name}.yaml"] = _parsed(text, source), text

    if not options.force and (
        why := explain_why_recipe_is_too_large(recipe, machine, PRESETS[options.preset].gpus if options.preset else 0)
    ):
        other = find_largest_fitting_preset(machine, shipped / "recipes")
        way = (
            Message(
                "presets.smaller",
                "'--preset {preset}' fits this machine ({what}).",
                preset=other,
                what=PRESETS[other].size,
            )
            if other
            else Message("presets.none_fits", "No preset fits this machine.")
        )
        raise InputError(
            "presets.too_large",
            "The model of {kind} {name} is too large for this machine. {reason} {way} If another machine will train "
            "the model, add '--force'.",
            kind="preset" if options.preset else "recipe",
            name=name,
            reason=why,
            way=way,
        )

    own = root / "policies" / "data.yaml"
    place = own if own.exists() else shipped / "data.yaml"
    policy = DataPolicy.load(place)
    if not is_padded_size(size, policy.tokenizer.vocab_size):
        if own.exists():
            raise ConfigError(
                "presets.data_vocabulary",
                "{file}: tokenizer.vocab_size is {size:,}, but model.vocab_size of recipe {recipe} is {wanted:,}. "
                "Change tokenizer.vocab_size to {wanted}, or remove the file.",
                file=own,
                size=policy.tokenizer.vocab_size,
                recipe=name,
                wanted=size,
            )
        changed = set_yaml_value(place.read_text(encoding="utf-8"), ("tokenizer", "vocab_size"), size)
        if (sample := SAMPLE_BYTES * size) > policy.tokenizer.sample_bytes:
            changed = set_yaml_value(changed, ("tokenizer", "sample_bytes"), sample)
        policies["data.yaml"] = changed
    return NewWorkspace(name, policies)


def _vocabulary(asked: InitOptions, given: Tokenizer | None, recipe: Recipe) -> int:
    """Return the number of rows of the embedding. Raises: InputError."""
    size = asked.vocabulary or recipe.model.vocab_size
    if given is None:
        if asked.vocabulary and not 300 <= asked.vocabulary <= 1 << 20:
            raise InputError(
                "presets.vocabulary_range",
                "--vocabulary: {size} is not between {least} and {most}. A vocabulary contains at least the 256 bytes and a "
                "few special tokens.",
                size=asked.vocabulary,
                least=300,
                most=1 << 20,
            )
        return size
    there = given.vocab_size
    if asked.vocabulary and not is_padded_size(asked.vocabulary, there):
        raise InputError(
            "presets.vocabulary_misfit",
            "--vocabulary {wanted}: the tokenizer has {entries} entries. Leave --vocabulary out, or give a number from {entries} to {most}.",
            wanted=asked.vocabulary,
            entries=there,
            most=pad_size(there),
        )
    return asked.vocabulary or (
        recipe.model.vocab_size if is_padded_size(recipe.model.vocab_size, there) else pad_size(there)
    )


def _recipe_file(name: str, root: Path, repository: Path) -> Path:
    """Find the file of a recipe in the workspace, the training code's repository or this checkout. Raises: InputError that suggests a near name."""
    folders = [folder / "policies" / "recipes" for folder in (root, repository, find_checkout_root())]
    found = next((folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    if found is None:
        raise InputError(
            "presets.no_recipe",
            "No recipe is named {name!r}{nearest}",
            name=name,
            nearest=suggest_name(name, {path.stem for f in folders for path in f.glob("*.yaml")}),
        )
    return found


def _parsed(text: str, source: Path) -> Recipe:
    try:
        return Recipe.parse(read_yaml(text, str(source), RecipeError), str(source))
    except RecipeError as error:
        raise ConfigError(error.message) from error
