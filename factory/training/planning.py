"""Plans segments: their token shards, their first checkpoint, and the number of steps that the data allow.

A plan is a row of the ledger. Nothing is started here.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from factory.computing import compute_settings
from factory.computing.tuned_kernels import KERNELS
from factory.core.errors import ConfigError, InputError, suggest_name
from factory.core.launching import check_ranks_fit
from factory.core.workspace import Workspace
from factory.ingest.rules.licence_claims import CONFLICT_EVENT, find_relicensed_documents
from factory.ingest.rules.policy import REPLAY_DOMAIN, DataPolicy, LicenceRules
from factory.ingest.vocabulary_size import check_vocabulary
from factory.ledger.imported_model import read_import_plan, refuse_unfinished_import
from factory.ledger.ledger import Ledger, data_plans, record_event, segments, token_shards
from factory.ledger.plant import Plant
from factory.ledger.removals import REMOVED, REMOVED_FATE, list_removals, replace_erased_token_shards
from factory.ledger.rows import IMPORT, SegmentRow, SqlReader, Subject
from factory.ledger.snapshot import Snapshot
from factory.ledger.stored_paths import to_stored_path, to_stored_paths
from factory.ledger.writing import find_next_key, insert_row
from factory.retrying.daemon_requests import (
    OVERRIDDEN,
    find_newest_decision_event,
    refuse_outdated_plan,
    refuse_rewound_segment,
)
from factory.retrying.trainer_deaths import refuse_while_parked
from kernels.contract.message import Message
from trainer.contract.errors import TrainerError

if TYPE_CHECKING:
    from trainer.contract.data.data_order import DataOrder
    from trainer.contract.data.data_plan import DataPlan
    from trainer.contract.recipe import Recipe


@dataclass(frozen=True)
class TrunkForecast:
    """The next trunk segment that the data allow."""

    steps: int  # 0: too little data for a trunk segment and its anneal
    new_shards: int  # token shards that the trunk has not seen
    wanted: int  # steps that the recipe asks for
    missing_tokens: int  # new tokens, each read ``max_epochs`` times, that a first step and an anneal still lack; 0 when there are enough


def forecast_trunk(plant: Plant, steps: int | None = None, changes: Sequence[str] = ()) -> TrunkForecast:
    """The trunk segment that could be planned now: ``steps`` or the recipe's steps, shortened to the data. ``changes``: as for ``plan_trunk``.

    The recipe's ``max_epochs`` limits the data, and the tokens of an anneal are reserved. Batches are counted as full. A packing
    that pads therefore leaves data over, and never runs out of data.
    """
    refuse_unfinished_import(plant)
    recipe = load_recipe(plant.workspace)
    last = find_trunk_parent(plant.ledger, recipe)
    wanted = steps or (
        recipe.schedule.trunk_steps.later if last and last.has_steps else recipe.schedule.trunk_steps.first
    )
    first = last.last_step if last else 0
    # Positions of a trunk segment of that many steps and its anneal. The batch size may still warm up.
    needs = lambda trunk: recipe.count_tokens_between(first, first + trunk + recipe.schedule.anneal_steps)
    lacks = lambda left: math.ceil(max(0, needs(1) - left) / recipe.mixture.max_epochs)
    shards = _every_shard(plant.ledger, last)
    seen = {shard["id"] for shard in read_data_plan(plant.ledger, last)["token_shards"]} if last else set()
    new = sum(1 for shard in shards if shard[0] not in seen)
    if not shards:
        return TrunkForecast(0, 0, wanted, lacks(0))
    refuse_changed_model(plant, recipe, last, changes)
    if _holds_replay_alone(plant, shards):
        return TrunkForecast(0, new, wanted, lacks(0))
    plan, _ = _data_plan(plant.ledger, recipe, "trunk", shards, first, first + wanted, _licences(plant.workspace))
    left = _data_order(plant.ledger, recipe, plan, last).estimate_positions_left()
    possible = bisect_right(range(wanted + 1), left, key=needs) - 1
    return TrunkForecast(max(0, possible), new, wanted, lacks(left) if possible < 1 else 0)


def plan_trunk(plant: Plant, steps: int | None = None, changes: Sequence[str] = ()) -> int:
    """Record the next trunk segment over all token shards; returns its id. A line of ``plant.progress`` names precision and kernels.

    ``changes``: keys of ``model`` that this segment may change, besides those of the recipe's ``accept_changes``.
    Shards that the trunk has not seen become a new generation. Raises: InputError when the data are too few or a segment is parked.
    """
    refuse_while_parked(plant.ledger)
    trunk = forecast_trunk(plant, steps, changes)
    recipe = load_recipe(plant.workspace)
    last = find_trunk_parent(plant.ledger, recipe)
    if not trunk.steps:
        if not trunk.new_shards and not (last and last.has_steps):
            raise InputError(
                "training.no_shards", "The factory has no ingested shard to train on. Drop a shard into the inbox."
            )
        if _holds_replay_alone(plant, _every_shard(plant.ledger, last)):
            raise InputError(
                "training.only_replay", "The ingested documents are all of the domain {domain}, which the model knew before. Ingest new data first: "
                "'factory ingest PATH'.", domain=REPLAY_DOMAIN,
            )  # fmt: skip
        raise InputError(
            "training.too_few_tokens", "Recipe {recipe} (max_epochs {max_epochs}) needs at least {missing:,|more token|more tokens} for one step "
            "and the {anneal:,|step|steps} of its anneal. Drop shards into the inbox. To train on less, lower schedule.anneal_steps, or "
            "batch.sequences with batch.micro_sequences, in {file}.",
            recipe=recipe.name, max_epochs=recipe.mixture.max_epochs, missing=trunk.missing_tokens,
            anneal=recipe.schedule.anneal_steps, file=plant.workspace.recipe_path(),
        )  # fmt: skip
    return _plan(plant, "trunk", last, trunk.steps, _every_shard(plant.ledger, last), changes)


def plan_anneal(plant: Plant) -> int:
    """Record an anneal from the trunk's last checkpoint over the trunk's token shards; returns its id. Raises: InputError."""
    refuse_while_parked(plant.ledger)
    trunk = find_last_finished_segment(plant.ledger, "trunk")
    if trunk is None:
        raise InputError(
            "training.no_trunk",
            "No trunk segment is finished, so an anneal has no checkpoint to start from. Run 'factory train' first.",
        )
    planned = replace_erased_token_shards(plant.ledger, read_data_plan(plant.ledger, trunk))["token_shards"]
    shards = [(shard["id"], shard["path"], shard["generation"]) for shard in planned]
    return _plan(plant, "anneal", trunk, load_recipe(plant.workspace).schedule.anneal_steps, shards)


def find_last_finished_segment(ledger: Ledger, kind: str) -> SegmentRow | None:
    """The newest finished segment of that kind."""
    return SegmentRow.find_first(ledger, "WHERE kind = :kind AND state = 'done' ORDER BY id DESC", kind=kind)


def find_trunk_parent(ledger: Ledger, recipe: Recipe) -> SegmentRow | None:
    """The segment from whose last checkpoint the next trunk segment starts. For the first trunk segment, it is the imported model, or None.

    With ``schedule.continue_from: anneal`` (WSD-S, arXiv 2410.05192) it is the anneal of the newest trunk segment. The next trunk
    segment takes the anneal's weights, sampler state and last step, so it repeats no document early and continues the step count.
    """
    trunk = find_last_finished_segment(ledger, "trunk")
    if trunk is None:
        return find_last_finished_segment(ledger, IMPORT)
    if recipe.schedule.continue_from == "trunk":
        return trunk
    anneal = find_last_finished_segment(ledger, "anneal")
    return anneal if anneal is not None and anneal.parent == trunk.id else trunk


def read_last_checkpoint(db: SqlReader, segment: int) -> dict[str, Any]:
    """The last checkpoint of a finished segment, as its row."""
    return db.read("SELECT * FROM checkpoints WHERE segment = :segment ORDER BY step DESC LIMIT 1", segment=segment)[0]


def read_data_plan(db: SqlReader, segment: SegmentRow) -> dict[str, Any]:
    """The data plan of a segment, as JSON values."""
    return dict(db.read("SELECT plan FROM data_plans WHERE id = :id", id=segment.data_plan)[0]["plan"])


def load_recipe(workspace: Workspace) -> Recipe:
    """Raises: ConfigError naming the file and the key."""
    from trainer.contract.recipe import Recipe

    try:
        recipe = Recipe.load(workspace.recipe_path())
    except TrainerError as error:
        raise ConfigError(error.message) from error
    check_ranks_fit(workspace, recipe)
    return recipe


def _with_keys(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe:
    """The recipe with other values. Raises: ConfigError when these values make an impossible recipe."""
    from trainer.contract.recipe import copy_with_changed_keys

    try:
        return type(recipe).parse(copy_with_changed_keys(recipe.model_dump(mode="json"), keys))
    except TrainerError as error:
        raise ConfigError(
            "training.override_impossible", "Recipe {recipe} cannot use the values {values}: {error}",
            recipe=recipe.name, values=dict(keys), error=error,
        ) from error  # fmt: skip


@contextmanager
def _fits(recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except TrainerError as error:
        raise ConfigError(
            "training.recipe_does_not_fit",
            "Recipe {recipe} cannot use the ingested shards: {error}",
            recipe=recipe.name,
            error=error,
        ) from error


def _every_shard(ledger: Ledger, last: SegmentRow | None) -> list[tuple[str, str, int]]:
    """(id, path, generation) of each token shard. Shards that the trunk has not seen form the next generation.

    A shard is left out when the trunk has not seen it and a person took out all of its documents.
    """
    seen = {shard["id"]: shard["generation"] for shard in read_data_plan(ledger, last)["token_shards"]} if last else {}
    newest = max(seen.values(), default=0)
    listed = ledger.read("SELECT id, path FROM token_shards WHERE tokens > 0 ORDER BY created_at, id")
    empty = _emptied(ledger) - seen.keys()
    return [(row["id"], row["path"], seen.get(row["id"], newest + 1)) for row in listed if row["id"] not in empty]


def _holds_replay_alone(plant: Plant, shards: Sequence[tuple[str, str, int]]) -> bool:
    """Whether only the ``replay_corpus`` of data.yaml arrived, on which an imported model would learn nothing new."""
    ids = {shard[0] for shard in shards}
    held = [row["domains"] for row in plant.ledger.read("SELECT id, domains FROM token_shards") if row["id"] in ids]
    return {domain for one in held for domain in one} == {REPLAY_DOMAIN} and bool(
        DataPolicy.load(plant.workspace.policy_path("data.yaml")).replay_corpus
    )


def _emptied(ledger: Ledger) -> set[str]:
    """The token shards of which a person took out all documents."""
    touched = {
        shard for removal in list_removals(ledger) if removal.state != "returned" for shard in removal.token_shards
    }
    sql = "SELECT COUNT(*) AS n FROM documents WHERE token_shard = :shard AND fate <> :fate"
    return {shard for shard in touched if not ledger.read(sql, shard=shard, fate=REMOVED_FATE)[0]["n"]}


def _data_plan(
    ledger: Ledger, recipe: Recipe, kind: str, shards: list[tuple[str, str, int]], first: int, last: int, licences: LicenceRules
) -> tuple[DataPlan, list[str]]:  # fmt: skip
    """(the plan of the steps [first, last), the domains of the mixture that have no shard yet).

    Raises: ConfigError naming the key, when no domain of a mixture that these steps need has a shard.
    """
    from trainer.contract.data.data_plan import DataPlan

    ids = {shard[0] for shard in shards}
    rows = ledger.read("SELECT id, domains FROM token_shards")
    held = {domain for row in rows if row["id"] in ids for domain in row["domains"]}
    plan = DataPlan.make_for_segment(recipe.mixture, "anneal" if kind == "anneal" else "trunk", shards, recipe.seed)
    plan = plan.model_copy(update={"targets_in_every_batch": True})
    with _fits(recipe):
        plan, left_out = plan.copy_without_missing_domains(held, first, last)
    plan = DataPlan.from_json(_with_moved(ledger, replace_erased_token_shards(ledger, json.loads(plan.to_json()))))
    return plan.copy_with_masked_documents(sorted({*_left_out(ledger, ids), *_barred(ledger, ids, licences)})), left_out


def _with_moved(ledger: Ledger, plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with the domains that a person gave to documents (``factory.data.relabelling``)."""
    rows = ledger.select_rows(
        sa.select(token_shards.c.id, token_shards.c.moved).where(token_shards.c.moved.is_not(None))
    )
    moved = {row["id"]: {"moved": row["moved"]} for row in rows if row["moved"]}
    return {**plan, "token_shards": [{**shard, **moved.get(shard["id"], {})} for shard in plan["token_shards"]]}


def _licences(workspace: Workspace) -> LicenceRules:
    return DataPolicy.load(workspace.policy_path("data.yaml")).licences


def _barred(ledger: Ledger, token_shards: set[str], licences: LicenceRules) -> set[str]:
    """Keys of documents of these shards that also arrived under a licence that forbids training, unless a person decided the conflict."""
    conflict = ledger.read("SELECT id FROM events WHERE kind = :kind LIMIT 1", kind=CONFLICT_EVENT)
    if not conflict and not any(
        "licence" in (row["counts"] or {}).get("dropped", {}) for row in ledger.read("SELECT counts FROM shards")
    ):
        return set()  # saves a search of the long table of documents
    strict = find_relicensed_documents(ledger, licences).values()
    return {
        one.key
        for one in strict
        if one.token_shard in token_shards and not licences.find_licence(one.find_effective_licence(licences)).train
    }


def _left_out(ledger: Ledger, token_shards: set[str]) -> list[str]:
    """Keys of documents of these shards that are in quarantine (``factory.diagnosis.remedies``) or that a person took out."""
    if not ledger.read(f"SELECT id FROM events WHERE kind IN ('documents_quarantined', '{REMOVED}') LIMIT 1"):
        return []  # saves a search of the long table of documents
    listed = ledger.read(f"SELECT key, token_shard FROM documents WHERE fate IN ('quarantined', '{REMOVED_FATE}')")
    return [row["key"] for row in listed if row["token_shard"] in token_shards]


def _data_order(ledger: Ledger, recipe: Recipe, plan: DataPlan, last: SegmentRow | None) -> DataOrder:
    """The data order from the end of the segment ``last``, or from its beginning. Raises: ConfigError when plan and recipe do not fit."""
    from trainer.contract.data.data_order import DataOrder

    state = None
    if last is not None:
        path = Path(read_last_checkpoint(ledger, last.id)["path"]) / "state.json"
        state = json.loads(path.read_text()).get("sampler")  # an imported model has read no data
    sizes = {"context": recipe.model.context, "vocab_size": recipe.model.vocab_size}
    with _fits(recipe):
        return DataOrder(plan, batch=recipe.batch, state=state, **sizes)


def _refuse_padding(ledger: Ledger, recipe: Recipe, plan: DataPlan, parent: SegmentRow | None, last_step: int) -> None:
    """Raises: ConfigError naming ``batch.max_padding`` when the plan needs more padding."""
    from trainer.contract.plan.feasibility import refuse_excessive_padding

    if recipe.batch.max_padding is not None:
        with _fits(recipe):
            refuse_excessive_padding(_data_order(ledger, recipe, plan, parent), recipe, last_step)


def make_next_trunk_spec(plant: Plant, steps: int, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The content of segment.json of a first trunk segment of so many steps, without a row in the ledger. ``changes``: as for ``plan_trunk``.

    Raises: InputError without data.
    """
    from factory.git.repository import get_live_commit, read_file_text

    recipe = load_recipe(plant.workspace)
    parent = find_trunk_parent(plant.ledger, recipe)
    shards = _every_shard(plant.ledger, parent)
    if not shards:
        raise InputError(
            "training.no_data", "The factory has no ingested shard. Ingest data first: 'factory ingest PATH'."
        )
    refuse_changed_model(plant, recipe, parent, changes)
    recipe = _accept_changes(keep_allowed_positions(plant, recipe, parent), changes)
    first = parent.last_step if parent else 0
    plan, _ = _data_plan(plant.ledger, recipe, "trunk", shards, first, first + steps, _licences(plant.workspace))
    commit = get_live_commit(plant.workspace.repository)
    kernels = read_file_text(plant.workspace.repository, commit, KERNELS)
    resolved, _, _ = compute_settings.choose_compute_settings(plant.workspace, recipe, kernels)
    return {
        "kind": "trunk", "recipe": resolved.model_dump(mode="json"), "data_plan": json.loads(plan.to_json()), "first_step": first,
        "last_step": first + steps, "initial_checkpoint": parent and read_last_checkpoint(plant.ledger, parent.id)["path"],
        "code_commit": commit, "kernels": None,
    }  # fmt: skip


def keep_allowed_positions(plant: Plant, recipe: Recipe, parent: SegmentRow | None) -> Recipe:
    """The recipe with the parent's ``max_positions`` if it has none. Otherwise a shorter context would shrink what exports of the model allow.

    Raises: ConfigError if the recipe's context is longer.
    """
    if parent is None or recipe.model.max_positions is not None:
        return recipe
    allowed, written = _find_allowed_positions(plant.ledger, parent)
    if allowed is None or (allowed == recipe.model.context and not written):
        return recipe  # as before imports wrote the key: its hash stays the same
    recipe = _with_keys(recipe, {"model.max_positions": allowed})
    try:
        recipe.refuse_beyond_model(str(plant.workspace.recipe_path()))
    except TrainerError as error:
        raise ConfigError(error.message) from error
    return recipe


def _find_allowed_positions(db: SqlReader, parent: SegmentRow) -> tuple[int | None, bool]:
    """(positions that the model of a segment allows, whether its recipe says so). The recipe of an older import lacks the number, its plan has it.
    None: a model of this factory without a number of its own."""
    written = (parent.recipe_json.get("model") or {}).get("max_positions")
    if written is not None:
        return int(written), True
    first = SegmentRow.read_lineage(db, parent.id)[0]
    if first.kind != IMPORT:
        return None, False
    trained = (parent.recipe_json.get("model") or {}).get(
        "context", 0
    )  # older factories took a longer one without a word
    return max(int(read_import_plan(db, first.id)["spec"]["context"]), int(trained)), False


def _accept_changes(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with these changes named in it, because the trainer compares it with the checkpoint too."""
    if not changes:
        return recipe
    accepted = sorted({*recipe.accept_changes, *changes})
    return type(recipe).parse(recipe.model_dump(mode="json") | {"accept_changes": accepted})


def _plan(
    plant: Plant,
    kind: str,
    parent: SegmentRow | None,
    length: int,
    shards: list[tuple[str, str, int]],
    changes: Sequence[str] = (),
) -> int:
    from factory.git.repository import get_live_commit, read_file_text

    decided = find_newest_decision_event(plant.ledger)
    if parent is not None:
        refuse_rewound_segment(plant.ledger, parent.id)
    recipe = load_recipe(plant.workspace)
    notes: list[str] = [*refuse_changed_model(plant, recipe, parent, changes)]
    recipe = _accept_changes(keep_allowed_positions(plant, recipe, parent), changes)
    first = parent.last_step if parent else 0
    overridden = find_recipe_override(plant.ledger, kind, parent.id if parent else None)
    if overridden is not None:
        recipe = _with_keys(recipe, overridden.keys)
        length = max(1, min(length, overridden.until - first)) if kind == "trunk" else length
        plant.progress.line(
            Message(
                "training.recipe_overridden",
                "  Steps {first} to {last} use {values} instead of the recipe's values ({reason}).",
                first=first,
                last=first + length - 1,
                values=[f"{key} {value}" for key, value in overridden.keys.items()],
                reason=overridden.reason,
            )  # fmt: skip
        )
    plan, left_out = _data_plan(plant.ledger, recipe, kind, shards, first, first + length, _licences(plant.workspace))
    _refuse_padding(plant.ledger, recipe, plan, parent, first + length)
    commit = get_live_commit(plant.workspace.repository)
    kernels = read_file_text(plant.workspace.repository, commit, KERNELS)
    recipe, computed, of_computing = compute_settings.choose_compute_settings(
        plant.workspace, recipe, kernels, parent.recipe_json["precision"] if parent and parent.has_steps else ""
    )
    notes += of_computing
    for note in notes:
        plant.progress.line(f"  {note}")
    moved = to_stored_paths(plant.workspace.root, json.loads(plan.to_json()))  # its id is the same in any folder
    plan = type(plan).from_json(moved)
    detail: dict[str, Any] = {"domains_not_arrived": left_out, "notes": notes}
    detail |= {"overridden": dict(overridden.keys)} if overridden else {}
    with plant.ledger.begin() as tx:
        refuse_outdated_plan(Snapshot(tx, plant.ledger.root), decided)
        if tx.execute(sa.select(data_plans.c.id).where(data_plans.c.id == plan.id)).first() is None:
            tx.execute(data_plans.insert().values(id=plan.id, plan=json.loads(plan.to_json()), created_at=time.time()))
        return insert_planned_segment(
            tx, plant.workspace, kind, (first, first + length), detail, parent=parent and parent.id, recipe=recipe.name,
            recipe_json=recipe.model_dump(mode="json"), recipe_sha256=recipe.sha256, data_plan=plan.id, code_commit=commit, computing=computed,
            generation=max(shard.generation for shard in plan.token_shards),
        )  # fmt: skip


def insert_planned_segment(
    tx: sa.Connection, workspace: Workspace, kind: str, steps: tuple[int, int], detail: dict[str, Any], **columns: Any
) -> int:
    """Add the row of a planned segment of the steps [first, last), and its event; returns its id."""
    number = find_next_key(tx, segments)
    folder = to_stored_path(workspace.root, workspace.segments / f"{number:05d}-{kind}")
    made = {"folder": folder, "state": "planned", "created_at": time.time()}
    insert_row(tx, segments, id=number, kind=kind, first_step=steps[0], last_step=steps[1], **made, **columns)
    record_event(tx, "segment_planned", Subject("segment", number), {"kind": kind, "steps": list(steps), **detail})
    return number


@dataclass(frozen=True)
class RecipeOverride:
    """Values that replace ``keys`` of the recipe (with dots) until step ``until`` (not included)."""

    keys: Mapping[str, Any]
    until: int
    reason: str


def record_recipe_override(tx: sa.Connection, spoiled_segment: SegmentRow, override: RecipeOverride) -> None:
    """Record an override for the segment that will replace ``spoiled_segment``."""
    place = {"kind": spoiled_segment.kind, "parent": spoiled_segment.parent}
    detail = {"keys": dict(override.keys), "until": override.until, "reason": override.reason}
    record_event(tx, OVERRIDDEN, Subject("segment", spoiled_segment.id), place | detail)


def find_recipe_override(db: SqlReader, kind: str, parent: int | None) -> RecipeOverride | None:
    """The newest override for a segment of this kind and parent; None when it has no keys, as after a rejected diagnosis."""
    found = _newest(db, kind, parent)
    return RecipeOverride(found["keys"], found["until"], found["reason"]) if found and found["keys"] else None


def has_recipe_override(db: SqlReader, kind: str, parent: int | None) -> bool:
    """Whether the ledger has an override for a segment of this kind and parent; a person's order to have none also counts."""
    return _newest(db, kind, parent) is not None


def _newest(db: SqlReader, kind: str, parent: int | None) -> dict[str, Any] | None:
    rows = db.read("SELECT detail FROM events WHERE kind = :kind ORDER BY id DESC", kind=OVERRIDDEN)
    found = (row["detail"] for row in rows)
    return next((detail for detail in found if (detail["kind"], detail["parent"]) == (kind, parent)), None)


def _refuse_frozen_new_rows(plant: Plant, recipe: Recipe, parent: SegmentRow) -> None:
    """Raises: ConfigError if the imported model has new rows for tokens, and neither a segment before nor this recipe trains them. All new rows are
    equal, so such a model cannot tell the tokens apart. A segment whose documents have none of the tokens leaves the rows equal."""
    from trainer.contract.recipe import is_trained

    first, *later = SegmentRow.read_lineage(plant.ledger, parent.id)
    plan = read_import_plan(plant.ledger, first.id) if first.kind == IMPORT else {}
    new = list(plan.get("new_rows", ()))
    tables = ["embedding"] if recipe.model.tied else ["embedding", "head"]
    list_frozen_tables = lambda adapt, freeze: [name for name in tables if not is_trained(name, adapt, freeze or ())]
    frozen = list_frozen_tables(recipe.adapt, recipe.freeze)
    if not new or not frozen:
        return
    trained = any(
        not list_frozen_tables(row.recipe_json.get("adapt"), row.recipe_json.get("freeze"))
        for row in later
        if row.has_steps
    )
    if not trained or _has_equal_rows(plant.ledger, parent, tables, [row["id"] for row in new]):
        raise ConfigError(
            "training.new_rows_frozen", "{recipe_file}: the key {key} keeps {tables} unchanged, but the rows of the tokens {tokens} are new and all "
            "equal, so the model cannot tell these tokens apart. Remove the key until a segment has trained them on documents with these tokens.",
            recipe_file=plant.workspace.recipe_path(), key="adapt" if recipe.adapt else "freeze", tables=frozen, tokens=[row["token"] for row in new],
        )  # fmt: skip


def _has_equal_rows(ledger: Ledger, segment: SegmentRow, tables: Sequence[str], ids: Sequence[int]) -> bool:
    """True if several rows of one of the tables are all equal in the segment's last checkpoint."""
    from trainer.contract.checkpoint.format import StoredTensors

    found = ledger.read(
        "SELECT path FROM checkpoints WHERE segment = :segment ORDER BY step DESC LIMIT 1", segment=segment.id
    )
    if not found or len(ids) == 1:
        return False
    stored = StoredTensors(Path(found[0]["path"]), "model")
    return any(bool((stored[name][list(ids)] == stored[name][ids[0]]).all()) for name in tables)


def refuse_changed_model(
    plant: Plant, recipe: Recipe, parent: SegmentRow | None, named: Sequence[str] = ()
) -> list[Message]:
    """Compare the recipe's model with that of the parent; returns a message for each change that ``named`` or ``accept_changes`` names.

    Raises: ConfigError naming each other change with both values, the file, and what to do; InputError for a name in ``named`` that no change has.
    """
    from models.spec import ACCEPTABLE
    from trainer.contract.checkpoint.model_function_changes import (
        find_export_changes,
        find_model_function_changes,
        find_unaccepted_changes,
    )

    if unknown := next((key for key in named if key not in ACCEPTABLE), None):
        raise InputError(
            "training.not_acceptable",
            "--change {key}: weights cannot be kept through a change of this key{nearest}",
            key=unknown,
            nearest=suggest_name(unknown, ACCEPTABLE),
        )
    if parent is None or not parent.has_steps:
        check_vocabulary(plant, recipe)
    if parent is None:
        _refuse_unused_changes(named, ())
        return []
    _refuse_frozen_new_rows(plant, recipe, parent)
    workspace = plant.workspace
    before = parent.recipe_json.get("model")  # of the ledger: an old checkpoint may not name its model
    if not before:
        return []  # an older factory recovered the row without its recipe; the trainer compares the weights
    allowed, _ = _find_allowed_positions(plant.ledger, parent)
    recipe = keep_allowed_positions(plant, recipe, parent)
    of_export = find_export_changes(before | ({"max_positions": allowed} if allowed else {}), recipe.model)
    changes = find_model_function_changes(before, recipe.model) | of_export
    accepted = [*recipe.accept_changes, *named]
    refused = find_unaccepted_changes(before, recipe.model, accepted)
    refused += [key for key in of_export if key not in accepted]
    if refused:
        accept: str = Message(
            "training.accept_model_change", "You can name the change: '{command}', or accept_changes: [{keys}] in the recipe. Training then "
            "continues from the present weights. ", command=" ".join(["factory train", *(f"--change {key}" for key in refused)]), keys=refused,
        )  # fmt: skip
        differing = [f"model.{key} {changes[key][0]} → {changes[key][1]}" for key in refused]
        accept = accept if set(refused) <= set(ACCEPTABLE) else ""
        first, *later = SegmentRow.read_lineage(plant.ledger, parent.id)
        if parent.id == first.id and first.kind == IMPORT:
            raise ConfigError(
                "training.imported_model_changed", "{recipe_file} describes another model than the imported one: {changes}. {accept}You can "
                "undo the change.", recipe_file=workspace.recipe_path(), changes=differing, accept=accept,
            )  # fmt: skip
        if first.kind == IMPORT:
            raise ConfigError(
                "training.continued_model_changed", "{recipe_file} changes the model with which segment {segment} was trained: {changes}. You can "
                "undo the change. {accept}You can begin again from the imported model with 'factory rewind {root} -w {workspace}', which keeps "
                "data, tokenizer and releases.", recipe_file=workspace.recipe_path(), segment=parent.id,
                changes=differing, accept=accept, root=later[0].id, workspace=workspace.root,
            )  # fmt: skip
        raise ConfigError(
            "training.model_changed", "{recipe_file} changes the model with which segment {segment} was trained: {changes}. You can undo "
            "the change. {accept}You can train from step 0 in this workspace with 'factory rewind {root} -w {workspace}', which keeps "
            "data, tokenizer and releases. Or you can begin another workspace with 'factory init --recipe {recipe} "
            "--tokenizer {tokenizer} -w FOLDER'.",
            recipe_file=workspace.recipe_path(), segment=parent.id,
            changes=differing, accept=accept, root=first.id,
            workspace=workspace.root, recipe=recipe.name, tokenizer=workspace.tokenizer,
        )  # fmt: skip
    _refuse_unused_changes(named, changes)
    notes = [
        Message(
            "training.model_change_accepted",
            "This change was named, so training continues with it: model.{key} {old} → {new}.",
            key=key,
            old=old,
            new=new,
        )
        for key, (old, new) in changes.items()
    ]
    if before.get("context", recipe.model.context) != recipe.model.context:
        notes.append(
            Message(
                "training.context_changed",
                "model.context changes from {old} to {new} positions. Training continues with the documents and tokens that were not read.",
                old=before["context"],
                new=recipe.model.context,
            )
        )
    unused = [key for key in recipe.accept_changes if key not in changes]
    if unused:
        notes.append(
            Message(
                "training.accept_changes_unused",
                "Key 'accept_changes' in {recipe_file} lists {keys}, but the recipe makes no such change. Remove {keys} from 'accept_changes'.",
                recipe_file=workspace.recipe_path(),
                keys=unused,
            )  # fmt: skip
        )
    return notes


def _refuse_unused_changes(named: Sequence[str], changes: Collection[str]) -> None:
    """Raises: InputError for a name that would accept nothing, because it would accept a later mistake."""
    if unused := next((key for key in named if key not in changes), None):
        raise InputError(
            "training.no_such_change",
            "--change {key}: the recipe's model does not differ in this key from the last segment's. Leave the option out.",
            key=unused,
        )
