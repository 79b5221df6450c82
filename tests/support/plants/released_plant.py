"""Two releases of tiny real exports, judged by the real gate on evaluations that were written by hand, so that they are there in seconds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from factory.core.workspace import Workspace
from factory.evals.evaluator import load_current_suite
from factory.evals.parity import CHECKS
from factory.evals.suite import TASK_VERSIONS, HeldOutDocument, Suite
from factory.evals.tasks import DEV, EvalItem, compute_bits_per_byte_by_domain
from factory.gates.release.gate import judge_candidate
from factory.ledger.ledger import Ledger, eval_items, evaluations, record_event, releases
from factory.ledger.plant import Plant
from tests.support.factory.exports import FilledPlant, build_plant, save_export, tiny_model
from tests.support.factory.task_files import choice_items, write_policy, write_task


def released_plant(root: Path, tasks: bool = False) -> FilledPlant:
    """Release 1 is a first release, release 2 was compared with it and is champion; with ``tasks`` on a multiple choice too."""
    workspace = Workspace.create(root / "workspace")
    if tasks:
        write_task(workspace, "python", [item | {"source": f"s{n}"} for n, item in enumerate(choice_items(12))])
        write_policy(workspace, tasks={"python": {"tier": "each", "margin": 1.0}})
    plant = build_plant(workspace, Ledger.create(workspace.ledger_url))
    for number, bits in ((1, 3.0), (2, 2.8)):
        export = save_export(tiny_model(number), workspace.exports / f"candidate-{number}", plant.tokenizer)
        evaluated(plant, plant.add_candidate(export), bits)
    for number in (1, 2):  # of the release and of its candidate
        verdict = judge_candidate(Plant(workspace, plant.ledger), number)
        with plant.ledger.begin() as tx:
            row = {
                "number": number,
                "candidate": number,
                "verdict": verdict,
                "state": "published",
                "created_at": 1.7e9,
            }
            tx.execute(releases.insert().values(row))
            record_event(tx, "promoted", f"release:{number}", {"candidate": number})
    return plant


def evaluated(plant: FilledPlant, candidate: int, bits: float) -> None:
    """An evaluation on the suite as it is, of a model with about so many bits per byte."""
    suite = load_current_suite(plant)
    items = [*_scored("bpb", suite.documents, bits), *_scored(DEV, suite.dev, bits), *_cloze(suite)]
    cloze = [item.value for item in items if item.task == "cloze"]
    summary: dict[str, Any] = {
        "tokenizer_sha256": plant.tokenizer.sha256,
        "task_versions": TASK_VERSIONS,
        "documents": {domain: len(suite.list_documents_of_domain(domain)) for domain in suite.domains},
        "bpb": compute_bits_per_byte_by_domain([item for item in items if item.task == "bpb"]),
        "noise_floor": dict.fromkeys(suite.domains, 0.001),
        "baselines": {domain: {"trigram": 3.5, "bigram": 3.9} for domain in suite.domains},
        "cloze": {"items": len(cloze), "share_right": sum(cloze) / len(cloze), "chance": 0.25},
        "samples": [{"question": suite.documents[0].content, "answer": "what a model wrote"}],
        "parity": {name: {"ok": True, "detail": "checked"} for name in CHECKS},
    }
    with plant.ledger.begin() as tx:
        tx.execute(
            evaluations.insert().values(
                id=candidate, candidate=candidate, suite_sha256=suite.sha256, summary=summary, created_at=1.7e9
            )
        )
        tx.execute(eval_items.insert(), [{"evaluation": candidate, **vars(item)} for item in items])


def _scored(task: str, documents: Sequence[HeldOutDocument], bits: float) -> list[EvalItem]:
    found = []
    for document in documents:
        weight = 200 + len(document.key)
        noise = hashlib.sha256(document.key.encode()).digest()[0] / 2560
        nats = weight * math.log(2) * (bits + noise)
        found.append(EvalItem(task, document.key, document.domain, document.cluster, nats, float(weight)))
    return found


def _cloze(suite: Suite) -> list[EvalItem]:
    return [
        EvalItem("cloze", d.key, d.domain, d.cluster, float(n % 3 == 0), 1.0) for n, d in enumerate(suite.documents)
    ]
