"""Recipes that are changed covertly: every value that training would read differently is a difference, and hidden YAML is refused."""

from __future__ import annotations

from kernels.contract.message import Message

from collections.abc import Callable

import pytest
import sqlalchemy as sa
import yaml

from agents.core.proposal import Edit, Proposal
from factory.ledger.plant import Plant
from factory.code_loop.submitting import submit_proposal
from factory.core.progress import SILENT
from factory.core.workspace import find_checkout_root
from factory.gates.recipe.gate import is_recipe_patch
from factory.gates.recipe_changes import select_result_changing_keys, read_recipe_changes
from factory.git import repository
from factory.git.scope import AgentsPolicy, FileChange
from factory.ledger.ledger import proposals, verdicts
from kernels.contract.strict_yaml import read_yaml
from tests.support.factory.code_loop import make
from trainer.contract.errors import RecipeError
from trainer.contract.recipe import Recipe

TINY = "policies/recipes/tiny.yaml"
BASE = (
    (find_checkout_root() / TINY)
    .read_text()
    .replace("  replay: 0.3", "  anneal_weights: {code: 1.0, chat: 0.0}\n  replay: 0.3")
)
AGENTS = AgentsPolicy.load(find_checkout_root() / "policies" / "agents.yaml")


def without(*path: str) -> str:
    """The recipe with one key gone."""
    recipe = yaml.safe_load(BASE.replace("3e-3", "0.003"))
    inner = recipe
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return yaml.safe_dump(recipe)


GONE = [
    ("mixture", "anneal_weights"),
    ("mixture", "anneal_weights", "chat"),
    ("mixture", "weights", "chat"),
    ("mixture", "weights", "*"),
    ("stability", "noise_scale_every"),
    ("stability",),
    ("checkpoint_every",),
]


@pytest.mark.parametrize("path", GONE, ids=".".join)
def test_a_removed_key_of_a_recipe_is_a_difference(path: tuple[str, ...]) -> None:
    found = select_result_changing_keys(
        read_recipe_changes(FileChange(TINY, without(*path).encode(), old_mode="100644"), BASE)
    )
    assert any(key.startswith(".".join(path)) for key in found), found


def test_every_key_of_a_recipe_is_compared() -> None:
    """Whichever key says something else, the change is seen: none is left out of the comparison."""
    here = Recipe.parse(read_yaml(BASE, "base", RecipeError)).model_dump(mode="json")
    for section, value in here.items():
        for key in value if isinstance(value, dict) else [None]:
            other = {**here, section: {**value, key: "changed"} if key is not None else "changed"}
            text = yaml.safe_dump(other)
            try:
                changes = read_recipe_changes(FileChange(TINY, text.encode(), old_mode="100644"), BASE)
            except RecipeError:
                continue  # another value is refused, which hides nothing
            assert changes, (section, key)


HIDING = {
    "a merge": "mixture: {<<: {max_epochs: 9}, weights: {code: 1.0}}\n",
    "an anchor": "a: &a 1\n",
    "an alias": "a: &a [1]\nb: *a\n",
    "a bomb": "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefghijklmnop", "bcdefghijklmnopq")),
    "a tag": "a: !!int '1'\n",
    "a tag of Python's": "a: !!python/object/apply:os.system [id]\n",
    "a doubled key": "seed: 1\nseed: 2\n",
    "a doubled key, quoted": "seed: 1\n'seed': 2\n",
    "a doubled key, written otherwise": "1: a\n0x1: b\n",
    "a doubled key below": "mixture: {replay: 0.1, replay: 0.2}\n",
    "two documents": "seed: 1\n---\nseed: 2\n",
}  # fmt: skip


@pytest.mark.parametrize("text", HIDING.values(), ids=HIDING.keys())
def test_the_loader_refuses_yaml_that_hides_a_value(text: str) -> None:
    with pytest.raises(RecipeError, match="recipe cannot be read as YAML: .*line"):
        read_yaml(text, "recipe", RecipeError)


def test_an_unknown_key_is_refused() -> None:
    for text in (BASE + "sead: 1\n", BASE + '"<<": {seed: 2}\n'):
        with pytest.raises(RecipeError, match="unknown key"):
            Recipe.parse(read_yaml(text, "recipe", RecipeError), "recipe")


CODE = ("trainer/optim/schedule.py", lambda text: text + "\n# faster\n")
BACK_DOORS: dict[str, tuple[Callable[[str], str], str]] = {
    "a domain's weight is gone": (lambda text: text.replace(", chat: 0.2", ""), "mixture.weights.chat changes"),
    "a section is gone": (lambda text: text.partition("stability:")[0], "stability.noise_scale_every changes"),
    "a merge": (lambda text: text.replace("  replay: 0.3", "  <<: {replay: 0.9}"), "'<<' is not allowed"),
    "an anchor": (lambda text: text.replace("seed: 1", "seed: &a 1"), "anchors"),
    "an unknown key": (lambda text: text + "sead: 1\n", "unknown key 'sead'"),
}


@pytest.mark.parametrize("name", BACK_DOORS)
@pytest.mark.parametrize("with_code", [True, False])
def test_a_recipe_cannot_change_together_with_code(name: str, with_code: bool) -> None:
    change, words = BACK_DOORS[name]
    made = make()
    text = (made.target / TINY).read_text()
    assert change(text) != text
    edits = [Edit(TINY, change(text))]
    if with_code:
        edits.append(Edit(CODE[0], CODE[1]((made.target / CODE[0]).read_text())))
    else:
        applied = repository.apply_proposal(
            made.target, made.base, [(TINY, change(text))], policy=AGENTS, branch="factory/evil/99-x", message="m",
            worktrees=made.workspace.worktrees,
        )  # fmt: skip
        learns = is_recipe_patch(made.workspace, applied)
        repository.remove_worktree(made.target, applied.worktree)
        repository.remove_branch(made.target, applied.branch)
        if "changes" in words:
            assert learns
            return
    number = submit_proposal(
        Plant(made.workspace, made.ledger), Proposal("x", "x", "T", "h", 1.1, tuple(edits)), made.base
    )
    joined = proposals.join(verdicts, verdicts.c.id == proposals.c.verdict)
    row = made.ledger.select_first(sa.select(verdicts).select_from(joined).where(proposals.c.number == number))
    assert row and (row["gate"], row["outcome"]) == ("patch", "reject"), row
    assert words in str(Message.from_json(row["reasons"][0])) and made.left_behind() == []
