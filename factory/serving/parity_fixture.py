"""Makes the parity fixture: the answers of the judge's own tokenizer and model for an export. An engine must give the same answers.

``python -m factory.serving.parity_fixture EXPORT OUT`` writes the fixture in a separate process: token ids of texts and chats, and greedy
continuations
with their log-probabilities and the margin of each likeliest token. The release gate asks the same questions (``factory.evals.probes.engine``).
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
from factory.core.launching import make_parent_death_hook
from factory.core.workspace import find_checkout_root
from factory.evals.probes.engine import EngineClient, make_engine_fixture
from factory.release.published_link import MODEL_NAME


class ParityError(FactoryError):
    """The engine's answers differ from those of the judged model."""


def make_parity_fixture(export: Path) -> dict[str, Any]:
    """Return the answers of the judge's model. Raises: InputError for an export that cannot be read."""
    from factory.evals.reference_model import ReferenceModel
    from factory.ingest.tokenizer import Tokenizer
    from factory.serving.api.defaults import GenerationDefaults

    model, greedy = ReferenceModel.load(export), GenerationDefaults.read(export).sampling.temperature == 0
    return make_engine_fixture(Tokenizer.load(export), model, model.spec.context, greedy)


async def check_parity(client: httpx.AsyncClient, fixture: dict[str, Any], tolerance: float) -> None:
    """Compare an engine's answers with the fixture. ``tolerance``: how much log-probabilities may differ, in nats.

    Raises: ParityError that names the failed checks; httpx.HTTPError.
    """
    found = await EngineClient(client, fixture, tolerance, MODEL_NAME).check(typed_texts=False)
    if wrong := [f"{check.name}: {check.detail}" for check in found if not check.ok]:
        raise ParityError(
            "serving.not_the_judged_model",
            "The engine's answers differ from those of the judged model. Failed checks: {failed}",
            failed=wrong,
        )


async def make_parity_fixture_in_process(export: Path) -> dict[str, Any]:
    """Run ``make_parity_fixture`` in a separate process. Returns the fixture. Raises: ParityError if that fails."""
    with tempfile.TemporaryDirectory(prefix="factory-fixture-") as folder:
        out = Path(folder) / "parity_fixture.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "factory.serving.parity_fixture", str(export), str(out)),
            env=os.environ | {"PYTHONPATH": str(find_checkout_root())},
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=make_parent_death_hook(os.getpid()),
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
                "serving.no_fixture",
                "The judge's model could not compute the expected answers for {export}: {error}",
                export=export,
                error="".join(last)[:300],
            )
        return dict(json.loads(out.read_text(encoding="utf-8")))


def main(arguments: list[str]) -> int:
    export, out = map(Path, arguments)
    try:
        out.write_text(json.dumps(make_parity_fixture(export)), encoding="utf-8")
    except FactoryError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
