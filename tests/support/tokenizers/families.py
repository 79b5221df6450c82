"""Writes the folder of a small tokenizer in the shape of a public family. The vocabularies are trained on the tests' own text.

The templates have the form of the families' templates (turns, trimming, default system prompts, what they refuse), in words of our own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a careful helper made for tests<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helper.' }}
    {%- endif %}
    {{- '\\n\\n# Tools\\nFunctions, one a line:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helper.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = (
    "{{- bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{{ 'Knowledge until: 2023\nToday: ' + date_string + '\n\n' }}{{ system }}{{ '<|eot_id|>' }}"
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set loop_messages = messages[1:] %}"
    "{% else %}{% set loop_messages = messages %}{% endif %}{{ bos_token }}"
    "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{% if loop.first and system is defined %}{{ ' [INST] ' + system + '\n\n' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' [INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
# With the tag that encloses answers, and roles as special tokens that swallow the blanks after them.
TAGGED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>\n' }}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A tokenizer's folder to be written. ``special``: texts or added tokens. ``ids``: content of generation_config.json."""

    name: str
    make: Callable[[list[str], list[Any]], Tokenizer]
    special: list[Any]
    template: str | None
    config: dict[str, Any] = field(default_factory=dict)
    stops: list[str] = field(default_factory=list)
    template_in_config: bool = False

    def write(self, folder: Path, texts: Iterable[str]) -> Path:
        """Train the tokenizer on ``texts`` and write its folder."""
        folder.mkdir(parents=True)
        inner = self.make(list(texts), self.special)
        inner.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.config}
        if self.template is not None and self.template_in_config:
            config["chat_template"] = self.template
        elif self.template is not None:
            (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        if self.stops:
            stops = {"eos_token_id": [inner.token_to_id(text) for text in self.stops]}
            (folder / "generation_config.json").write_text(json.dumps(stops), encoding="utf-8")
        return folder


def _byte_level(
    split: Any, normalizer: Any = None, whole_words: bool = False, post: str = ""
) -> Callable[[list[str], list[Any]], Tokenizer]:
    def make(texts: list[str], special: list[Any]) -> Tokenizer:
        inner = Tokenizer(models.BPE(ignore_merges=whole_words))
        if normalizer is not None:
            inner.normalizer = normalizer
        inner.pre_tokenizer = split
        inner.decoder = decoders.ByteLevel()
        inner.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=1200, initial_alphabet=BYTES, show_progress=False)
        )
        inner.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
        inner.add_special_tokens(special)
        if post:
            frame = processors.TemplateProcessing(
                single=f"{post} $A", pair=f"{post} $A {post} $B", special_tokens=[(post, inner.token_to_id(post))]
            )
            inner.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), frame])
        else:
            inner.post_processor = processors.ByteLevel(trim_offsets=False)
        return inner

    return make


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_fallback(prepend: bool) -> Callable[[list[str], list[Any]], Tokenizer]:
    """SentencePiece's BPE as Llama 2, Mistral (``prepend``) and Gemma have it: blanks are ▁, and unknown characters are bytes."""

    def make(texts: list[str], special: list[Any]) -> Tokenizer:
        inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        steps = [normalizers.Replace(" ", "▁")]
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if prepend else steps)
        split = pre_tokenizers.Split("▁", "merged_with_next")
        inner.pre_tokenizer = split
        names = [str(getattr(token, "content", token)) for token in special]
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=1400, special_tokens=[*names, *fallback], show_progress=False, max_token_length=16
        )
        inner.train_from_iterator(texts, trainer)
        data = json.loads(inner.to_str())
        data["pre_tokenizer"] = (
            None
            if prepend
            else {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        )
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in names]
        inner = Tokenizer.from_str(json.dumps(data))
        strip = [decoders.Strip(content=" ", left=1)] if prepend else []
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        bos = next(name for name in ("<s>", "<bos>") if name in names)
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, inner.token_to_id(bos))]
        )
        return inner

    return make


def _unigram(texts: list[str], special: list[Any]) -> Tokenizer:
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    pieces = [text[:2000] for text in texts]
    inner.train_from_iterator(
        pieces,
        trainers.UnigramTrainer(
            vocab_size=600, special_tokens=special, unk_token="<unk>", show_progress=False, n_sub_iterations=1
        ),
    )
    return inner


def _word_piece(texts: list[str], special: list[Any]) -> Tokenizer:
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    )
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(t, inner.token_to_id(t)) for t in ("[CLS]", "[SEP]")],
    )
    return inner


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "smollm2",
            _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            CHATML,
            {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
            template_in_config=True,
        ),
        Family(
            "qwen2.5",
            _byte_level(_split(QWEN_SPLIT), normalizers.NFC()),
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            QWEN,
            {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False},
            ["<|im_end|>", "<|endoftext|>"],
        ),
        Family(
            "llama3",
            _byte_level(_split(LLAMA_SPLIT), None, True, "<|begin_of_text|>"),
            ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"],
            LLAMA,
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
            ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        ),
        Family(
            "gemma",
            _byte_fallback(False),
            ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
            GEMMA,
            {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "add_bos_token": True},
            ["<eos>", "<end_of_turn>"],
        ),
        Family(
            "mistral",
            _byte_fallback(True),
            ["<unk>", "<s>", "</s>"],
            MISTRAL,
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False},
            ["</s>"],
        ),
        Family(
            "unigram",
            _unigram,
            ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
            CHATML,
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        ),
        Family(
            "wordpiece",
            _word_piece,
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<|im_start|>", "<|im_end|>"],
            CHATML,
            {"eos_token": "[SEP]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"},
        ),
        Family(
            "tagged",
            _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
            [
                "<|endoftext|>",
                *(AddedToken(text, rstrip=True, normalized=False) for text in ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")),
                AddedToken("<|end|>", lstrip=True, normalized=False),
            ],
            TAGGED,
            {"eos_token": "<|end|>", "bos_token": "<|endoftext|>"},
        ),
    )
}  # fmt: skip
