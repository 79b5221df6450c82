"""Compares a serving engine's answers over HTTP with the judge's own tokenizer and model.

``make_engine_fixture`` gives the judge's answers as JSON values. If the log-probabilities of the two likeliest tokens are too close, either token
is right, and the comparison of that continuation ends before it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import httpx

from factory.evals.probes.checks import OF_ENGINE, ProbeCheck, join_sentences
from factory.evals.probes.conversations import (
    CHATS,
    SPACED_CHATS,
    SPACED_TEXTS,
    SYSTEM_CHAT,
    TEXTS,
    choose_spelled_tokens,
    encode_prompt_or_none,
    list_expected_special_ids,
    make_injected_chats,
    make_typed_chats,
    make_typed_texts,
    select_special_ids,
)
from factory.ingest.tokenizer import Tokenizer
from kernels.contract.message import CodedError, Message

CONTINUED = 16  # tokens
TODO = Message(
    "engine.do_not_serve",
    "The engine's answers differ from the judged model's, so do not serve with this engine. Check this "
    "machine with 'factory check'",
)
Fixture = dict[str, Any]


class EngineDiffersError(CodedError):
    """The engine's answer differs from the judge's."""


class NothingToCompareError(CodedError):
    """The fixture has nothing that the engine can be compared on."""


def make_engine_fixture(tokenizer: Tokenizer, model: Any, context: int, greedy_by_default: bool) -> Fixture:
    """Return the answers of the judge's tokenizer and ``model``.

    ``greedy_by_default``: whether the export's sampling defaults are greedy. If so, they are checked too.
    """
    texts = [_text(tokenizer, text) for text in (*TEXTS, *SPACED_TEXTS)]
    chats = [row for chat in (*CHATS, *SPACED_CHATS, SYSTEM_CHAT) if (row := _chat(tokenizer, chat))["ids"] is not None]
    spelled = choose_spelled_tokens(tokenizer)
    room, count = context - CONTINUED, min(CONTINUED, context - 1)
    # A text that is too long for a tiny context is cut and asked for by its ids.
    prompts: list[tuple[list[int], Any]] = [(row["ids"][: max(1, room)], None) for row in texts]
    prompts += [(row["ids"], row["messages"]) for row in chats if len(row["ids"]) <= room]
    greedy = [{"prompt": ids, "chat": chat} | asdict(model.continue_greedily(ids, count)) for ids, chat in prompts]
    return {
        "texts": texts,
        "chats": chats,
        "typed_texts": [_text(tokenizer, text) for text in make_typed_texts(spelled)],
        "typed": [row for chat in make_typed_chats(spelled) if (row := _chat(tokenizer, chat))["ids"] is not None],
        "injected": [_chat(tokenizer, chat) for chat in make_injected_chats(spelled)],
        "spelled": spelled,
        "greedy": greedy,
        "stops": [stop for row in greedy if (stop := _stop(tokenizer, row))],
        "greedy_by_default": greedy_by_default,
        "special_ids": sorted(tokenizer.special_ids),
        "template_defuses": tokenizer.is_own,  # whether the template itself keeps text that spells a special token from becoming one
    }


def _text(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    return {"text": text, "ids": tokenizer.encode_text_prompt(text).tolist()}


def _chat(tokenizer: Tokenizer, chat: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "messages": chat,
        "ids": encode_prompt_or_none(chat, tokenizer),
        "frame": list_expected_special_ids(chat, tokenizer),
    }


def _stop(tokenizer: Tokenizer, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return a stop text from the second half of a continuation, and the text before it; None if the bytes are not whole characters.

    The text is what the tokens add to the text of the prompt: SentencePiece's decoders drop the first blank of what they decode."""
    before, both = tokenizer.decode(row["prompt"]), tokenizer.decode([*row["prompt"], *row["tokens"]])
    written = both.removeprefix(before)
    special = any(token in tokenizer.special_ids for token in row["tokens"])
    if special or not before or not both.startswith(before) or "\ufffd" in written or len(written) < 8:
        return None
    stop = written[len(written) // 2 :][:2]
    return {
        "prompt": row["prompt"],
        "stop": stop,
        "text": written[: written.index(stop)],
        "margin": min(row["margins"]),
    }


class EngineClient:
    """Asks one engine. ``check`` returns a check for each name in ``OF_ENGINE`` except the first."""

    def __init__(self, client: httpx.AsyncClient, fixture: Fixture, tolerance: float, model_name: str) -> None:
        """``tolerance``: the allowed difference of log-probabilities, in nats."""
        self._client, self._fixture, self._tolerance, self._model_name = client, fixture, tolerance, model_name

    async def check(self, typed_texts: bool) -> list[ProbeCheck]:
        """Run all checks. ``typed_texts``: also check that special tokens in a plain prompt stay text, and in what a foreign template writes.

        Raises: httpx.HTTPError."""
        parts: dict[str, Callable[[], Awaitable[Message]]] = {
            "engine_text": self._texts,
            "engine_chat": self._chats,
            "engine_typed_special": lambda: self._typed(typed_texts),
            "engine_injected_role": lambda: self._injected(typed_texts),
            "engine_stop": self._stops,
            "engine_logprobs": self._continuations,
        }
        assert ("engine_start", *parts) == OF_ENGINE
        found = []
        for name, part in parts.items():
            try:
                found.append(ProbeCheck(name, True, await part()))
            except NothingToCompareError as error:
                found.append(ProbeCheck(name, None, error.message))
            except (
                EngineDiffersError,
                KeyError,
                IndexError,
                TypeError,
                ValueError,
            ) as error:  # or an answer with other keys than the API's
                problem = error.message if isinstance(error, EngineDiffersError) else _incomplete(error)
                found.append(ProbeCheck(name, False, join_sentences([problem, TODO])))
        return found

    async def _texts(self) -> Message:
        for row in self._fixture["texts"]:
            await self._same_ids({"prompt": row["text"]}, row["ids"], f"ids of {row['text'][:30]!r}")
        return Message(
            "engine.same_texts",
            "Engine and judge give the same ids for {texts:,} texts",
            texts=len(self._fixture["texts"]),
        )

    async def _chats(self) -> Message:
        for row in self._fixture["chats"]:
            roles = ", ".join(message["role"] for message in row["messages"])
            last = row["messages"][-1]["content"]
            await self._same_ids({"messages": row["messages"]}, row["ids"], f"ids of chat {last[:30]!r} ({roles})")
        return Message(
            "engine.same_chats",
            "Engine and judge give the same ids for {chats:,} chats",
            chats=len(self._fixture["chats"]),
        )

    async def _typed(self, texts: bool) -> Message:
        for row in self._fixture["typed_texts"] if texts else ():
            await self._same_ids({"prompt": row["text"]}, row["ids"], f"ids of {row['text'][:30]!r}")
        for row in self._select_defused("typed", texts):
            found = await self._ids({"messages": row["messages"]})
            if self._special(found) != row["frame"]:
                content = next(
                    m["content"]
                    for m in row["messages"]
                    if any(word in m["content"] for word in self._fixture["spelled"])
                )
                raise EngineDiffersError(
                    "engine.typed_special", "The text {text!r} in a message becomes special tokens: {ids}",
                    text=content[:40], ids=self._special(found),
                )  # fmt: skip
        return Message(
            "engine.no_typed_special",
            "In {chats:,} chats, text that spells a special token stays text",
            chats=len(self._select_defused("typed", texts)),
        )

    def _select_defused(self, kind: str, reads_text: bool) -> list[dict[str, Any]]:
        """Return the chats that spell special tokens in texts ('typed') or roles ('injected'); none for an engine that matches special tokens in what
        a foreign template writes. The router refuses other roles than those of documents before such an engine reads them."""
        return list(self._fixture[kind]) if reads_text or self._fixture["template_defuses"] else []

    def _special(self, ids: list[int]) -> list[int]:
        return select_special_ids(ids, self._fixture["special_ids"])

    async def _injected(self, texts: bool) -> Message:
        rows = self._select_defused("injected", texts)
        for row in rows:
            status, found = await self._answer("/tokenize", {"messages": row["messages"]})
            if not 400 <= status < 500 and self._special(found.get("tokens", [])) != row["frame"]:
                raise EngineDiffersError(
                    "engine.injected_role",
                    "A role with the text {role!r} becomes special tokens",
                    role=row["messages"][0]["role"][:40],
                )
        return Message(
            "engine.no_injected_role",
            "In {roles:,} roles, text that spells a special token stays text",
            roles=len(rows),
        )

    async def _stops(self) -> Message:
        sure = [row for row in self._fixture["stops"] if row["margin"] > 2 * self._tolerance]
        for row in sure:
            ask = {"prompt": row["prompt"], "stop": row["stop"], "max_tokens": CONTINUED, "temperature": 0}
            choice = (await self._ask("/v1/completions", ask | {"ignore_eos": True}))["choices"][0]
            if (choice["text"], choice["finish_reason"]) != (row["text"], "stop"):
                raise EngineDiffersError(
                    "engine.ran_past_stop",
                    "With the stop text {stop!r}, the engine wrote {text!r} and ended for the reason {reason!r}. "
                    "Expected: {expected!r} and the reason 'stop'",
                    stop=row["stop"], text=choice["text"][:40], reason=choice["finish_reason"], expected=row["text"][:40],
                )  # fmt: skip
        if (
            not sure
        ):  # not the engine's fault, and other checks compare its weights, so a release does not wait for this check
            return Message(
                "engine.no_sure_stop", "The check was skipped, because none of {continuations:,} continuations surely contains a stop text",
                continuations=len(self._fixture["greedy"]),
            )  # fmt: skip
        return Message("engine.stopped", "{generations:,} generations ended at a stop text", generations=len(sure))

    async def _continuations(self) -> Message:
        farthest, tokens = 0.0, 0
        for row in self._fixture["greedy"]:
            for defaults in (False, True) if self._fixture["greedy_by_default"] else (False,):
                apart, sure = await self._continuation(row, defaults)
                farthest, tokens = max(farthest, apart), tokens + sure
        if not tokens:
            raise NothingToCompareError(
                "engine.no_sure_token",
                "In {continuations:,} continuations, the likeliest token never leads the second by more than {margin:g} nats. "
                "Therefore the check cannot show whether the engine has the judge's weights",
                continuations=len(self._fixture["greedy"]),
                margin=2 * self._tolerance,
            )
        return Message(
            "engine.same_tokens", "Engine and judge wrote the same {tokens:,} tokens. Their log-probabilities differ by at most " "{apart:.1e} nats",
            tokens=tokens, apart=farthest,
        )  # fmt: skip

    async def _continuation(self, row: dict[str, Any], defaults: bool) -> tuple[float, int]:
        """Compare one continuation. ``defaults``: send no temperature, so that the export's own sampling defaults are checked too."""
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
        prompt = len(row["prompt"])
        where = (
            Message(
                "engine.default_continuation",
                "continuation of a prompt of {prompt:,} tokens with the export's defaults",
                prompt=prompt,
            )
            if defaults
            else Message(
                "engine.greedy_continuation", "greedy continuation of a prompt of {prompt:,} tokens", prompt=prompt
            )
        )
        _same(where, found[:sure], row["tokens"][:sure])
        pairs = list(zip(logprobs[:sure], row["logprobs"][:sure], strict=True))
        for at, (told, own) in enumerate(pairs):
            if not (_finite(told) and _finite(own)):
                raise EngineDiffersError(
                    "engine.logprob_not_finite",
                    "{where}: token {token} has log-probability {found} from the engine and {expected} from the judge. "
                    "Both must be finite",
                    where=where, token=at, found=str(told), expected=str(own),
                )  # fmt: skip
        apart = max((abs(told - own) for told, own in pairs), default=0.0)
        if apart > tolerance:
            raise EngineDiffersError(
                "engine.other_logprobs",
                "{where}: the log-probabilities of engine and judge differ by {apart:.2g} nats. At most {limit:g} is "
                "allowed",
                where=where, apart=apart, limit=tolerance,
            )  # fmt: skip
        return apart, sure

    async def _same_ids(self, body: dict[str, Any], expected: list[int], what: str) -> None:
        _same(what, await self._ids(body), expected)

    async def _ids(self, body: dict[str, Any]) -> list[int]:
        return list((await self._ask("/tokenize", body))["tokens"])

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = await self._answer(path, body)
        if status != 200:
            raise EngineDiffersError(
                "engine.refused", "The engine answered {path} with status {status}: {answer}",
                path=path, status=status, answer=str(answer)[:300],
            )  # fmt: skip
        return answer

    async def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = await self._client.post(path, json={"model": self._model_name, **body})
        return answer.status_code, dict(answer.json())


def _incomplete(error: Exception) -> Message:
    return Message(
        "engine.incomplete",
        "The engine's answer is not as expected: {reason}",
        reason=f"{type(error).__name__} {str(error)[:80]}",
    )


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _same(what: str, found: list[int], expected: list[int]) -> None:
    if found != expected:
        pairs = zip(found, expected, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
        raise EngineDiffersError(
            "engine.other_tokens", "{what}: the engine's token {token} is {found!r}, but the judge's is {expected!r}",
            what=what, token=at, found=found[at : at + 1], expected=expected[at : at + 1],
        )  # fmt: skip
