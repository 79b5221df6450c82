"""``factory serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from factory.cli.app import DEFAULT, Where, app
from factory.core.errors import InputError, nearest
from factory.core.workspace import Workspace

ENGINES = ("native", "vllm")


@app.command()
def serve(
    where: Where = DEFAULT,
    engine: Annotated[
        str,
        typer.Option(
            help="native: this factory's own, on any machine. vllm: faster on a GPU; 'make serve-env' installs it."
        ),
    ] = "native",
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that others can reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one, which is printed.")] = 8000,
    key: Annotated[
        str,
        typer.Option(envvar="FACTORY_SERVE_KEY", help="What clients must send as bearer token; others see it in 'ps'."),
    ] = "",
) -> None:
    """Serve the champion at an OpenAI-compatible address, and every later champion after it, without losing a request.

    It follows the ledger: a release, or 'factory release --rollback N', starts a second engine beside the first, which is held to the
    export's hash and to what the judge's own model says, takes over, and only then the first one ends. Needs memory for both.
    """
    from factory.serving.engines import native
    from factory.serving.serve import serve as serve_champion
    from factory.serving.vllm import vllm

    if engine not in ENGINES:
        raise InputError(f"--engine: there is no {engine!r}{nearest(engine, ENGINES)}")
    workspace = Workspace.open(where)
    kind = native() if engine == "native" else vllm()
    serve_champion(workspace, kind, host=host, port=port, key=key, say=lambda line: print(line, flush=True))
