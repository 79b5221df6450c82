"""An imported model whose tensors have several dtypes is trained further and leaves in shards: with its dtypes, through every reader of an export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from factory.bundles.writing import BundleOptions, write_release_bundle
from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.evals.evaluator import evaluate_candidate
from factory.evals.parity import CHECKS
from factory.evals.reference_model import ReferenceModel
from factory.gates.release.gate import judge_candidate
from factory.ingest.chain import ingest_shard
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, EvaluationRow, ReleaseRow, SegmentRow, find_champion
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.release.checks import check_export_unchanged
from factory.release.gguf.writing import write_release_gguf
from factory.training.exporting import export_candidate
from factory.training.planning import read_last_checkpoint
from models.files.model_folder import INDEX, ONE_FILE
from tests.support.factory.code_loop import make_target
from tests.support.factory.made_up_text import prose
from tests.support.factory.shown import release
from tests.support.lent_libraries import lend
from tests.support.paths import ROOT
from tests.support.plants.trained_plant import lenient, opened, train_anneal, train_trunk, write_shards
from tests.support.trainer.public_model import save_public_model
from trainer.contract.checkpoint.format import read_tensors

SHARD_BYTES = 12_000
# One matrix of one layer has another type than the same matrix of the other.
BF16 = "model.layers.1.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def choose_type(name: str) -> torch.dtype:
    return torch.float32 if "norm" in name else torch.bfloat16 if name == BF16 else torch.float16


def read_export(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files of an export."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "public"
    folder.mkdir()
    model = save_public_model(folder, [prose(i) for i in range(60)])
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            # of norms, values that bf16 and fp16 cannot hold; of matrices, values so small that fp16 holds them with fewer bits
            changed = tensor + 0.3 * torch.randn_like(tensor) if "norm" in name else tensor
            changed.view(-1)[:2] = torch.tensor([3e-7, -0.0])
            tensors[name] = changed.to(choose_type(name)).clone()
    save_file(tensors, folder / ONE_FILE, {"format": "pt"})
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    return folder


@pytest.fixture(scope="module")
def plant(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Plant:
    """After an import, a trunk with frozen embedding, and an anneal, from which exports have small files."""
    root = tmp_path_factory.mktemp("sharded")
    make_imported_workspace(root / "plant", ImportOptions(source, context=64), make_target(root / "code"), SILENT)
    workspace, ledger = opened(root / "plant")
    lend(workspace)
    own = workspace.root / "policies" / "gates"
    own.mkdir(parents=True, exist_ok=True)
    (own / "release.yaml").write_text(lenient((ROOT / "policies" / "gates" / "release.yaml").read_text()))
    plant = Plant(workspace, ledger)
    (root / "data").mkdir()
    write_shards(root / "data")
    for path in sorted((root / "data").iterdir()):
        ingest_shard(plant, path)
    recipe = yaml.safe_load(workspace.recipe_path().read_text())
    recipe |= {"precision": "fp32", "compile": False, "batch": {"sequences": 8}, "freeze": ["embedding"]}
    recipe |= {"export_shard_bytes": SHARD_BYTES}
    recipe["mixture"]["max_epochs"] = 20
    recipe["optimizer"]["lr"] = 0.01
    recipe["schedule"] = {"warmup_steps": 2, "trunk_steps": {"first": 6, "later": 3}, "anneal_steps": 3}
    workspace.recipe_path().write_text(yaml.safe_dump(recipe))
    train_trunk(workspace, ledger)
    train_anneal(workspace, ledger)
    export_candidate(plant, 3)
    return plant


def test_release_0_of_mixed_types_is_the_source_to_the_bit(plant: Plant, source: Path) -> None:
    champion = find_champion(plant.ledger)
    assert champion is not None
    export = Path(champion.export_path)
    assert_same(read_export(export), load_file(source / ONE_FILE))
    assert not (export / INDEX).exists()
    assert json.loads((export / "config.json").read_text())["dtype"] == "float16"
    recipe = SegmentRow.get(plant.ledger, 1).recipe_json
    norms = {f"model.layers.*.{name}.weight": "fp32" for name in ("input_layernorm", "post_attention_layernorm")}
    assert recipe["export_dtype"] == "fp16"
    assert recipe["export_dtypes"] == norms | {"model.norm.weight": "fp32", BF16: "bf16"}


def test_a_trained_model_leaves_in_shards_with_the_types_of_its_source(plant: Plant, source: Path) -> None:
    from transformers import AutoModelForCausalLM

    export = Path(newest(plant).export_path)
    index = json.loads((export / INDEX).read_text())
    files = sorted(export.glob("*.safetensors"))
    assert len(files) > 3 and not (export / ONE_FILE).exists()
    assert {file.name for file in files} == set(index["weight_map"].values())
    found, before = read_export(export), load_file(source / ONE_FILE)
    assert found.keys() == before.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= SHARD_BYTES
    trained = read_tensors(Path(read_last_checkpoint(plant.ledger, 3)["path"]), "model")
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], trained["blocks.0.up"].half())
    assert torch.equal(found[BF16], trained["blocks.1.up"].bfloat16())
    assert torch.equal(found["model.norm.weight"], trained["final_norm"])
    for name, tensor in found.items():
        assert tensor.dtype == before[name].dtype == choose_type(name)
        assert torch.equal(tensor, before[name]) is (name == EMBEDDING), f"{name}: the embedding alone was frozen"
    assert json.loads((export / "config.json").read_text())["dtype"] == "float16"

    tokens_BT = torch.arange(40)[None] * 7 % 500
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)(tokens_BT).logits
    judge = ReferenceModel.load(export)
    assert float((judge.logits(tokens_BT) - theirs).abs().max()) < 1e-4


def test_judge_server_gguf_and_bundle_read_the_shards(plant: Plant, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    candidate = newest(plant)
    evaluate_candidate(plant, 1)
    evaluate_candidate(plant, candidate.id)  # trainer, export, transformers and engine
    evaluation = EvaluationRow.find_newest(plant.ledger, candidate.id)
    assert evaluation is not None
    parity = evaluation.summary["parity"]
    assert parity.keys() >= set(CHECKS) and all(check["ok"] for check in parity.values()), parity
    number = release(plant, judge_candidate(plant, candidate.id))
    assert ReleaseRow.get(plant.ledger, number).state == "published"

    made = write_release_gguf(plant.ledger, number, tmp_path / "model.gguf", SILENT)
    stored = {one.name: one for one in gguf.GGUFReader(made.file).tensors}
    expected = read_export(Path(candidate.export_path))
    kinds = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
    for ours, theirs in {
        "blk.1.ffn_up": BF16,
        "blk.0.ffn_up": BF16.replace("1", "0", 1),
        "token_embd": EMBEDDING,
    }.items():
        one, tensor = stored[f"{ours}.weight"], expected[theirs]
        assert one.tensor_type.name == kinds[tensor.dtype]
        assert np.array_equal(gguf.dequantize(one.data, one.tensor_type), tensor.float().numpy())

    bundle = write_release_bundle(plant, number, BundleOptions()).folder
    copied = {file.name: file.read_bytes() for file in (bundle / "model").iterdir()}
    for file in Path(candidate.export_path).glob("model*"):
        assert copied[file.name] == file.read_bytes()


@pytest.mark.parametrize("spoil", ["remove", "change"])
def test_a_release_is_refused_when_one_shard_of_its_export_is_gone_or_changed(plant: Plant, spoil: str) -> None:
    candidate = newest(plant)
    check_export_unchanged(plant.ledger, candidate.id)
    shard = sorted(Path(candidate.export_path).glob("*.safetensors"))[1]
    content = shard.read_bytes()
    try:
        shard.unlink() if spoil == "remove" else shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(InputError):
            check_export_unchanged(plant.ledger, candidate.id)
    finally:
        shard.write_bytes(content)


def newest(plant: Plant) -> CandidateRow:
    return CandidateRow.select(plant.ledger, "ORDER BY id DESC")[0]
