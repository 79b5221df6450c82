"""Another process, with other code in another folder and a copy of the cache, finds the kernels that a step compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

STEP = """
import json, sys
from pathlib import Path
from agents.line_profiler.step_rate import measure_step_rate
from trainer.contract.recipe import Recipe
import trainer
tiny = Recipe.load(Path("policies/recipes/tiny.yaml"))
recipe = tiny.model_copy(update={"compile": True, "model": tiny.model.model_copy(update={"layers": 1})})
found = measure_step_rate(recipe, Path(sys.argv[1]), 1)
from torch._dynamo.utils import counters
kinds = {key: value for kind in ("inductor", "aot_autograd") for key, value in counters[kind].items()}
print(json.dumps({"first_step_s": found["first_step_s"], "code": str(Path(trainer.__file__).parent.parent), **kinds}))
"""


def first_step(code: Path, cache: Path, kernels: Path) -> tuple[dict[str, object], set[str]]:
    """(counters of the first step of code in a process of its own, files that it added to its cache)."""
    before = {str(path.relative_to(cache)) for path in cache.rglob("*")}
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton"), "PYTHONPATH": str(code),
                 "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(kernels)],
        cwd=code,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == str(code)
    added = {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()} - before
    print(f"first step {found['first_step_s']:.1f} s, {len(added)} files written; {found}")
    return found, added


@pytest.mark.long("a model's block is compiled by g++: a minute of a core")
def test_code_compiled_for_one_commit_is_reused_by_the_next(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels.yaml"
    kernels.write_text("cpu: {}\ncuda: {}\nfallback: reference\n")
    old, new = tmp_path / "old", tmp_path / "new"
    for code in (old, new):
        for name in ("agents", "trainer", "models", "kernels", "policies"):
            shutil.copytree(ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    moved = new / "trainer" / "model" / "transformer.py"  # another commit: its lines lie elsewhere
    text = moved.read_text()
    begin = text.index("from __future__")
    moved.write_text(f"{text[:begin]}{'# a line more' + chr(10)}{text[begin:]}")

    cold, written = first_step(old, tmp_path / "first", kernels)
    assert cold["fxgraph_cache_miss"] and "fxgraph_cache_hit" not in cold and written
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    copied, written = first_step(new, tmp_path / "second", kernels)
    assert copied["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"] and "fxgraph_cache_miss" not in copied
    assert copied["autograd_cache_hit"] and not written
