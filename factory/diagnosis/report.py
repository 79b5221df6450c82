"""The page of a diagnosis, ``anomaly-N.html``: the loss around the window, each arm's curve, the documents' text, the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agents.core.pages import render
from agents.core.untrusted import visible
from agents.loss_doctor.curves import StepPoint
from agents.loss_doctor.doctor import Diagnosis
from factory.core.errors import FactoryError
from factory.core.workspace import Workspace
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.anomalies import draft_of, words_state
from factory.ledger.ledger import documents, token_shards
from factory.ledger.plant import Plant
from factory.reports.pictures import curves
from kernels.contract.files import write_atomically
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import TrainerError

TEMPLATE = Path(__file__).with_name("anomaly.html.jinja")
WORDS = Path(__file__).with_name("words.html.jinja")
BEGIN, END = "<!-- words -->", "<!-- /words -->"  # around the words: no value can hold them, as each is escaped
AROUND = 40  # steps before the onset, and after the last step, that are drawn
CURVES = 4  # of arms, besides the live run's
TEXT = 600  # characters of a document that are shown
DOCUMENTS = 10
SHOWN = ("kind", "segment", "onset", "last", "causes", "why", "steps", "budget", "guilty", "triggers")


def write(
    plant: Plant,
    lead: int,
    detail: Mapping[str, Any],
    lines: Sequence[StepPoint],
    found: Diagnosis | None,
) -> Path:
    """Write the page; returns its path."""
    plant.workspace.reports.mkdir(parents=True, exist_ok=True)
    path = plant.workspace.reports / f"anomaly-{lead}.html"
    drawn = [point for point in lines if detail["onset"] - AROUND <= point.step <= detail["last"] + AROUND]
    shown = {"live": [(float(p.step), p.loss) for p in drawn]}
    for outcome in found.outcomes if found else ():
        if outcome.curve and len(shown) <= CURVES and outcome.fires is not True:
            shown[outcome.arm] = [(float(p.step), p.loss) for p in outcome.curve]
    norms = {"live": [(float(p.step), p.grad_norm) for p in drawn]}
    marks = [(float(detail["onset"]), "onset")]
    words = {True: "there", False: "gone", None: "unclear"}
    write_atomically(
        path,
        render(
            TEMPLATE, lead=lead, **{key: detail[key] for key in SHOWN},
            loss=curves(shown, marks=marks), norms=curves(norms, marks=marks),
            arms=[{**arm, "shows": words[arm["fires"]]} for arm in detail["arms"]],
            documents=documents_of(plant, detail["guilty"] or detail["triggers"]), words=_words(detail, None),
        ),
    )  # fmt: skip
    return path


def add_words(page: Path, detail: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    """Put into a page what a language model said, in place of what stood there. A page that is gone stays gone."""
    try:
        before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    except FileNotFoundError:
        return
    _, end, after = rest.partition(END)
    if begin and end:
        write_atomically(page, before + _words(detail, said) + after)


def _words(detail: Mapping[str, Any], said: Mapping[str, Any] | None) -> str:
    """From ``BEGIN`` to ``END``."""
    claims = said["claims"] if said else []
    return render(WORDS, state=words_state(detail, said), claims=claims, draft=draft_of(detail)).strip()


def documents_of(plant: Plant, keys: Sequence[str], most: int = DOCUMENTS) -> list[dict[str, Any]]:
    """Id, domain, source and the beginning of the text of at most ``most`` documents, as they were trained on."""
    found = []
    for key in keys[:most]:
        joined = sa.select(documents, token_shards.c.path.label("folder"))
        row = plant.ledger.one(
            joined.join(token_shards, token_shards.c.id == documents.c.token_shard).where(documents.c.key == key)
        )
        if row is not None:
            told = {name: visible(str(row[name] or ""), 300) for name in ("id", "domain", "source")}
            found.append({"key": key, **told, "text": _text(plant.workspace, Path(row["folder"]), key)})
    return found


def _text(workspace: Workspace, folder: Path, key: str) -> str:
    try:
        shard = TokenShard(folder)
        at = shard.documents["key"].to_pylist().index(key)
        start, length = (shard.documents[name][at].as_py() for name in ("start", "length"))
        tokens = shard.tokens[start : start + min(length, TEXT)].tolist()
        return visible(Tokenizer.load(workspace.tokenizer).decode(tokens), TEXT)
    except (TrainerError, FactoryError, OSError, ValueError) as error:
        return f"(it cannot be read any more: {error})"
