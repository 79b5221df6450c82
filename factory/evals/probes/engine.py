"""A serving engine, held to what the judge's own tokenizer and model say of an export: asked over HTTP, as its users ask it.

``make_fixture`` is the judge's side, as JSON values. Where the margin of a token is within the tolerance either token is right, and the
comparison of that continuation ends before it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import httpx

from factory.evals.probes.checks import OF_ENGINE, Check
from factory.evals.probes.conversations import (
    CHATS,
    INJECTED_CHATS,
    SPACED_CHATS,
    SPACED_TEXTS,
    SYSTEM_CHAT,
    TEXTS,
    TYPED_CHATS,
    TYPED_TEXTS,
    frame,
    specials,
)
from factory.ingest.tokenizer import SPECIAL, Tokenizer

CONTINUED = 16  # tokens
TODO = "the engine is not the model that was judged: do not serve with it; 'factory check' says what this machine has"
Fixture = dict[str, Any]


class EngineDiffersError(Exception):
    """What differs."""


class NothingToCompareError(Exception):
    """Why a question could not be asked."""


def make_fixture(tokenizer: Tokenizer, model: Any, context: int, greedy_by_default: bool) -> Fixture:
    """What the judge's side, its ``model``, says. ``greedy_by_default``: the export's sampling defaults are greedy, and checked too."""
    texts = [_text(tokenizer, text) for text in (*TEXTS, *SPACED_TEXTS)]
    chats = [_chat(tokenizer, chat) for chat in (*CHATS, *SPACED_CHATS, SYSTEM_CHAT)]
    room, count = context - CONTINUED, min(CONTINUED, context - 1)
    # What is too long for a tiny context is cut, and then asked for by ids alone.
    prompts: list[tuple[list[int], Any]] = [(row["ids"][: max(1, room)], None) for row in texts]
    prompts += [(row["ids"], row["messages"]) for row in chats if len(row["ids"]) <= room]
    greedy = [{"prompt": ids, "chat": chat} | asdict(model.continuation(ids, count)) for ids, chat in prompts]
    return {
        "texts": texts,
        "chats": chats,
        "typed_texts": [_text(tokenizer, text) for text in TYPED_TEXTS],
        "typed": [_chat(tokenizer, chat) for chat in TYPED_CHATS],
        "injected": [_chat(tokenizer, chat) for chat in INJECTED_CHATS],
        "greedy": greedy,
        "stops": [stop for row in greedy if (stop := _stop(tokenizer, row))],
        "greedy_by_default": greedy_by_default,
    }


def _text(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    return {"text": text, "ids": tokenizer.text_prompt(text).tolist()}


def _chat(tokenizer: Tokenizer, chat: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": chat, "ids": tokenizer.prompt(chat).tolist(), "frame": frame(chat, tokenizer)}


def _stop(tokenizer: Tokenizer, row: dict[str, Any]) -> dict[str, Any] | None:
    """A text that the continuation comes to in its second half, and the text before it; None where its bytes are no characters."""
    written = tokenizer.decode(row["tokens"])
    if any(token < len(SPECIAL) for token in row["tokens"]) or "\ufffd" in written or len(written) < 8:
        return None
    stop = written[len(written) // 2 :][:2]
    return {
        "prompt": row["prompt"],
        "stop": stop,
        "text": written[: written.index(stop)],
        "margin": min(row["margins"]),
    }


class Asking:
    """One engine, asked. ``check`` answers with a check for each of ``OF_ENGINE`` but the first."""

    def __init__(self, client: httpx.AsyncClient, fixture: Fixture, tolerance: float, model_name: str) -> None:
        """``tolerance``: of log-probabilities, in nats."""
        self._client, self._fixture, self._tolerance, self._model_name = client, fixture, tolerance, model_name

    async def check(self, typed_texts: bool) -> list[Check]:
        """``typed_texts``: special tokens in a plain prompt stay text too, without the router in front. Raises: httpx.HTTPError."""
        parts: dict[str, Callable[[], Awaitable[str]]] = {
            "engine_text": self._texts,
            "engine_chat": self._chats,
            "engine_typed_special": lambda: self._typed(typed_texts),
            "engine_injected_role": self._injected,
            "engine_stop": self._stops,
            "engine_logprobs": self._continuations,
        }
        assert ("engine_start", *parts) == OF_ENGINE
        found = []
        for name, part in parts.items():
            try:
                found.append(Check(name, True, await part()))
            except NothingToCompareError as error:
                found.append(Check(name, None, str(error)))
            except (
                EngineDiffersError,
                KeyError,
                IndexError,
                TypeError,
                ValueError,
            ) as error:  # or no answer of that API
                what = str(error) if isinstance(error, EngineDiffersError) else f"an answer without {str(error)[:80]}"
                found.append(Check(name, False, f"{what}: {TODO}"))
        return found

    async def _texts(self) -> str:
        for row in self._fixture["texts"]:
            await self._same_ids({"prompt": row["text"]}, row["ids"], f"ids of {row['text'][:30]!r}")
        return f"{len(self._fixture['texts'])} texts with the same ids"

    async def _chats(self) -> str:
        for row in self._fixture["chats"]:
            roles = ", ".join(message["role"] for message in row["messages"])
            last = row["messages"][-1]["content"]
            what = f"ids of the chat ({roles}) that ends {last[:30]!r}"
            await self._same_ids({"messages": row["messages"]}, row["ids"], what)
        return f"{len(self._fixture['chats'])} chats with the same ids"

    async def _typed(self, texts: bool) -> str:
        for row in self._fixture["typed_texts"] if texts else ():
            await self._same_ids({"prompt": row["text"]}, row["ids"], f"ids of {row['text'][:30]!r}")
        for row in self._fixture["typed"]:
            found = await self._ids({"messages": row["messages"]})
            if specials(found) != row["frame"]:
                content = next(m["content"] for m in row["messages"] if any(word in m["content"] for word in SPECIAL))
                raise EngineDiffersError(f"{content[:40]!r} in a message makes special tokens {specials(found)}")
        return f"{len(self._fixture['typed'])} chats: special tokens typed as text stay text"

    async def _injected(self) -> str:
        for row in self._fixture["injected"]:
            status, found = await self._answer("/tokenize", {"messages": row["messages"]})
            if not 400 <= status < 500 and specials(found.get("tokens", [])) != row["frame"]:
                raise EngineDiffersError(f"the role {row['messages'][0]['role'][:40]!r} makes special tokens")
        return f"{len(self._fixture['injected'])} roles that spell special tokens make none"

    async def _stops(self) -> str:
        sure = [row for row in self._fixture["stops"] if row["margin"] > 2 * self._tolerance]
        for row in sure:
            ask = {"prompt": row["prompt"], "stop": row["stop"], "max_tokens": CONTINUED, "temperature": 0}
            choice = (await self._ask("/v1/completions", ask | {"ignore_eos": True}))["choices"][0]
            if (choice["text"], choice["finish_reason"]) != (row["text"], "stop"):
                wrote = f"{choice['text'][:40]!r} ({choice['finish_reason']})"
                raise EngineDiffersError(f"stop {row['stop']!r}: it wrote {wrote}, not {row['text'][:40]!r} (stop)")
        if not sure:  # no fault of the engine's, and the other checks hold its weights: a release does not wait for it
            return f"left out, none of {len(self._fixture['greedy'])} continuations has a text that it surely comes to"
        return f"{len(sure)} generations ended by a text"

    async def _continuations(self) -> str:
        farthest, tokens = 0.0, 0
        for row in self._fixture["greedy"]:
            for defaults in (False, True) if self._fixture["greedy_by_default"] else (False,):
                apart, sure = await self._continuation(row, defaults)
                farthest, tokens = max(farthest, apart), tokens + sure
        if not tokens:
            raise NothingToCompareError(
                f"no token of {len(self._fixture['greedy'])} continuations is the likeliest by more than {2 * self._tolerance:g} nats, "
                "so nothing says that the engine has the judge's weights"
            )
        return f"{tokens} tokens written are the judge's, log-probabilities at most {farthest:.1e} nats apart"

    async def _continuation(self, row: dict[str, Any], defaults: bool) -> tuple[float, int]:
        """``defaults``: the temperature is left out, so that the export's own sampling defaults are checked too."""
        ask: dict[str, Any] = {"max_tokens": len(row["tokens"]), "ignore_eos": True, "return_tokens_as_token_ids": True}
        ask |= {} if defaults else {"temperature": 0}
        if row["chat"] and defaults:
            ask |= {"messages": row["chat"], "logprobs": True}
            content = (await self._ask("/v1/chat/completions", ask))["choices"][0]["logprobs"]["content"]
            names, logprobs = [entry["token"] for entry in content], [entry["logprob"] for entry in content]
        else:
            ask |= {"prompt": row["prompt"], "logprobs": 1}
            answer = (await self._ask("/v1/completions", ask))["choices"][0]["logprobs"]
            names, logprobs = answer["tokens"], answer["token_logprobs"]
        found = [int(name.removeprefix("token_id:")) for name in names]
        tolerance, count = self._tolerance, len(row["margins"])
        sure = next((n for n, margin in enumerate(row["margins"]) if margin <= 2 * tolerance), count)
        where = f"greedy continuation of {len(row['prompt'])} tokens" + (" by default" if defaults else "")
        _same(where, found[:sure], row["tokens"][:sure])
        pairs = list(zip(logprobs[:sure], row["logprobs"][:sure], strict=True))
        for at, (told, own) in enumerate(pairs):
            if not (_finite(told) and _finite(own)):
                raise EngineDiffersError(f"{where}: the log-probability of token {at} is {told}, the judge's {own}")
        apart = max((abs(told - own) for told, own in pairs), default=0.0)
        if apart > tolerance:
            raise EngineDiffersError(
                f"{where}: log-probabilities are {apart:.2g} nats apart, {tolerance:g} are allowed"
            )
        return apart, sure

    async def _same_ids(self, body: dict[str, Any], expected: list[int], what: str) -> None:
        _same(what, await self._ids(body), expected)

    async def _ids(self, body: dict[str, Any]) -> list[int]:
        return list((await self._ask("/tokenize", body))["tokens"])

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = await self._answer(path, body)
        if status != 200:
            raise EngineDiffersError(f"{path} answered {status}: {str(answer)[:300]}")
        return answer

    async def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = await self._client.post(path, json={"model": self._model_name, **body})
        return answer.status_code, dict(answer.json())


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _same(what: str, found: list[int], expected: list[int]) -> None:
    if found != expected:
        pairs = zip(found, expected, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
        shown = f"token {at} is {found[at : at + 1]}, the judge's side has {expected[at : at + 1]}"
        raise EngineDiffersError(f"{what}: {shown}")
