"""What a factory on this machine would train with: the precision, and the kernels that tuning chooses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml

from kernels.contract.machine import choose_fast_precision, describe_this_machine
from trainer.contract.plan.precision import DTYPES, choose_training_device, replace_auto_precision
from trainer.contract.recipe import Recipe

ROOT = Path(__file__).parents[2]
CUDA = torch.cuda.is_available()
PRECISION = choose_fast_precision("cuda" if CUDA else "cpu")  # of what is timed alone
DTYPE = DTYPES[PRECISION]


def demo_recipe() -> Recipe:
    """The demo's recipe, in the precision that trains fastest here."""
    return replace_auto_precision(Recipe.load(ROOT / "policies" / "recipes" / "demo.yaml"), choose_training_device())


def tuned_kernels(recipe: Recipe | None = None) -> Path:
    """A ``kernels.yaml`` with what ``kernels.contract.tune`` chooses for a recipe here; measured once, for this process and its children."""
    recipe = recipe or demo_recipe()
    known = f"TUNED_KERNELS_{recipe.sha256[:16]}"
    if known in os.environ:
        return Path(os.environ[known])
    folder = Path(tempfile.mkdtemp(prefix="tuned-"))
    given = folder / "recipe.yaml"
    given.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    words = ["-m", "kernels.contract.tune", "--recipe", str(given), "--precision", recipe.precision]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    choice = json.loads(done.stdout.splitlines()[-1])["choice"]
    print(f"\ntuned for {describe_this_machine()}, {recipe.precision}: {choice}")
    path = folder / "kernels.yaml"
    os.environ[known] = str(path)
    path.write_text(yaml.safe_dump({choose_training_device().type: choice}))
    return path
