"""The embedded engine beside ``transformers serve``: the parity checks of each, and what it writes a second over HTTP.

``python -m benchmarks.serving.transformers_serve``. A model of the demo's shape with weights as they are initialised, fp32, a CPU, one thread for
each engine. Each round sends 16 requests at once, of some 60 tokens, for 64 more of each, greedy; rounds of the engines alternate. Tokens a second
of wall time say what a user sees; tokens a second of the engine's CPU time do not depend on what else the machine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from factory.evals.probes.engine import EngineClient
from factory.serving.parity_fixture import make_parity_fixture
from tests.support.factory.exports import plant_of_one_thread, save_export, tiny_model

REQUESTS, WRITTEN, ROUNDS = 16, 64, 3
SHAPE = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 768, "max_position_embeddings": 256,
}  # fmt: skip
TEXT = "A list is a mutable sequence; number {} of these requests asks for what follows it in the text of the library. "


@dataclass
class Served:
    """An engine that runs. ``model``: the name that it knows its export by."""

    name: str
    model: str
    process: psutil.Process
    client: httpx.AsyncClient
    wall: list[float] = field(default_factory=list)  # tokens a second, by round
    cpu: list[float] = field(default_factory=list)

    async def ask(self, number: int) -> int:
        body = {"model": self.model, "prompt": TEXT.format(number), "max_tokens": WRITTEN, "temperature": 0}
        answer = await self.client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    async def round(self) -> None:
        began, used = time.perf_counter(), sum(self.process.cpu_times()[:2])
        tokens = sum(await asyncio.gather(*map(self.ask, range(REQUESTS))))
        self.wall.append(tokens / (time.perf_counter() - began))
        self.cpu.append(tokens / (sum(self.process.cpu_times()[:2]) - used))


@contextlib.asynccontextmanager
async def served(name: str, words: list[str], model: str, address: str, unix: str | None) -> AsyncIterator[Served]:
    with tempfile.TemporaryFile() as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        try:
            transport = httpx.AsyncHTTPTransport(uds=unix)
            async with httpx.AsyncClient(
                transport=transport, base_url=address, timeout=1200, trust_env=False
            ) as client:
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await client.get("/health")).status_code == 200:
                            break
                    if process.poll() is not None:
                        log.seek(0)
                        sys.exit(f"{name} ended: {log.read()[-2000:].decode(errors='replace')}")
                    await asyncio.sleep(0.2)
                yield Served(name, model, psutil.Process(process.pid), client)
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def compare(export: Path, folder: Path) -> None:
    fixture, port = make_parity_fixture(export), free_port()
    unix = str(folder / "socket")
    native = [sys.executable, "-m", "factory.serving.native.server", str(export), unix]
    program = str(Path(sys.executable).with_name("transformers"))
    other = [program, "serve", str(export), "--continuous-batching", "--device", "cpu", "--dtype", "float32"]
    other += ["--host", "127.0.0.1", "--port", str(port)]
    async with (
        served("native", native, "factory-lm", "http://engine", unix) as first,
        served("transformers serve", other, str(export), f"http://127.0.0.1:{port}", None) as second,
    ):
        for engine in (first, second):
            for check in await EngineClient(engine.client, fixture, 1e-3, engine.model).check(typed_texts=True):
                print(
                    f"{engine.name}: {check.name}: {'ok' if check.ok else 'FAILED'}: {check.detail[:160]}", flush=True
                )
        for number in range(ROUNDS + 1):
            for engine in (first, second) if number % 2 else (second, first):
                await engine.round()
                print(
                    f"{engine.name}: round {number}: {engine.wall[-1]:,.0f} tokens/s, {engine.cpu[-1]:,.0f} a CPU second",
                    flush=True,
                )
        for what in ("wall", "cpu"):
            ours, theirs = (statistics.median(getattr(engine, what)[1:]) for engine in (first, second))
            print(f"{what}: native {ours:,.0f} tokens/s, transformers serve {theirs:,.0f}: {theirs / ours:.2f} ×")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, plant_of_one_thread(Path(name)) as plant:
        folder = save_export(tiny_model(0, "qwen3", **SHAPE), Path(name) / "export", plant.tokenizer)
        asyncio.run(compare(folder, Path(name)))
