"""The tokenizer of an export as a GGUF file says it.

llama.cpp has the split patterns in its own code and chooses one by name, ``tokenizer.ggml.pre``. Its converter finds the name by a
hash over the ids of a sample text, so that it knows published vocabularies alone; ours is trained on the factory's own text, and
splits as Qwen2's does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factory.core.errors import InputError
from factory.evals.export_folder import read_json
from factory.ingest.tokenizer import PATTERN, Tokenizer

if TYPE_CHECKING:
    import gguf

MODEL, PRE = "gpt2", "qwen2"  # byte-level BPE, and Qwen2's split pattern
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens


def add_vocabulary(writer: gguf.GGUFWriter, export: Path, vocab_size: int) -> None:
    """``vocab_size``: rows of the embedding; ids without a token become unused ones.

    Raises: InputError for a tokenizer that llama.cpp would split otherwise.
    """
    tokenizer = Tokenizer.load(export, probed=False)  # what it splits is looked at below
    where = export / "tokenizer.json"
    data = json.loads(where.read_text(encoding="utf-8"))
    model = data["model"]
    if (why := _unlike_qwen2(data)) is not None:
        raise InputError(f"{where}: {why}; llama.cpp would give other ids, so no GGUF file is made")
    by_id: dict[int, str] = {number: token for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for added in data["added_tokens"]:
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if beyond := [number for number in by_id if number >= vocab_size]:
        raise InputError(f"{where}: token {max(beyond)} is beyond the model's vocabulary of {vocab_size}")
    writer.add_tokenizer_model(MODEL)
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types([kinds.get(number, UNUSED) for number in range(vocab_size)])
    # two tokens and a blank between, best first
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.end_token)
    writer.add_eos_token_id(tokenizer.stop_token)  # ends a turn; llama.cpp knows <|endoftext|> by its name
    writer.add_eot_token_id(tokenizer.stop_token)
    writer.add_pad_token_id(tokenizer.end_token)
    writer.add_add_bos_token(bool(tokenizer.bos))
    writer.add_add_eos_token(False)
    writer.add_chat_template(_chat_template(export) or tokenizer.chat_template)


def _unlike_qwen2(data: dict[str, Any]) -> str | None:
    """Why text is not split and merged as llama.cpp does under the name ``PRE``; None when it is."""
    model, split = data["model"], data["pre_tokenizer"] or {}
    steps = split.get("pretokenizers", [split])
    patterns = [step["pattern"] for step in steps if step.get("type") == "Split"]
    if patterns != [{"Regex": PATTERN}] or [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return "text is not split with Qwen2's pattern into byte-level pieces"
    if data["normalizer"] is not None:
        return "text is normalised before it is split"
    if model["type"] != "BPE" or model.get("ignore_merges") or model.get("byte_fallback") or model.get("dropout"):
        return "it is no plain BPE"
    return None


def _chat_template(export: Path) -> str | None:
    """As transformers reads it: the file before the key."""
    if (path := export / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    if (path := export / "tokenizer_config.json").is_file():
        return read_json(path).get("chat_template")
    return None
