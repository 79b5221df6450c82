"""``factory verify``, and what ``factory release --bundle`` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.ledger.plant import Plant

if TYPE_CHECKING:
    from factory.bundles.writing import BundleOptions


def verify(
    folder: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    public_key: Annotated[
        Path | None,
        typer.Option(help="The signer's public key, from its publisher (PEM). Without it: the one in the folder."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")
    ] = False,
) -> None:
    """Check a release's bundle: hashes, signature, the verdict judged again, the parity fixture made again, card, provenance and licences."""
    from factory.bundles.verifying import verify as verify_bundle

    found = verify_bundle(folder, public_key)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        for check in found.checks:
            state = "ok" if check.ok else "FAILED" if check.ok is False else "not asked"
            print(f"  {check.name:<11} {state:<9}  {check.detail}")
        wrong = [check.name for check in found.checks if not check.ok]
        apart = ", its reasons' words apart: another version of the judge gave them"
        apart = apart if found.judge and found.judge["worded_otherwise"] else ""
        print(
            f"NOT VERIFIED: {', '.join(wrong)}"
            if wrong
            else "verified" + ("" if found.pinned else ", by its own key alone") + apart
        )
    if not found.ok:
        raise typer.Exit(1)


def write(plant: Plant, number: int, options: BundleOptions) -> None:
    """Write the bundle of a release and say where it lies and who signed it."""
    from factory.bundles.writing import write_bundle
    from factory.show.catching_up import catch_up

    written = write_bundle(plant, number, options)
    plant.say(f"  release {number} is bundled in {written.folder}")
    catch_up(plant)
    plant.say(f"  signed by {written.signer}")
    plant.say(
        "  publish signing_key.pem, or this fingerprint, where others trust you: they pin it with 'factory verify --public-key'"
    )
