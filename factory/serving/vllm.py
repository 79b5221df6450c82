"""vLLM as an engine: ``vllm serve`` from its own environment (``make serve-env``), on a Unix socket.

Three differences from the embedded engine are removed here. Sampling defaults are passed, because vLLM ignores ``do_sample: false``. Prompts
become token ids, because vLLM would find special tokens in plain text. Requests are checked by the same rules.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from factory.core.errors import FactoryError, InputError
from factory.core.workspace import find_checkout_root
from factory.evals.export_folder import read_config
from factory.evals.probes.engine_process import find_vllm_obstacle
from factory.release.published_link import MODEL_NAME
from factory.serving.api.defaults import GenerationDefaults
from factory.serving.api.request import ServedModel, check_messages, load_served_model, parse_body, read_request
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


def make_vllm_engine_kind(environment: Path | None = None) -> EngineKind:
    """Return vLLM as an engine kind. ``environment``: None for that of ``make serve-env``. Raises: InputError if vLLM is not installed there."""
    environment = environment or find_checkout_root() / ENVIRONMENT
    program = environment / "bin" / "vllm"
    if not program.exists():
        raise InputError(
            "serving.no_vllm", "vLLM is not installed: {program} is missing. Run 'make serve-env', which downloads some GB, or use --engine native.",
            program=program,
        )  # fmt: skip
    on_gpu = Path("/dev/nvidia0").exists()

    def command(export: Path, socket: str) -> list[str]:
        if lacks := find_vllm_obstacle(read_config(export)):
            raise InputError(
                "serving.vllm_cannot",
                "vLLM cannot serve {export}: {why}. Use --engine native.",
                export=export.name,
                why=lacks,
            )
        defaults = GenerationDefaults.read(export).sampling
        sampling = {"temperature": defaults.temperature, "top_p": defaults.top_p, "top_k": defaults.top_k}
        line = [str(program), "serve", str(export), "--uds", socket, "--served-model-name", MODEL_NAME]
        line += ["--override-generation-config", json.dumps(sampling), "--disable-uvicorn-access-log"]
        return line + (["--dtype", "auto"] if on_gpu else ["--dtype", "float32", "--enforce-eager"])

    settings = SETTINGS | {"PATH": f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin"}
    if not on_gpu:
        settings["VLLM_CPU_KVCACHE_SPACE"] = CPU_CACHE_GIB
    # In bf16 two correct programs differ by some hundredths of a nat.
    return EngineKind("vllm", command, settings, tolerance=0.1 if on_gpu else 1e-3, adapt=adapt_request)


def adapt_request(path: str, body: bytes, export: Path) -> bytes:
    """Convert the body of a client's request to the body that vLLM gets. Raises: ApiError."""
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
    return load_served_model(export)


def main(arguments: list[str]) -> NoReturn:
    """``python -m factory.serving.vllm EXPORT SOCKET``: becomes vLLM, for the release gate."""
    export, socket = arguments
    try:
        kind = make_vllm_engine_kind()
        command = kind.command(Path(export), socket)
    except FactoryError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    os.execve(command[0], command, os.environ | kind.environment)


if __name__ == "__main__":
    main(sys.argv[1:])
