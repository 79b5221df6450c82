"""A template's tokens that a model never had get the mean of all rows, at the ids that transformers reads, and frozen ones are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from factory.core.errors import ConfigError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.imported_model import read_import_plan
from factory.ledger.ledger import Ledger, checkpoints, segments
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, find_champion
from factory.ledger.writing import insert_row
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.repairs.checkpoints import replay_checkpoint
from factory.training.planning import load_recipe, read_last_checkpoint, refuse_changed_model
from tests.support.factory.made_up_text import prose
from tests.support.messages import refused
from tests.support.tokenizers.families import CHATML, FAMILIES
from tests.support.trainer.public_model import SIZES
from trainer.contract.checkpoint.format import read_tensors
from trainer.contract.recipe import Recipe

NEW = ("<|im_start|>", "<|im_end|>")
CHAT = [{"role": "user", "content": "Which one?"}, {"role": "assistant", "content": "The second."}]
Make = Callable[..., "Imported"]


class Imported:
    """A base model that was imported with the chat template of another family, and its export."""

    def __init__(self, source: Path, facts: dict[str, Any]) -> None:
        self.source, self.facts = source, facts
        workspace = Workspace.open(Path(facts["workspace"]))
        self.plant = Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root))
        champion = find_champion(self.plant.ledger)
        assert champion is not None
        self.export = Path(champion.export_path)
        self.tokens = Tokenizer.load(source.parent / "base").vocab_size  # of the vocabulary before

    @property
    def size(self) -> int:
        return load_recipe(self.plant.workspace).model.vocab_size


@pytest.fixture
def make(tmp_path: Path, code_repository: Path) -> Make:
    """``free``: rows of the embedding that have no token. ``template``: other than ChatML."""

    def run(tied: bool = True, free: int = 0, dtype: torch.dtype = torch.float32, template: str = CHATML) -> Imported:
        from transformers import LlamaConfig, LlamaForCausalLM

        base = FAMILIES["llama3"].write(tmp_path / "base", [prose(number) for number in range(60)])
        source = FAMILIES["llama3"].write(tmp_path / "Base-Model", [prose(number) for number in range(60)])
        (source / "chat_template.jinja").write_text(template)
        torch.manual_seed(3)
        size = Tokenizer.load(base).vocab_size + free
        config = LlamaConfig(**SIZES | {"vocab_size": size, "tie_word_embeddings": tied})
        LlamaForCausalLM(config).to(dtype).save_pretrained(source)
        (source / "generation_config.json").write_bytes((base / "generation_config.json").read_bytes())
        options = ImportOptions(source, licence="MIT")
        return Imported(source, make_imported_workspace(tmp_path / "factory", options, code_repository, SILENT))

    return run


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_and_the_export_has_their_ids(tied: bool, make: Make) -> None:
    from transformers import AutoTokenizer

    made = make(tied)
    ids = [made.tokens, made.tokens + 1]
    assert made.facts["new_tokens"] == [*NEW]
    assert made.size == made.tokens + 2 == json.loads((made.export / "config.json").read_text())["vocab_size"]
    there, here = load_file(made.source / "model.safetensors"), load_file(made.export / "model.safetensors")
    tables = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    for name, tensor in there.items():
        if name not in tables:
            assert torch.equal(here[name], tensor), name
            continue
        assert torch.equal(here[name][: made.tokens], tensor)
        mean = tensor.double().mean(0)
        assert here[name].shape[0] == made.size and (here[name][ids].double() - mean).abs().max() < 1e-8, name
    tokenizer = AutoTokenizer.from_pretrained(made.export)
    assert [tokenizer.convert_tokens_to_ids(token) for token in NEW] == ids
    theirs = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    ours = Tokenizer.load(made.plant.workspace.tokenizer).encode_chat(CHAT)[0].tolist()
    assert theirs == ours and ours.count(ids[0]) == 3


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_those_of_transformers_resize_token_embeddings(tied: bool, make: Make) -> None:
    """It draws around the mean, with a deviation of 3e-5 times that of the rows."""
    made = make(tied)
    model = load(made.source)
    model.resize_token_embeddings(made.size, mean_resizing=True)
    ours = load(made.export)
    for one in ("get_input_embeddings", "get_output_embeddings"):
        theirs, mine = getattr(model, one)().weight, getattr(ours, one)().weight
        assert (theirs - mine).abs().max() < 1e-5


@pytest.mark.parametrize(("tied", "free"), [(True, 0), (False, 0), (True, 40)])
def test_release_0_differs_from_the_source_only_by_the_share_that_new_tokens_take(
    tied: bool, free: int, make: Make
) -> None:
    """By at most ln(1 + n/V) nats a token, which is Jensen's inequality."""
    made = make(tied, free)
    ids = torch.tensor([Tokenizer.load(made.source.parent / "base").encode(prose(7))[:200]])
    with torch.no_grad():
        before, after = (load(folder)(ids).logits[0, :-1] for folder in (made.source, made.export))
    known = slice(0, made.tokens)
    assert (before[:, known] - after[:, known]).abs().max() < 1e-6
    loss = [
        torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:], reduction="none") for logits in (before, after)
    ]
    change = loss[1] - loss[0]
    assert change.max() <= math.log1p(2 / made.tokens) + 1e-6
    assert change.mean().abs() < 2e-3 and (free or change.min() > 0)


def test_rows_without_a_token_are_used_before_new_ones(make: Make) -> None:
    """As Qwen's embedding, which is larger than its vocabulary."""
    made = make(free=40, dtype=torch.bfloat16)
    ids = [made.tokens, made.tokens + 1]
    there, here = load_file(made.source / "model.safetensors"), load_file(made.export / "model.safetensors")
    assert made.size == made.tokens + 40
    name = "model.embed_tokens.weight"
    others = [row for row in range(made.size) if row not in ids]
    assert torch.equal(there[name][others], here[name][others]) and here[name].dtype == torch.bfloat16
    mean = there[name][: made.tokens].double().mean(0).bfloat16()
    assert torch.equal(here[name][ids], mean.expand(2, -1)), "the mean of the rows that have a token"
    stored = read_tensors(Path(read_last_checkpoint(made.plant.ledger, 1)["path"]), "model")["embedding"]
    assert torch.equal(stored, here[name].float()), "the export has the bits of the checkpoint"


def test_a_text_that_is_no_special_token_gets_no_row(make: Make) -> None:
    template = "{% for m in messages %}<tool_call>{{ m.content }}</tool_call>{{ eos_token }}{% endfor %}"
    made = make(template=template)
    assert made.facts["new_tokens"] == [] and made.size == made.tokens
    assert read_import_plan(made.plant.ledger, 1)["new_rows"] == []


def test_a_checkpoint_with_new_rows_is_made_again_from_the_source(make: Make) -> None:
    made = make()
    path = Path(read_last_checkpoint(made.plant.ledger, 1)["path"])
    before = read_tensors(path, "model")["embedding"].clone()  # the file is mapped
    (path / "model.safetensors").write_bytes(b"damaged")
    assert replay_checkpoint(made.plant, 1) == ""
    assert torch.equal(read_tensors(path, "model")["embedding"], before) and len(before) == made.tokens + 2


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"freeze": ["embedding"]}, "freeze"),
        ({"freeze": ["embed*"]}, "freeze"),
        ({"adapt": {"rank": 4}}, "adapt"),
    ],
)
def test_new_rows_that_nothing_would_train_are_refused_until_a_segment_trained_them(
    keys: dict[str, Any], key: str, make: Make
) -> None:
    made = make()
    plant, ledger = made.plant, made.plant.ledger
    plain = load_recipe(plant.workspace)
    frozen = Recipe.parse(plain.model_dump(mode="json") | keys, "recipe.yaml")
    row = SegmentRow.get(ledger, 1)
    assert refuse_changed_model(plant, plain, row) == []
    with refused("training.new_rows_frozen", ConfigError, key=key, tokens=[*NEW]):
        refuse_changed_model(plant, frozen, row)
    values = ledger.read("SELECT * FROM segments WHERE id = 1")[0]
    for number, recipe in ((2, frozen), (3, plain)):
        later = {"id": number, "parent": number - 1, "kind": "trunk", "last_step": number}
        changed = {**values, **later, "recipe_json": recipe.model_dump(mode="json")}
        with ledger.begin() as tx:
            insert_row(tx, segments, **changed)
        if number == 2:
            with refused("training.new_rows_frozen", ConfigError):
                refuse_changed_model(plant, frozen, SegmentRow.get(ledger, number))
        else:
            assert refuse_changed_model(plant, frozen, SegmentRow.get(ledger, number)) == []
    # a segment that trained the tables, but on documents without the tokens: its checkpoint still has equal rows
    made_by_import = ledger.read("SELECT * FROM checkpoints WHERE segment = 1")[0]
    with ledger.begin() as tx:
        tx.execute(checkpoints.insert().values(made_by_import | {"id": made_by_import["id"][::-1], "segment": 3}))
    with refused("training.new_rows_frozen", ConfigError):
        refuse_changed_model(plant, frozen, SegmentRow.get(ledger, 3))


def test_a_frozen_head_of_its_own_is_refused(make: Make) -> None:
    made = make(tied=False)
    plain = load_recipe(made.plant.workspace)
    frozen = Recipe.parse(plain.model_dump(mode="json") | {"freeze": ["head"]}, "recipe.yaml")
    with refused("training.new_rows_frozen", ConfigError, tables=["head"]):
        refuse_changed_model(made.plant, frozen, SegmentRow.get(made.plant.ledger, 1))
