"""A request as OpenAI's API writes it, read as hostile input: what is asked for, or one clear error. Pure.

What would change the answer and is not understood is refused; what changes nothing (``user``, ``metadata``, zero penalties) is ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factory.core.errors import nearest
from factory.core.left_files import parse_json_object
from factory.evals.export_config import ExportError
from factory.evals.export_folder import read_config
from factory.ingest.chat_template import OLDER_TEMPLATES
from factory.ingest.document import ROLES
from factory.ingest.tokenizer import Tokenizer
from factory.release.serving import MODEL_NAME
from factory.serving.api.defaults import GenerationDefaults, Sampling
from factory.serving.api.errors import ApiError

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
# Keys that are understood only where they say that nothing is asked for.
NOTHING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None), "presence_penalty": (0, None), "logit_bias": ({}, None), "tools": ([], None), "functions": ([], None),
    "tool_choice": ("none", "auto", None), "response_format": ({"type": "text"}, None), "suffix": ("", None), "echo": (False, None),
    "best_of": (1, None), "parallel_tool_calls": (True, False, None), "modalities": (["text"], None),
    "reasoning_effort": (None,), "verbosity": (None,),
}  # fmt: skip

IN_MESSAGE, IN_PART = ("role", "content"), ("type", "text")
# Keys of OpenAI's messages that are understood only where they say nothing.
UNSAID = frozenset(
    ("name", "refusal", "audio", "annotations", "tool_calls", "tool_call_id", "function_call", "reasoning_content", "reasoning")
)  # fmt: skip


@dataclass(frozen=True)
class CompletionAsk:
    """What a request asks for."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]  # token ids; a chat has one
    n: int
    most_tokens: int
    sampling: Sampling
    seed: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    logprobs: int | None  # this many likeliest with each token; None: no log-probabilities
    stream: bool
    usage_in_stream: bool
    tokens_as_ids: bool  # tokens are written token_id:N, as vLLM does it

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


@dataclass(frozen=True)
class ServedModel:
    """What requests are read against."""

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    context: int
    vocab_size: int


def load_served(export: Path) -> ServedModel:
    """Raises: ExportError for an export that cannot be read, or whose chat template is not this factory's."""
    config, tokenizer = read_config(export), Tokenizer.load(export)
    path = export / "chat_template.jinja"
    known = (tokenizer.chat_template, *(() if tokenizer.bos else OLDER_TEMPLATES))
    if not path.is_file() or path.read_text(encoding="utf-8") not in known:
        raise ExportError(f"{path}: not the template that this factory trains with; chats would get other ids")
    return ServedModel(tokenizer, GenerationDefaults.read(export), config.context, config.vocab_size)


def parse_body(body: bytes) -> dict[str, Any]:
    """Raises: ApiError."""
    try:
        return parse_json_object(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON that can be read: {error}") from None


def read_request(body: dict[str, Any], chat: bool, served: ServedModel) -> CompletionAsk:
    """Raises: ApiError naming the parameter."""
    check_model(body)
    _check_keys(body, chat)
    prompts = (tuple(chat_ids(body, served.tokenizer)),) if chat else text_ids(body, served)
    longest = max(map(len, prompts))
    wanted = _whole(body, "max_completion_tokens", 1, 1 << 24) if chat else None
    wanted = wanted or _whole(body, "max_tokens", 1, 1 << 24)
    if longest + (wanted or 1) > served.context:
        asked = f" and max_tokens {wanted}" if wanted else ""
        raise ApiError(
            400,
            f"this model's context is {served.context} tokens; the prompt has {longest}{asked}: shorten one of them",
            "messages" if chat else "prompt",
            "context_length_exceeded",
        )
    room = served.context - longest
    defaults = served.defaults.sampling
    temperature, top_p = _number(body, "temperature", 0, 2), _number(body, "top_p", 0, 1)
    top_k = _whole(body, "top_k", -1, 1 << 20)
    sampling = Sampling(
        defaults.temperature if temperature is None else temperature,
        defaults.top_p if top_p is None else top_p,
        defaults.top_k if top_k is None else max(0, top_k),
    )
    n = _whole(body, "n", 1, MOST_CHOICES) or 1
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options: expected an object", "stream_options")
    if strange := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        words = f"{strange[0][:80]}: no such key is known{nearest(strange[0], ['include_usage'])}"
        raise ApiError(400, f"stream_options.{words}", "stream_options")
    return CompletionAsk(
        chat=chat,
        prompts=prompts,
        n=n,
        most_tokens=wanted or (room if chat else min(room, 16)),  # OpenAI's default of completions
        sampling=sampling,
        seed=_whole(body, "seed", -(1 << 63), (1 << 63) - 1),
        stops=_stops(body),
        stop_ids=frozenset() if _truth(body, "ignore_eos") else served.defaults.stop_ids,
        logprobs=_logprobs(body, chat),
        stream=_truth(body, "stream"),
        usage_in_stream=_truth(options, "include_usage"),
        tokens_as_ids=_truth(body, "return_tokens_as_token_ids"),
    )


def check_model(body: dict[str, Any]) -> None:
    """Raises: ApiError for another model than the one that is served."""
    if body.get("model", MODEL_NAME) != MODEL_NAME:
        name = str(body["model"])[:80]
        raise ApiError(404, f"there is no model {name!r}; this server has {MODEL_NAME!r}", "model", "model_not_found")


def chat_ids(body: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The ids of a chat that waits for its answer: special tokens in a message are plain text. Raises: ApiError."""
    return [int(number) for number in tokenizer.prompt(check_messages(body))]


def check_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages, contents as text. Raises: ApiError for a role that no training document can have (a role with a line end could
    spell special tokens where a template writes it down), a content that is not text, or a key that is not understood."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: expected a list of at least one message", "messages")
    found = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ApiError(400, f"{where}: expected an object with 'role' and 'content'", where)
        _check_message_keys(message, IN_MESSAGE, where)
        role = message.get("role")
        if role == "developer":  # OpenAI's newer name
            role = "system"
        if role not in ROLES:
            raise ApiError(400, f"{where}.role: expected one of {', '.join(ROLES)}, got {str(role)[:40]!r}", where)
        content = message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                raise ApiError(400, f"{where}.content: this model reads text only", where)
            for at, part in enumerate(content):
                _check_message_keys(part, IN_PART, f"{where}.content[{at}]")
                if not isinstance(part.get("text"), str):
                    raise ApiError(400, f"{where}.content[{at}].text: expected text", where)
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ApiError(400, f"{where}.content: expected text", where)
        found.append({"role": role, "content": content})
    return found


def _check_message_keys(given: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """What asks for nothing is let pass: a client gives an answer back with all its keys, most of them null."""
    for key in sorted(given.keys() - {*known}):
        if not (key in UNSAID and given[key] in (None, [], {}, "")):
            does = "this model reads role and content alone: leave it out" if key in UNSAID else "no such key is known"
            near = "" if key in UNSAID else nearest(key, known)
            raise ApiError(400, f"{where}.{key[:80]}: {does}{near}", f"{where}.{key[:80]}", "unsupported_parameter")


def text_ids(body: dict[str, Any], served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The ids of each prompt of a completion. Raises: ApiError."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or isinstance(prompt, list) and prompt and all(type(part) is int for part in prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt or len(prompt) > MOST_PROMPTS:
        raise ApiError(
            400, f"prompt: expected a text, token ids, or a list of at most {MOST_PROMPTS} of them", "prompt"
        )
    return tuple(_ids_of(part, served) for part in prompt)


def _ids_of(part: Any, served: ServedModel) -> tuple[int, ...]:
    if isinstance(part, str):
        ids = served.tokenizer.text_prompt(part).tolist()
    elif isinstance(part, list) and all(type(number) is int for number in part):
        ids = part
    else:
        raise ApiError(400, "prompt: expected a text or a list of token ids", "prompt")
    if not ids:
        raise ApiError(400, "prompt: it is empty, and there is no token to begin from", "prompt")
    if wrong := [number for number in ids if not 0 <= number < served.vocab_size]:
        raise ApiError(400, f"prompt: token id {wrong[0]} is not between 0 and {served.vocab_size - 1}", "prompt")
    return tuple(ids)


def _check_keys(body: dict[str, Any], chat: bool) -> None:
    for key, allowed in NOTHING.items():
        if key in body and body[key] not in allowed:
            raise ApiError(400, f"{key}: this server does not do that: leave it out", key, "unsupported_parameter")
    known = IDLE | NOTHING.keys() | {
        "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "logprobs", "ignore_eos", "return_tokens_as_token_ids",
    }  # fmt: skip
    known |= {"messages", "max_completion_tokens", "top_logprobs"} if chat else {"prompt"}
    if strange := sorted(body.keys() - known):
        raise ApiError(
            400, f"{strange[0][:80]}: no such parameter is known{nearest(strange[0], known)}", strange[0][:80]
        )


def _logprobs(body: dict[str, Any], chat: bool) -> int | None:
    if not chat:
        return _whole(body, "logprobs", 0, MOST_LOGPROBS)
    top = _whole(body, "top_logprobs", 0, MOST_LOGPROBS)
    if not _truth(body, "logprobs"):
        if top:
            raise ApiError(400, "top_logprobs: needs 'logprobs': true", "top_logprobs")
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
        raise ApiError(400, f"stop: expected a text or a list of at most {MOST_STOPS}, none of them empty", "stop")
    return tuple(found)


def _whole(body: dict[str, Any], key: str, lowest: int, highest: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or not lowest <= value <= highest:
        raise ApiError(400, f"{key}: expected a whole number from {lowest} to {highest}, got {str(value)[:40]}", key)
    return value


def _number(body: dict[str, Any], key: str, lowest: float, highest: float) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not lowest <= value <= highest:
        raise ApiError(400, f"{key}: expected a number from {lowest} to {highest}, got {str(value)[:40]}", key)
    return float(value)


def _truth(body: dict[str, Any], key: str) -> bool:
    value = body.get(key)
    if value not in (None, True, False) or type(value) in (int, float):
        raise ApiError(400, f"{key}: expected true or false, got {str(value)[:40]}", key)
    return bool(value)
