"""vLLM as an engine: started from its own environment (``make serve-env``) as ``vllm serve``, spoken to over a Unix socket.

What it would do otherwise than this factory's engine is settled before it is asked: its sampling defaults are passed (it ignores
``do_sample: false``), prompts become token ids here (it would match special tokens in plain text), and requests are read by the same rules.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from factory.core.errors import FactoryError, InputError
from factory.core.workspace import code_root
from factory.evals.export_folder import read_config
from factory.evals.probes.engine_process import vllm_lacks
from factory.release.serving import MODEL_NAME
from factory.serving.api.defaults import GenerationDefaults
from factory.serving.api.request import ServedModel, check_messages, load_served, parse_body, read_request
from factory.serving.engines import EngineKind

ENVIRONMENT = ".venv-serve"
CPU_CACHE_GIB = "1"
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONPATH": "",
    "VLLM_LOGGING_COLOR": "0",
}


def vllm(environment: Path | None = None) -> EngineKind:
    """``environment``: by default the one that ``make serve-env`` makes. Raises: InputError when there is no vLLM in it."""
    environment = environment or code_root() / ENVIRONMENT
    program = environment / "bin" / "vllm"
    if not program.exists():
        raise InputError(f"{program}: vLLM is not installed: run 'make serve-env' (some GB), or use --engine native")
    on_gpu = Path("/dev/nvidia0").exists()

    def command(export: Path, socket: str) -> list[str]:
        if lacks := vllm_lacks(read_config(export).head_dim):
            raise InputError(f"{export.name}: {lacks}: use --engine native")
        defaults = GenerationDefaults.read(export).sampling
        sampling = {"temperature": defaults.temperature, "top_p": defaults.top_p, "top_k": defaults.top_k}
        words = [str(program), "serve", str(export), "--uds", socket, "--served-model-name", MODEL_NAME]
        words += ["--override-generation-config", json.dumps(sampling), "--disable-uvicorn-access-log"]
        return words + (["--dtype", "auto"] if on_gpu else ["--dtype", "float32", "--enforce-eager"])

    settings = SETTINGS | {"PATH": f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
    if not on_gpu:
        settings["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE_GIB
    # In bf16 two right programs differ by some hundredths of a nat.
    return EngineKind("vllm", command, settings, tolerance=0.1 if on_gpu else 1e-3, adapt=adapt)


def adapt(path: str, body: bytes, export: Path) -> bytes:
    """The body that vLLM gets for a request. Raises: ApiError."""
    chat = path.endswith("/chat/completions")
    data = parse_body(body)
    ask = read_request(data, chat, _served(export))
    if chat:
        data["messages"] = check_messages(data)
    else:
        data["prompt"] = [list(ids) for ids in ask.prompts]
    return json.dumps({**data, "model": MODEL_NAME}).encode()


@functools.lru_cache(maxsize=2)
def _served(export: Path) -> ServedModel:
    return load_served(export)


def main(arguments: list[str]) -> NoReturn:
    """``python -m factory.serving.vllm EXPORT SOCKET``: becomes vLLM, for the release gate."""
    export, socket = arguments
    try:
        kind = vllm()
        command = kind.command(Path(export), socket)
    except FactoryError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    os.execve(command[0], command, os.environ | kind.environment)


if __name__ == "__main__":
    main(sys.argv[1:])
