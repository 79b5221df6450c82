"""An export, held to the checkpoint that it was made from: its weights to the bit, and every key of its files by what it means.

Export and server read the same folder, so what both read wrong there no comparison of the two can show. ``made_from`` converts the
checkpoint by the rules of ``trainer.contract.checkpoint.export`` in the factory's own process; the ledger keeps what came out with the candidate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open

from factory.core.errors import NoMemoryError, SegmentError
from factory.core.faults import is_of_no_file
from factory.evals.export_config import parse_config
from factory.evals.export_folder import ExportError, read_json
from factory.evals.probes.checks import OF_CHECKPOINT, OF_FILES, Check
from factory.ingest.tokenizer import END, IM_END
from factory.ledger.ledger import Ledger
from factory.ledger.rows import CandidateRow, Subject
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.export import converted, dtype_of, generation_config, hf_config
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import Recipe

AGAIN = "export the segment's checkpoint again, and judge the new candidate"
# Which check a field of config.json belongs to; the others are 'shape'.
FIELDS = {"rope_theta": "rope", "rope_layers": "rope", "norm_eps": "norm", "vocab_size": "vocabulary"}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
IDLE = {"_from_model_config", "transformers_version", "use_cache", *TOKEN_IDS}  # of generation_config.json
GREEDY = {"do_sample": False, "temperature": 0}  # transformers reads the first, vLLM the second

Digests = dict[str, str]


@dataclass(frozen=True)
class Made:
    """What an export of a checkpoint must be."""

    weights_sha256: str  # over the digests of all tensors
    config: dict[str, Any]  # config.json

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# -- what it must be ---------------------------------------------------------------------------------------------------
def made_from(checkpoint: Path, recipe: dict[str, Any]) -> Made:
    """Raises: SegmentError for a damaged checkpoint or a recipe that cannot be read; NoMemoryError."""
    parsed = _recipe(recipe)
    config = hf_config(parsed.model, dtype_of(parsed))
    return Made(_total(checkpoint_digests(checkpoint, recipe)), config)


def recorded_of(ledger: Ledger, candidate: int) -> Made | None:
    """What was recorded when a candidate was exported; None where an older factory did that."""
    found = ledger.read(
        "SELECT detail FROM events WHERE kind = 'candidate' AND subject = :subject ORDER BY id DESC LIMIT 1",
        subject=str(Subject("candidate", candidate)),
    )
    made = (found[0]["detail"] or {}).get("made") if found else None
    return Made(**made) if made else None


def checkpoint_digests(checkpoint: Path, recipe: dict[str, Any]) -> Digests:
    """Of every tensor as it must stand in the export. Raises: SegmentError; NoMemoryError."""
    try:
        files = checkpoints.read_manifest(checkpoint)["files"]
        names = [name for name in files if name.startswith("model") and name.endswith(".safetensors")]
        needed, free = 2 * sum(files[name]["bytes"] for name in names), psutil.virtual_memory().available
        if needed > free:
            raise NoMemoryError(
                f"{checkpoint}: to hash its weights takes {needed >> 20} MiB, {free >> 20} MiB are free"
            )
        for name in names:
            with open(checkpoint / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != files[name]["sha256"]:
                    raise SegmentError(f"{checkpoint / name}: its SHA-256 is not the one in the manifest")
        return _digests(converted(checkpoints.read_tensors(checkpoint, "model"), _recipe(recipe)))
    except (TrainerError, OSError, KeyError) as error:
        if is_of_no_file(error):
            raise
        raise SegmentError(f"{checkpoint} cannot be read: {error}") from error


def export_digests(export: Path) -> Digests:
    """Of every tensor that stands in the export. Raises: ExportError."""
    return _digests(_tensors(export / "model.safetensors"))


def _recipe(recipe: dict[str, Any]) -> Recipe:
    try:
        return Recipe.parse(recipe)
    except TrainerError as error:
        raise SegmentError(f"its recipe cannot be read: {error}") from error


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with (
            open(path, "rb"),
            safe_open(path, framework="pt") as file,
        ):  # the library does not say why it cannot open one
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        if is_of_no_file(error):
            raise
        raise ExportError(f"{path} cannot be read: {error}") from error


def _digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> Digests:
    found = {}
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        found[name] = digest.hexdigest()
    return found


def _total(digests: Digests) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


# -- is it that? -------------------------------------------------------------------------------------------------------
def checkpoint_checks(ledger: Ledger, candidate: CandidateRow, vocabulary: int) -> list[Check]:
    """A check for each of ``OF_CHECKPOINT``. ``vocabulary``: tokens of the tokenizer."""
    made = recorded_of(ledger, candidate.id)
    if made is None:
        return [Check(name, None, f"nothing was recorded when it was exported: {AGAIN}") for name in OF_CHECKPOINT]
    export = Path(candidate.export_path)
    here, where = read_json(export / "config.json"), export / "config.json"
    found = asdict(parse_config(here, where))
    expected = asdict(parse_config(made.config, f"config.json of candidate {candidate.id}, as recorded"))
    wrong: dict[str, list[str]] = {name: [] for name in OF_CHECKPOINT}
    for key in found:
        if found[key] != expected[key]:
            words = f"{key} is {str(found[key])[:60]}, of the checkpoint it is {str(expected[key])[:60]}"
            wrong[FIELDS.get(key, "shape")].append(words)
    if found["vocab_size"] < vocabulary:
        wrong["vocabulary"].append(f"{found['vocab_size']} rows, the tokenizer has {vocabulary} tokens")
    fine = {
        "shape": "layers, widths, heads, context and experts are the checkpoint's",
        "rope": f"RoPE base {found['rope_theta']:g} in the checkpoint's layers",
        "norm": f"norm epsilon {found['norm_eps']:g}",
        "vocabulary": f"{found['vocab_size']} rows for {vocabulary} tokens",
    }
    checks = [
        Check(name, not wrong[name], f"config.json: {'; '.join(wrong[name])}: {AGAIN}" if wrong[name] else words)
        for name, words in fine.items()
    ]
    return [_weights(export, made), *checks]


def _weights(export: Path, made: Made) -> Check:
    tensors = export_digests(export)
    found, recorded = _total(tensors), made.weights_sha256
    if found == recorded:
        return Check("weights", True, f"{len(tensors)} tensors are the checkpoint's, to the bit ({found[:12]})")
    words = f"the tensors are not the checkpoint's: {found[:12]}, recorded {recorded[:12]}: {AGAIN}"
    return Check("weights", False, words)


def file_checks(
    export: Path,
    made_config: dict[str, Any] | None,
    tokenizer_ids: list[int | None],
    asked: list[int],
    bos: int | None,
) -> list[Check]:
    """BOS, EOS, sampling and the chat template, as the other files say them. ``asked``: the tokenizer's end and stop tokens; ``bos``: what
    its documents begin with."""
    parts: dict[str, Callable[[], Check]] = {
        "bos_eos": lambda: _bos_eos(export, made_config, tokenizer_ids, asked, bos),
        "generation_config": lambda: _generation(export),
        "template": lambda: _template(export),
    }
    assert tuple(parts) == OF_FILES
    found = []
    for name, part in parts.items():
        try:
            found.append(part())
        except ExportError as error:
            found.append(Check(name, False, f"{error}: {AGAIN}"))
    return found


def _bos_eos(
    export: Path,
    made_config: dict[str, Any] | None,
    tokenizer_ids: list[int | None],
    stop: list[int],
    bos: int | None,
) -> Check:
    config = read_json(export / "config.json")
    end, end_of_turn = stop
    expected: dict[str, Any] = {"eos_token_id": end, "pad_token_id": end}
    if made_config is not None:
        expected = {key: made_config.get(key) for key in TOKEN_IDS}
    expected["bos_token_id"] = bos  # of the tokenizer, which the trainer does not know
    wrong = [
        f"config.json: {key} is {str(config.get(key))[:40]}, not {value}"
        for key, value in expected.items()
        if config.get(key) != value
    ]
    for key, found, value in zip(TOKEN_IDS, tokenizer_ids, (bos, end_of_turn, end), strict=True):
        if found != value:
            wrong.append(f"tokenizer_config.json: {key} is {found}, not {value}")
    named = read_json(export / "tokenizer_config.json")
    for key, token in {
        "bos_token": None if bos is None else END,
        "eos_token": IM_END,
        "pad_token": END,
    }.items():  # other programs read the names
        text = value.get("content") if isinstance(value := named.get(key), dict) else value
        if text != token:
            wrong.append(f"tokenizer_config.json: {key} is {str(text)[:40]}, not {token}")
    words = f"{'no BOS' if bos is None else f'BOS is {bos}'}; documents end at {end}, turns at {end_of_turn}"
    return Check("bos_eos", not wrong, f"{'; '.join(wrong)}: {AGAIN}" if wrong else words)


def _generation(export: Path) -> Check:
    """It was judged greedy: both programs must be greedy by default, and nothing may change what is likeliest."""
    where = export / "generation_config.json"
    found = read_json(where)
    wrong = [
        f"{key} is {str(found.get(key))[:40]}, not {value}" for key, value in GREEDY.items() if found.get(key) != value
    ]
    wrong += [f"{key[:40]} is set" for key in sorted(found.keys() - GREEDY.keys() - IDLE) if found[key] is not None]
    todo = f"{where.name} must say {json.dumps(generation_config())}"
    return Check(
        "generation_config", not wrong, f"{'; '.join(wrong)}: {todo}" if wrong else "greedy in transformers and vLLM"
    )


def _template(export: Path) -> Check:
    """transformers reads the file, others the key."""
    file, key = export / "chat_template.jinja", read_json(export / "tokenizer_config.json").get("chat_template")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
    same = text is not None and key in (None, text)
    todo = (
        "chat_template.jinja and chat_template of tokenizer_config.json differ, or the file is missing: export it again"
    )
    return Check("template", same, "chat_template.jinja and tokenizer_config.json have the same" if same else todo)
