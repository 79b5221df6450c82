"""``python -m trainer.tools.divergence FOLDER``: whether the trainer and transformers compute the same function from a public model's folder.

Prints how far the two are apart after the embedding, after each block and at the logits, for 2 rows of 64 random tokens in fp32, and the first place
at which they depart. Exit code 1 if they depart. Both models are in memory: some 8 bytes a parameter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.contract.registry import bind_ops
from models.adapters.config_reader import ModelFilesError
from models.divergence import DivergenceReport, compare_places, record_places
from models.files.model_folder import ModelSource, open_model_folder
from models.spec import ModelSpec
from trainer.contract.errors import run_and_get_exit_code
from trainer.model.transformer import Decoder

ROWS, LENGTH = 2, 64


def load_decoder(source: ModelSource, spec: ModelSpec | None = None) -> Decoder:
    """The trainer's model with the weights of a folder, fp32. ``spec``: another description with tensors of the same names and shapes."""
    decoder = Decoder(spec or source.spec, bind_ops({}), torch.float32)
    state = decoder.state_dict()
    with torch.no_grad():
        for name, tensor in source.iterate_native():
            state.pop(name).copy_(tensor)
    assert not state, f"tensors that the folder lacks: {list(state)}"
    return decoder


def compare_with_transformers(theirs: Any, ours: Decoder, tokens_BT: Tensor) -> DivergenceReport:
    """Compare a model of transformers with the trainer's. Each row is one document."""
    documents_BT = torch.zeros_like(tokens_BT, dtype=torch.int32)
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    with torch.no_grad():
        expected = record_places(theirs.model.layers, lambda: theirs(tokens_BT, use_cache=False).logits)
        found = record_places(list(ours.blocks), lambda: ours.logits(tokens_BT, positions_BT, documents_BT))
    return compare_places(expected, found)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    departs = False

    def compare() -> None:
        nonlocal departs
        from transformers import AutoModelForCausalLM

        folder = Path(arguments[0])
        source = open_model_folder(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        length = min(LENGTH, source.spec.context)
        tokens_BT = torch.randint(source.spec.vocab_size, (ROWS, length), generator=torch.Generator().manual_seed(0))
        report = compare_with_transformers(theirs, load_decoder(source), tokens_BT)
        print("\n".join(report.to_lines()))
        departs = report.first is not None

    code = run_and_get_exit_code("trainer.tools.divergence", compare, ModelFilesError)
    return code or int(departs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
