"""The parity fixture: what the judge's own tokenizer and model say of an export, and whether an engine says the same.

``python -m factory.serving.fixture EXPORT OUT`` writes it, in a process of its own: ids of texts and chats, and greedy continuations with their
log-probabilities and the margin by which each token is the likeliest. It is what the release gate asked too (``factory.evals.probes.engine``).
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
from factory.evals.probes.engine import Asking, make_fixture
from factory.release.serving import MODEL_NAME


class ParityError(FactoryError):
    """The engine is not the model that was judged."""


def make(export: Path) -> dict[str, Any]:
    """What the judge's side says. Raises: InputError for an export that cannot be read."""
    from factory.evals.reference_model import ReferenceModel
    from factory.ingest.tokenizer import Tokenizer
    from factory.serving.api.defaults import GenerationDefaults

    model, greedy = ReferenceModel.load(export), GenerationDefaults.read(export).sampling.temperature == 0
    return make_fixture(Tokenizer.load(export), model, model.config.context, greedy)


async def check(client: httpx.AsyncClient, fixture: dict[str, Any], tolerance: float) -> None:
    """Hold an engine to the fixture. ``tolerance``: of log-probabilities, in nats.

    Raises: ParityError naming the checks that failed; httpx.HTTPError.
    """
    found = await Asking(client, fixture, tolerance, MODEL_NAME).check(typed_texts=False)
    if wrong := [f"{check.name}: {check.detail}" for check in found if not check.ok]:
        raise ParityError("; ".join(wrong))


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
