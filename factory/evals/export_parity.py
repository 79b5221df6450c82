"""Compares an export with its checkpoint: every bit of the weights, and the meaning of every key of its files.

Evaluator and server both read the export, so comparing them cannot show an error that both share. ``compute_expected_export`` therefore converts the
checkpoint in the factory's own process, by the rules of ``trainer.contract.checkpoint.export``. The ledger stores the result with the candidate.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from factory.core.errors import InputError, NoMemoryError, SegmentError
from factory.core.faults import is_machine_fault_unrelated_to_files
from factory.evals.export_folder import ExportError, ExportWeights, parse_config, read_json
from factory.evals.probes.checks import OF_CHECKPOINT, OF_FILES, ProbeCheck, join_sentences
from factory.ingest.tokenizer import END, FILES, IM_END, Tokenizer
from factory.ingest.tokenizing.description import DEFAULT, read_chat_templates
from factory.ledger.ledger import Ledger
from factory.ledger.rows import CandidateRow, Subject
from kernels.contract.message import Message
from models.spec import ModelSpec
from models.tensors import list_tensor_shapes
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.export import (
    choose_export_dtype,
    convert_tensors,
    make_generation_config,
    make_hf_config,
)
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe

AGAIN = Message("export_parity.again", "Export the segment's checkpoint again and judge the new candidate")
# The check of a key of ``ModelSpec``. All other keys belong to 'shape'.
FIELDS = {
    "rope_theta": "rope", "rope_share": "rope", "rope_scaling": "rope", "window_rope_theta": "rope", "nope_every": "rope", "position": "rope",
    "norm_eps": "norm", "norms": "norm", "norm_plus_one": "norm", "qk_norm": "norm", "norm_weights": "norm",
    "embedding_norm": "norm", "vocab_size": "vocabulary",
}  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
IDLE = {"_from_model_config", "transformers_version", "use_cache", *TOKEN_IDS}  # of generation_config.json
HELD_BYTES = 32  # of memory for each value of the largest tensor, while LoRA's matrices are merged in fp64
GREEDY = {"do_sample": False, "temperature": 0}  # transformers reads the first, vLLM the second

Digests = dict[str, str]


@dataclass(frozen=True)
class ForeignTokenFiles:
    """The files that an export must have from a workspace's tokenizer that is not of the factory's own format."""

    tokenizer: Tokenizer

    def list_changed_files(self, export: Path) -> list[str]:
        """Return the names of the files that differ, are missing or are too many in an export."""
        read = lambda path: path.read_bytes() if path.is_file() else None
        return [name for name in FILES if read(self.tokenizer.folder / name) != read(export / name)]


@dataclass(frozen=True)
class ExpectedExport:
    """The content that the export of a checkpoint must have."""

    weights_sha256: str  # over the digests of all tensors
    config: dict[str, Any]  # config.json

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# -- what it must be ---------------------------------------------------------------------------------------------------
def compute_expected_export(checkpoint: Path, recipe: dict[str, Any]) -> ExpectedExport:
    """Compute the content that the export of a checkpoint must have.

    Raises: SegmentError for a damaged checkpoint or an invalid recipe; NoMemoryError.
    """
    parsed = _recipe(recipe)
    config = make_hf_config(parsed.model, choose_export_dtype(parsed))
    return ExpectedExport(_total(hash_checkpoint_tensors(checkpoint, recipe)), config)


def read_recorded_export(ledger: Ledger, candidate: int) -> ExpectedExport | None:
    """Return the expected content that the ledger recorded with the candidate's export; None if an older factory exported it and recorded nothing."""
    found = ledger.read(
        "SELECT detail FROM events WHERE kind = 'candidate' AND subject = :subject ORDER BY id DESC LIMIT 1",
        subject=str(Subject("candidate", candidate)),
    )
    made = (found[0]["detail"] or {}).get("made") if found else None
    return ExpectedExport(**made) if made else None


def hash_checkpoint_tensors(checkpoint: Path, recipe: dict[str, Any]) -> Digests:
    """Return the digest of every tensor that the export must hold. Memory holds one tensor. Raises: SegmentError; NoMemoryError."""
    parsed = _recipe(recipe)
    try:
        files = checkpoints.read_manifest(checkpoint)["files"]
        names = [name for name in files if name.startswith("model") and name.endswith(".safetensors")]
        largest = max(math.prod(shape) for shape in list_tensor_shapes(parsed.model).values())
        needed, free = HELD_BYTES * largest, psutil.virtual_memory().available
        if needed > free:
            raise NoMemoryError(
                "export_parity.no_memory", "{checkpoint}: hashing the weights needs {needed:,} MiB of memory, but only {free:,} MiB are free",
                checkpoint=checkpoint, needed=needed >> 20, free=free >> 20,
            )  # fmt: skip
        for name in names:
            with open(checkpoint / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != files[name]["sha256"]:
                    raise SegmentError(
                        "export_parity.other_hash",
                        "{file} does not have the SHA-256 that the manifest records",
                        file=checkpoint / name,
                    )
        return _digests(convert_tensors(checkpoints.StoredTensors(checkpoint, "model"), parsed))
    except (TrainerError, OSError, KeyError) as error:
        if is_machine_fault_unrelated_to_files(error):
            raise
        raise SegmentError(
            "export_parity.unreadable",
            "{checkpoint} cannot be read: {reason}",
            checkpoint=checkpoint,
            reason=str(error),
        ) from error


def hash_export_tensors(export: Path) -> Digests:
    """Return the digest of every tensor in the export. Raises: ExportError."""
    files = ExportWeights(export)
    return _digests((name, files.read_tensor(name, dtype=None)) for name in files.tensors)


def _recipe(recipe: dict[str, Any]) -> Recipe:
    try:
        return Recipe.parse(recipe)
    except TrainerError as error:
        raise SegmentError(
            "export_parity.odd_recipe", "The segment's recipe is invalid: {reason}", reason=str(error)
        ) from error


def _digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> Digests:
    found = {}
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        found[name] = digest.hexdigest()
        del tensor  # before the next one is made
    return found


def _total(digests: Digests) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


# -- is it that? -------------------------------------------------------------------------------------------------------
def check_against_checkpoint(ledger: Ledger, candidate: CandidateRow, vocabulary: int) -> list[ProbeCheck]:
    """Return a check for each name in ``OF_CHECKPOINT``. ``vocabulary``: the number of tokens of the tokenizer."""
    made = read_recorded_export(ledger, candidate.id)
    if made is None:
        detail = join_sentences(
            [Message("export_parity.not_recorded", "The ledger has no hashes of this export"), AGAIN]
        )
        return [ProbeCheck(name, None, detail) for name in OF_CHECKPOINT]
    export = Path(candidate.export_path)
    here, where = read_json(export / "config.json"), export / "config.json"
    found, expected = parse_config(here, where), parse_config(made.config, f"candidate {candidate.id}, recorded")
    wrong: dict[str, list[Message]] = {name: [] for name in OF_CHECKPOINT}
    for key in ModelSpec.model_fields:
        ours, theirs = getattr(found, key), getattr(expected, key)
        if ours != theirs:
            wrong[FIELDS.get(key, "shape")].append(
                Message(
                    "export_parity.other_field", "config.json: {key} is {found}, but the checkpoint has {expected}",
                    key=key, found=str(ours)[:60], expected=str(theirs)[:60],
                )
            )  # fmt: skip
    if found.vocab_size < vocabulary:
        wrong["vocabulary"].append(
            Message(
                "export_parity.small_vocabulary", "config.json: the embedding has {rows:,} rows, but the tokenizer has {tokens:,} tokens",
                rows=found.vocab_size, tokens=vocabulary,
            )
        )  # fmt: skip
    passed = {
        "shape": Message("export_parity.same_shape", "Export and checkpoint have the same layers, widths, heads, context and experts"),
        "rope": Message("export_parity.same_rope",
            "The export has RoPE with base {base:g} in the same layers as the checkpoint",
            base=found.rope_theta),
        "norm": Message("export_parity.same_norm", "Export and checkpoint have norm epsilon {epsilon:g}", epsilon=found.norm_eps),
        "vocabulary": Message(
            "export_parity.vocabulary_fits", "The embedding has {rows:,} rows for {tokens:,} tokens",
            rows=found.vocab_size, tokens=vocabulary,
        ),
    }  # fmt: skip
    checks = [
        ProbeCheck(name, not wrong[name], join_sentences([*wrong[name], AGAIN]) if wrong[name] else detail)
        for name, detail in passed.items()
    ]
    return [_weights(export, made), *checks]


def _weights(export: Path, made: ExpectedExport) -> ProbeCheck:
    tensors = hash_export_tensors(export)
    found, recorded = _total(tensors), made.weights_sha256
    if found == recorded:
        same = Message(
            "export_parity.same_weights", "{tensors:,} tensors are the same to the bit as in the checkpoint (sha256 {sha256:.12})",
            tensors=len(tensors), sha256=found,
        )  # fmt: skip
        return ProbeCheck("weights", True, same)
    other = Message(
        "export_parity.other_weights", "The tensors have sha256 {found:.12}, but the checkpoint's have {recorded:.12}",
        found=found, recorded=recorded,
    )  # fmt: skip
    return ProbeCheck("weights", False, join_sentences([other, AGAIN]))


def check_export_files(
    export: Path,
    expected_config: dict[str, Any] | None,
    tokenizer_ids: list[int | None],
    stop_ids: list[int],
    bos: int | None,
    foreign: ForeignTokenFiles | None = None,
) -> list[ProbeCheck]:
    """Check BOS, EOS, sampling defaults and chat template in the export's other files.

    ``stop_ids``: the tokenizer's end and stop tokens. ``bos``: the first token of a document, if any. ``foreign``: the files of a tokenizer that is
    not of the factory's own format.
    """
    parts: dict[str, Callable[[], ProbeCheck]] = {
        "bos_eos": lambda: (
            _foreign_ids(export, tokenizer_ids, foreign)
            if foreign
            else _bos_eos(export, expected_config, tokenizer_ids, stop_ids, bos)
        ),
        "generation_config": lambda: _generation(export),
        "template": lambda: _foreign_template(export, foreign) if foreign else _template(export),
    }
    assert tuple(parts) == OF_FILES
    found = []
    for name, part in parts.items():
        try:
            found.append(part())
        except (ExportError, InputError) as error:
            found.append(ProbeCheck(name, False, join_sentences([error.message, AGAIN])))
    return found


def _bos_eos(
    export: Path,
    made_config: dict[str, Any] | None,
    tokenizer_ids: list[int | None],
    stop: list[int],
    bos: int | None,
) -> ProbeCheck:
    config = read_json(export / "config.json")
    end, end_of_turn = stop
    expected: dict[str, Any] = {"eos_token_id": end, "pad_token_id": end}
    if made_config is not None:
        expected = {key: made_config.get(key) for key in TOKEN_IDS}
    expected["bos_token_id"] = bos  # from the tokenizer; the trainer does not know it
    wrong = [
        _other_key("config.json", key, config.get(key), value)
        for key, value in expected.items()
        if config.get(key) != value
    ]
    for key, found, value in zip(TOKEN_IDS, tokenizer_ids, (bos, end_of_turn, end), strict=True):
        if found != value:
            wrong.append(_other_key("tokenizer_config.json", key, found, value))
    named = read_json(export / "tokenizer_config.json")
    for key, token in {
        "bos_token": None if bos is None else END,
        "eos_token": IM_END,
        "pad_token": END,
    }.items():  # other programs read the names
        text = value.get("content") if isinstance(value := named.get(key), dict) else value
        if text != token:
            wrong.append(_other_key("tokenizer_config.json", key, text, token))
    passed = Message(
        "export_parity.special_tokens", "Special tokens: BOS {bos}, end of document {end}, end of turn {end_of_turn}",
        bos="none" if bos is None else bos, end=end, end_of_turn=end_of_turn,
    )  # fmt: skip
    return ProbeCheck("bos_eos", not wrong, join_sentences([*wrong, AGAIN]) if wrong else passed)


def _foreign_ids(export: Path, tokenizer_ids: list[int | None], foreign: ForeignTokenFiles) -> ProbeCheck:
    """Check that the export states the ids of the workspace's tokenizer, and has its files byte for byte."""
    expected = foreign.tokenizer.stop_config
    config, generation = read_json(export / "config.json"), read_json(export / "generation_config.json")
    wrong = [
        _other_key("config.json", key, config.get(key), value)
        for key, value in expected.items()
        if config.get(key) != value
    ]
    stop, key = list(foreign.tokenizer.stop_ids), "eos_token_id"
    if generation.get(key) != stop:
        wrong.append(_other_key("generation_config.json", key, generation.get(key), stop))
    for key, found, value in zip(TOKEN_IDS, tokenizer_ids, foreign.tokenizer.named_ids, strict=True):
        if found != value:
            wrong.append(_other_key("tokenizer_config.json", key, found, value))
    wrong += [
        Message("export_parity.other_file", "{file} differs from the workspace's file", file=name)
        for name in foreign.list_changed_files(export)
    ]
    passed = Message(
        "export_parity.foreign_special_tokens",
        "The export has the tokenizer's own files. Generation ends at the ids {stop}",
        stop=stop,
    )
    return ProbeCheck("bos_eos", not wrong, join_sentences([*wrong, AGAIN]) if wrong else passed)


def _foreign_template(export: Path, foreign: ForeignTokenFiles) -> ProbeCheck:
    """Check that the export has the chat template with which the documents were written, and no other."""
    found = read_chat_templates(export, read_json(export / "tokenizer_config.json"))
    if found.get(DEFAULT) == foreign.tokenizer.chat_template:
        return ProbeCheck(
            "template",
            True,
            Message("export_parity.template_of_tokenizer", "The chat template is the one of the workspace's tokenizer"),
        )
    other = Message("export_parity.template_differs", "The chat template is not the one of the workspace's tokenizer")
    return ProbeCheck("template", False, join_sentences([other, AGAIN]))


def _other_key(file: str, key: str, found: Any, expected: Any) -> Message:
    return Message(
        "export_parity.other_key", "{file}: {key} is {found}, but must be {expected}",
        file=file, key=key[:40], found=str(found)[:40], expected=str(expected),
    )  # fmt: skip


def _generation(export: Path) -> ProbeCheck:
    """Check that transformers and vLLM decode greedily by default and do not change logits, because the model was judged with greedy decoding."""
    where = export / "generation_config.json"
    found = read_json(where)
    wrong = [
        _other_key(where.name, key, found.get(key), value) for key, value in GREEDY.items() if found.get(key) != value
    ]
    extra = [key for key in sorted(found.keys() - GREEDY.keys() - IDLE) if found[key] is not None]
    wrong += [_other_key(where.name, key, found[key], None) for key in extra]
    if wrong:
        todo = Message(
            "export_parity.generation_config",
            "{file} must contain {config}",
            file=where.name,
            config=json.dumps(make_generation_config()),
        )
        return ProbeCheck("generation_config", False, join_sentences([*wrong, todo]))
    return ProbeCheck(
        "generation_config",
        True,
        Message("export_parity.greedy", "By default, transformers and vLLM decode the export greedily"),
    )


def _template(export: Path) -> ProbeCheck:
    """Check both places of the chat template: transformers reads chat_template.jinja, other programs read a key of tokenizer_config.json."""
    file, key = export / "chat_template.jinja", read_json(export / "tokenizer_config.json").get("chat_template")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
    same = text is not None and key in (None, text)
    if same:
        return ProbeCheck(
            "template", True, Message("export_parity.same_template", "chat_template.jinja is the only chat template")
        )
    other = Message(
        "export_parity.other_template",
        "chat_template.jinja is missing or differs from key chat_template of tokenizer_config.json. Export the checkpoint again",
    )
    return ProbeCheck("template", False, other)
