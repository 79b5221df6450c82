"""Every error of an engine fails its own check. A check that could not be made is not reported as passed."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from factory.evals.probes.engine import EngineClient, make_engine_fixture
from factory.evals.reference_model import ReferenceModel
from factory.ledger.rows import CandidateRow
from factory.serving.api.defaults import SamplingSettings
from factory.serving.native.server import NativeEngine, make_application
from factory.serving.parity_fixture import ParityError
from factory.serving.parity_fixture import check_parity as check_engine
from tests.support.factory.export_breaks import (
    other_weights,
)
from tests.support.factory.exports import FilledPlant
from tests.support.messages import codes, says, tree


class Blunt(NativeEngine):
    """The real engine with one thing gone wrong, named by ``slip``."""

    slip = ""

    def tokenize(self, body: bytes) -> list[int]:
        data = json.loads(body)
        tokenizer = self._served.tokenizer
        if "prompt" in data:
            if self.slip == "strips texts":
                data["prompt"] = data["prompt"].strip()
            if self.slip == "matches special tokens in texts" and "<|im_end|>" in data["prompt"]:
                head, tail = data["prompt"].split("<|im_end|>", 1)
                return [*tokenizer.encode_text_prompt(head).tolist(), 2, *tokenizer.encode(tail)]
        elif self.slip == "drops system messages":
            data["messages"] = [m for m in data["messages"] if m["role"] != "system"]
        elif self.slip in ("matches special tokens in messages", "takes any role"):
            return self._rendered(data["messages"])
        return super().tokenize(json.dumps(data).encode())

    def _rendered(self, messages: list[dict[str, str]]) -> list[int]:
        """As a server does that renders a string and matches special tokens in it."""
        defused = self.slip == "takes any role"
        found = []
        for message in messages:
            content = message["content"].replace("<|", "<| ") if defused else message["content"]
            found.append(f"<|im_start|>{message['role']}\n{content}<|im_end|>\n")
        inner = self._served.tokenizer._form.inner
        inner.encode_special_tokens = False
        try:
            return list(inner.encode("".join([*found, "<|im_start|>assistant\n"])).ids)
        finally:
            inner.encode_special_tokens = True

    def read_request(self, body: bytes, chat: bool) -> Any:
        ask = super().read_request(body, chat)
        if self.slip == "ignores stop strings":
            return replace(ask, stops=())
        if self.slip == "samples by default" and "temperature" not in json.loads(body):
            return replace(ask, sampling=SamplingSettings(5.0))
        return ask


SLIPS = {
    "": set(),
    "strips texts": {"engine_text"},
    "drops system messages": {"engine_chat"},
    "matches special tokens in texts": {"engine_typed_special"},
    "matches special tokens in messages": {"engine_typed_special", "engine_injected_role"},
    "takes any role": {"engine_injected_role"},
    "ignores stop strings": {"engine_stop"},
    "samples by default": {"engine_logprobs"},
    "serves other weights": {"engine_logprobs", "engine_stop"},
}


@pytest.mark.parametrize("slip", SLIPS)
def test_each_error_of_an_engine_fails_its_own_check(
    plant: FilledPlant, sound: CandidateRow, tmp_path: Path, slip: str
) -> None:
    export = Path(shutil.copytree(sound.export_path, tmp_path / "export"))
    model = ReferenceModel.load(export)
    fixture = make_engine_fixture(plant.tokenizer, model, model.spec.context, greedy_by_default=True)
    assert fixture["stops"], "nothing to stop at proves nothing"
    if slip == "serves other weights":
        other_weights(export)
    engine = Blunt(export, torch.device("cpu"))
    engine.slip = slip

    async def asked() -> list[Any]:
        transport = httpx.ASGITransport(make_application(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None) as client:
            return await EngineClient(client, fixture, 1e-3, "factory-lm").check(typed_texts=True)

    found = {check.name: check.detail for check in asyncio.run(asked()) if not check.ok}
    assert set(found) == SLIPS[slip], found
    assert all("engine.do_not_serve" in codes(tree(detail)) for detail in found.values())


@pytest.mark.parametrize(
    ("lacking", "left_out", "logprobs"),
    [("nothing", False, True), ("stops", True, True), ("sure stops", True, True), ("sure tokens", False, None)],
)
def test_a_check_that_could_not_be_made_is_not_reported_as_passed(
    plant: FilledPlant, sound: CandidateRow, lacking: str, left_out: bool, logprobs: bool | None
) -> None:
    """A text to stop at is left out, as a candidate would wait for it in vain; without a token that is sure the weights are not known."""
    model = ReferenceModel.load(Path(sound.export_path))
    fixture = make_engine_fixture(plant.tokenizer, model, model.spec.context, greedy_by_default=False)
    assert fixture["stops"] and fixture["greedy"]
    if lacking == "stops":
        fixture["stops"] = []
    if lacking == "sure stops":
        fixture["stops"] = [row | {"margin": 0.0} for row in fixture["stops"]]
    if lacking == "sure tokens":
        fixture["greedy"] = [row | {"margins": [0.0] * len(row["margins"])} for row in fixture["greedy"]]

    async def asked() -> list[Any]:
        transport = httpx.ASGITransport(make_application(NativeEngine(Path(sound.export_path), torch.device("cpu"))))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None) as client:
            if logprobs is None:
                with pytest.raises(ParityError, match="engine_logprobs"):
                    await check_engine(client, fixture, 1e-3)
            else:
                await check_engine(client, fixture, 1e-3)
            return await EngineClient(client, fixture, 1e-3, "factory-lm").check(typed_texts=True)

    found = {check.name: check for check in asyncio.run(asked())}
    assert found["engine_stop"].ok is True
    assert codes([found["engine_stop"].detail]) == ["engine.no_sure_stop" if left_out else "engine.stopped"]
    assert " 0 " not in f" {found['engine_stop'].detail} " and found["engine_logprobs"].ok is logprobs
    assert all(check.ok for name, check in found.items() if name not in ("engine_stop", "engine_logprobs"))


class Garbling(httpx.ASGITransport):
    """The real engine's answers, one log-probability of each replaced."""

    def __init__(self, engine: NativeEngine, at: int, by: str) -> None:
        super().__init__(make_application(engine))
        self.at, self.by = at, by

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        body = json.loads(await answer.aread())
        probabilities = ((body.get("choices") or [{}])[0].get("logprobs") or {}).get("token_logprobs")
        if probabilities is None:
            return httpx.Response(answer.status_code, json=body)
        probabilities[self.at] = "here"
        return httpx.Response(200, text=json.dumps(body).replace('"here"', self.by))


@pytest.mark.parametrize("by", ["NaN", "null"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_log_probability_that_is_not_a_number_is_reported(
    plant: FilledPlant, sound: CandidateRow, at: int, by: str
) -> None:
    """The first and the second: of [0, NaN] Python's max is 0."""
    model = ReferenceModel.load(Path(sound.export_path))
    fixture = make_engine_fixture(plant.tokenizer, model, model.spec.context, greedy_by_default=False)
    engine = NativeEngine(Path(sound.export_path), torch.device("cpu"))

    async def asked() -> list[Any]:
        async with httpx.AsyncClient(transport=Garbling(engine, at, by), base_url="http://engine", timeout=None) as it:
            return await EngineClient(it, fixture, 1e-3, "factory-lm").check(typed_texts=True)

    failed = {check.name: check.detail for check in asyncio.run(asked()) if not check.ok}
    assert set(failed) == {"engine_logprobs"}
    assert says(failed["engine_logprobs"], ("engine.logprob_not_finite", {"token": at}))


def test_a_server_that_is_not_an_engine_fails_all_checks(sound: CandidateRow, plant: FilledPlant) -> None:
    model = ReferenceModel.load(Path(sound.export_path))
    fixture = make_engine_fixture(plant.tokenizer, model, model.spec.context, greedy_by_default=True)

    async def asked() -> list[Any]:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"tokens": None}))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await EngineClient(client, fixture, 1e-3, "factory-lm").check(typed_texts=True)

    assert not any(check.ok for check in asyncio.run(asked()))
