from __future__ import annotations

import errno
import json
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.failing.limits import few_handles
from tests.support.messages import codes, refused
from tests.support.paths import ROOT
from tests.support.trainer.segments import MakeShard, plan_of, write_spec
from trainer.checkpoint_writer import CheckpointWriter
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint
from trainer.contract.checkpoint.region import Region
from trainer.contract.errors import CheckpointError
from trainer.contract.plan.spec import SegmentSpec
from trainer.parallel.ranks import Ranks
from trainer.segment import find_start_checkpoint

pytestmark = pytest.mark.portable


def make(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    model = {"a": torch.randn(7, 3, generator=generator), "b.c": torch.randn(5, generator=generator)}
    optimizer = {"step.a": torch.tensor(float(step)), "rng": torch.get_rng_state()}
    return Checkpoint(model, optimizer, {"step": step, "sampler": {"x": [1.5, None]}})


def test_a_saved_checkpoint_is_loaded_unchanged(tmp_path: Path) -> None:
    path = checkpoints.save_checkpoint(tmp_path, make(12))
    assert path.name == "step-00000012" and sorted(p.name for p in tmp_path.iterdir()) == [path.name]
    loaded, made = checkpoints.load_checkpoint(path), make(12)
    assert loaded.state == made.state
    for ours, theirs in ((made.model, loaded.model), (made.optimizer, loaded.optimizer)):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    for name in ("a", "b.c"):  # the real library reads what our writer wrote
        assert torch.equal(load_file(path / "model.safetensors")[name], made.model[name])


def test_tensors_that_many_ranks_saved_can_be_read_in_any_region(tmp_path: Path) -> None:
    whole = {"a": torch.arange(20.0).view(5, 4), "b": torch.arange(6, dtype=torch.bfloat16), "c": torch.tensor(7)}
    parts = [{"a": Region((5, 4), (0, 0), (3, 4)), "b": Region((6,), (2,), (4,))}]
    parts.append({"a": Region((5, 4), (3, 0), (2, 4)), "b": Region((6,), (0,), (2,))})
    assert Region.from_tensor(whole["a"]) == Region((5, 4), (0, 0), (5, 4)) and Region.from_tensor(
        whole["c"]
    ) == Region((), (), ())
    for rank in (1, 0):  # the first waits for the others
        held = {
            name: parts[rank][name].view_in_whole_tensor(tensor)
            for name, tensor in whole.items()
            if name in parts[rank]
        }
        held |= {} if rank else {"c": whole["c"]}
        state = None if rank else {"step": 4}
        path = checkpoints.save_rank_share(tmp_path, 4, {"model": held, "optimizer": {}}, parts[rank], state, rank, 2)
    assert (
        not checkpoints.find_checkpoint_fault(path)
        and checkpoints.load_checkpoint(path).step == checkpoints.read_manifest(path)["step"] == 4
    )
    for wanted in ({}, *parts, {"a": Region((5, 4), (2, 1), (2, 2))}, {"a": Region((5, 4), (4, 3), (1, 1))}):
        found = checkpoints.read_tensors(path, "model", wanted)
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            expected = wanted[name].view_in_whole_tensor(tensor) if name in wanted else tensor
            assert torch.equal(found[name], expected) and found[name].dtype == tensor.dtype, (wanted, name)
    with refused("trainer.other_shape", CheckpointError, tensor="a", wanted="[4, 5]", found="[5, 4]"):
        checkpoints.read_tensors(path, "model", {"a": Region((4, 5), (0, 0), (4, 5))})
    shares = sorted(path.glob("model-*"))
    assert [share.name for share in shares] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"].pop(shares[1].name)["bytes"] == shares[1].stat().st_size
    (path / "manifest.json").write_text(json.dumps(manifest))
    with refused("trainer.missing_elements", CheckpointError, count=8, kind="model", tensor="a"):
        checkpoints.read_tensors(path, "model")
    assert checkpoints.read_tensors(path, "model", parts[0])["a"].shape == (3, 4)
    for files, words in (
        ({"../x": manifest["files"]["state.json"]}, "trainer.damaged_manifest"),
        ({}, "trainer.manifest_lacks"),
    ):
        (path / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
        assert codes([checkpoints.find_checkpoint_fault(path)]) == [words]
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    assert codes([checkpoints.find_checkpoint_fault(path)]) == ["trainer.checkpoint_format"]


def test_a_checkpoint_counts_as_undamaged_if_file_handles_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.save_checkpoint(tmp_path, make(12))
    for read in (
        checkpoints.load_checkpoint,
        checkpoints.find_checkpoint_fault,
        checkpoints.read_manifest,
        checkpoints.read_checkpoint_state,
    ):
        with few_handles(), pytest.raises(OSError) as raised:
            read(path)
        assert raised.value.errno == errno.EMFILE
    manifest = checkpoints.read_manifest(path)
    monkeypatch.setattr(checkpoints, "read_manifest", lambda path: manifest)
    with few_handles(), pytest.raises(OSError):
        checkpoints.find_checkpoint_fault(path)
    assert not checkpoints.find_checkpoint_fault(path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]),
    torn=st.booleans(),
)
def test_loading_finds_a_flipped_bit_or_a_truncated_file_anywhere(
    tmp_path: Path, seed: int, name: str, torn: bool
) -> None:
    path = checkpoints.save_checkpoint(tmp_path, make(3))
    blob = bytearray((path / name).read_bytes())
    at = random.Random(seed).randrange(len(blob))
    before = json.loads((path / "manifest.json").read_bytes())
    if torn:
        del blob[at:]
    else:
        blob[at] ^= 1 << random.Random(seed).randrange(8)
    (path / name).write_bytes(blob)
    try:
        checkpoints.load_checkpoint(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:  # a flip in the manifest's white space or step: the hashes are untouched
        assert name == "manifest.json" and json.loads(blob)["files"] == before["files"]


def test_a_run_starts_from_the_newest_good_checkpoint_and_renames_bad_ones(
    tmp_path: Path, make_shard: MakeShard
) -> None:
    spec = SegmentSpec.load(write_spec(tmp_path, plan_of(make_shard())))
    alone, own = Ranks(0, 1, torch.device("cpu")), tmp_path / "checkpoints"
    assert find_start_checkpoint(tmp_path, spec, alone) == (None, [])
    for step in (1, 2, 3):
        checkpoints.save_checkpoint(own, make(step))
    (own / "step-00000003" / "state.json").unlink()
    found, skipped = find_start_checkpoint(tmp_path, spec, alone)
    assert found == own / "step-00000002"
    assert len(skipped) == 1 and "step-00000003/state.json cannot " in skipped[0].reason
    assert (own / "bad-step-00000003").is_dir()
    assert find_start_checkpoint(tmp_path, spec, alone) == (found, [])


def test_a_writer_keeps_the_newest_checkpoints_unchanged_by_later_steps(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in range(1, 5):
        writer.wait_until_copied()
        weight += 1
        writer.begin_save(step, {"model": {"w": weight}, "optimizer": {}}, {}, {"step": step})
    assert writer.wait_for_last_save() == tmp_path / "step-00000004"
    writer.close()
    assert [step for step, _ in checkpoints.list_checkpoints(tmp_path)] == [3, 4]
    assert float(checkpoints.load_checkpoint(tmp_path / "step-00000003").model["w"][0]) == 3


def test_a_save_to_a_full_disk_leaves_older_checkpoints_good_and_no_files(tmp_path: Path) -> None:
    checkpoints.save_checkpoint(tmp_path, make(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = Checkpoint({"w": torch.zeros(1 << 16)}, {}, {"step": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError) as full:
            checkpoints.save_checkpoint(tmp_path, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert full.value.errno == errno.EFBIG
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoints.load_checkpoint(tmp_path / "step-00000001").step == 1


def test_a_save_killed_anywhere_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """A process that saves for ever is killed during a save. Every checkpoint with a final name is good."""
    script = (
        "import sys, torch; from pathlib import Path; from trainer.contract.checkpoint.format import *\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    save_checkpoint(Path(sys.argv[1]), Checkpoint({'w': torch.full((1 << 18,), float(step))}, {}, {'step': step}))\n"
        "    print(step, flush=True)\n"
    )
    chance = random.Random(5)
    for round_ in range(2):
        folder = tmp_path / str(round_)
        command = [sys.executable, "-c", script, str(folder)]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
        ) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(1, 12)):
                writer.stdout.readline()
            writer.kill()
        named = checkpoints.list_checkpoints(folder)
        assert named
        for step, path in named:
            assert float(checkpoints.load_checkpoint(path).model["w"][0]) == step
