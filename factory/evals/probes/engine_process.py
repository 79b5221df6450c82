"""Starts a serving engine on an export, as ``factory serve`` does: in its own process group, on a socket that no other user can reach."""

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

from factory.core.launching import run_in_background_process
from factory.core.untrusted_trainer_files import read_tail
from factory.core.workspace import find_checkout_root
from factory.evals.probes.checks import OF_ENGINE, ProbeCheck
from factory.evals.probes.engine import EngineClient, Fixture
from kernels.contract.message import Message
from models.adapters import find_family_for_export
from models.spec import ModelSpec

NATIVE, VLLM = "factory.serving.native.server", "factory.serving.vllm"  # ``python -m MODULE EXPORT SOCKET``
VLLM_PROGRAM = find_checkout_root() / ".venv-serve" / "bin" / "vllm"
MODEL_NAME = "factory-lm"
TOLERANCE = 1e-3  # nats between two programs in fp32
TOLERANCE_BF16 = 0.1  # vLLM on a GPU
POLL_SECONDS = 0.1
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # environment variables
# From vLLM 0.32 (vllm/v1/attention/backends/cpu_attn.py). With another head_dim, its engine starts and fails at the first prompt.
VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
VLLM_CPU_LATENT = (
    512,
    64,
)  # kv_rank and rope_head_dim, of DeepSeek-V3 itself (vllm/v1/attention/backends/mla/cpu_mla.py)
# Families whose class in vLLM 0.32 (vllm/model_executor/models) has a window in all layers or in none (qwen2.py), and families whose class drops the
# bias of attention's output (qwen3.py, qwen3_moe.py).
VLLM_ONE_WINDOW, VLLM_NO_OUT_BIAS = ("qwen2", "qwen3"), ("qwen3", "qwen3_moe")


@dataclass
class EngineProcess:
    """A serving engine that is starting or running."""

    module: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return "vllm" if self.module == VLLM else "native"

    def run_checks(self, fixture: Fixture, seconds: int) -> list[ProbeCheck]:
        """Return a check for each name in ``OF_ENGINE``, within ``seconds``. Nothing in the export can make the function raise."""
        began = time.monotonic()
        try:
            found = asyncio.run(asyncio.wait_for(self._check(fixture), seconds))
        except TimeoutError:
            late = Message(
                "engine_process.late",
                "The engine did not finish the checks within {seconds:,} s. Close other programs, or raise engine_seconds (for vLLM: "
                "vllm_seconds) in policies/evals.yaml",
                seconds=seconds,
            )
            return [ProbeCheck(name, None, make_engine_detail(self.name, late)) for name in OF_ENGINE]
        except (httpx.HTTPError, ChildProcessError) as error:
            ended = Message(
                "engine_process.ended",
                "The engine failed: {reason}",
                reason=self._ended() or str(error) or type(error).__name__,
            )
            skipped = Message(
                "engine_process.skipped",
                "The check was skipped, because the engine did not start. See the check engine_start",
            )
            return [
                ProbeCheck("engine_start", False, make_engine_detail(self.name, ended)),
                *(ProbeCheck(name, None, make_engine_detail(self.name, skipped)) for name in OF_ENGINE[1:]),
            ]
        started = Message(
            "engine_process.started",
            "The engine loaded the export and answered in {seconds:.1f} s",
            seconds=time.monotonic() - began,
        )
        up = ProbeCheck("engine_start", True, started)
        return [ProbeCheck(check.name, check.ok, make_engine_detail(self.name, check.detail)) for check in (up, *found)]

    async def _check(self, fixture: Fixture) -> list[ProbeCheck]:
        transport = httpx.AsyncHTTPTransport(uds=str(self.folder / "socket"))
        address = "http://engine"
        async with httpx.AsyncClient(transport=transport, base_url=address, timeout=None, trust_env=False) as client:
            while not await _healthy(client):
                if self.process.poll() is not None:
                    raise ChildProcessError
                await asyncio.sleep(POLL_SECONDS)
            on_gpu = self.module == VLLM and Path("/dev/nvidia0").exists()
            asking = EngineClient(client, fixture, TOLERANCE_BF16 if on_gpu else TOLERANCE, MODEL_NAME)
            return await asking.check(typed_texts=self.module == NATIVE)

    def _ended(self) -> str:
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # a killed process stops answering before poll() sees its end
            self.process.wait(2)
        lines = read_tail(self.folder / "log", 1 << 16).decode(errors="replace").strip().splitlines()
        return "" if self.process.returncode is None else f"{lines[-1][:300] if lines else 'no output'}"


def make_engine_detail(engine: str, detail: str) -> Message:
    """Return the detail of a check, with the engine's name before it."""
    return Message("engine_process.detail", "{engine}: {detail}", engine=engine, detail=detail)


def find_vllm_obstacle(spec: ModelSpec) -> Message | None:
    """Return why vLLM cannot run a model on this machine; None if there is no known reason. vLLM has the class of each family."""
    windows = {spec.layer(number).window for number in range(spec.layers)}
    family = find_family_for_export(spec).name if len(windows) > 1 or spec.attention_out_bias else ""
    if len(windows) > 1 and family in VLLM_ONE_WINDOW:
        return Message(
            "engine_process.mixed_windows",
            "vLLM's class for {family} has a window in all layers or in none, and this model has one in some",
            family=family,
        )
    if spec.attention_out_bias and family in VLLM_NO_OUT_BIAS:
        return Message(
            "engine_process.no_out_bias",
            "vLLM's class for {family} has no bias of attention's output, and this model has one",
            family=family,
        )
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "yarn" and scaling.original_context is not None:
        positions = int(scaling.factor * scaling.original_context)
        if positions < spec.context:  # of further positions, log-probabilities are not finite
            return Message(
                "engine_process.short_yarn",
                "vLLM computes YaRN for {positions:,} positions (factor times original_max_position_embeddings), and the model has {context:,}",
                positions=positions, context=spec.context,
            )  # fmt: skip
    if Path("/dev/nvidia0").exists():
        return None
    if spec.latent is not None:
        found = (spec.latent.kv_rank, spec.latent.rope_head_dim)
        if found != VLLM_CPU_LATENT:
            return Message(
                "engine_process.no_latent",
                "vLLM on a CPU supports multi-head latent attention only with the ranks {known}, and the model has {found}",
                known=VLLM_CPU_LATENT, found=found,
            )  # fmt: skip
        if spec.rope_scaling is None:
            return Message(
                "engine_process.latent_without_yarn",
                "vLLM on a CPU computes other logits for multi-head latent attention without YaRN",
            )
        return None
    if spec.head_dim in VLLM_CPU_HEAD_DIMS:
        return None
    return Message(
        "engine_process.no_head_dim", "vLLM on a CPU does not support head_dim {head_dim}. Supported: {known}",
        head_dim=spec.head_dim, known=VLLM_CPU_HEAD_DIMS,
    )  # fmt: skip


async def _healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def start_engine(module: str, export: Path) -> Iterator[EngineProcess]:
    """Start an engine in the background. At the end of the block, the engine and its children are stopped. The native engine does not use a GPU."""
    folder = Path(tempfile.mkdtemp(prefix="factory-engine-"))  # short: a socket's path has 107 bytes
    kept = NO_GPU | {"HOME": str(folder)} if module == NATIVE else {}
    try:
        command = [sys.executable, "-m", module, str(export), str(folder / "socket")]
        environment = os.environ | {"PYTHONPATH": str(find_checkout_root())} | kept
        with run_in_background_process(command, folder, folder / "log", environment) as process:
            yield EngineProcess(module, folder, process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
