"""Lets a language model describe a recorded diagnosis once, checks the description against the record, and stores it beside the record.

The description has no effect: cause, documents and remedy come from the diagnosis. If the endpoint fails, is slow or is too expensive, the reason is
stored instead of the description. After a kill between request and record, the factory asks once more, in the same run and budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import sqlalchemy as sa

from agents.core.untrusted import fold_to_one_line, shorten_text
from agents.llm.exchange import LlmError
from agents.loop.role import DraftError
from agents.loss_doctor.curves import StepMetrics
from agents.loss_doctor.wording import AGENT, ArmResult, CheckedWording, DiagnosisFacts, ask_for_wording
from factory.code_loop.agent_runs import AgentOptions, AgentRuns
from factory.core.errors import FactoryError
from factory.core.workspace import Workspace
from factory.diagnosis.diagnosing import read_live_metrics
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.anomalies import DIAGNOSED, EXPLAINED, find_next_unexplained_episode, read_newest_details_by_anomaly
from factory.ledger.ledger import Ledger, agent_runs, documents, exchanges, record_event, token_shards
from factory.ledger.plant import Plant
from factory.ledger.rows import SegmentRow, Subject
from kernels.contract.message import Message
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import TrainerError

MOST_REQUESTS = 2  # requests about one diagnosis: the first, and one after a kill
BEFORE = 16  # steps before the onset whose median is the usual loss
LONGEST = 500  # characters of a fact
TEXT = 600  # characters of each document in the request
DOCUMENTS = 10


def describe_diagnosis(plant: Plant, number: int) -> None:
    """Let a language model describe the newest diagnosis of an anomaly, and record the result.

    Afterwards the diagnosis no longer waits for a description.

    A failure that the endpoint, its answer or its policy causes is recorded and not raised.
    """
    detail = read_newest_details_by_anomaly(plant.ledger, DIAGNOSED)[number]
    lead, segment = detail["lead"], SegmentRow.get(plant.ledger, detail["segment"])
    said, model, failed = CheckedWording(), "", ""
    asked = AgentOptions(target=f"diagnosis:{detail['event']}")
    plant.progress.line(
        Message(
            "diagnosis.wording_begins",
            "  A language model now describes the diagnosis of anomaly {anomaly}.",
            anomaly=lead,
        )
    )
    try:
        runs = AgentRuns.open(plant, AGENT, asked, work="diagnosis")
        model = f"{runs.policy.model or 'a model without a name'} at {runs.endpoint.name}"
        shown = read_shown_documents(plant, detail["guilty"] or detail["triggers"], runs.policy.diagnosis_documents)
        facts = make_diagnosis_facts(detail, read_live_metrics(plant.ledger, segment), shown)
        run = next(iter(runs.find_unfinished(segment.code_commit, 1)), None) or runs.begin_run(
            segment.code_commit, asked.target
        )
        try:
            if _requests(plant.ledger, asked.target) >= MOST_REQUESTS:
                raise LlmError(
                    Message(
                        "diagnosis.wording_killed",
                        "The factory asked the language model {requests} times, and was killed each time before it recorded the answer.",
                        requests=MOST_REQUESTS,
                    )
                )
            said = ask_for_wording(run.client, f"{AGENT}-{run.number}", facts)
        except (LlmError, DraftError) as error:
            failed = fold_to_one_line(str(error), LONGEST)
        runs.record_run_end(run.number, "nothing" if failed else "worded", why=failed)
    except FactoryError as error:
        failed = fold_to_one_line(str(error), LONGEST)
    answer = {
        "anomalies": detail["anomalies"], "diagnosis": detail["event"], "model": fold_to_one_line(model, 200), "failed": failed,
        "claims": [vars(claim) for claim in said.claims], "dropped": list(said.dropped),
    }  # fmt: skip
    with plant.ledger.begin() as tx:
        record_event(tx, EXPLAINED, Subject("anomaly", lead), answer)
    counts = Message(
        "diagnosis.wording_checked", "In the description, {kept:,|sentence agrees|sentences agree} with the record, and {dropped:,|sentence "
                                     "was|sentences were} dropped.",
        kept=len(said.claims), dropped=len(said.dropped),
    )  # fmt: skip
    plant.progress.line(f"  {failed or counts}")


def describe_waiting_diagnoses(plant: Plant) -> None:
    """Let a language model describe every diagnosis that waits for a description."""
    while (lead := find_next_unexplained_episode(plant.ledger)) is not None:
        describe_diagnosis(plant, lead)


def make_diagnosis_facts(
    detail: Mapping[str, Any], lines: Sequence[StepMetrics], documents: Sequence[Mapping[str, Any]] = ()
) -> DiagnosisFacts:
    """Return the facts of a diagnosis for a language model. ``lines``: metrics of the live run. ``documents``: from ``read_shown_documents``.

    >>> arm = {"arm": "fp32", "fires": True, "steps": 4, "failed": ""}
    >>> lists = {"causes": ["rate"], "guilty": [], "triggers": ["a", "b"], "arms": [arm]}
    >>> detail = {"kind": "loss_spike", "segment": 3, "onset": 7, "last": 8, "why": "so it was", "remedy": "rate × 0.1", **lists}
    >>> found = make_diagnosis_facts(detail, [StepMetrics(5, 2.0, 0.5), StepMetrics(6, 2.2, 0.5), StepMetrics(7, 9.25, 8.0),
    ...     StepMetrics(8, 3.0, 0.5)])
    >>> found.arms["fp32"].shows, found.facts["loss"], found.facts["steps"]
    ('there', '2.1 before the anomaly, 9.25 at the largest deviation', '7 to 8')
    """
    shows = {True: "there", False: "gone", None: "unclear"}
    arms = {
        fold_to_one_line(arm["arm"], 100): ArmResult("not run" if arm["failed"] else shows[arm["fires"]], arm["steps"])
        for arm in detail["arms"]
    }
    facts = {
        "kind": detail["kind"],
        "segment": str(detail["segment"]),
        "steps": f"{detail['onset']} to {detail['last']}",
        "causes": " or ".join(detail["causes"]),
        "why": detail["why"],
        "guilty documents": str(len(detail["guilty"])),
        "documents it depends on": str(len(detail["triggers"])),
        "what tames it": detail["remedy"] or "nothing that was tried",
    }
    for name, quantity in (("loss", "loss"), ("gradient norm", "grad_norm")):
        before, during = (
            [p.look_up_quantity(quantity) or 0.0 for p in lines if first <= p.step < end]
            for first, end in ((detail["onset"] - BEFORE, detail["onset"]), (detail["onset"], detail["last"] + 1))
        )
        if before and during:
            usual = median(before)
            farthest = max(during, key=lambda value: abs(value - usual))
            facts[name] = Message(
                "diagnosis.fact",
                "{usual:.4g} before the anomaly, {farthest:.4g} at the largest deviation",
                usual=usual,
                farthest=farthest,
            )
    shown = tuple((f"{d['id']} of domain {d['domain']}, {d['source']}", str(d["text"])) for d in documents)
    return DiagnosisFacts(
        tuple(detail["causes"]), {k: fold_to_one_line(v, LONGEST) for k, v in facts.items()}, arms, shown
    )


def _requests(ledger: Ledger, asked: str) -> int:
    """Return the number of requests about a diagnosis, over all runs."""
    runs = sa.select(agent_runs.c.id).where(agent_runs.c.agent == AGENT, agent_runs.c.asked == asked)
    return len(ledger.select_rows(sa.select(exchanges.c.id).where(exchanges.c.run.in_(runs))))


def read_shown_documents(plant: Plant, keys: Sequence[str], limit: int = DOCUMENTS) -> list[dict[str, Any]]:
    """Return id, domain, source and first characters of at most ``limit`` documents, as training saw them."""
    found = []
    for key in keys[:limit]:
        joined = sa.select(documents, token_shards.c.path.label("folder"))
        row = plant.ledger.select_first(
            joined.join(token_shards, token_shards.c.id == documents.c.token_shard).where(documents.c.key == key)
        )
        if row is not None:
            told = {name: shorten_text(str(row[name] or ""), 300) for name in ("id", "domain", "source")}
            found.append({"key": key, **told, "text": _text(plant.workspace, Path(row["folder"]), key)})
    return found


def _text(workspace: Workspace, folder: Path, key: str) -> str:
    try:
        shard = TokenShard(folder)
        at = shard.documents["key"].to_pylist().index(key)
        start, length = (shard.documents[name][at].as_py() for name in ("start", "length"))
        tokens = shard.tokens[start : start + min(length, TEXT)].tolist()
        return shorten_text(Tokenizer.load(workspace.tokenizer).decode(tokens), TEXT)
    except (TrainerError, FactoryError, OSError, ValueError) as error:
        return Message("diagnosis.document_unreadable", "(The document can no longer be read: {error})", error=error)
