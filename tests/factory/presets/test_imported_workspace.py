"""A workspace begins with a public model: everything is checked first, a kill at any line does no harm, and the export is the source."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import load_file, save_file

from factory.cli.continuing_plan import describe_this_machine, plan_continuing
from factory.core.errors import ConfigError, DiskFullError, FactoryError
from factory.core.faults import is_disk_full
from factory.core.progress import SILENT, SilentProgress
from factory.core.workspace import Workspace
from factory.diagnosis.remedies import rewind_segment
from factory.duties.duty import DutyState
from factory.duties.releasing import MEASURE_IMPORT, find_unexported_segments
from factory.gates.release.training_evidence import read_training_evidence
from factory.ingest.tokenizing.fast_path import SPLIT_NAMES, get_split_rule, name_split, spell_split
from factory.ledger.imported_model import find_import, find_imported_licence, read_import_plan, refuse_unfinished_import
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, ReleaseRow, SegmentRow, VerdictRow, find_champion
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.presets.new_workspace import open_tokenizer
from factory.presets.presets import Hardware, estimate_memory_here
from factory.releasable.report import make_report
from factory.release.gguf.writing import write_export_gguf, write_release_gguf
from factory.release.releases import finish_interrupted_releases
from factory.repairs.checkpoints import replay_checkpoint
from factory.retention.needs import RetentionNeeds
from factory.training.gguf_source import open_gguf
from factory.training.import_source import ImportRefusedError, ImportSource
from factory.training.planning import find_trunk_parent, load_recipe, read_last_checkpoint, refuse_changed_model
from factory.training.training import run_segment
from kernels.contract.message import Message
from tests.support.factory.command import command_here
from tests.support.factory.made_up_text import prose
from tests.support.killed_at import killed_at, lines_run
from tests.support.messages import refused
from tests.support.models.changed_files import rewrite_gguf, write_lfs_pointer
from tests.support.trainer.public_model import save_public_model
from trainer.contract.checkpoint.format import find_checkpoint_fault, read_tensors

OURS = ("imported_workspace.py", "importing.py", "imported_release.py", "exporting.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "Small-Model.v1"
    folder.mkdir()
    save_public_model(folder, [prose(i) for i in range(60)], torch.bfloat16)
    return folder


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    return shutil.copytree(model, tmp_path / model.name)


@pytest.fixture
def make(tmp_path: Path, code_repository: Path) -> Callable[..., dict[str, Any]]:
    def run(place: Path, **options: Any) -> dict[str, Any]:
        return make_imported_workspace(tmp_path / "factory", ImportOptions(place, **options), code_repository, SILENT)

    return run


def opened(root: Path) -> Plant:
    workspace = Workspace.open(root)
    return Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root))


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# -- what becomes of a model ---------------------------------------------------------------------------------------------
def test_an_imported_model_is_release_0_and_the_start_of_the_trunk(
    model: Path, make: Callable[..., dict[str, Any]]
) -> None:
    facts = make(model)
    plant = opened(Path(facts["workspace"]))
    row = find_import(plant.ledger)
    assert row is not None and (row.state, row.first_step, row.last_step, row.parent) == ("done", 0, 0, None)
    champion = find_champion(plant.ledger)
    assert champion is not None and (champion.number, champion.state, champion.segment) == (0, "published", row.id)
    verdict = VerdictRow.get(plant.ledger, champion.verdict)
    assert (verdict.gate, verdict.outcome, verdict.against) == ("import", "imported", None)
    assert VerdictRow.find_first(plant.ledger, "WHERE gate = 'release'") is None, "no decision of the gate is pretended"
    recipe = load_recipe(plant.workspace)
    assert (recipe.name, recipe.export_dtype, recipe.model.family) == ("small-model-v1", "bf16", "llama")
    parent = find_trunk_parent(plant.ledger, recipe)
    assert parent is not None and parent.id == row.id
    assert refuse_changed_model(plant, recipe, parent) == []
    plan = read_import_plan(plant.ledger, row.id)
    assert plan["files"].keys() >= {"config.json", "model.safetensors", "tokenizer.json"}
    licence = find_imported_licence(plant.ledger)
    assert (
        licence is not None
        and (licence.name, licence.origin) == ("apache-2.0", "README.md")
        and "Apache" in licence.text
    )
    assert row.id in RetentionNeeds.find_in_ledger(plant).ends, "its checkpoint is never removed"
    assert make(model) == facts and len(ReleaseRow.select(plant.ledger)) == 1


def test_the_export_of_an_import_is_the_source_to_the_bit(model: Path, make: Callable[..., dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM

    facts = make(model, context=64)
    champion = find_champion(opened(Path(facts["workspace"])).ledger)
    assert champion is not None
    export = Path(champion.export_path)
    source, ours = load_file(model / "model.safetensors"), load_file(export / "model.safetensors")
    assert source.keys() == ours.keys()
    for name, tensor in source.items():
        assert ours[name].dtype == tensor.dtype == torch.bfloat16 and torch.equal(ours[name], tensor), name
    there, here = (json.loads((folder / "config.json").read_text()) for folder in (model, export))
    assert here["max_position_embeddings"] == there["max_position_embeddings"] == 256, (
        "not the shorter rows of training"
    )
    ids = torch.arange(40)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits for folder in (model, export)
    ]
    assert torch.equal(*logits)


def test_an_imported_checkpoint_is_made_again_from_the_source(own: Path, make: Callable[..., dict[str, Any]]) -> None:
    plant = opened(Path(make(own)["workspace"]))
    row = find_import(plant.ledger)
    assert row is not None
    path = Path(read_last_checkpoint(plant.ledger, row.id)["path"])
    (path / "model.safetensors").write_bytes(b"damaged")
    assert replay_checkpoint(plant, row.id) == "" and find_checkpoint_fault(path) == ""
    rewrite(own / "generation_config.json", top_k=3)
    shutil.rmtree(path)
    assert replay_checkpoint(plant, row.id) != "", "another source is not the import"


def test_a_recipe_of_another_function_is_refused(model: Path, make: Callable[..., dict[str, Any]]) -> None:
    facts = make(model)
    plant, own = opened(Path(facts["workspace"])), Path(facts["recipe"])
    own.write_text(own.read_text().replace("norm_eps: 1.0e-05", "norm_eps: 1.0e-06"))
    recipe = load_recipe(plant.workspace)
    with refused("training.imported_model_changed"):
        refuse_changed_model(plant, recipe, find_trunk_parent(plant.ledger, recipe))


def test_a_stated_licence_takes_precedence_and_the_imported_model_waits_for_held_out_documents(
    model: Path, make: Callable[..., dict[str, Any]]
) -> None:
    facts = make(model, licence="MIT")
    plant = opened(Path(facts["workspace"]))
    assert facts["licence"] == "MIT"
    with plant.ledger.snapshot() as db:
        assert not [*MEASURE_IMPORT.due(DutyState(plant, db))]


@pytest.mark.parametrize("named", [True, False])
def test_the_models_licence_counts_for_every_candidate_that_descends_from_it(
    named: bool, own: Path, make: Callable[..., dict[str, Any]]
) -> None:
    if not named:
        (own / "README.md").unlink()
    plant = opened(Path(make(own)["workspace"]))
    evidence = read_training_evidence(plant, 1)
    assert evidence["not_releasable"] == ({} if named else {"no licence (imported model)": 1.0})
    (line,) = [line for line in make_report(plant) if line.name == "imported model"]
    assert line.ok is named and bool(line.todo) is not named


def test_a_licence_of_unlabelled_documents_says_nothing_about_the_model_and_the_advised_command_names_it(
    own: Path, make: Callable[..., dict[str, Any]]
) -> None:
    (own / "README.md").unlink()
    plant = opened(Path(make(own)["workspace"]))

    def is_allowed() -> tuple[bool | None, dict[str, float]]:
        (line,) = [line for line in make_report(plant) if line.name == "imported model"]
        return line.ok, read_training_evidence(plant, 1)["not_releasable"]

    for_documents = ["config", "set", "data", "licences.missing", "{train: true, release: true}"]
    assert command_here(*for_documents, home=plant.workspace).exit_code == 0
    assert is_allowed() == (False, {"no licence (imported model)": 1.0})
    (todo,) = [line.todo for line in make_report(plant) if line.name == "imported model"]
    (advised,) = re.findall(r"'factory ([^']*)'", str(todo))
    assert command_here(*shlex.split(advised), home=plant.workspace).exit_code == 0
    assert is_allowed() == (True, {})


def test_a_gguf_file_that_is_a_pointer_of_git_lfs_is_refused(
    make: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    write_lfs_pointer(file)
    with refused("gguf_source.pointer"):
        make(file)


def test_an_odd_name_of_a_licence_is_not_replaced_by_an_example(own: Path, make: Callable[..., dict[str, Any]]) -> None:
    (own / "README.md").write_text("---\nlicense: Somebody's Community Licence (2024)\n---\n")
    plant = opened(Path(make(own)["workspace"]))
    (todo,) = [line.todo for line in make_report(plant) if line.name == "imported model"]
    assert isinstance(todo, Message) and todo.code == "releasable.odd_imported_licence"


def test_an_imported_model_is_not_rewound(model: Path, make: Callable[..., dict[str, Any]]) -> None:
    plant = opened(Path(make(model)["workspace"]))
    with refused("diagnosis.import_stays"):
        rewind_segment(plant.ledger, 1, "a person")
    assert SegmentRow.get(plant.ledger, 1).state == "done"


@pytest.mark.slow("transformers starts in the sandbox to read the file")
def test_a_gguf_file_is_imported_with_the_bits_of_its_weights(
    isolates: None, model: Path, make: Callable[..., dict[str, Any]], tmp_path: Path, code_repository: Path
) -> None:
    plant = opened(Path(make(model)["workspace"]))
    file, text = tmp_path / "small.gguf", tmp_path / "text.gguf"
    write_release_gguf(plant.ledger, 0, file, SILENT)
    facts = make_imported_workspace(tmp_path / "again", ImportOptions(file), code_repository, SILENT)
    assert facts["files"].keys() == {"small.gguf"} and facts["class"] == "LlamaForCausalLM"
    again = opened(Path(facts["workspace"]))
    ours, theirs = (read_tensors(Path(read_last_checkpoint(one.ledger, 1)["path"]), "model") for one in (again, plant))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    text.write_text("GGUF, but only a text")
    with refused("gguf_source.unreadable"):
        make_imported_workspace(tmp_path / "none", ImportOptions(text), code_repository, SILENT)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("memory", "micro", "code"),
    [
        (1e9, 16, ""),
        (40e6, 4, ""),  # half of it is between the needs of 4 and of 8 rows
        (5e6, 1, ""),  # half of it is too little for one row, but one row fits
        (3e6, None, "imported_workspace.shorter"),
        (1e6, None, ""),
    ],
)
def test_a_machines_memory_sets_the_micro_batch_and_too_little_is_refused_with_what_would_fit(
    memory: float,
    micro: int | None,
    code: str,
    model: Path,
    make: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Hardware, "of_this_machine", lambda: Hardware((), memory, 1))
    if micro is not None:
        recipe = load_recipe(opened(Path(make(model)["workspace"])).workspace)
        assert recipe.batch.micro_sequences == micro
        assert estimate_memory_here(recipe, Hardware((), memory, 1)) <= memory * (0.5 if micro > 1 else 1.0)
        return
    with refused("imported_workspace.too_large") as error:
        make(model)
    advice = error.value.data["advice"]
    assert getattr(advice, "code", "") == code
    if code:
        assert make(model, context=advice.data["context"])["release"] == 0


@pytest.mark.slow("transformers starts in the sandbox to read the file")
def test_the_plan_of_a_gguf_file_is_that_of_its_folder(isolates: None, model: Path, small_gguf: Path) -> None:
    of_file, of_folder = (
        plan_continuing(place, None, [describe_this_machine()], 4, (), None).to_json() for place in (small_gguf, model)
    )
    assert of_file["model"] | {"norm_eps": 0} == of_folder["model"] | {"norm_eps": 0}
    assert of_file["fits"] == of_folder["fits"] and of_file["files"] is None


# what is changed, the code, and data of the refusal
LOSSES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "a tensor is missing": (
        {"blk.0.attn_q.weight": None},
        "gguf_source.missing_tensor",
        {"name": "model.layers.0.self_attn.q_proj.weight", "count": 1},
    ),
    "Llama 3's factors": (
        {"rope_freqs.weight": np.array([1, 1, 2, 8], np.float32)},
        "gguf_source.unread_tensor",
        {"name": "rope_freqs.weight", "count": 1},
    ),
    "a bias": (
        {"blk.1.attn_q.bias": np.ones(32, np.float32)},
        "gguf_source.unread_tensor",
        {"name": "blk.1.attn_q.bias", "count": 1},
    ),
    "yarn": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        "gguf_source.unread_key",
        {"key": "llama.rope.scaling.type", "value": "yarn"},
    ),
    "a factor alone is linear scaling": (
        {"llama.rope.scaling.factor": 4.0},
        "gguf_source.unread_key",
        {"key": "llama.rope.scaling.factor", "value": "4.0"},
    ),
    "a soft cap": (
        {"llama.attn_logit_softcapping": 50.0},
        "gguf_source.unread_key",
        {"key": "llama.attn_logit_softcapping", "value": "50.0"},
    ),
    "an unknown split": ({"tokenizer.ggml.pre": "tekken"}, "gguf_source.unknown_split", {"rule": "tekken"}),
}


@pytest.fixture(scope="module")
def small_gguf(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    export = shutil.copytree(model, folder / "export", ignore=shutil.ignore_patterns("README.md", "LICENSE"))
    write_export_gguf(export, folder / "small.gguf", {}, SILENT)
    return folder / "small.gguf"


@pytest.mark.slow("transformers starts in the sandbox to read the file")
@pytest.mark.parametrize("loss", LOSSES)
def test_a_gguf_file_from_which_transformers_loses_something_is_refused_by_its_name(
    loss: str, isolates: None, small_gguf: Path, tmp_path: Path
) -> None:
    change, code, data = LOSSES[loss]
    file = rewrite_gguf(small_gguf, tmp_path / "changed.gguf", change)
    with pytest.raises(ImportRefusedError) as error, open_gguf(file):
        pass
    assert error.value.code == code and error.value.data.items() >= data.items()


@pytest.mark.slow("transformers starts in the sandbox to read the file")
@pytest.mark.parametrize(("pre", "split"), [("smollm", "digits gpt2"), ("llama-bpe", "llama3"), ("gpt-2", "gpt2")])
def test_a_gguf_file_splits_text_by_the_rule_that_it_names(
    pre: str, split: str, isolates: None, small_gguf: Path, tmp_path: Path
) -> None:
    """Keys that say that nothing is scaled lose nothing."""
    change = {"tokenizer.ggml.pre": pre, "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}
    with open_gguf(rewrite_gguf(small_gguf, tmp_path / "changed.gguf", change)) as source:
        written = json.loads((source.folder / "tokenizer.json").read_text())
    assert name_split(written) == split and written["model"]["ignore_merges"] is (pre == "llama-bpe")


@pytest.mark.parametrize("split", SPLIT_NAMES)
def test_a_spelled_split_has_its_name_and_leaves_out_no_byte(split: str) -> None:
    text, part = "x  2024\n    42 it's", spell_split(split)
    assert name_split({"pre_tokenizer": part}) == split
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    spelled = json.loads(tokenizer.to_str()) | {"pre_tokenizer": part}
    loaded = tokenizers.Tokenizer.from_str(json.dumps(spelled)).pre_tokenizer
    pieces = [text[begin:end] for _, (begin, end) in loaded.pre_tokenize_str(text)]
    assert "".join(pieces) == text and pieces == get_split_rule(split).ascii.findall(text)


# -- kills ---------------------------------------------------------------------------------------------------------------
@pytest.mark.slow("some twenty imports, each killed at another line and finished")
def test_an_import_that_is_killed_at_any_line_is_finished_by_the_next(
    model: Path, tmp_path: Path, code_repository: Path
) -> None:
    names = itertools.count()
    call = lambda root: make_imported_workspace(root, ImportOptions(model), code_repository, SILENT)
    lines = lines_run(lambda: call(tmp_path / "whole"), OURS)
    whole = opened(tmp_path / "whole")
    expected = read_tensors(Path(read_last_checkpoint(whole.ledger, 1)["path"]), "model")
    assert lines > 40
    for line in range(1, lines, max(1, lines // 20)):
        root = tmp_path / f"killed-{next(names)}"
        killed_at(line, lambda root=root: call(root), OURS)
        if (root / "factory.yaml").exists() and (root / "ledger.db").exists():
            half = opened(root)
            row = find_import(half.ledger)
            if row is None or row.state != "done":
                with refused("imported_model.not_finished", ConfigError):
                    refuse_unfinished_import(half)
        facts = call(root)
        plant = opened(root)
        found = read_tensors(Path(read_last_checkpoint(plant.ledger, 1)["path"]), "model")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        assert facts["release"] == 0 and [row.state for row in ReleaseRow.select(plant.ledger)] == ["published"]
        assert len(SegmentRow.select(plant.ledger)) == len(CandidateRow.select(plant.ledger)) == 1
        assert not list((root / "segments").rglob(".writing-*"))


def test_the_daemon_finishes_an_import_that_was_planned(
    model: Path, make: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """With the steps of its duties: train, export, release."""
    from factory.release.imported_release import find_unreleased_import, release_imported_model
    from factory.training import importing
    from factory.training.exporting import export_candidate

    root = tmp_path / "factory"
    stop = RuntimeError("the process ends here")

    def die(*_: object) -> None:
        raise stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "_write_checkpoint", die)
        with pytest.raises(RuntimeError):
            make(model)
    plant = opened(root)
    with refused("imported_model.not_finished", ConfigError):
        refuse_unfinished_import(plant)
    run_segment(plant, 1)
    assert find_unexported_segments(plant.ledger) == [1]
    export_candidate(plant, 1)
    (candidate,) = find_unreleased_import(plant.ledger)
    assert release_imported_model(plant, candidate) == 0 == release_imported_model(plant, candidate)
    assert finish_interrupted_releases(plant) == []
    refuse_unfinished_import(plant)


# -- bad input -----------------------------------------------------------------------------------------------------------
def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_nan(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = float("nan")

    change_weights(folder, spoil)


def with_fewer_rows(folder: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:300].clone()

    change_weights(folder, cut)
    rewrite(folder / "config.json", vocab_size=300)


def with_two_templates(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", chat_template="{{ messages }}")


def with_named_templates(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "{{ messages }}"}])


def with_an_exploding_tokenizer(folder: Path) -> None:
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    rewrite(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [longer] * 12})


def with_a_link_out(folder: Path) -> None:
    (folder.parent / "secret").write_text("not of the model")
    (folder / "LICENSE").unlink(missing_ok=True)
    (folder / "LICENSE").symlink_to(folder.parent / "secret")


def with_a_pipe(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    os.mkfifo(folder / "chat_template.jinja")


def with_sentencepiece_alone(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no model": (lambda folder: (folder / "config.json").unlink(), "models.no_config"),
    "pickles": (only_pickles, "models.pickled"),
    "NaN": (with_nan, "models.not_finite"),
    "unknown key": (lambda folder: rewrite(folder / "config.json", query_pre_attn_scalar=144), "models.unknown_key"),
    "large vocabulary": (with_fewer_rows, "imported_workspace.large_vocabulary"),
    "two templates": (with_two_templates, "import_source.two_templates"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "presets.unreadable_tokenizer"),
    "a tokenizer of SentencePiece": (with_sentencepiece_alone, "presets.only_sentencepiece"),
    "a pointer of Git LFS for weights": (
        lambda folder: write_lfs_pointer(folder / "model.safetensors"),
        "models.lfs_pointer",
    ),
    "a pointer of Git LFS for the tokenizer": (
        lambda folder: write_lfs_pointer(folder / "tokenizer.json"),
        "models.lfs_pointer",
    ),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{,"), "models.not_json"),
    "another class": (
        lambda folder: rewrite(folder / "config.json", architectures=["LlamaForSequenceClassification"]),
        "models.other_class",
    ),
    "another activation": (lambda folder: rewrite(folder / "config.json", hidden_act="gelu"), "models.other_value"),
    "an exploding tokenizer": (with_an_exploding_tokenizer, "presets.crashing_tokenizer"),
    "named templates": (with_named_templates, "import_source.two_templates"),
    "a link out of the folder": (with_a_link_out, "models.link_outside"),
    "a pipe": (with_a_pipe, "import_source.odd_file"),
    "a cut file": (lambda folder: os.truncate(folder / "model.safetensors", 9000), "models.other_length"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_model_is_refused_before_anything_is_written(
    case: str, own: Path, make: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    spoil, code = BAD[case]
    spoil(own)
    with pytest.raises(FactoryError) as error:
        make(own)
    assert error.value.code == code, error.value
    if case == "unknown key":
        assert (error.value.data["key"], error.value.data["value"]) == ("query_pre_attn_scalar", "144")
    assert not (tmp_path / "factory").exists()


def with_another_model(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def with_an_unknown_stop_id(folder: Path) -> None:
    rewrite(folder / "tokenizer.json", normalizer={"type": "NFC"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 100_000}))


def with_a_broken_template(folder: Path) -> None:
    rewrite(folder / "tokenizer.json", normalizer={"type": "NFC"})
    for file in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
        file.unlink()
    (folder / "chat_template.jinja").write_text("{% for %}")


@pytest.mark.parametrize("spoil", [with_another_model, with_an_unknown_stop_id, with_a_broken_template])
def test_a_model_is_never_told_to_train_a_tokenizer_of_its_own(
    spoil: Callable[[Path], object], own: Path, make: Callable[..., dict[str, Any]]
) -> None:
    spoil(own)
    with refused("presets.bad_tokenizer") as error:
        make(own)
    assert error.value.data["advice"].code == "presets.models_tokenizer"
    with refused("presets.bad_tokenizer") as error, open_tokenizer(own):
        pass
    assert error.value.data["advice"].code == "presets.own_tokenizer"


@pytest.mark.parametrize(
    ("place", "code", "data"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "gguf_source.hub_name", {"name": "SmolLM2-135M"}),
        ("nothere.gguf", "gguf_source.no_place", {"place": Path("nothere.gguf")}),
        ("modles/llama.gguf", "gguf_source.no_place", {}),
        ("~nobody-of-this-name/model", "gguf_source.no_place", {}),
        ("./models/nothere/at/all", "gguf_source.no_place", {}),
        ("there/nothere", "gguf_source.no_place", {}),
    ],
)
def test_a_place_where_nothing_is_is_refused_and_a_hubs_name_is_told_how_to_download(
    place: str,
    code: str,
    data: dict[str, Any],
    make: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for attempt in (
        lambda: make(Path(place)),
        lambda: plan_continuing(Path(place), None, [describe_this_machine()], 4, (), None),
    ):
        with refused(code) as error:
            attempt()
        assert error.value.data.items() >= data.items()


def test_a_folder_that_changes_while_it_is_read_is_refused(own: Path) -> None:
    def touch(share: float, note: str) -> None:
        if note == "numbers":
            rewrite(own / "config.json", use_cache=False)

    with refused("import_source.changed"):
        ImportSource.read(own, touch)


class FillsDisk(SilentProgress):
    """From the moment when a tensor with this name was written, no file can grow beyond 4 KiB."""

    def __init__(self, name: str) -> None:
        self.name = name

    @contextmanager
    def task(self, title: str, total: float | None = None) -> Iterator[Any]:
        def advance(amount: float = 1, note: str = "") -> None:
            if note == self.name:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

        yield SimpleNamespace(advance=advance)


def test_a_full_disk_costs_nothing_and_the_import_can_be_finished(
    model: Path, make: Callable[..., dict[str, Any]], tmp_path: Path, code_repository: Path
) -> None:
    limits, root = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "factory"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with refused("importing.disk", DiskFullError):
            make(model)
        assert not root.exists(), "it is known before anything is written"
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(OSError) as error:
            make_imported_workspace(root, ImportOptions(model), code_repository, FillsDisk("blocks.0.q"))
        assert is_disk_full(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((root / "segments").rglob("*.safetensors"))
    assert make(model)["release"] == 0


def test_a_workspace_takes_no_second_model_and_no_model_beside_its_own_work(
    model: Path, own: Path, make: Callable[..., dict[str, Any]], workspace: Workspace
) -> None:
    make(model)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] += 1

    change_weights(own, change)
    for options in ({"context": 16}, {"licence": "mit"}):
        with refused("imported_workspace.other_option"):
            make(model, **options)
    with refused("imported_workspace.rate_finder") as error:
        make(model, find_rate=False)
    configuration: Path = error.value.data["file"]
    configuration.write_text(yaml.safe_dump(yaml.safe_load(configuration.read_text()) | {"find_rate": False}))
    assert make(model, find_rate=False) == make(model), "as the message advises"
    with refused("importing.other_model"):
        make(own)
    with refused("imported_workspace.no_import"):
        make_imported_workspace(workspace.root, ImportOptions(model), None, SILENT)
