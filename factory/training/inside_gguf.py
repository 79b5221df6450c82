"""The sandboxed side of ``gguf_source``: transformers reads a .gguf file, and the model is saved as a folder with fp32 safetensors.

It is run as ``python -I inside_gguf.py FILE OUT``, and imports nothing of the factory. The licence that the file names goes into a card. With a third
argument, ``--config``, it writes only config.json, of which the description of the model follows.
``facts.json`` says what transformers did not take from the file, because transformers itself passes over tensors and keys in silence.

A separate file, because it runs alone in the sandbox.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


NAMES = ("quantization_config", "unk_token_id", "local_files_only")
FACTS = "facts.json"
NO_FACTOR = (0, 1)


def find_lost_key(values: Mapping[str, Any], config: Any) -> str | None:
    """Return the first key that transformers did not read and that changes what the model computes; None if there is none.

    ``values``: the file's keys of its architecture, without the name of the architecture. ``config``: the configuration that was made of them.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    read: Any = GGUF_CONFIG_MAPPING[config.model_type.removesuffix("_text")]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    same: dict[str, Any] = {
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "attention.causal": True,
    }
    same["rope.freq_base_swa"] = dict(rope.get("sliding_attention") or {}).get("rope_theta")
    for key, name in (
        ("vocab_size", "vocab_size"),
        ("attention.sliding_window", "sliding_window"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        same[key] = getattr(config, name, None)
    # llama.cpp takes a file without a type of scaling for a linear one
    scaling = {key.removeprefix("rope.scaling."): value for key, value in values.items()}
    kind, factor = scaling.get("type", "linear"), scaling.get("factor", 1)
    unscaled = kind == "none" or (kind == "linear" and factor in NO_FACTOR)
    for key, value in values.items():
        if read.get(key) is not None or key == "tensor_data_layout":  # llama.cpp does not read the latter, either
            continue
        if key.startswith("rope.scaling.") and key != "rope.scaling.attn_factor":
            known = unscaled
        elif key in ("rope.scaling.attn_factor", "rope.scale_linear"):
            known = value in NO_FACTOR
        elif key in ("expert_count", "expert_used_count"):
            known = value == 0
        else:
            known = key in same and value == same[key]
        if not known:
            return key
    return None


def list_unread_tensors(names: Iterable[str], model: Any, architecture: str) -> list[str]:
    """Return the tensors of the file that transformers has no place for in the model."""
    from transformers import modeling_gguf_pytorch_utils as reader

    processor = reader.TENSOR_PROCESSORS.get(architecture, reader.TensorProcessor)(config={})
    places = reader.get_gguf_hf_weights_map(model, processor)
    # all experts of a layer are one tensor, whose place is named without a suffix
    return [name for name in names if name not in places and name.removesuffix(".weight") not in places]


def write_facts(out: str, **facts: Any) -> None:
    with open(os.path.join(out, FACTS), "w", encoding="utf-8") as file:
        json.dump(facts, file, default=str)


def write_config(config: Any, class_name: str | None, out: str) -> None:
    """Write config.json. The weights are no longer quantised, and the other keys name things: save_pretrained would refuse the model."""
    named = {"architectures": [class_name]} if class_name else {}
    keys = {key: value for key, value in config.to_diff_dict().items() if key not in NAMES and not key.startswith("_")}
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as file:
        json.dump(keys | named, file)


def main(path: str, out: str, config_only: bool) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, name = os.path.split(path)
    reader = gguf.GGUFReader(path)
    fields = reader.fields
    said = {
        key: fields[key].contents()
        for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
        if key in fields
    }
    architecture = str(said["general.architecture"])
    begin = f"{architecture}."
    values = {key.removeprefix(begin): field.contents() for key, field in fields.items() if key.startswith(begin)}
    if config_only:
        config = AutoConfig.from_pretrained(folder, gguf_file=name, local_files_only=True)
        if (lost := find_lost_key(values, config)) is not None:
            return write_facts(out, refused="key", name=begin + lost, value=str(values[lost]))
        write_config(config, None, out)
        return write_facts(out, refused="")
    licence = fields["general.license"].contents() if "general.license" in fields else ""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    tokenizer.save_pretrained(out)
    found: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    model, loading = found
    absent = sorted(
        {str(key) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for key in loading[kind]}
    )
    if absent:
        return write_facts(out, refused="missing", name=absent[0], count=len(absent))
    if unread := list_unread_tensors([tensor.name for tensor in reader.tensors], model, architecture):
        return write_facts(out, refused="tensor", name=unread[0], count=len(unread))
    if (lost := find_lost_key(values, model.config)) is not None:
        return write_facts(out, refused="key", name=begin + lost, value=str(values[lost]))
    write_config(model.config, type(model).__name__, out)
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, os.path.join(out, "model.safetensors"))
    if isinstance(licence, str) and licence:
        with open(os.path.join(out, "README.md"), "w", encoding="utf-8") as card:
            card.write(f"---\nlicense: {json.dumps(licence[:100])}\n---\n")
    return write_facts(out, refused="", tokenizer=said.get("tokenizer.ggml.model"), pre=said.get("tokenizer.ggml.pre"))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], "--config" in sys.argv[3:])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:250]}")  # in one line, which the person sees
