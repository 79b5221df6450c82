"""A tokenizer that somebody brings to ``factory init``: a Hugging Face ``tokenizer.json``, or its folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.ingest import store
from factory.ingest.tokenizer import Tokenizer, write_files
from factory.ledger.ledger import tokenizers
from factory.ledger.plant import Plant

LARGEST = 1 << 28  # bytes


@contextmanager
def opened(given: Path) -> Iterator[Tokenizer]:
    """The tokenizer of a file or folder, with this factory's files around it, while the block lasts.

    Raises: InputError where this factory would not make its ids of it (``Tokenizer.misread``), or its ids have gaps.
    """
    path = given / "tokenizer.json" if given.is_dir() else given
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"--tokenizer: {path} has more than {LARGEST >> 20} MiB: that is no tokenizer")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"--tokenizer: {path} cannot be read: {error}; name a tokenizer.json, or a folder that has one"
        ) from None
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        try:
            tokenizer = Tokenizer.load(folder)
        except InputError as error:
            said = str(error).replace(str(folder / "tokenizer.json"), str(path))
            raise InputError(f"--tokenizer: {said}; leave --tokenizer out, and one is trained on your data") from None
        if tokenizer.has_gaps():
            raise InputError(
                f"--tokenizer: {path}: its ids are not 0 to {tokenizer.vocab_size - 1}; leave --tokenizer out"
            )
        yield tokenizer


def install(plant: Plant, tokenizer: Tokenizer) -> None:
    """Freeze it as the workspace's, in place of one that the first ingest would train. Again with the same: nothing.

    Raises: InputError where there is another.
    """
    recorded = plant.ledger.one(sa.select(tokenizers))
    if recorded and recorded["sha256"] != tokenizer.sha256:
        raise InputError(
            f"--tokenizer: {plant.workspace.root} has its tokenizer already, and what was ingested is made of its ids: name a new workspace"
        )
    write_files(
        (tokenizer.folder / "tokenizer.json").read_text(encoding="utf-8"),
        bool(tokenizer.bos),
        plant.workspace.tokenizer,
    )
    with plant.ledger.begin() as tx:
        store.write_tokenizer(
            tx, Tokenizer.load(plant.workspace.tokenizer), plant.ledger.inside(plant.workspace.tokenizer)
        )
