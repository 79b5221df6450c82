"""Starts a serving engine on an export, as ``factory serve`` would start it: in a process group of its own, on a socket that nobody else reaches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from factory.core.launching import background_process
from factory.core.left_files import read_tail
from factory.core.workspace import code_root
from factory.evals.probes.checks import OF_ENGINE, Check
from factory.evals.probes.engine import Asking, Fixture

NATIVE, VLLM = "factory.serving.native.server", "factory.serving.vllm"  # ``python -m MODULE EXPORT SOCKET``
VLLM_PROGRAM = code_root() / ".venv-serve" / "bin" / "vllm"
MODEL_NAME = "factory-lm"
TOLERANCE = 1e-3  # nats, of two programs in fp32
TOLERANCE_BF16 = 0.1  # vLLM on a GPU
POLL_SECONDS = 0.1
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # variables
# Of vLLM 0.32 (vllm/v1/attention/backends/cpu_attn.py); with another its engine starts, and ends at the first prompt.
VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


@dataclass
class EngineProcess:
    """An engine that comes up."""

    module: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return "vllm" if self.module == VLLM else "native"

    def check(self, fixture: Fixture, seconds: int) -> list[Check]:
        """A check for each of ``OF_ENGINE``, within ``seconds``. Never raises for what the export holds."""
        began = time.monotonic()
        try:
            found = asyncio.run(asyncio.wait_for(self._check(fixture), seconds))
        except TimeoutError:
            why = f"no end after {seconds} s: close other programs, or raise engine_seconds in policies/evals.yaml"
            return [Check(name, None, f"{self.name}: {why}") for name in OF_ENGINE]
        except (httpx.HTTPError, ChildProcessError) as error:
            return [
                Check("engine_start", False, f"{self.name}: {self._ended() or str(error) or type(error).__name__}"),
                *(Check(name, None, f"{self.name} did not start, see engine_start") for name in OF_ENGINE[1:]),
            ]
        up = Check("engine_start", True, f"loaded and asked in {time.monotonic() - began:.1f} s")
        return [Check(check.name, check.ok, f"{self.name}: {check.detail}") for check in (up, *found)]

    async def _check(self, fixture: Fixture) -> list[Check]:
        transport = httpx.AsyncHTTPTransport(uds=str(self.folder / "socket"))
        address = "http://engine"
        async with httpx.AsyncClient(transport=transport, base_url=address, timeout=None, trust_env=False) as client:
            while not await _healthy(client):
                if self.process.poll() is not None:
                    raise ChildProcessError
                await asyncio.sleep(POLL_SECONDS)
            on_gpu = self.module == VLLM and Path("/dev/nvidia0").exists()
            asking = Asking(client, fixture, TOLERANCE_BF16 if on_gpu else TOLERANCE, MODEL_NAME)
            return await asking.check(typed_texts=self.module == NATIVE)

    def _ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # a killed process stops answering before its end is known
            self.process.wait(2)
        lines = read_tail(self.folder / "log", 1 << 16).decode(errors="replace").strip().splitlines()
        return "" if self.process.returncode is None else f"{lines[-1][:300] if lines else 'no output'}"


def vllm_lacks(head_dim: int) -> str:
    """What vLLM's attention lacks on this machine for a model; '': nothing that is known."""
    if head_dim in VLLM_CPU_HEAD_DIMS or Path("/dev/nvidia0").exists():
        return ""
    return f"vLLM's attention has no head_dim {head_dim} on a CPU, only {', '.join(map(str, VLLM_CPU_HEAD_DIMS))}"


async def _healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def engine_process(module: str, export: Path) -> Iterator[EngineProcess]:
    """It comes up while the block does other things; all that it started is ended with the block. The native one is kept off GPUs."""
    folder = Path(tempfile.mkdtemp(prefix="factory-engine-"))  # short: a socket's path has 107 bytes
    kept = NO_GPU | {"HOME": str(folder)} if module == NATIVE else {}
    try:
        command = [sys.executable, "-m", module, str(export), str(folder / "socket")]
        environment = os.environ | {"PYTHONPATH": str(code_root())} | kept
        with background_process(command, folder, folder / "log", environment) as process:
            yield EngineProcess(module, folder, process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
