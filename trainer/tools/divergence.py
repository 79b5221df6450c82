"""``python -m trainer.tools.divergence FOLDER [TEXT]``: whether the trainer and transformers compute the same function from a public model's folder.

Prints how far the two are apart after the embedding, after each block and at the logits, for 2 rows of 64 random tokens in fp32, and the first place
at which they depart. With a file of English or other text, it also prints both losses on the first tokens of the text, by the folder's tokenizer.
Exit code 1 if the two depart, or if the losses differ by more than ``LOSS_BOUND``. Both models are in memory: some 8 bytes a parameter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.message import Message
from kernels.contract.registry import bind_ops
from models.adapters.config_reader import ModelFilesError
from models.divergence import DivergenceReport, compare_places, record_places
from models.files.model_folder import ModelSource, open_model_folder
from models.spec import ModelSpec
from trainer.contract.errors import run_and_get_exit_code
from trainer.model.transformer import Decoder

ROWS, LENGTH = 2, 64
TEXT_ROWS, TEXT_LENGTH = 4, 512  # tokens of a text, of which each is predicted but the first of a row
LOSS_BOUND = 1e-4  # nats a token


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


def measure_losses(theirs: Any, ours: Decoder, tokens_BT: Tensor) -> tuple[float, float]:
    """The mean loss in nats of tokens [B, T], without the first of each row, by (a model of transformers, the trainer's). A row is one document."""
    documents_BT = torch.zeros_like(tokens_BT, dtype=torch.int32)
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    losses = []
    with torch.no_grad():
        for compute in (
            lambda: theirs(tokens_BT, use_cache=False).logits,
            lambda: ours.logits(tokens_BT, positions_BT, documents_BT),
        ):
            logits_NV = compute()[:, :-1].flatten(0, 1).float()
            losses.append(F.cross_entropy(logits_NV, tokens_BT[:, 1:].flatten()).item())
    return losses[0], losses[1]


def read_rows(folder: Path, text: Path, context: int) -> Tensor:
    """The first tokens of a text as rows [``TEXT_ROWS``, T]. A shorter text gives shorter rows."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)(text.read_text("utf-8"), add_special_tokens=False)["input_ids"]
    length = min(TEXT_LENGTH, context, len(tokens) // TEXT_ROWS)
    return torch.tensor(tokens[: TEXT_ROWS * length]).view(TEXT_ROWS, length)


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
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
        ours = load_decoder(source)
        report = compare_with_transformers(theirs, ours, tokens_BT)
        print("\n".join(report.to_lines()))
        departs = report.first is not None
        if len(arguments) == 2:
            rows_BT = read_rows(folder, Path(arguments[1]), source.spec.context)
            expected, found = measure_losses(theirs, ours, rows_BT)
            print(
                Message(
                    "divergence.losses",
                    "loss on {tokens:,} tokens: transformers {expected:.6f}, trainer {found:.6f}, difference {difference:.1e}",
                    tokens=rows_BT[:, 1:].numel(),
                    expected=expected,
                    found=found,
                    difference=abs(expected - found),
                )
            )
            departs = departs or not abs(expected - found) <= LOSS_BOUND

    code = run_and_get_exit_code("trainer.tools.divergence", compare, ModelFilesError)
    return code or int(departs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
