"""Reads a request of OpenAI's API, which may be hostile, and returns its checked content or raises one clear error. It has no side effects.

An unsupported key that would change the answer is refused. A key that changes nothing (``user``, ``metadata``, zero penalties) is ignored.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import suggest_name
from factory.core.untrusted_trainer_files import parse_json_object
from factory.evals.export_folder import ExportError, read_config
from factory.ingest.chat_template import OLDER_TEMPLATES
from factory.ingest.document import ROLES
from factory.ingest.tokenizer import Tokenizer
from factory.ingest.tokenizing.chat_rendering import ChatRefusedError
from factory.ingest.tokenizing.library_faults import TokenizerFailedError
from factory.ingest.tokenizing.marked_library import SpellsMarkError
from factory.release.published_link import MODEL_NAME
from factory.serving.api.defaults import GenerationDefaults, SamplingSettings
from factory.serving.api.errors import ApiError
from kernels.contract.message import Message

MOST_CHOICES, MOST_STOPS, MOST_PROMPTS = 64, 16, 256
MOST_LOGPROBS = 20
IDLE = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "seed",
    "model",
    "stream",
    "stream_options",
}
# Unsupported keys, with the values that have no effect.
NOTHING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "logit_bias": ({}, None), "tools": ([], None), "functions": ([], None),
    "tool_choice": ("none", "auto", None), "response_format": ({"type": "text"}, None), "suffix": ("", None), "echo": (False, None),
    "best_of": (1, None), "parallel_tool_calls": (True, False, None), "modalities": (["text"], None),
    "reasoning_effort": (None,), "verbosity": (None,),
}  # fmt: skip

MESSAGE_KEYS, PART_KEYS = ("role", "content"), ("type", "text")
# Unsupported keys of OpenAI's messages. Only empty values are accepted.
UNSUPPORTED_MESSAGE_KEYS = frozenset(
    ("name", "refusal", "audio", "annotations", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning")
)  # fmt: skip


@dataclass(frozen=True)
class CompletionRequest:
    """The content of a request after all checks."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]  # token ids of each prompt; a chat has one prompt
    n: int
    most_tokens: int
    sampling: SamplingSettings
    seed: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    logprobs: int | None  # how many of the likeliest tokens to list with each token; None: no log-probabilities
    stream: bool
    usage_in_stream: bool
    tokens_as_ids: bool  # tokens are written as token_id:N, as in vLLM

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class ServedModel:
    """The parts of the served model that a request is checked against."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    context: int
    vocab_size: int


def load_served_model(export: Path) -> ServedModel:
    """Load the parts of an export. Raises: ExportError if it cannot be read, or if it has the factory's own tokenizer with another chat template."""
    config, tokenizer = read_config(export), Tokenizer.load(export)
    path = export / "chat_template.jinja"
    known = (tokenizer.chat_template, *(() if tokenizer.bos else OLDER_TEMPLATES))
    if tokenizer.is_own and (not path.is_file() or path.read_text(encoding="utf-8") not in known):
        raise ExportError(
            "serving.other_chat_template",
            "{file} is not the chat template of this factory, so chats would get other token ids.",
            file=path,
        )
    return ServedModel(tokenizer, GenerationDefaults.read(export), config.context, config.vocab_size)


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises: ApiError."""
    try:
        return parse_json_object(body)
    except ValueError as error:
        raise ApiError(
            400, Message("serving.body_not_json", "The body is not a valid JSON object: {error}", error=error)
        ) from None


def read_request(body: dict[str, Any], chat: bool, served: ServedModel) -> CompletionRequest:
    """Check the body of a request, and return its content. Raises: ApiError that names the parameter."""
    check_requested_model(body)
    _check_keys(body, chat)
    prompts = (tuple(tokenize_chat(body, served.tokenizer)),) if chat else tokenize_prompts(body, served)
    longest = max(map(len, prompts))
    wanted = _whole(body, "max_completion_tokens", 1, 1 << 24) if chat else None
    wanted = wanted or _whole(body, "max_tokens", 1, 1 << 24)
    if longest + (wanted or 1) > served.context:
        too_long = Message(
            "serving.context_exceeded",
            "The model's context has {context} tokens, but the prompt has {prompt} tokens{answer}. Shorten the "
            "prompt or lower max_tokens.",
            context=served.context, prompt=longest, answer=f" and max_tokens is {wanted}" if wanted else "", max_tokens=wanted,
        )  # fmt: skip
        raise ApiError(400, too_long, "messages" if chat else "prompt", "context_length_exceeded")
    room = served.context - longest
    defaults = served.defaults.sampling
    temperature, top_p = _number(body, "temperature", 0, 2), _number(body, "top_p", 0, 1)
    top_k = _whole(body, "top_k", -1, 1 << 20)
    sampling = SamplingSettings(
        defaults.temperature if temperature is None else temperature,
        defaults.top_p if top_p is None else top_p,
        defaults.top_k if top_k is None else max(0, top_k),
    )
    n = _whole(body, "n", 1, MOST_CHOICES) or 1
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(400, Message("serving.stream_options", "stream_options must be an object."), "stream_options")
    if strange := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise ApiError(
            400, _unknown(f"stream_options.{strange[0]}", suggest_name(strange[0], ["include_usage"])), "stream_options"
        )
    return CompletionRequest(
        chat=chat,
        prompts=prompts,
        n=n,
        most_tokens=wanted or (room if chat else min(room, 16)),  # 16 is OpenAI's default for completions
        sampling=sampling,
        seed=_whole(body, "seed", -(1 << 63), (1 << 63) - 1),
        stops=_stops(body),
        stop_ids=frozenset() if _truth(body, "ignore_eos") else served.defaults.stop_ids,
        logprobs=_logprobs(body, chat),
        stream=_truth(body, "stream"),
        usage_in_stream=_truth(options, "include_usage"),
        tokens_as_ids=_truth(body, "return_tokens_as_token_ids"),
    )


def check_requested_model(body: dict[str, Any]) -> None:
    """Raises: ApiError if the request names a model other than the served one."""
    if body.get("model", MODEL_NAME) != MODEL_NAME:
        other = Message(
            "serving.no_such_model",
            "This server has no model {name!r}. Its model is {served!r}.",
            name=str(body["model"])[:80],
            served=MODEL_NAME,
        )
        raise ApiError(404, other, "model", "model_not_found")


def tokenize_chat(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a chat up to its next answer. Special tokens in a message are read as plain text. Raises: ApiError."""
    messages = check_messages(body)
    try:
        return [int(number) for number in tokenizer.encode_chat_prompt(messages, datetime.datetime.now())]
    except (
        ChatRefusedError,
        SpellsMarkError,
        TokenizerFailedError,
    ) as error:  # the model's own chat template refuses it
        raise ApiError(400, Message.from_json(error.message), "messages") from error


def check_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages, with their contents as text.

    Raises: ApiError for an unknown role, a content that is not text, or an unsupported key. Only the roles of training documents are allowed,
    because a role with a newline in it could produce special tokens in a template.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(
            400, Message("serving.no_messages", "messages must be a list with at least one message."), "messages"
        )
    found = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ApiError(
                400,
                Message(
                    "serving.message_not_an_object", "{where} must be an object with 'role' and 'content'.", where=where
                ),
                where,
            )
        _check_message_keys(message, MESSAGE_KEYS, where)
        role = message.get("role")
        if role == "developer":  # OpenAI's newer name of the role
            role = "system"
        if role not in ROLES:
            wrong = Message(
                "serving.unknown_role",
                "{where}.role must be one of {roles}, not {role!r}.",
                where=where,
                roles=list(ROLES),
                role=str(role)[:40],
            )
            raise ApiError(400, wrong, where)
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                raise ApiError(
                    400,
                    Message(
                        "serving.text_only",
                        "{where}.content must be text, because this model reads only text.",
                        where=where,
                    ),
                    where,
                )
            for at, part in enumerate(content):
                _check_message_keys(part, PART_KEYS, f"{where}.content[{at}]")
                if not isinstance(part.get("text"), str):
                    raise ApiError(400, _not_text(f"{where}.content[{at}].text"), where)
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ApiError(400, _not_text(f"{where}.content"), where)
        found.append({"role": role, "content": content})
    return found


def _not_text(where: str) -> Message:
    return Message("serving.not_text", "{where} must be text.", where=where)


def _unknown(where: str, nearby: str) -> Message:
    return Message(
        "serving.unknown_parameter", "{where} is not a known parameter{nearest}", where=where[:160], nearest=nearby
    )


def _check_message_keys(given: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raises: ApiError for an unknown key. An unsupported key passes if it is empty: clients send answers back with all keys, most of them null."""
    for key in sorted(given.keys() - {*known}):
        if not (key in UNSUPPORTED_MESSAGE_KEYS and given[key] in (None, [], {}, "")):
            place = f"{where}.{key[:80]}"
            unsupported = Message(
                "serving.message_key",
                "{where} is not supported: this model reads only role and content. Remove this key.",
                where=place,
            )
            refusal = unsupported if key in UNSUPPORTED_MESSAGE_KEYS else _unknown(place, suggest_name(key, known))
            raise ApiError(400, refusal, place, "unsupported_parameter")


def tokenize_prompts(body: dict[str, Any], served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each prompt of a completion. Raises: ApiError."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or isinstance(prompt, list) and prompt and all(type(part) is int for part in prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt or len(prompt) > MOST_PROMPTS:
        wrong = Message(
            "serving.prompt",
            "prompt must be a text, a list of token ids, or a list of at most {most} such prompts.",
            most=MOST_PROMPTS,
        )
        raise ApiError(400, wrong, "prompt")
    return tuple(_ids_of(part, served) for part in prompt)


def _ids_of(part: Any, served: ServedModel) -> tuple[int, ...]:
    if isinstance(part, str):
        try:
            ids = served.tokenizer.encode_text_prompt(part).tolist()
        except (SpellsMarkError, TokenizerFailedError) as error:
            raise ApiError(400, Message.from_json(error.message), "prompt") from error
    elif isinstance(part, list) and all(type(number) is int for number in part):
        ids = part
    else:
        raise ApiError(
            400, Message("serving.prompt_part", "Each prompt must be a text or a list of token ids."), "prompt"
        )
    if not ids:
        raise ApiError(
            400, Message("serving.prompt_empty", "prompt is empty, and this model has no start token."), "prompt"
        )
    if wrong := [number for number in ids if not 0 <= number < served.vocab_size]:
        outside = Message(
            "serving.token_id",
            "prompt has the token id {id}, which is not between 0 and {last}.",
            id=wrong[0],
            last=served.vocab_size - 1,
        )
        raise ApiError(400, outside, "prompt")
    return tuple(ids)


def _check_keys(body: dict[str, Any], chat: bool) -> None:
    for key, allowed in NOTHING.items():
        if key in body and body[key] not in allowed:
            unsupported = Message(
                "serving.unsupported_parameter",
                "This server does not support {key}. Remove it from the request.",
                key=key,
            )
            raise ApiError(400, unsupported, key, "unsupported_parameter")
    known = IDLE | NOTHING.keys() | {
        "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "logprobs", "ignore_eos", "return_tokens_as_token_ids",
    }  # fmt: skip
    known |= {"messages", "max_completion_tokens", "top_logprobs"} if chat else {"prompt"}
    if strange := sorted(body.keys() - known):
        raise ApiError(400, _unknown(strange[0][:80], suggest_name(strange[0], known)), strange[0][:80])


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        return _whole(body, "logprobs", 0, MOST_LOGPROBS)
    top = _whole(body, "top_logprobs", 0, MOST_LOGPROBS)
    if not _truth(body, "logprobs"):
        if top:
            raise ApiError(
                400,
                Message("serving.top_logprobs", "top_logprobs is allowed only with 'logprobs': true."),
                "top_logprobs",
            )
        return None
    return top or 0


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(found, list)
        or len(found) > MOST_STOPS
        or not all(isinstance(text, str) and text for text in found)
    ):
        raise ApiError(
            400,
            Message(
                "serving.stop",
                "stop must be a text or a list of at most {most} texts. No text may be empty.",
                most=MOST_STOPS,
            ),
            "stop",
        )
    return tuple(found)


def _whole(body: dict[str, Any], key: str, lowest: int, highest: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or not lowest <= value <= highest:
        wrong = Message(
            "serving.whole_number", "{key} must be a whole number from {lowest} to {highest}, not {value}.",
            key=key, lowest=lowest, highest=highest, value=str(value)[:40],
        )  # fmt: skip
        raise ApiError(400, wrong, key)
    return value


def _number(body: dict[str, Any], key: str, lowest: float, highest: float) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not lowest <= value <= highest:
        wrong = Message(
            "serving.number", "{key} must be a number from {lowest} to {highest}, not {value}.", key=key, lowest=lowest, highest=highest,
            value=str(value)[:40],
        )  # fmt: skip
        raise ApiError(400, wrong, key)
    return float(value)


def _truth(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if value not in (None, True, False) or type(value) in (int, float):
        raise ApiError(
            400,
            Message(
                "serving.true_or_false", "{key} must be true or false, not {value}.", key=key, value=str(value)[:40]
            ),
            key,
        )
    return bool(value)
