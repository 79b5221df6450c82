"""The registered model in MLflow, with a version for every judged candidate, where people compare and approve candidates.

A version's tags have the verdict and the lineage. The alias ``candidate`` is the newest judged candidate, and ``champion`` is the ledger's champion.
A version is found by its tags, so that registering a candidate again adds no second version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from factory.core.time_formats import format_iso_time
from factory.core.workspace import PATIENCE, Workspace
from factory.evals.statistics import read_confidence_interval
from factory.ledger.decisions import find_override
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.ledger.removals import list_releases_with_removed_data
from factory.ledger.rows import ON_CANDIDATES, CandidateRow, EvaluationRow, ReleaseRow, SegmentRow, Subject, VerdictRow
from factory.release.checks import check_export_unchanged, get_newest_verdict
from factory.release.published_link import MODEL_NAME as MODEL
from factory.show.mlflow.model_files import log_loadable_model
from factory.show.mlflow.runs import CANDIDATES, PROPOSALS, TRAINING, MlflowTracking, make_averaged_checkpoints_tag
from factory.show.mlflow.store import convert_mlflow_errors, open_client
from factory.show.mlflow.version_page import PICTURES, TRAINING_MODE, RunAddress, VersionLinks, render_description
from factory.show.pages.release_pictures import TITLES, draw_release_pictures
from factory.show.pages.release_report import write_report
from kernels.contract.message import Message

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION, CANDIDATE = "champion", "candidate"
SHOWN = (
    "candidate",
    "export_sha256",
    "verdict_id",
    "release",
    "removed_data",
    "bundle",
)  # the tags that say which verdict and release a version shows
REGISTERED = (
    "registered"  # this tag is written last, after alias, report and approval; it is a digest of the tags SHOWN
)
# Tags that may become wrong, for example when a removal is undone or a release is withdrawn. They are deleted then.
REMOVABLE_TAGS = frozenset({"removed_data", "release", "bundle", "overridden_by", "override_reason"})
ABOUT = Message(
    "registry.about",
    "Each version is a judged candidate. The version with the alias champion is the release that is served. The version "
    "with the alias candidate was judged last. Click a version to see its verdict, numbers and reasons. Its page also has links "
    "to the report, the pictures, the training and the bundle. To approve or reject a candidate, set the tag approval of its version. A useful "
    "filter: tags.verdict = 'promote'. The factory's ledger decides; this page only shows the ledger's content.",
)


def register_version(plant: Plant, tracking: MlflowTracking, candidate_id: int) -> str:
    """Make sure that a judged candidate has its version, tags, alias and report. Returns the version.

    Raises: InputError when the candidate was not judged or its export changed since; TrackingError.
    """
    verdict = get_newest_verdict(plant.ledger, candidate_id)
    candidate = check_export_unchanged(plant.ledger, candidate_id)
    run = tracking.update_candidate_run(candidate_id)
    client = tracking.client
    tags = _tags(plant.ledger, candidate, verdict)
    if verdict.against:  # show the champion's newest numbers too, measured on the same documents
        tracking.update_candidate_run(Subject.parse(verdict.against).number)
    with (
        convert_mlflow_errors(f"registering candidate {candidate_id}"),
        plant.workspace.hold_lock("registry", PATIENCE),
    ):
        _ensure_model(client)
        pictures = draw_release_pictures(plant.ledger, candidate_id)
        for name, picture in pictures.items():
            client.log_text(run, picture, f"{PICTURES}/{name}")
        segment, evidence = SegmentRow.get(plant.ledger, candidate.segment), verdict.read_evidence(plant.ledger)
        about = render_description(
            candidate,
            segment,
            verdict,
            evidence,
            _places(tracking, segment, verdict, tags, {name: TITLES[name] for name in pictures}),
        )
        version = find_candidate_version(client, candidate_id, candidate.export_sha256)
        if version is None:
            source = log_loadable_model(client, run, candidate)
            version = client.create_model_version(MODEL, source, run, tags | {REGISTERED: "not yet"}, description=about)
        for key in sorted(REMOVABLE_TAGS & version.tags.keys() - tags.keys()):
            client.delete_model_version_tag(MODEL, version.version, key)
        for key, value in tags.items():
            if version.tags.get(key) != value:
                client.set_model_version_tag(MODEL, version.version, key, value)
        if version.description != about:
            client.update_model_version(MODEL, version.version, about)
        if candidate_id == max(one.subject_number for one in VerdictRow.select(plant.ledger, f"WHERE {ON_CANDIDATES}")):
            client.set_registered_model_alias(MODEL, CANDIDATE, version.version)
    tracking.log_report(run, write_report(plant, candidate_id))
    return str(version.version)


def is_version_complete(version: ModelVersion) -> bool:
    """Return whether a version has everything that its tags name. A version of an older factory, without REGISTERED, counts as complete."""
    return version.tags.get(REGISTERED) in (None, _digest(version))


def mark_version_complete(client: MlflowClient, version: str) -> None:
    """Note on a version that it has everything that its tags name. Raises: TrackingError."""
    with convert_mlflow_errors("marking a version"):
        found = client.get_model_version(MODEL, version)
        if found.tags.get(REGISTERED) != (digest := _digest(found)):
            client.set_model_version_tag(MODEL, version, REGISTERED, digest)


def _digest(version: ModelVersion) -> str:
    return hashlib.sha256(json.dumps([version.tags.get(key) for key in SHOWN]).encode()).hexdigest()[:12]


def find_candidate_version(client: MlflowClient, candidate: int, export_sha256: str) -> ModelVersion | None:
    """The version of a candidate, found by the candidate's number and the hash of its export."""
    query = " and ".join((f"name = '{MODEL}'", f"tags.`candidate` = '{candidate}'"))
    found = [v for v in client.search_model_versions(query) if v.tags.get("export_sha256") == export_sha256]
    return min(found, key=lambda version: int(version.version), default=None)


def read_aliases(client: MlflowClient) -> dict[str, str]:
    """``{alias: version}`` of the registered model; empty if the model is not registered yet."""
    from mlflow.exceptions import MlflowException

    try:
        return {name: str(version) for name, version in client.get_registered_model(MODEL).aliases.items()}
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {}


def _ensure_model(client: MlflowClient) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(MODEL, description=ABOUT)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _places(
    tracking: MlflowTracking,
    segment: SegmentRow,
    verdict: VerdictRow,
    tags: dict[str, str],
    pictures: Mapping[str, str],
) -> VersionLinks:
    place = lambda subject: RunAddress(*found) if (found := tracking.find_run_and_experiment(subject)) else None
    mine = place(Subject("candidate", verdict.subject_number))
    assert mine is not None, "its run was made"
    against = place(Subject.parse(verdict.against)) if verdict.against else None
    number = int(tags["release"]) if "release" in tags else None
    over = f"{tags['overridden_by']}: {tags['override_reason']}" if "overridden_by" in tags else None
    return VersionLinks(
        mine, place(Subject("segment", segment.id)), against, number, tags.get("bundle"), pictures, over
    )


def find_newest_bundle_folder(ledger: Ledger, release: int) -> str | None:
    """The folder of the newest bundle of a release; None if the release has no bundle."""
    sql = "SELECT detail FROM events WHERE kind = 'bundled' AND subject = :subject ORDER BY id DESC LIMIT 1"
    rows = ledger.read(sql, subject=str(Subject("release", release)))
    return str(rows[0]["detail"]["folder"]) if rows else None


def describe_removed_data(ledger: Ledger, release: int) -> str | None:
    """Training data of a release that was removed since, as text for a tag; None: nothing was removed."""
    about = [
        mark
        for mark in list_releases_with_removed_data(ledger)
        if mark["release"] == release and mark["removal"] is not None
    ]
    return "; ".join(f"removal {mark['removal']}: {mark['documents']} documents" for mark in about) or None


def _tags(ledger: Ledger, candidate: CandidateRow, verdict: VerdictRow) -> dict[str, str]:
    segment = SegmentRow.get(ledger, candidate.segment)
    release = ReleaseRow.find_first(ledger, "WHERE candidate = :candidate", candidate=candidate.id)
    evaluation = EvaluationRow.find_newest(ledger, candidate.id)
    tags = {
        "verdict": verdict.outcome,
        "release": release and release.number,
        "candidate": candidate.id,
        **_gain(verdict.read_evidence(ledger)),
        "verdict_id": verdict.id,
        "segment": segment.id,
        "generation": segment.generation,
        "recipe": segment.recipe,
        "data_plan": segment.data_plan,
        "code_commit": segment.code_commit,
        "export_sha256": candidate.export_sha256,
        "judged_at": format_iso_time(verdict.created_at),
        "bundle": find_newest_bundle_folder(ledger, release.number) if release else None,
        "removed_data": describe_removed_data(ledger, release.number) if release else None,
        **make_averaged_checkpoints_tag(segment.result),
    }
    if over := find_override(ledger, verdict):
        tags |= {"overridden_by": over["by"], "override_reason": over["why"]}
    bpb = evaluation.summary.get("bpb", {}) if evaluation else {}
    tags |= {f"bpb.{domain}": f"{value:.4f}" for domain, value in bpb.items() if isinstance(value, int | float)}
    return {key: str(value) for key, value in tags.items() if value is not None}


def _gain(evidence: dict[str, Any]) -> dict[str, str]:
    gain = read_confidence_interval(evidence.get("target"))
    return {"gain": f"{gain[0]:+.4f}", "gain_low": f"{gain[1]:+.4f}"} if gain else {}


def list_start_page_addresses(workspace: Workspace, server: str) -> dict[str, str]:
    """The pages to begin with, ``{name: address on the server}``. MLflow's own start page opens in a mode that hides registered models.

    Opening the store also updates its paths if the workspace was moved. Raises: TrackingError when the store cannot be opened.
    """
    client = open_client(workspace)
    pages = {"releases": f"models/{MODEL}"}
    with convert_mlflow_errors("listing experiments"):
        for name in (CANDIDATES, TRAINING, PROPOSALS):
            if found := client.get_experiment_by_name(name):
                pages[name] = f"experiments/{found.experiment_id}"
        if not client.search_registered_models(f"name = '{MODEL}'"):
            del pages["releases"]
    return {name: f"{server}/#/{page}?{TRAINING_MODE}" for name, page in pages.items()}
