"""The sandboxed side of ``gguf_source``: transformers reads a .gguf file, and the model is saved as a folder with fp32 safetensors.

It is run as ``python -I inside_gguf.py FILE OUT``, and imports nothing of the factory. The licence that the file names goes into a card. With a third
argument, ``--config``, it writes only config.json, of which the description of the model follows.
``facts.json`` says what transformers did not take from the file, because transformers itself passes over tensors and keys in silence. The tokenizer
that transformers makes is compared with the file's list of tokens, because its classes add tokens of their own (``restore_tokens``).

A separate file, because it runs alone in the sandbox.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
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
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # llama.cpp's kinds of tokens; the last two are matched whole
BYTE_LEVEL = "gpt2"  # the kind of tokenizer whose tokens are spelled in the alphabet of bytes
PLAIN_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


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


def restore_tokens(
    library: dict[str, Any], tokens: Sequence[str], kinds: Sequence[int], byte_level: bool
) -> tuple[int, str | None] | None:
    """Change the content of a tokenizer.json so that its ids are those of the file; return the first id that still has another token, and the token
    (None: no token). None if no id has.

    ``tokens``, ``kinds``: of each id, by the file. transformers' class of a tokenizer adds its default special tokens, such as <|endoftext|>, after
    the file's last id. They are removed: the model has no row for them. transformers also spells tokens outside the alphabet of bytes in this
    alphabet, and no longer matches them whole. A control or user-defined token is spelled and matched as in the file again.

        >>> library = {"model": {"vocab": {"a": 0, "<s>": 1}}, "added_tokens": [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}]}
        >>> restore_tokens(library, ["a", "<s>"], [1, 3], True), library["added_tokens"]
        (None, [{'id': 1, 'content': '<s>'}])
        >>> restore_tokens(library, ["a", "<s>", "b"], [1, 3, 1], True), restore_tokens(library, ["b", "<s>"], [1, 3], True)
        ((2, None), (0, 'a'))
    """
    model, count = library["model"], len(tokens)
    added = [one for one in library["added_tokens"] if one["id"] < count and one["content"] == tokens[one["id"]]]
    listed = model["vocab"]
    held = dict(listed) if isinstance(listed, dict) else {piece: number for number, (piece, _) in enumerate(listed)}
    by_id = {number: token for token, number in held.items()} | {one["id"]: one["content"] for one in added}
    for number, token in enumerate(tokens):
        saved = by_id.get(number)
        if saved == token:
            continue
        if saved is None or saved not in list_spellings(token, byte_level):
            return number, saved
        if byte_level and kinds[number] in (CONTROL, USER_DEFINED):
            listed[token] = listed.pop(saved)
            added.append({"id": number, "content": token, **PLAIN_FLAGS, "special": kinds[number] == CONTROL})
    if beyond := sorted(number for number in held.values() if number >= count):
        return beyond[0], by_id[beyond[0]]
    library["added_tokens"] = sorted(added, key=lambda one: int(one["id"]))
    unknown = model.get("unk_token")
    if unknown is not None and unknown not in tokens:
        model["unk_token"] = None
    return None


def list_spellings(token: str, byte_level: bool) -> tuple[str, ...]:
    """Return how transformers spells a token of the file: in the alphabet of bytes, or with the sign of SentencePiece for blanks."""
    if not byte_level:
        return (token.replace(" ", "\u2581"),)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet: dict[int, str] = bytes_to_unicode()
    return ("".join(alphabet[byte] for byte in token.encode("utf-8")),)


def drop_other_tokens(said: Any, tokens: Container[str]) -> Any:
    """Return a value of tokenizer_config.json without the tokens that are not in ``tokens``: null in place of such a token, or nothing in a list.

    >>> drop_other_tokens(["<s>", {"content": "<mask>"}], {"<s>"}), drop_other_tokens("<mask>", {"<s>"})
    (['<s>'], None)
    """
    if isinstance(said, list):
        return [one for one in said if drop_other_tokens(one, tokens) is not None]
    text = said.get("content") if isinstance(said, dict) else said
    return None if isinstance(text, str) and text not in tokens else said


def restore_tokenizer(
    out: str, tokens: Sequence[str], kinds: Sequence[int], byte_level: bool
) -> tuple[int, str | None] | None:
    """Make the written tokenizer have the file's tokens and no others. Returns and arguments: as ``restore_tokens``; then the files are unchanged."""
    path = os.path.join(out, "tokenizer.json")
    library = read_json(path)
    if (other := restore_tokens(library, tokens, kinds, byte_level)) is not None:
        return other
    write_json(path, library)
    path, known = os.path.join(out, "tokenizer_config.json"), set(tokens)
    config = read_json(path)
    for key in [key for key in config if key.endswith(("_token", "special_tokens"))]:
        config[key] = drop_other_tokens(config[key], known)
    listed = config.get("added_tokens_decoder", {})
    if listed:
        config["added_tokens_decoder"] = {number: one for number, one in listed.items() if one["content"] in known}
    write_json(path, config)
    return None


def read_json(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def write_json(path: str, content: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, ensure_ascii=False)


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
    tokens = [str(token) for token in fields["tokenizer.ggml.tokens"].contents()]
    kinds = (
        fields["tokenizer.ggml.token_type"].contents()
        if "tokenizer.ggml.token_type" in fields
        else [NORMAL] * len(tokens)
    )
    other = restore_tokenizer(out, tokens, kinds, said.get("tokenizer.ggml.model") == BYTE_LEVEL)
    if other is not None:
        number, saved = other
        return write_facts(
            out, refused="token", number=number, saved=saved, token=tokens[number] if number < len(tokens) else None
        )
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
