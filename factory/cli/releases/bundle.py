"""The command ``factory verify``, and the implementation of ``factory release --bundle``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factory.ledger.plant import Plant
from kernels.contract.message import Message

if TYPE_CHECKING:
    from factory.bundles.writing import BundleOptions


def verify(
    folder: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    public_key: Annotated[
        Path | None,
        typer.Option(
            help="The signer's public key, which the publisher gave you (PEM; default: the key in the folder)."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")
    ] = False,
) -> None:
    """Check a release's bundle: hashes, signature, model card, provenance and licences.

    The command also judges the release again from its evidence, and computes the parity fixture again.
    """
    from factory.bundles.verifying import verify_bundle as verify_bundle

    found = verify_bundle(folder, public_key)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        for check in found.checks:
            state = "ok" if check.ok else "FAILED" if check.ok is False else "not asked"
            print(f"  {check.name:<11} {state:<9}  {check.detail}")
        wrong = [check.name for check in found.checks if not check.ok]
        if wrong:
            print(Message("bundle.not_verified", "NOT VERIFIED: {checks}", checks=wrong))
        elif found.pinned:
            print(Message("bundle.verified", "verified"))
        else:
            print(
                Message(
                    "bundle.verified_own_key",
                    "verified, but only with the public key in the bundle, which does not prove who signed the bundle",
                )
            )
        if not wrong and found.judge and found.judge["worded_otherwise"]:
            print(
                Message(
                    "bundle.other_wording",
                    "The reasons of the verdict have other texts in the bundle, because another version of the judge wrote them.",
                )
            )
    if not found.is_verified:
        raise typer.Exit(1)


def write_and_print_bundle(plant: Plant, number: int, options: BundleOptions) -> None:
    """Write the bundle of a release, and print its folder and the fingerprint of the signer."""
    from factory.bundles.writing import write_release_bundle
    from factory.show.unshown_items import show_unshown_items

    written = write_release_bundle(plant, number, options)
    bundled = Message(
        "bundle.written", "  The bundle of release {release} is in {folder}", release=number, folder=written.folder
    )
    plant.print_line(bundled)
    show_unshown_items(plant)
    plant.print_line(f"  signed by {written.signer}")
    plant.print_line(
        Message(
            "bundle.publish_key",
            "  Publish signing_key.pem, or this fingerprint, at a place that others trust. Others check the bundle with 'factory "
            "verify --public-key FILE'",
        )
    )
