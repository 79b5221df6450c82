"""Makes a workspace whose recipe, vocabulary, tokenizer and data policy fit one another, and fit this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from agents.core.yaml_edit import set_value
from factory.backups.backups import make_ledger
from factory.core.errors import ConfigError, InputError, nearest
from factory.core.workspace import Config, Workspace, code_root
from factory.git.git_store import entries_of
from factory.git.repository import LIVE_FOLDERS, RepositoryError, live_commit
from factory.ingest import store
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.tokenizer import Tokenizer, write_files
from factory.ingest.vocabulary_size import fits, padded
from factory.ledger.ledger import tokenizers
from factory.ledger.plant import Plant
from factory.presets.presets import PRESETS, Hardware, fitting, too_large
from kernels.contract.strict_yaml import read_yaml
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

# A tokenizer that somebody brings to ``factory init``: a Hugging Face ``tokenizer.json``, or its folder.
LARGEST = 1 << 28  # bytes


@contextmanager
def opened(given: Path) -> Iterator[Tokenizer]:
    """The tokenizer of a file or folder, with this factory's files around it, while the block lasts.

    Raises: InputError where this factory would not make its ids of it (``Tokenizer.misread``), or its ids have gaps.
    """
    path = given / "tokenizer.json" if given.is_dir() else given
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"--tokenizer: {path} has more than {LARGEST >> 20} MiB: that is no tokenizer")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--tokenizer: {path} cannot be read: {error}; name a tokenizer.json, or a folder that has one"
        ) from None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        try:
            tokenizer = Tokenizer.load(folder)
        except InputError as error:
            said = str(error).replace(str(folder / "tokenizer.json"), str(path))
            raise InputError(f"--tokenizer: {said}; leave --tokenizer out, and one is trained on your data") from None
        if tokenizer.has_gaps():
            raise InputError(
                f"--tokenizer: {path}: its ids are not 0 to {tokenizer.vocab_size - 1}; leave --tokenizer out"
            )
        yield tokenizer


def install(plant: Plant, tokenizer: Tokenizer) -> None:
    """Freeze it as the workspace's, in place of one that the first ingest would train. Again with the same: nothing.

    Raises: InputError where there is another.
    """
    recorded = plant.ledger.one(sa.select(tokenizers))
    if recorded and recorded["sha256"] != tokenizer.sha256:
        raise InputError(
            f"--tokenizer: {plant.workspace.root} has its tokenizer already, and what was ingested is made of its ids: name a new workspace"
        )
    write_files(
        (tokenizer.folder / "tokenizer.json").read_text(encoding="utf-8"),
        bool(tokenizer.bos),
        plant.workspace.tokenizer,
    )
    with plant.ledger.begin() as tx:
        store.write_tokenizer(
            tx, Tokenizer.load(plant.workspace.tokenizer), plant.ledger.inside(plant.workspace.tokenizer)
        )


SAMPLE_BYTES = 1500  # of text for an entry of the vocabulary; the shipped policy has as many for its own


@dataclass(frozen=True)
class InitOptions:
    """What the person named; empty, 0 or None: nothing."""

    preset: str = ""
    recipe: str = ""
    vocabulary: int = 0
    tokenizer: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class NewWorkspace:
    """A workspace to be made."""

    recipe: str  # its name
    policies: dict[str, str]  # the workspace's own copies: place in policies/ → text; none where the shipped ones fit


def make(where: Path, asked: InitOptions, repository: Path | None) -> Workspace:
    """A new workspace, or the one that is there already, if it is what is asked for. ``repository``: whose code is trained with and patched.

    Raises: InputError, ConfigError, WorkspaceError, RepositoryError; then nothing was made.
    """
    root = where.expanduser().resolve()
    with ExitStack() as held:
        given = held.enter_context(opened(asked.tokenizer)) if asked.tokenizer else None
        if (root / "factory.yaml").exists():
            workspace = Workspace.open(root)
            _refuse_other(workspace, asked, given, repository)
        else:
            if repository:
                _refuse_no_code(repository)
            start = start_of(asked, given, root, repository or code_root(), Hardware.here())
            config = Config(recipe=start.recipe, repository=str(repository) if repository else "")
            workspace = Workspace.create(root, config, start.policies)
        ledger = make_ledger(workspace)
        if given is not None:
            install(Plant(workspace, ledger), given)
    return workspace


def _refuse_no_code(repository: Path) -> None:
    """Raises: InputError for what nothing can be trained with: no folder, no git checkout, no commit, or of other code."""
    way = "name a clone of the factory's repository, or leave --repository out"
    if not repository.is_dir():
        raise InputError(f"--repository {repository}: no such folder: {way}")
    try:
        commit = live_commit(repository)
    except RepositoryError as error:
        raise InputError(f"--repository: {error}") from error
    there = {path.partition("/")[0] for path in entries_of(repository, commit)}
    if missing := [folder for folder in LIVE_FOLDERS if folder not in there]:
        raise InputError(f"--repository {repository}: its commit {commit[:12]} has no folder {missing[0]}/: {way}")


def _refuse_other(workspace: Workspace, asked: InitOptions, given: Tokenizer | None, repository: Path | None) -> None:
    """Raises: InputError where a workspace is not what is asked for: what was ingested and trained there is made of what it is."""
    there = workspace.config.recipe
    if (wanted := asked.preset or asked.recipe) not in ("", there):
        raise InputError(
            f"{workspace.root} is a workspace already, of recipe {there}: name a new folder for {wanted}, or change 'recipe' in its factory.yaml"
        )
    if repository and repository.resolve() != workspace.repository.resolve():
        raise InputError(
            f"--repository {repository}: {workspace.root} is a workspace already, of {workspace.repository}: name a new folder, or change "
            "'repository' in its factory.yaml"
        )
    source = workspace.recipe_path()
    size = _parsed(source.read_text(encoding="utf-8"), source).model.vocab_size
    if asked.vocabulary not in (0, size):
        raise InputError(
            f"--vocabulary {asked.vocabulary}: {workspace.root} is a workspace already, of {size}: name a new folder"
        )
    if given is not None and not fits(size, given.vocab_size):
        raise InputError(
            f"--tokenizer: it has {given.vocab_size} entries, {source}: model.vocab_size is {size}: name a new folder"
        )


def start_of(
    asked: InitOptions, given: Tokenizer | None, root: Path, repository: Path, machine: Hardware
) -> NewWorkspace:
    """``given``: the tokenizer that is brought. A policy that already lies in ``root`` counts as a person's word.

    Raises: InputError, ConfigError: what does not fit, its file and key, and what to do.
    """
    shipped = code_root() / "policies"
    if asked.preset and asked.preset not in PRESETS:
        raise InputError(f"no preset {asked.preset!r}{nearest(asked.preset, PRESETS)}")
    if asked.preset and asked.recipe not in ("", asked.preset):
        raise InputError(f"--preset {asked.preset} has a recipe of its own: name --preset or --recipe, not both")
    name = asked.preset or asked.recipe or "demo"
    policies: dict[str, str] = {}

    source = _recipe_file(name, root, repository)
    text = source.read_text(encoding="utf-8")
    recipe = _parsed(text, source)
    size = _vocabulary(asked, given, recipe)
    if size != recipe.model.vocab_size:
        own = root / "policies" / "recipes" / f"{name}.yaml"
        if own.exists():
            raise InputError(
                f"{own}: model.vocab_size is {recipe.model.vocab_size}: write {size} there, or name that as --vocabulary"
            )
        text = set_value(text, ("model", "vocab_size"), size)
        recipe, policies[f"recipes/{name}.yaml"] = _parsed(text, source), text

    if not asked.force and (why := too_large(recipe, machine, PRESETS[asked.preset].gpus if asked.preset else 0)):
        other = fitting(machine, shipped / "recipes")
        way = f"'--preset {other}' ({PRESETS[other].what}) fits" if other else "no preset fits"
        raise InputError(
            f"{'preset' if asked.preset else 'recipe'} {name} {why}: {way}, or '--force' where another machine trains"
        )

    own = root / "policies" / "data.yaml"
    place = own if own.exists() else shipped / "data.yaml"
    policy = DataPolicy.load(place)
    if not fits(size, policy.tokenizer.vocab_size):
        if own.exists():
            raise ConfigError(
                f"{own}: tokenizer.vocab_size is {policy.tokenizer.vocab_size}, recipe {name} has model.vocab_size {size}: write {size} there, "
                f"or take the file away"
            )
        changed = set_value(place.read_text(encoding="utf-8"), ("tokenizer", "vocab_size"), size)
        if (sample := SAMPLE_BYTES * size) > policy.tokenizer.sample_bytes:
            changed = set_value(changed, ("tokenizer", "sample_bytes"), sample)
        policies["data.yaml"] = changed
    return NewWorkspace(name, policies)


def _vocabulary(asked: InitOptions, given: Tokenizer | None, recipe: Recipe) -> int:
    """Entries of the embedding. Raises: InputError."""
    size = asked.vocabulary or recipe.model.vocab_size
    if given is None:
        if asked.vocabulary and not 300 <= asked.vocabulary <= 1 << 20:
            raise InputError(
                f"--vocabulary: {asked.vocabulary} is not between 300 and {1 << 20}: 256 bytes and a few special tokens come first"
            )
        return size
    there = given.vocab_size
    if asked.vocabulary and not fits(asked.vocabulary, there):
        raise InputError(
            f"--vocabulary {asked.vocabulary}: the tokenizer has {there} entries: leave it out, or name {there} to {padded(there)}"
        )
    return asked.vocabulary or (recipe.model.vocab_size if fits(recipe.model.vocab_size, there) else padded(there))


def _recipe_file(name: str, root: Path, repository: Path) -> Path:
    """The workspace's own copy, the trained code's, the checkout's. Raises: InputError naming the nearest."""
    folders = [folder / "policies" / "recipes" for folder in (root, repository, code_root())]
    found = next((folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").is_file()), None)
    if found is None:
        raise InputError(
            f"no recipe {name!r}{nearest(name, {path.stem for f in folders for path in f.glob('*.yaml')})}"
        )
    return found


def _parsed(text: str, source: Path) -> Recipe:
    try:
        return Recipe.parse(read_yaml(text, str(source), RecipeError), str(source))
    except RecipeError as error:
        raise ConfigError(str(error)) from error
