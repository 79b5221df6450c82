"""Import, export and its check hold one tensor at a time: the growth of a process's memory, measured on a model of 0.4 GB in shards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.adapters import FAMILIES, list_stored_tensors
from models.files.safetensors_file import write_weights
from models.spec import ModelSpec
from tests.support.paths import ROOT

# The embedding is beyond 32 MiB, below which C's allocator keeps what is freed.
SPEC = ModelSpec(
    vocab_size=12_000, d_model=1024, layers=3, heads=16, kv_heads=8, head_dim=64, d_ff=16_384, context=64, qk_norm=False, tied=False, family="llama",
)  # fmt: skip
LARGEST = SPEC.d_ff * SPEC.d_model * 4  # bytes in fp32 of each of an MLP's three matrices, which follow each other

PROGRAM = """
import sys
from pathlib import Path
import json
import torch
from factory.evals.export_parity import hash_checkpoint_tensors
from models.files.model_folder import open_model_folder
from models.tensors import list_tensor_shapes
from tests.support.trainer.segments import recipe_with
from trainer.contract.checkpoint.export import export_checkpoint
from trainer.contract.checkpoint.format import write_imported_checkpoint

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

def grown(work):
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before

folder, checkpoints, out = map(Path, sys.argv[1:])
source = open_model_folder(folder)
dict(zip(range(3), source.iterate_native()))  # what torch allocates once
recipe = recipe_with(export_dtype="bf16", export_shard_bytes=100_000_000).model_dump(mode="json") | {"model": source.spec.model_dump()}
shapes = list_tensor_shapes(source.spec)
work = {
    "imported": lambda: write_imported_checkpoint(checkpoints, shapes, source.iterate_native(), {"recipe": recipe}),
    "exported": lambda: export_checkpoint(checkpoints / "step-00000000", out),
    "hashed": lambda: hash_checkpoint_tensors(checkpoints / "step-00000000", recipe),
}
print(json.dumps({name: grown(one) for name, one in work.items()}))
"""


@pytest.mark.slow("it writes and reads 3 GB")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux measures a process's peak memory")
def test_import_export_and_its_check_hold_one_tensor_and_not_the_model(tmp_path: Path) -> None:
    for name in ("source", "checkpoint", "out"):
        (tmp_path / name).mkdir()
    family = FAMILIES["llama"]
    layout = list_stored_tensors(SPEC, family, lambda name: torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tensors = ((name, torch.randn(shape, generator=generator)) for name, (_, shape) in layout.items())
    names = write_weights(tmp_path / "source", layout, tensors, 100_000_000)
    config = {"architectures": [family.class_name], "model_type": family.name, **family.write(SPEC)}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    total = sum((tmp_path / "source" / name).stat().st_size for name in names)
    assert total > 3e8 and len(names) > 3
    paths = [str(tmp_path / name) for name in ("source", "checkpoint", "out")]
    said = subprocess.run([sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, check=True, cwd=ROOT)
    grown = json.loads(said.stdout)
    assert grown.keys() == {"imported", "exported", "hashed"}
    assert max(grown["imported"], grown["exported"]) < 1.3 * LARGEST, (grown, LARGEST)
    assert grown["hashed"] < 1.8 * LARGEST, "a tensor in fp32 and in bf16"
    for name in names:
        assert (tmp_path / "source" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
