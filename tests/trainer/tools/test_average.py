from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.support.trainer.segments import MakeShard, plan_of, recipe_with, train_here, write_spec
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint, write_imported_checkpoint
from trainer.tools.average import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one real run."""
    from tests.support.trainer.segments import make_documents
    from trainer.contract.data.token_shard import write_token_shard

    folder = tmp_path_factory.mktemp("average")
    documents = make_documents(0, {"code": 120, "docs": 60, "chat": 60})
    shard = write_token_shard(folder / "shards", documents, vocab_size=512, tokenizer_sha256="test")
    recipe = recipe_with(keep_checkpoints=3, checkpoint_every=5)
    assert train_here(write_spec(folder / "segment", plan_of(shard), recipe, last_step=15)) == (0, "")
    found = [path for _, path in checkpoints.list_checkpoints(folder / "segment" / "checkpoints")]
    assert len(found) == 3
    return found


def made(step: int, **changes: object) -> Checkpoint:
    """A checkpoint small enough to be written by hand."""
    recipe = {"name": "x", "model": {"layers": 2, "d_model": 4}, "optimizer": {"lr": 0.1}}
    model = {"a": torch.full((2, 3), float(step)), "b": torch.arange(4.0)}
    return Checkpoint(
        {**model, **changes.get("model", {})}, {}, {"step": step, "recipe": changes.get("recipe", recipe)}
    )  # type: ignore[dict-item]


@pytest.mark.parametrize("weights", [None, [1.0, 1.0, 1.0], [0.5, 0.0, 1.5]])
def test_the_average_equals_numpys(trained: list[Path], tmp_path: Path, weights: list[float] | None) -> None:
    words = ["--weights", ",".join(map(str, weights))] if weights else []
    assert main([str(tmp_path), *map(str, trained), *words]) == 0
    mean = checkpoints.load_checkpoint(tmp_path / trained[-1].name)  # verifies: it is a checkpoint like any other
    arrays = [load_file(path / "model.safetensors") for path in trained]
    for name, tensor in mean.model.items():
        expected = np.average([a[name].astype(np.float64) for a in arrays], axis=0, weights=weights)
        np.testing.assert_array_max_ulp(tensor.numpy(), expected.astype(np.float32), maxulp=1)  # a tie of rounding
    shares = np.array(weights or [1.0] * 3) / sum(weights or [1.0] * 3)
    assert [part["weight"] for part in mean.state["averaged_from"]] == pytest.approx(shares)
    assert [part["manifest_sha256"] for part in mean.state["averaged_from"]] == [
        checkpoints.hash_manifest(path) for path in trained
    ]


def test_tensors_not_averaged_come_from_the_newest_checkpoint(trained: list[Path], tmp_path: Path) -> None:
    assert main([str(tmp_path), str(trained[2]), str(trained[0]), str(trained[1])]) == 0
    mean, newest = checkpoints.load_checkpoint(tmp_path / trained[-1].name), checkpoints.load_checkpoint(trained[-1])
    assert mean.step == newest.step and mean.state["sampler"] == newest.state["sampler"]
    assert mean.optimizer.keys() == newest.optimizer.keys()
    assert all(torch.equal(mean.optimizer[name], newest.optimizer[name]) for name in newest.optimizer)


def test_training_continues_from_an_average(trained: list[Path], tmp_path: Path, make_shard: MakeShard) -> None:
    assert main([str(tmp_path / "mean"), *map(str, trained)]) == 0
    start = str(tmp_path / "mean" / trained[-1].name)
    folder = write_spec(
        tmp_path / "on", plan_of(make_shard()), recipe_with(keep_checkpoints=3, checkpoint_every=5), first_step=15,
        last_step=17, initial_checkpoint=start,
    )  # fmt: skip
    assert train_here(folder) == (0, "")
    assert json.loads((folder / "result.json").read_text())["last_step"] == 17


def test_averages_are_summed_in_double_precision(tmp_path: Path) -> None:
    """fp32 sums would lose the ones beside 2**25."""
    values = (2.0**25, 1.0, 1.0, -(2.0**25))
    made_of = [made(step, model={"a": torch.tensor([value])}) for step, value in enumerate(values)]
    paths = [checkpoints.save_checkpoint(tmp_path / str(step), checkpoint) for step, checkpoint in enumerate(made_of)]
    assert main([str(tmp_path / "out"), *map(str, paths)]) == 0
    assert checkpoints.load_checkpoint(tmp_path / "out" / "step-00000003").model["a"].item() == 0.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"b": torch.zeros(5)}}, "error[trainer.other_tensor]: | b is [5]"),
        ({"model": {"c": torch.zeros(1)}}, "error[trainer.other_tensor]: | c is [1]"),
        ({"recipe": {"name": "x", "model": {"layers": 2, "d_model": 4, "rope_theta": 5e5}}},
         "error[trainer.other_recipe]: | recipe.model.rope_theta is 500000.0, but 10000.0"),
        ({"recipe": {"name": "x", "model": {"layers": 2}, "optimizer": {"lr": 0.1}}}, "error[trainer.other_recipe]: | recipe.model.d_model"),
        ({"model": {"a": torch.full((2, 3), float("nan"))}}, "error[trainer.not_finite]: Tensor a"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_model_is_refused_and_the_difference_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], said: str
) -> None:
    paths = [
        checkpoints.save_checkpoint(tmp_path / "0", made(1)),
        checkpoints.save_checkpoint(tmp_path / "1", made(2, **changes)),
    ]
    assert main([str(tmp_path / "out"), *map(str, paths)]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said.split(" | ")) and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_imported_checkpoint_and_one_of_another_recipe_are_averaged_with_lora_merged(
    trained: list[Path], tmp_path: Path, make_shard: MakeShard
) -> None:
    """The imported one has weights only. LoRA's product is merged first: the mean of products is not the product of means."""
    whole = checkpoints.load_checkpoint(trained[0])
    imported = write_imported_checkpoint(
        tmp_path / "import",
        {name: tuple(tensor.shape) for name, tensor in whole.model.items()},
        whole.model.items(),
        {"recipe": whole.state["recipe"]},
    )
    recipe = recipe_with(adapt={"rank": 2, "alpha": 64.0}, optimizer={"lr": 0.05}, checkpoint_every=5)
    folder = write_spec(
        tmp_path / "on", plan_of(make_shard()), recipe, first_step=5, last_step=10, initial_checkpoint=str(trained[0])
    )
    assert train_here(folder) == (0, "")
    adapted = Path(json.loads((folder / "result.json").read_text())["checkpoint"])
    assert main([str(tmp_path / "out"), str(imported), str(adapted), "--weights", "0.25,0.75"]) == 0
    mean, held = checkpoints.load_checkpoint(tmp_path / "out" / adapted.name), checkpoints.load_checkpoint(adapted)
    assert mean.model.keys() == whole.model.keys() and "adapt" not in mean.state["recipe"]
    assert mean.state["recipe"]["optimizer"]["lr"] == 0.05, "all else is the newest checkpoint's"
    assert mean.optimizer and not [name for name in mean.optimizer if "lora" in name]
    for name, tensor in mean.model.items():
        old, change = whole.model[name].double(), 0.0
        if f"{name}_lora_a" in held.model:
            change = 32.0 * held.model[f"{name}_lora_b"].double() @ held.model[f"{name}_lora_a"].double()
        expected = 0.25 * old + 0.75 * (held.model[name].double() + change).float().double()
        torch.testing.assert_close(tensor, expected.float(), rtol=3e-7, atol=1e-8)
    changed = (mean.model["blocks.0.q"] - whole.model["blocks.0.q"]).abs().max().item()
    assert changed > 1e-3, "five steps of LoRA moved the weights"


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [checkpoints.save_checkpoint(tmp_path / str(i), made(i)) for i in range(2)]
    blob = (paths[1] / "model.safetensors").read_bytes()
    (paths[1] / "model.safetensors").write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    assert main([str(tmp_path / "out"), *map(str, paths)]) == 2
    assert "model.safetensors" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["0/step-00000000"], "trainer.one_checkpoint"),
        (["0/step-00000000", "0/step-00000000"], "trainer.checkpoint_twice"),
        (["0/step-00000000", "1/step-00000001", "--weights", "1"], "trainer.weight_count"),
        (["0/step-00000000", "1/step-00000001", "--weights", "1,-1"], "trainer.wrong_weight"),
        (["0/step-00000000", "1/step-00000001", "--weights", "0,0"], "trainer.wrong_weight"),
        (["0/step-00000000", "1/step-00000001", "--weights", "nan,1"], "trainer.wrong_weight"),
        (["0/step-00000000", "1/step-00000001", "--weights", "a,b"], "trainer.not_weights"),
        (["0/step-00000000", "9/step-00000009"], "trainer.not_a_checkpoint"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    for i in range(2):
        checkpoints.save_checkpoint(tmp_path / str(i), made(i))
    words = [str(tmp_path / word) if "/" in word else word for word in words]
    assert main([str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert f"error[{said}]" in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
