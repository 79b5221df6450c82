"""The ``factory`` command. Each command imports what it needs when it runs, so that ``--help`` and ``status`` answer at once."""

# Each module registers its commands when it is imported. --help lists the commands in this order.
# isort: off
from factory.cli import init  # noqa: F401
from factory.cli import model_loop  # noqa: F401
from factory.cli import code_loop  # noqa: F401
from factory.cli import anomalies  # noqa: F401
from factory.cli import runs  # noqa: F401
from factory.cli import profiling  # noqa: F401
from factory.cli import operate  # noqa: F401
from factory.cli import plan  # noqa: F401
from factory.cli import look  # noqa: F401
from factory.cli import config  # noqa: F401
from factory.cli import safety  # noqa: F401

# isort: on
from factory.cli.app import app as root
from factory.cli.app import main
from factory.cli.data import (
    compare,
    data,
    generate,
    ingest,
    provenance,
    relabel,  # noqa: F401 (a command of ``data``)
)
from factory.cli.evals import tasks
from factory.cli.releases import bundle, releases

for commands in (ingest.commands, provenance.commands, data.commands, compare.commands, generate.commands):
    root.add_typer(commands)
root.add_typer(tasks.commands, name="tasks")
root.add_typer(releases.commands, name="releases")
root.command()(bundle.verify)  # it needs no workspace and does not import the app

__all__ = ["main"]
