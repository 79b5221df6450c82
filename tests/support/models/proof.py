"""The proof that a family's adapter is right: each check compares a small model of transformers' class with what the adapter made of it.

``CHECKS`` has the checks by name, each a function of a ``Subject`` that returns the number it saw, which must be at most its bound.
``python -m tests.support.models.proof --write`` runs all and writes the table of docs/MODELS.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from factory.evals.reference_model import ReferenceModel
from factory.serving.native.decoder import CachedDecoder
from models.adapters import FAMILIES, convert_to_files, list_stored_tensors
from models.divergence import TOLERANCE
from models.files.model_folder import ModelSource, open_model_folder
from models.files.safetensors_file import write_weights
from models.tensors import is_multi_token
from tests.support.models.files import list_file_tensors
from tests.support.models.multi_token import PublishedLayers
from tests.support.models.small_models import CASES, Case, make_tokens, save_model
from tests.support.serving.imported import PROMPTS, count_different_served_tokens
from trainer.model.transformer import Decoder
from trainer.tools.divergence import compare_with_transformers, load_decoder

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/MODELS.md"
LENGTHS = (23, 11, 46)  # of the documents packed in a row; two are longer than a window
PROMPT, GENERATED = 16, 64


class Subject:
    """A case's model of transformers, the folder that transformers wrote of it, and what the adapter reads from the folder."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.theirs = case.make_model()
        self.exported = save_model(self.theirs, folder / "theirs", 40_000)  # shards
        self.multi_token = PublishedLayers(self.theirs, case.multi_token_layers)
        if case.multi_token_layers:
            self.multi_token.save(self.theirs, self.exported)

    @cached_property
    def source(self) -> ModelSource:
        return open_model_folder(self.exported)

    @cached_property
    def ours(self) -> Decoder:
        return load_decoder(self.source)

    @cached_property
    def written(self) -> Path:
        """The folder that the adapter writes of the model, with the trainer's weights."""
        out = self.folder / "ours"
        out.mkdir()
        spec, family = self.source.spec, self.source.family
        keys = family.write(family.as_stored(spec))
        config = {"architectures": [family.class_name], "model_type": family.name, **keys, "bos_token_id": None}
        (out / "config.json").write_text(
            json.dumps(config | {"eos_token_id": None, "pad_token_id": None, "dtype": "float32"})
        )
        state = self.ours.state_dict()
        layout = list_stored_tensors(spec, family, lambda name: torch.float32)
        write_weights(out, layout, convert_to_files(spec, family, state.__getitem__), 40_000)
        return out

    def compute_theirs(self, tokens_BT: Tensor) -> Tensor:
        with torch.no_grad():
            return self.theirs(tokens_BT, use_cache=False).logits  # type: ignore[no-any-return]

    def compute_ours(self, tokens_BT: Tensor) -> Tensor:
        positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
        with torch.no_grad():
            return self.ours.logits(tokens_BT, positions_BT, torch.zeros_like(tokens_BT, dtype=torch.int32))


def count_equal_tensors(subject: Subject) -> float:
    """HF → native → HF: every tensor to the bit. Returns how many differ."""
    source = subject.source
    native = dict(source.iterate_native())
    back = dict(convert_to_files(source.spec, source.family, native.__getitem__))
    every = list_file_tensors(subject.theirs, subject.theirs.state_dict()) | subject.multi_token.list_tensors()
    stored = {name: tensor for name, tensor in every.items() if name in source.dtypes}
    assert set(subject.multi_token.list_tensors()) <= set(stored) <= set(back)
    assert stored and set(source.dtypes) <= set(back), "the copies too"
    return sum(not torch.equal(back[name], tensor) for name, tensor in stored.items())


def reload_in_transformers(subject: Subject) -> float:
    """The folder that the adapter writes, loaded by transformers: logits."""
    import transformers

    kind = getattr(transformers, FAMILIES[subject.case.family].class_name)
    loaded, report = kind.from_pretrained(
        subject.written, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # transformers' classes have no layers for multi-token prediction, and know their numbers in the published models alone
    begins = tuple(f"model.layers.{number}." for number in subject.source.spec.multi_token_numbers)
    unexpected = [name for name in report["unexpected_keys"] if not name.startswith(begins)]
    assert not unexpected and not any(report[key] for key in ("missing_keys", "mismatched_keys")), report
    with torch.no_grad():
        return _largest(loaded(make_tokens(), use_cache=False).logits - subject.compute_theirs(make_tokens()))


def compare_logits(subject: Subject) -> float:
    return _largest(subject.compute_ours(make_tokens()) - subject.compute_theirs(make_tokens()))


def compare_places_of_blocks(subject: Subject) -> float:
    """The divergence report names no block; its largest relative difference."""
    report = compare_with_transformers(subject.theirs, subject.ours, make_tokens())
    assert report.first is None, report.first
    return max(one.relative for one in report.places)


def compare_packed_documents(subject: Subject) -> float:
    """Several documents in one row against each alone."""
    tokens_BT = make_tokens(1, sum(LENGTHS))
    positions_BT = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    documents_BT = torch.cat([torch.full((length,), n) for n, length in enumerate(LENGTHS)])[None].int()
    with torch.no_grad():
        together = subject.ours.logits(tokens_BT, positions_BT, documents_BT)
    parts = zip(tokens_BT.split(LENGTHS, 1), together.split(LENGTHS, 1), strict=True)
    return max(_largest(ours - subject.compute_theirs(tokens)) for tokens, ours in parts)


def compare_gradients(subject: Subject) -> float:
    """The gradient of each tensor, relative to its largest value."""
    tokens_BT = make_tokens(seed=2)
    positions_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT)
    subject.theirs.zero_grad()
    subject.ours.zero_grad()
    for logits in (
        subject.theirs(tokens_BT, use_cache=False).logits,
        subject.ours.logits(tokens_BT, positions_BT, torch.zeros_like(tokens_BT, dtype=torch.int32)),
    ):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
    gradients = {n: p.grad for n, p in subject.theirs.named_parameters() if p.grad is not None}
    theirs = list_file_tensors(subject.theirs, gradients)
    ours = {name: parameter.grad for name, parameter in subject.ours.named_parameters()}
    worst = 0.0
    for mapping in subject.source.family.list_mappings(subject.source.spec):
        if mapping.natives[0].endswith("router_bias") or is_multi_token(mapping.natives[0]) or mapping.is_copy:
            continue  # a buffer, or no part of the logits (tests/trainer/model/test_multi_token.py)
        for name, expected in mapping.to_native(theirs.__getitem__):
            gradient = ours.get(name)
            assert gradient is not None, name
            worst = max(worst, _largest(gradient - expected) / max(float(expected.abs().max()), 1e-3))
    return worst


def count_different_tokens(subject: Subject) -> float:
    """64 greedy tokens after a prompt: how many differ."""
    prompt = make_tokens(1, PROMPT, seed=3)
    expected = subject.theirs.generate(prompt, max_new_tokens=GENERATED, do_sample=False)
    assert expected.shape[1] == PROMPT + GENERATED
    tokens = prompt
    for _ in range(GENERATED):
        tokens = torch.cat((tokens, subject.compute_ours(tokens)[:, -1:].argmax(-1)), 1)
    return int((tokens != expected).sum())


def compare_judge(subject: Subject) -> float:
    """The judge's own model, from the folder that the adapter writes: logits."""
    return _largest(ReferenceModel.load(subject.written).logits(make_tokens()) - subject.compute_theirs(make_tokens()))


def compare_server(subject: Subject) -> float:
    """The native server's decoder, a prompt at once and then token by token: logits."""
    tokens_BT = make_tokens(1)
    served = CachedDecoder.load(subject.written, torch.device("cpu"))
    cache = served.make_cache(1, tokens_BT.shape[1])
    tokens = tokens_BT[0].tolist()
    expected_TV = subject.compute_theirs(tokens_BT)[0]
    logits = [served.compute_logits([tokens[:PROMPT]], [0], cache)]
    logits += [served.compute_logits([[tokens[at]]], [at], cache) for at in range(PROMPT, len(tokens))]
    return _largest(torch.cat([one.view(1, -1) for one in logits]) - expected_TV[PROMPT - 1 :])


def count_different_tokens_over_http(subject: Subject) -> float:
    """Greedy tokens of ``factory serve`` after ``factory init --from``, against transformers with the source: how many differ."""
    return count_different_served_tokens(subject.case, subject.folder / "imported", GENERATED)


def _largest(difference: Tensor) -> float:
    return float(difference.detach().abs().max())


@dataclass(frozen=True)
class Check:
    title: str  # of the table's column
    run: Callable[[Subject], float]
    bound: float


CHECKS: Mapping[str, Check] = {
    "tensors": Check("tensors that a round trip changes", count_equal_tensors, 0),
    "reload": Check("written folder in transformers", reload_in_transformers, 0),
    "blocks": Check("each block, relative", compare_places_of_blocks, TOLERANCE),
    "logits": Check("logits", compare_logits, 1e-4),
    "packed": Check("packed documents", compare_packed_documents, 1e-4),
    "gradients": Check("gradients, relative", compare_gradients, 1e-4),
    "greedy": Check("of 64 greedy tokens, different", count_different_tokens, 0),
    "judge": Check("judge's model", compare_judge, 1e-4),
    "server": Check("native server", compare_server, 1e-4),
    "served": Check(
        f"of {len(PROMPTS) * GENERATED} tokens of `factory serve`, different", count_different_tokens_over_http, 0
    ),
}
BEGIN, END = "<!-- proof table -->", "<!-- end of the proof table -->"


def measure(case: Case, checks: Iterable[str] = CHECKS) -> dict[str, float]:
    """The number that each of some checks sees for a case."""
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(case, Path(folder))
        return {name: CHECKS[name].run(subject) for name in checks}


def format_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    titles = [f"{check.title} (≤ {check.bound:g})" for check in CHECKS.values()]
    lines = [f"| model | {' | '.join(titles)} |", "|---" * (len(CHECKS) + 1) + "|"]
    for name, numbers in rows.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{numbers[check]:.1e}" if numbers[check] else "0" for check in CHECKS) + " |"
        )
    return "\n".join(lines)


def read_table() -> dict[str, dict[str, float]]:
    """The rows of the page's table."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: dict(zip(CHECKS, map(float, numbers), strict=True)) for name, *numbers in cells}


def main(arguments: list[str]) -> int:
    rows: dict[str, Mapping[str, float]] = {}
    failed = 0
    chosen = [argument for argument in arguments if not argument.startswith("-")]
    for case in CASES:
        if chosen and case.family not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            subject: Any = Subject(case, Path(folder))
            numbers = {}
            for name, check in CHECKS.items():
                try:
                    numbers[name] = check.run(subject)
                except Exception as error:  # noqa: BLE001 - the table shows every check
                    print(f"{case} {name}: {type(error).__name__} {str(error)[:200]}")
                    numbers[name] = float("nan")
                failed += not numbers[name] <= check.bound
        rows[str(case)] = numbers
        print(case, {name: f"{number:.1e}" for name, number in numbers.items()}, flush=True)
    if "--write" in arguments and not failed and not chosen:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{format_table(rows)}\n{END}{rest.partition(END)[2]}")
    print(f"{failed} checks failed")
    return int(failed > 0)


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main(sys.argv[1:]))
