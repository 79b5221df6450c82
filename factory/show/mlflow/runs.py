"""Shows segments, candidates, proposals, profiles and other training runs as MLflow runs (DESIGN §5, Tracking). The ledger decides.

Sending anything to MLflow again adds nothing twice. A run is found by its ``factory.subject`` tag, MLflow merges equal metric points, and the
ledger's ``tracked_runs`` maps subjects to runs. So MLflow may be locked, slow or deleted: missing data is sent later, and training does not wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from factory.computing.compute_settings import describe_compute_settings
from factory.core.workspace import PATIENCE
from factory.evals.statistics import read_confidence_interval
from factory.ledger.ledger import exchanges, record_event, tracked_runs
from factory.ledger.plant import Plant
from factory.ledger.rows import (
    CandidateRow,
    EvaluationRow,
    ProposalRow,
    ReleaseRow,
    RunRow,
    SegmentRow,
    Subject,
    VerdictRow,
)
from factory.release.approvals import APPROVAL_TAG
from factory.retention.stored_folders import TRAINING
from factory.runs.arm_runner import format_run
from factory.runs.arm_runner import run_to_json as describe_run
from factory.show.mlflow.metrics_follower import (
    METRICS_PER_BATCH,
    MetricsFollower,
    clean_metric_key,
    flatten_numbers,
    rename_evaluation_metrics,
)
from factory.show.mlflow.outages import refuse_during_outage
from factory.show.mlflow.store import convert_mlflow_errors, flush_store, open_client, purge_deleted_runs
from factory.show.pages.release_facts import flatten_keys
from kernels.contract.message import Message

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

CANDIDATES, PROPOSALS, PROFILES = "candidates", "proposals", "profiles"  # experiments; TRAINING is one too
ARMS = "runs"  # the experiment for factory.runs
EXCHANGES = "exchanges"  # the experiment for traces of language models
KIND, NOTE = (
    "mlflow.experimentKind",
    "mlflow.note.content",
)  # tags: how MLflow's pages show an experiment, and the text at their top
TRAINING_RUNS, LANGUAGE_MODELS = "custom_model_development", "genai_development"  # without this tag, MLflow guesses
ABOUT = {
    TRAINING: Message(
        "runs.about_training",
        "Each run is a segment of training: a part of the trunk, or an anneal that branches off the trunk. The first charts show the loss, in "
        "total and by domain. The last charts show single layers.",
    ),
    CANDIDATES: Message(
        "runs.about_candidates",
        "Each run is a candidate for release, with bits per byte and gains on held-out documents, samples, report.html and pictures. Sort by "
        "gain/target, and filter by tags.verdict. To approve a candidate, open the model factory-lm in the model registry.",
    ),
    PROPOSALS: Message(
        "runs.about_proposals",
        "Each run is a patch that an agent proposed, with evidence, verdict and report. To decide, set the tag approval to approved or rejected.",
    ),
    ARMS: Message(
        "runs.about_runs",
        "Each run trained a variant of the model for a comparison. Segments are not in this list. Certificates, "
        "preflights, audits, diagnoses, replicas and gates start such runs. Filter by tags.purpose and tags.for.",
    ),
    PROFILES: Message("runs.about_profiles", "Each run is a line profile of the training code."),
    EXCHANGES: Message(
        "runs.about_exchanges", "Each trace is a request to a language model and its reply, with tokens and cost."
    ),
}
SUBJECT = "factory.subject"
# Events that record what MLflow has: a segment's end, a proposal's state, a diagnosis, and so on (``factory.show.unshown_items``).
CLOSED, SHOWN, DIAGNOSIS_SHOWN = "run_closed", "proposal_shown", "diagnosis_shown"
PROFILE_SHOWN, RUN_DELETED, ARM_SHOWN = "profile_shown", "run_deleted", "arm_shown"
STATUS = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}  # MLflow's status, by the state of an arm
PATCH = "patch_sha256"  # tag of a proposal's run: the patch that the run shows and that a person decides about
PARAMS_PER_BATCH = 100  # MLflow's own limit


class MlflowTracking:
    """A process's access to a workspace's MLflow. Opening costs nothing, because the store is opened at its first use."""

    def __init__(self, plant: Plant) -> None:
        self.workspace, self.ledger = plant.workspace, plant.ledger
        self._client: MlflowClient | None = None
        self._experiments: dict[str, str] = {}

    @classmethod
    def open(cls, plant: Plant) -> MlflowTracking:
        return cls(plant)

    @property
    def client(self) -> MlflowClient:
        """Raises: TrackingError when the store cannot be reached."""
        if self._client is None:
            self._client = open_client(self.workspace)
        else:
            refuse_during_outage(self.workspace.mlflow_uri)
        return self._client

    def _experiment(self, name: str) -> str:
        if name not in self._experiments:
            client = self.client
            with self.workspace.hold_lock("mlflow", PATIENCE):
                found = client.get_experiment_by_name(name)
                tags = {KIND: LANGUAGE_MODELS if name == EXCHANGES else TRAINING_RUNS, NOTE: ABOUT[name]}
                if found is None:
                    remote = self.workspace.mlflow_uri.startswith("http")  # a server chooses the place of its artifacts
                    location = None if remote else (self.workspace.mlflow_artifacts / name).as_uri()
                    self._experiments[name] = client.create_experiment(name, artifact_location=location, tags=tags)
                else:
                    self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def _run(
        self,
        subject: Subject | str,
        experiment: str,
        name: str,
        started: float,
        tags: dict[str, Any],
        params: dict[str, Any],
    ) -> str:
        """The run of a subject, made if it is missing. There is exactly one run, even if several processes call this at the same time."""
        client = self.client
        from mlflow.entities import Param

        if known := self._known(subject):
            return known
        # A server may have several workspaces, and a store may outlive its ledger. So a proposal's run must also have the same patch.
        mine = f"tags.`{SUBJECT}` = '{subject}'"
        mine += f" and tags.{PATCH} = '{tags[PATCH]}'" if tags.get(PATCH) else ""
        with convert_mlflow_errors(f"the run of {subject}"):
            experiment_id = self._experiment(experiment)
            with self.workspace.hold_lock("mlflow", PATIENCE):
                same = client.search_runs([experiment_id], mine, max_results=1)
                if same:
                    run_id = same[0].info.run_id
                else:
                    tags = {SUBJECT: str(subject), "mlflow.source.name": "factory", **tags}
                    words = {key: str(value) for key, value in tags.items() if value is not None}
                    run_id = client.create_run(experiment_id, int(started * 1000), words, name).info.run_id
                pairs = [Param(key, str(value)) for key, value in params.items()]
                for start in range(0, len(pairs), PARAMS_PER_BATCH):
                    client.log_batch(run_id, params=pairs[start : start + PARAMS_PER_BATCH])
                with self.ledger.begin() as tx:
                    tx.execute(tracked_runs.delete().where(tracked_runs.c.subject == subject))
                    tx.execute(tracked_runs.insert().values(subject=subject, run_id=run_id))
        return run_id

    def _known(self, subject: Subject | str) -> str:
        """The run of a subject, from the ledger. '' if the ledger has no run, or MLflow no longer has it."""
        from mlflow.exceptions import MlflowException

        known = self.ledger.select_first(sa.select(tracked_runs.c.run_id).where(tracked_runs.c.subject == subject))
        with convert_mlflow_errors(f"the run of {subject}"):
            try:
                return str(self.client.get_run(known["run_id"]).info.run_id) if known else ""
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return ""

    def find_run_and_experiment(self, subject: Subject | str) -> tuple[str, str] | None:
        """(run, experiment) of a subject; None if the subject has no run. Raises: TrackingError."""
        if not (run := self._known(subject)):
            return None
        with convert_mlflow_errors(f"the run of {subject}"):
            return run, str(self.client.get_run(run).info.experiment_id)

    # -- segments ---------------------------------------------------------------------------------------------------
    def ensure_segment_run(self, segment: SegmentRow) -> str:
        """Make or find the run of a segment, with the recipe as parameters and the lineage as tags. Returns its id.

        Raises: TrackingError.
        """
        plan = self.ledger.read("SELECT plan FROM data_plans WHERE id = :id", id=segment.data_plan)
        tags = segment.select_fields("kind generation parent recipe recipe_sha256 data_plan") | {
            "segment": segment.id,
            NOTE: Message(
                "runs.segment",
                "Segment {segment} ({kind}): steps {first}–{last}, recipe {recipe}, generation {generation}{parent}.",
                segment=segment.id,
                kind=segment.kind,
                first=segment.first_step,
                last=segment.last_step,
                recipe=segment.recipe,
                generation=segment.generation,
                parent=f", after segment {segment.parent}" if segment.parent else "",
            ),
            "token_shards": len(plan[0]["plan"].get("token_shards", [])) if plan else None,
            "mlflow.source.git.commit": segment.code_commit,
            "computing": describe_compute_settings(segment.computing) or None,
        }
        params = {
            "first_step": segment.first_step,
            "last_step": segment.last_step,
            **_params(segment.recipe_json),
            **_params(segment.computing or {}, "computing."),
        }
        subject = Subject("segment", segment.id)
        return self._run(subject, TRAINING, f"{segment.kind}-{segment.id}", segment.created_at, tags, params)

    def follow_segment(self, segment: SegmentRow, say: Callable[[str], None] = lambda _: None) -> MetricsFollower:
        """A follower of the segment's ``metrics.jsonl`` that also makes the run. It never raises, whatever MLflow does."""
        path = Path(segment.folder) / "metrics.jsonl"
        run, close = lambda: self.ensure_segment_run(segment), lambda: self.finish_segment(segment.id)
        return MetricsFollower(self.workspace, lambda: self.client, path, run, say, close)

    def finish_segment(self, segment_id: int) -> None:
        """Close the run of a segment that is done or failed. The run of a planned segment stays open. Raises: TrackingError."""
        segment = SegmentRow.get(self.ledger, segment_id)
        if segment.state != "planned":
            run = self.ensure_segment_run(segment)
            with convert_mlflow_errors(f"closing segment {segment_id}'s run"):
                ended = int((segment.finished_at or time.time()) * 1000)
                self.client.set_terminated(run, "FINISHED" if segment.state == "done" else "FAILED", ended)
            self._note(Subject("segment", segment_id), CLOSED, {})

    def tag_diagnosis(self, segment: SegmentRow, event: int, causes: Sequence[str], why: str, page: Path) -> None:
        """Tag a segment's run with a diagnosis, and attach its page. ``event``: the number of the event that records it. Raises: TrackingError."""
        run = self.ensure_segment_run(segment)
        self._tag(run, {"diagnosis": " or ".join(causes), "diagnosis.why": join_reasons([why])})
        with convert_mlflow_errors(f"logging {page.name}"):
            self.client.log_text(run, page.read_text(encoding="utf-8"), page.name)
        self._note(Subject("diagnosis", event), DIAGNOSIS_SHOWN, {})

    # -- candidates and proposals -----------------------------------------------------------------------------------
    def update_candidate_run(self, candidate_id: int) -> str:
        """Make or update the run of a candidate, with its newest evaluation as metrics and samples as an artifact. Returns its id.

        Raises: TrackingError.
        """
        candidate = CandidateRow.get(self.ledger, candidate_id)
        segment = SegmentRow.get(self.ledger, candidate.segment)
        tags = {
            "candidate": candidate_id,
            NOTE: Message(
                "runs.candidate",
                "Candidate {candidate}, from segment {segment} ({kind}). The tab Artifacts shows report.html. It also shows pictures that "
                "compare the candidate with the champion, in the folder comparison. To see the verdict or to approve the candidate, "
                "open the registered model above.",
                candidate=candidate_id,
                segment=segment.id,
                kind=segment.kind,
            ),
            "segment": segment.id,
            "generation": segment.generation,
            "data_plan": segment.data_plan,
            "export_sha256": candidate.export_sha256,
            "mlflow.source.git.commit": segment.code_commit,
            **make_averaged_checkpoints_tag(segment.result),
        }
        subject, name = Subject("candidate", candidate_id), f"candidate-{candidate_id}"
        run = self._run(subject, CANDIDATES, name, candidate.created_at, tags, {"recipe": segment.recipe})
        if evaluation := EvaluationRow.find_newest(self.ledger, candidate_id):
            summary = dict(evaluation.summary)
            samples = summary.pop("samples", None)
            files = {"evaluation.json": summary, "samples.json": samples}
            self._log_once(run, rename_evaluation_metrics(flatten_numbers(summary)), evaluation.created_at, files)
        if verdict := VerdictRow.find_newest_on_candidate(self.ledger, candidate_id):
            self._judged(run, candidate, verdict)
        return run

    def _judged(self, run: str, candidate: CandidateRow, verdict: VerdictRow) -> None:
        """Log the verdict as tags and gains, by which the table of candidates can be sorted and filtered. Log the champion's numbers too."""
        release = ReleaseRow.find_first(self.ledger, "WHERE candidate = :candidate", candidate=candidate.id)
        self._tag(run, {"verdict": verdict.outcome, "release": release.number if release else "none"})
        evidence = verdict.read_evidence(self.ledger)
        gains = {"target": evidence.get("target"), **(evidence.get("guards") or {})}
        found = {name: interval for name, stored in gains.items() if (interval := read_confidence_interval(stored))}
        values = {f"gain/{name}": gain for name, (gain, _, _) in found.items()}
        values |= {f"gain_low/{name}": low for name, (_, low, _) in found.items()}
        champion = {"champion": {"bpb": evidence.get("champion_bits_per_byte") or {}}}
        self._log_once(run, flatten_numbers(values | champion), verdict.created_at, {})

    def update_proposal_run(self, number: int) -> str:
        """Make or update the run of a proposal, with verdict, evidence, and the report if it exists. Returns its id.

        Raises: TrackingError.
        """
        proposal = ProposalRow.get(self.ledger, number)
        tags = proposal.select_fields("agent target branch base_commit") | {
            "proposal": number,
            NOTE: f"Proposal {number} by {proposal.agent}, branch {proposal.branch}: {' '.join(proposal.title.split())[:300]}",
            PATCH: proposal.patch_sha256,
            "mlflow.source.git.commit": proposal.commit,
        }
        params = proposal.select_fields("title predicted_gain")
        subject, name = Subject("proposal", number), f"proposal-{number}"
        run = self._run(subject, PROPOSALS, name, proposal.created_at, tags, params)
        if proposal.verdict:
            verdict = VerdictRow.get(self.ledger, proposal.verdict)
            self._tag(
                run, {"verdict": verdict.outcome, "reasons": join_reasons(verdict.reasons), "state": proposal.state}
            )
            waits = verdict.outcome == "promote" and proposal.state == "judged"
            if waits and not self._tag_of(run, APPROVAL_TAG):
                self._tag(run, {APPROVAL_TAG: "pending"})
            evidence = verdict.read_evidence(self.ledger)
            self._log_once(run, flatten_numbers(evidence), verdict.created_at, {"evidence.json": evidence})
        if proposal.report and Path(proposal.report).is_file():
            self.log_report(run, Path(proposal.report))
        self._note(subject, SHOWN, {"state": proposal.state})
        return run

    def delete_runs(self, runs: Sequence[str]) -> None:
        """Remove runs. An SQLite store loses them for good; a server keeps them as deleted until its own ``mlflow gc``.

        Raises: TrackingError.
        """
        from mlflow.exceptions import MlflowException

        there = []
        for run in runs:
            with convert_mlflow_errors(f"removing run {run}"):
                try:
                    self.client.delete_run(run)
                    there.append(run)
                except MlflowException as error:
                    if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                        raise
        purge_deleted_runs(self.workspace, there)
        for run in runs:
            self._note(f"run:{run}", RUN_DELETED, {})

    def _note(self, subject: Subject | str, kind: str, detail: dict[str, Any]) -> None:
        """Record in the ledger what MLflow has, unless the newest such event is equal."""
        sql = "SELECT detail FROM events WHERE kind = :kind AND subject = :subject ORDER BY id DESC LIMIT 1"
        newest = self.ledger.read(sql, kind=kind, subject=str(subject))
        if not newest or newest[0]["detail"] != detail:
            flush_store(self.workspace)
            with self.ledger.begin() as tx:
                record_event(tx, kind, subject, detail)

    def read_proposal_decision(self, number: int) -> str:
        """A person's decision about a proposal, from the tag of its run: 'pending', 'approved' or 'rejected'. Raises: TrackingError."""
        run = self._known(Subject("proposal", number)) or self.update_proposal_run(number)
        return self._tag_of(run, APPROVAL_TAG).strip().lower()

    def _tag_of(self, run: str, tag: str) -> str:
        with convert_mlflow_errors(f"reading run {run}"):
            return str(self.client.get_run(run).data.tags.get(tag, ""))

    def update_profile_run(self, number: int) -> str:
        """Make or update the run of a profile, with step times as metrics and all files as artifacts. Returns its id.

        Raises: TrackingError.
        """
        profile = self.ledger.read("SELECT * FROM profiles WHERE id = :id", id=number)[0]
        summary, created = profile["summary"], profile["created_at"]
        tags = {"profile": number, "device": summary.get("device"), "mlflow.source.git.commit": profile["code_commit"]}
        run = self._run(Subject("profile", number), PROFILES, f"profile-{number}", created, tags, {})
        self._log_once(run, flatten_numbers(summary), created, {})
        with convert_mlflow_errors(f"logging profile {number}"):
            self.client.log_artifacts(run, str(Path(profile["path"]).parent))
        self._note(Subject("profile", number), PROFILE_SHOWN, {})
        return run

    def update_arm_run(self, row: RunRow, say: Callable[[str], None]) -> None:
        """Make or update the run of an arm that ended, with its changes as parameters, its end, and its metrics if its folder still exists.

        Raises: TrackingError.
        """
        arm, subject, name = row.arm, f"arm:{row.id}", f"{row.purpose}: {row.arm['name']}"
        params = {name: join_reasons([str(value)]) for name, value in _params(arm).items() if value is not None}
        run = self._run(subject, ARMS, name, row.started_at, {"mlflow.source.git.commit": arm["code"]}, params)
        about = {"purpose": row.purpose, "for": row.subject, "state": row.state, NOTE: format_run(describe_run(row))}
        self._tag(run, about)

        def close() -> None:
            with convert_mlflow_errors(f"closing the run of {subject}"):
                self.client.set_terminated(run, STATUS[row.state], int((row.finished_at or row.started_at) * 1000))
            self._note(subject, ARM_SHOWN, {"state": row.state, "at": row.started_at})

        path = Path(row.folder) / "metrics.jsonl"
        follower = MetricsFollower(self.workspace, lambda: self.client, path, lambda: run, say, close)
        while follower.poll():
            pass
        follower.finish()

    def store_exchange_trace(self, row: dict[str, Any], say: Callable[[str], None]) -> None:
        """Store a trace of one exchange with a language model, a row of the ledger, with its tokens and cost.

        Raises: TrackingError, also when MLflow reports no error but did not store the trace.
        """
        trace = ""
        try:
            told = json.loads(Path(row["file"]).read_text())
        except (OSError, ValueError) as error:
            say(
                Message(
                    "runs.no_trace",
                    "  Exchange {exchange} gets no trace in MLflow, because {file} cannot be read: {reason}",
                    exchange=row["id"],
                    file=row["file"],
                    reason=error,
                )
            )
        else:
            trace = self._trace(row, told)
        with self.ledger.begin() as tx:
            tx.execute(exchanges.update().where(exchanges.c.id == row["id"]).values(trace=trace))

    def _trace(self, row: dict[str, Any], told: dict[str, Any]) -> str:
        client = self.client
        import mlflow

        experiment, (sent, got) = self._experiment(EXCHANGES), (told["input_tokens"], told["output_tokens"])
        counts = {"input_tokens": sent, "output_tokens": got, "total_tokens": sent + got}
        with convert_mlflow_errors(f"tracing {told['label']}"):
            mlflow.set_tracking_uri(self.workspace.mlflow_uri)  # traces ignore the client's own address
            span = client.start_trace(
                told["label"],
                span_type="CHAT_MODEL",
                inputs=told["request"],
                attributes={"mlflow.chat.tokenUsage": counts, "mlflow.llm.cost": {"total_cost": told["usd"]}},  # type: ignore[dict-item]
                tags={"run": str(row["run"]), "exchange": str(row["id"]), "endpoint": told["endpoint"]},
                experiment_id=experiment,
                start_time_ns=int(told["began"] * 1e9),
            )
            status = "ERROR" if "error" in told["reply"] else "OK"
            client.end_trace(span.trace_id, outputs=told["reply"], status=status, end_time_ns=int(told["ended"] * 1e9))
            client.get_trace(span.trace_id, display=False)  # exporting only logs its failures
        return str(span.trace_id)

    def log_report(self, run: str, path: Path) -> None:
        """Attach a report to the run as ``report.html``. Raises: TrackingError."""
        with convert_mlflow_errors(f"logging {path.name}"):
            self.client.log_text(run, path.read_text(encoding="utf-8"), "report.html")

    def _tag(self, run: str, tags: dict[str, Any]) -> None:
        from mlflow.entities import RunTag

        with convert_mlflow_errors("tagging a run"):
            self.client.log_batch(run, tags=[RunTag(key, str(value)) for key, value in tags.items()])

    def _log_once(self, run: str, values: dict[str, float], at: float, artifacts: dict[str, Any]) -> None:
        """Log numbers under the time of their measurement, so that logging them again adds no second point."""
        from mlflow.entities import Metric

        metrics = [Metric(key, value, int(at * 1000), 0) for key, value in values.items()]
        with convert_mlflow_errors("logging an evaluation"):
            for start in range(0, len(metrics), METRICS_PER_BATCH):
                self.client.log_batch(run, metrics=metrics[start : start + METRICS_PER_BATCH])
            for name, content in artifacts.items():
                if content is not None:
                    words = json.dumps(content, indent=2, ensure_ascii=False).encode("utf-8", "replace").decode()
                    self.client.log_text(run, words, name)
            self.client.set_terminated(run, "FINISHED", int(at * 1000))


def make_averaged_checkpoints_tag(result: Mapping[str, Any] | None) -> dict[str, str]:
    """The tag that names the checkpoints of an average; {} for a trained segment."""
    from factory.ledger.status import describe_average

    averaged = (result or {}).get("averaged")
    return {"averaged": describe_average(averaged)} if averaged else {}


def _params(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``tree``, flattened, with names that MLflow accepts."""
    return {
        clean_metric_key(f"{prefix}{name}".replace("*", "others")): value for name, value in flatten_keys(tree).items()
    }


def join_reasons(reasons: list[str], limit: int = 500) -> str:
    """Reasons as text that fits into one tag."""
    text = "; ".join(reasons)
    return text if len(text) <= limit else text[: limit - 1] + "…"
