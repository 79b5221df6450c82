"""Ways in which an export can slip from what it was made of: each with what it is, the checks that name it, and how it is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from factory.ingest.chat_template import CHAT_TEMPLATE
from tests.support.factory.exports import VOCAB
from tests.support.trainer.segments import recipe_with
from tests.support.trainer.small_models import make_model
from trainer.contract.checkpoint.export import export_checkpoint as write_export
from trainer.contract.checkpoint.format import Checkpoint, save_checkpoint

RECIPE = recipe_with(model__vocab_size=VOCAB, model__context=64, model__head_dim=32)  # a width that vLLM has on a CPU


def checkpoint_of(seed: int, folder: Path) -> Path:
    """Of a model that the trainer made, moved a little, so that no norm is one."""
    torch.manual_seed(seed)
    model = {k: v + 0.1 * torch.randn_like(v) for k, v in make_model(RECIPE).state_dict().items()}
    return save_checkpoint(
        folder, Checkpoint(model, {"step.x": torch.zeros(1)}, {"step": 1, "recipe": RECIPE.model_dump()})
    )


Break = Callable[[Path], None]


def in_json(name: str, **changes: Any) -> Break:
    def make(export: Path) -> None:
        found = json.loads((export / name).read_text()) | changes
        (export / name).write_text(json.dumps({k: v for k, v in found.items() if v != "left out"}))

    return make


def in_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Break:
    def make(export: Path) -> None:
        tensors = load_file(export / "model.safetensors")
        change(tensors)
        save_file(tensors, export / "model.safetensors", {"format": "pt"})

    return make


def in_template(old: str, new: str) -> Break:
    def make(export: Path) -> None:
        assert old in CHAT_TEMPLATE
        template = CHAT_TEMPLATE.replace(old, new)
        (export / "chat_template.jinja").write_text(template)
        in_json("tokenizer_config.json", chat_template=template)(export)

    return make


def in_tokenizer(**changes: Any) -> Break:
    return in_json("tokenizer.json", **changes)


def other_weights(export: Path) -> None:
    other = export.parent / "other"
    write_export(checkpoint_of(2, export.parent / "two"), other)
    shutil.copyfile(other / "model.safetensors", export / "model.safetensors")


def rounded(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].bfloat16().float()


def in_bf16(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()


def swapped_layers(tensors: dict[str, torch.Tensor]) -> None:
    a, b = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1))
    tensors[a], tensors[b] = tensors[b], tensors[a]


def padded_rows(export: Path) -> None:
    in_json("config.json", vocab_size=VOCAB + 8)(export)
    name = "model.embed_tokens.weight"
    in_weights(lambda tensors: tensors.update({name: torch.cat([tensors[name], torch.zeros(8, 32)])}))(export)


def texts_without_bos(export: Path) -> None:
    in_tokenizer(post_processor=None)(export)
    in_json("tokenizer_config.json", add_bos_token=False)(export)


DEFUSED = " | replace('<|im_', '<| im_') | replace('<|endoftext|>', '<| endoftext|>')"
CONTENT = "ns.text | replace('<|im_', '<| im_') | replace('<|endoftext|>', '<| endoftext|>')"
ROLE = CHAT_TEMPLATE[
    CHAT_TEMPLATE.index("{%- if message['role'] not") : CHAT_TEMPLATE.index("{%- set ns.text = message")
]
BOS, FIRST = CHAT_TEMPLATE.split("\n")[0], "{%- for message in messages -%}"
FOR = "{%- for message in messages if message['role'] != 'system' -%}"
# break → (its own check, what else cannot pass then, how)
BREAKS: dict[str, tuple[str, set[str], Break]] = {
    "weights of another checkpoint": ("weights", set(), other_weights),
    "one tensor rounded": ("weights", set(), in_weights(rounded)),
    "weights stored in bf16": ("weights", set(), in_weights(in_bf16)),
    "two layers swapped": ("weights", set(), in_weights(swapped_layers)),
    "another RoPE base": (
        "rope",
        set(),
        in_json("config.json", rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ),
    "another norm epsilon": ("norm", set(), in_json("config.json", rms_norm_eps=1e-5)),
    "padded vocabulary rows": ("vocabulary", {"weights"}, padded_rows),
    "a longer context": ("shape", set(), in_json("config.json", max_position_embeddings=128)),
    "a BOS id": ("bos_eos", set(), in_json("config.json", bos_token_id=1)),
    "texts without BOS": ("tokenizer", {"server_text", "whitespace", "engine_start"}, texts_without_bos),
    "chats without BOS": (
        "server_chat",
        {"whitespace", "system_message", "typed_special", "tools_printed", "engine_start"},
        in_template(f"{BOS}\n", ""),
    ),
    "no BOS": ("bos_eos", set(), in_json("config.json", bos_token_id=None)),
    "another EOS id": ("bos_eos", set(), in_json("config.json", eos_token_id=2)),
    "another EOS of the tokenizer": ("bos_eos", set(), in_json("tokenizer_config.json", eos_token="<|endoftext|>")),
    "a third stop id": ("stop", set(), in_json("generation_config.json", eos_token_id=[0, 2, 99])),
    "a stop id less": ("stop", set(), in_json("generation_config.json", eos_token_id=[0])),
    "a repetition penalty": ("generation_config", {"engine_start"}, in_json("generation_config.json", repetition_penalty=1.2)),
    "sampled": ("generation_config", set(), in_json("generation_config.json", do_sample=True, temperature=0.7)),
    "greedy in transformers alone": ("generation_config", set(), in_json("generation_config.json", temperature="left out")),
    "special tokens no longer defused": ("typed_special", {"tools_printed", "engine_start"}, in_template(CONTENT, "ns.text")),
    "any role": ("injected_role", {"engine_start"}, in_template(ROLE, "")),
    "system messages dropped": ("system_message", {"tools_printed", "engine_start"}, in_template(FIRST, FOR)),
    "tools in another JSON": ("tools_printed", {"engine_start"}, in_template("(value | tojson)", "(value | string)")),
    "tools dropped": ("tools_printed", {"engine_start"}, in_template("{%- if ns.tools -%}", "{%- if false -%}")),
    "special tokens in tools": ("tools_printed", {"engine_start"}, in_template(f"ns.tools{DEFUSED}", "ns.tools")),
    "arguments in another JSON": ("tools_printed", {"engine_start"}, in_template("{}) | tojson)", "{}) | tojson(ensure_ascii=true))")),
    "reasoning dropped": ("tools_printed", {"engine_start"}, in_template("'<think>\\n' + ns.reasoning", "'<think>\\n'")),
    "contents trimmed": ("whitespace", {"tools_printed", "engine_start"}, in_template(CONTENT, CONTENT + " | trim")),
    "no line after a turn": (
        "server_chat",
        {"whitespace", "system_message", "tools_printed", "engine_start"},
        in_template("'<|im_end|>\\n'", "'<|im_end|>'"),
    ),
    "two templates": ("template", set(), in_json("tokenizer_config.json", chat_template="{{ messages }}")),
    "another tokenizer": (
        "tokenizer",
        {"server_text", "round_trip", "engine_text"},
        in_tokenizer(normalizer={"type": "NFC"}),
    ),
}  # fmt: skip
