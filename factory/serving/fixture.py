"""The parity fixture: what the judge's own tokenizer and model say of an export, and whether an engine says the same.

``python -m factory.serving.fixture EXPORT OUT`` writes it, in a process of its own: ids of texts and chats, and greedy continuations with their
log-probabilities and the margin by which each token is the likeliest. Where the margin is within the tolerance either token is right, and the
comparison of that continuation ends before it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from factory.core.errors import FactoryError
from factory.core.launching import die_with
from factory.core.workspace import code_root
from factory.release.serving import MODEL_NAME

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n\treturn a + b   # 12345 + 678\n\n\n",
    " leading and trailing blanks  ",
    "naïve café, 東京, Ελλάδα, 🙂🙃, e\u0301",
    '{"key": [1, 2.5, null], "other": "<|not special|>"}',
)
CHATS = (
    [{"role": "user", "content": "What is a shard?"}],
    [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And then?\n\n- one\n- two"},
    ],
)
CONTINUED = 16  # tokens


class ParityError(FactoryError):
    """The engine is not the model that was judged."""


def make(export: Path) -> dict[str, Any]:
    """What the judge's side says. Raises: InputError for an export that cannot be read."""
    import torch

    from factory.evals.reference_model import ReferenceModel
    from factory.ingest.tokenizer import Tokenizer
    from factory.serving.api.defaults import GenerationDefaults

    tokenizer, model = Tokenizer.load(export), ReferenceModel.load(export)
    texts = [{"text": text, "ids": tokenizer.encode_text(text)[0][:-1].tolist()} for text in TEXTS]
    chats = [{"messages": chat, "ids": tokenizer.prompt(chat).tolist()} for chat in CHATS]
    room = model.config.context - CONTINUED
    # What is too long for a tiny context is cut, and then asked for by ids alone.
    prompts = [row["ids"][: max(1, room)] for row in texts]
    count = min(CONTINUED, model.config.context - 1)
    greedy = [_continuation(torch, model, ids, count, None) for ids in prompts]
    greedy += [
        _continuation(torch, model, row["ids"], count, row["messages"]) for row in chats if len(row["ids"]) <= room
    ]
    by_default = GenerationDefaults.read(export).sampling.temperature == 0
    return {"texts": texts, "chats": chats, "greedy": greedy, "greedy_by_default": by_default}


def _continuation(torch: Any, model: Any, prompt: list[int], count: int, chat: Any) -> dict[str, Any]:
    tokens = model.generate([prompt], count, stop=())[0].tokens
    logprobs_TV = model.logits(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logprobs_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    best_T2 = logprobs_TV.topk(2).values
    margins = (best_T2[:, 0] - best_T2[:, 1]).tolist()
    return {"prompt": prompt, "chat": chat, "tokens": tokens, "logprobs": own.tolist(), "margins": margins}


async def check(client: httpx.AsyncClient, fixture: dict[str, Any], tolerance: float) -> None:
    """Hold an engine to the fixture. ``tolerance``: of log-probabilities, in nats.

    Raises: ParityError naming the first thing that differs; httpx.HTTPError.
    """
    for row in fixture["texts"]:
        _same(
            f"ids of {row['text'][:30]!r}",
            (await _ask(client, "/tokenize", {"prompt": row["text"]}))["tokens"],
            row["ids"],
        )
    for row in fixture["chats"]:
        last = row["messages"][-1]["content"]
        found = await _ask(client, "/tokenize", {"messages": row["messages"]})
        _same(f"ids of the chat that ends {last[:30]!r}", found["tokens"], row["ids"])
    for row in fixture["greedy"]:
        for defaults in (False, True) if fixture["greedy_by_default"] else (False,):
            await _check_continuation(client, row, tolerance, defaults)


async def _check_continuation(client: httpx.AsyncClient, row: dict[str, Any], tolerance: float, defaults: bool) -> None:
    """``defaults``: the temperature is left out, so that the export's own sampling defaults are checked too."""
    ask: dict[str, Any] = {"max_tokens": len(row["tokens"]), "ignore_eos": True, "return_tokens_as_token_ids": True}
    ask |= {} if defaults else {"temperature": 0}
    if row["chat"] and defaults:
        ask |= {"messages": row["chat"], "logprobs": True}
        content = (await _ask(client, "/v1/chat/completions", ask))["choices"][0]["logprobs"]["content"]
        names, logprobs = [entry["token"] for entry in content], [entry["logprob"] for entry in content]
    else:
        answer = (await _ask(client, "/v1/completions", ask | {"prompt": row["prompt"], "logprobs": 1}))["choices"][0]
        names, logprobs = answer["logprobs"]["tokens"], answer["logprobs"]["token_logprobs"]
    found = [int(name.removeprefix("token_id:")) for name in names]
    sure = next((n for n, margin in enumerate(row["margins"]) if margin <= 2 * tolerance), len(row["margins"]))
    where = f"greedy continuation of {len(row['prompt'])} tokens" + (" by default" if defaults else "")
    _same(where, found[:sure], row["tokens"][:sure])
    apart = max((abs(a - b) for a, b in zip(logprobs[:sure], row["logprobs"][:sure], strict=True)), default=0.0)
    if not apart <= tolerance:
        raise ParityError(f"{where}: log-probabilities are {apart:.2g} nats apart, {tolerance:g} are allowed")


async def _ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json={"model": MODEL_NAME, **body})
    if answer.status_code != 200:
        raise ParityError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
    return dict(answer.json())


def _same(what: str, found: list[int], expected: list[int]) -> None:
    if found != expected:
        pairs = zip(found, expected, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
        raise ParityError(f"{what}: token {at} is {found[at : at + 1]}, the judge's side has {expected[at : at + 1]}")


async def made(export: Path) -> dict[str, Any]:
    """``make`` in a process of its own. Raises: ParityError."""
    with tempfile.TemporaryDirectory(prefix="factory-fixture-") as folder:
        out = Path(folder) / "fixture.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "factory.serving.fixture", str(export), str(out)),
            env=os.environ | {"PYTHONPATH": str(code_root())},
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=die_with(os.getpid()),
        )
        try:
            _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = said.decode(errors="replace").strip().splitlines()[-1:]
            raise ParityError(
                f"{export}: what the judge's side says of it could not be computed: {''.join(last)[:300]}"
            )
        return dict(json.loads(out.read_text(encoding="utf-8")))


def main(arguments: list[str]) -> int:
    export, out = map(Path, arguments)
    try:
        out.write_text(json.dumps(make(export)), encoding="utf-8")
    except FactoryError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
