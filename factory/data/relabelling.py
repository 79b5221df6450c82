"""Gives documents another domain, source, licence or group in place, without a new ingest. Each relabel is a recorded decision of a person.

The documents' rows, held-out halves, domains of token shards and the record (table ``relabels``) change in one transaction. Token shards stay as they
are. A token shard's ledger row (``moved``) and every later data plan name the rows that have another domain now. Earlier segments are replayed from
their own plans. A held-out document stays held out.

Held-out documents may get another group. A document that something may have read keeps its half, and its new group gets that half. A new group of
documents that nothing has read yet goes to the half that has fewer groups of its domains. So a document that influenced a choice never becomes
sealed. Evaluations, verdicts, proposals, agents' runs and averages count as readers.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from factory.core.errors import InputError
from factory.data.selecting import (
    AT_ONCE,
    DocumentSelection,
    find_keys_of_unique_document,
    make_unknown_value_error,
    select_documents_by_label,
)
from factory.ingest.document import LONGEST_NAME, check_domain_name
from factory.ingest.rules.held_out_split import (
    KINDS,
    GroupKind,
    goes_to_sealed_half_on_tie,
    make_group_name,
    name_held_out_draw_unit,
)
from factory.ingest.rules.licence_names import normalise_licence_name
from factory.ingest.rules.policy import DataPolicy
from factory.ingest.shapes.field_mapping import get_original_file_name
from factory.ledger.ledger import Ledger, documents, held_out, record_event, relabels, shards, token_shards
from factory.ledger.plant import Plant
from factory.ledger.removals import NO_LICENCE, REMOVABLE_FATES, REMOVED_FATE, list_removed_labels
from factory.ledger.rows import SegmentRow
from factory.ledger.writing import insert_row
from factory.training.planning import load_recipe, read_data_plan
from kernels.contract.message import Message
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenShard, format_row_ranges, parse_row_ranges
from trainer.contract.errors import DataPlanError, TokenShardError

RELABELLED_EVENT = "relabelled"  # kind of a relabel's event
FATES = {"train": "to train on", "held_out": "held out"}  # as a person reads them
# Kinds of events of readers of held-out documents: an evaluation, a verdict, a proposal, an agent's run.
READING = ("evaluated", "judged", "drafted", "agent_began")
c = documents.c
COLUMNS = (
    c.key, c.shard, c.domain, c.source, c.license, c.releasable, c.group_key, c.facts, c.fate, c.token_shard, c.content_sha256,
)  # fmt: skip


@dataclass(frozen=True)
class DocumentFilter:
    """Selects the documents that match every field that is not empty. A document matches a field if it has one of the field's names."""

    domain: Sequence[str] = ()
    source: Sequence[str] = ()
    license: Sequence[str] = ()  # 'none': documents without a licence
    shard: Sequence[str] = ()  # names of shards, or of the files that they are parts of
    document: Sequence[str] = ()  # ids or keys


@dataclass(frozen=True)
class NewLabels:
    """The new values of labels. None leaves a label unchanged. ``license`` 'none' or '' and ``source`` '' remove the name."""

    domain: str | None = None
    source: str | None = None
    license: str | None = None
    group: GroupKind | None = None


@dataclass
class PlannedRelabelling:
    """The changes of a relabel, and their consequences.

    ``documents`` maps keys to the new values of columns, and ``held`` does the same for held-out documents. ``token_shards`` maps ids of token shards
    to rows by domain (``PlannedShard.moved``). ``lines`` are for a person.
    """

    filter: DocumentFilter
    change: NewLabels
    selected: int
    documents: dict[str, dict[str, Any]]
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    token_shards: dict[str, dict[str, str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        counts = {"held_out": len(self.held), "token_shards": len(self.token_shards)}
        return {"selected": self.selected, "documents": len(self.documents), **counts}


def plan_relabelling(plant: Plant, document_filter: DocumentFilter, change: NewLabels) -> PlannedRelabelling:
    """Find what a relabel would change, without changing anything.

    Raises: InputError for names that no document has, for a change without effect, for a change after which no segment can be planned, and for a
    licence that does not allow training.
    """
    if not any(vars(document_filter).values()):
        raise InputError("data.no_filter", "choose documents with --domain, --source, --license, --shard or --document")
    if all(value is None for value in vars(change).values()):
        raise InputError("data.no_change", "give new labels with --to-domain, --to-source, --to-license or --group")
    policy = DataPolicy.load(plant.workspace.policy_path("data.yaml"))
    if change.domain is not None:
        check_domain_name(change.domain)
    if change.license is not None and not policy.licences.find_licence(_licence(change.license)).train:
        raise InputError(
            "data.licence_forbids",
            "the licence {licence!r} does not allow training (see 'licences' in data.yaml). To remove these documents: 'factory data remove'",
            licence=change.license,
        )
    _refuse_names(plant.ledger, change)
    rows = _selected(plant.ledger, document_filter)
    if not rows:
        raise InputError("data.no_match", "no document matches all of these filters. Nothing was changed")
    _refuse_unknown_facts(rows, change)
    changed = {row["key"]: new for row in rows if (new := _changed(row, change, policy))}
    if not changed:
        raise InputError(
            "data.same_labels",
            "{documents:,|selected document has|selected documents have} these labels already. Nothing was changed",
            documents=len(rows),
        )
    found = PlannedRelabelling(document_filter, change, len(rows), changed)
    found.held = _held(plant.ledger, changed, _trained_groups(plant.ledger, rows, changed), found.lines)
    found.token_shards = _moved(
        plant.ledger, [row for row in rows if "domain" in changed.get(row["key"], {})], change.domain
    )
    _say(plant, policy, rows, found)
    return found


def apply_relabelling(plant: Plant, planned: PlannedRelabelling, by: str, why: str = "") -> int:
    """Make the changes that ``plan_relabelling`` found. Returns the number of the relabel.

    The caller must hold the model loop's lock since before ``plan_relabelling``.
    """
    with plant.ledger.begin() as tx:
        number = insert_row(
            tx, relabels, at=time.time(), who=by, why=why, counts=planned.to_json(),
            filter={name: list(names) for name, names in vars(planned.filter).items() if names},
            change={name: value for name, value in vars(planned.change).items() if value is not None},
        )  # fmt: skip
        _update(tx, documents, planned.documents)
        _update(tx, held_out, planned.held)
        for shard, moved in planned.token_shards.items():
            domains = _domains(tx, c.token_shard == shard)
            tx.execute(token_shards.update().where(token_shards.c.id == shard).values(moved=moved, domains=domains))
        in_shards = token_shards.c.id.in_(planned.token_shards)
        for (shard,) in tx.execute(sa.select(token_shards.c.shard).where(in_shards).distinct()).all():
            domains = _domains(tx, sa.and_(c.shard == shard, c.token_shard.is_not(None)))
            tx.execute(shards.update().where(shards.c.sha256 == shard).values(domains=domains))
        record_event(tx, RELABELLED_EVENT, f"relabel:{number}", {"by": by, "why": why, **planned.to_json()})
    return number


def _update(tx: sa.Connection, table: sa.Table, changed: Mapping[str, Mapping[str, Any]]) -> None:
    by_columns: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for key, values in changed.items():
        by_columns[tuple(values)].append({"this": key, **{f"new_{name}": value for name, value in values.items()}})
    for names, rows in by_columns.items():
        tx.execute(
            table.update()
            .where(table.c.key == sa.bindparam("this"))
            .values({n: sa.bindparam(f"new_{n}") for n in names}),
            rows,
        )


def _domains(tx: sa.Connection, where: sa.ColumnElement[bool]) -> dict[str, dict[str, int]]:
    """Return the value of ``domains`` for a row of ``shards`` or ``token_shards``."""
    sums = [sa.func.count(), sa.func.sum(c.tokens), sa.func.sum(c.supervised_tokens)]
    rows = tx.execute(sa.select(c.domain, *sums).where(where).group_by(c.domain).order_by(c.domain)).all()
    return {
        domain: {"documents": int(count), "tokens": int(tokens), "supervised_tokens": int(supervised)}
        for domain, count, tokens, supervised in rows
    }


# -- what is chosen, and what it becomes -------------------------------------------------------------------------------
def _licence(name: str) -> str | None:
    return None if name.strip() in ("", NO_LICENCE) else name


def _refuse_names(ledger: Ledger, change: NewLabels) -> None:
    """Refuse a name that no row may have, and a source or licence whose documents a person removed. Raises: InputError."""
    for noun, name in (("source", change.source), ("license", change.license)):
        if name is not None and (len(name) > LONGEST_NAME or not name.isprintable()):
            raise InputError(
                "data.unusable_name",
                "--to-{label} may have at most {limit:,} characters, all of them printable. Nothing was changed",
                label=noun,
                limit=LONGEST_NAME,
            )
    known = list_removed_labels(ledger)
    sources = {str(name): number for name, number in known["source"].items()}
    licences = {normalise_licence_name(name): number for name, number in known["license"].items()}
    licence = None if change.license is None else normalise_licence_name(_licence(change.license))
    for noun, name, number in (
        ("source", change.source, sources.get(change.source or "")),
        ("licence", change.license, None if licence is None else licences.get(licence)),
    ):
        if number is not None:
            raise InputError(
                "data.removed_name",
                "removal {removal} removed the documents of the {noun} {name!r}, so ingest refuses documents of this {noun}. Nothing was "
                "changed. To put the documents back: 'factory data undo {removal}'",
                removal=number,
                noun=noun,
                name=name,
            )


def _selected(ledger: Ledger, chosen: DocumentFilter) -> list[dict[str, Any]]:
    where: list[sa.ColumnElement[bool]] = [c.fate.in_((*REMOVABLE_FATES, REMOVED_FATE))]
    if chosen.domain:
        where.append(
            c.domain.in_(_known(chosen.domain, "domain", ledger.read("SELECT DISTINCT domain AS name FROM documents")))
        )
    if chosen.shard:
        listed = ledger.read("SELECT name, sha256 FROM shards WHERE state = 'ingested'")
        names = _known(
            chosen.shard, "shard", [*listed, *({"name": get_original_file_name(row["name"])} for row in listed)]
        )
        where.append(
            c.shard.in_([row["sha256"] for row in listed if {row["name"], get_original_file_name(row["name"])} & names])
        )
    for column in ("source", "license"):
        if names := getattr(chosen, column):
            select_documents_by_label(ledger, column, names)  # raises for a name that no document has
            where.append(DocumentSelection(column, tuple(names)).build_sql_condition_without_copies())
    if not chosen.document:
        return ledger.select_rows(sa.select(*COLUMNS).where(*where).order_by(c.key))
    fitting = c.fate.in_((*REMOVABLE_FATES, REMOVED_FATE))
    keys = sorted({key for name in chosen.document for key in find_keys_of_unique_document(ledger, name, fitting)})
    parts = [keys[start : start + AT_ONCE] for start in range(0, len(keys), AT_ONCE)]
    return [row for part in parts for row in ledger.select_rows(sa.select(*COLUMNS).where(*where, c.key.in_(part)))]


def _known(names: Sequence[str], noun: str, rows: Iterable[Mapping[str, Any]]) -> set[str]:
    known = {row["name"] for row in rows}
    for name in names:
        if name not in known:
            raise make_unknown_value_error(noun, name, known)
    return set(names)


def _refuse_unknown_facts(rows: Sequence[Mapping[str, Any]], change: NewLabels) -> None:
    if change.group in ("url-host", "conversation") and not any((row["facts"] or {}).get(change.group) for row in rows):
        what = {"url-host": "url", "conversation": "conversation_id"}[change.group]
        raise InputError(
            "data.no_grouping_key",
            "none of the {documents:,} selected documents has a known {key}: their rows have no {key}, or an older factory did not keep the "
            "value. Group by 'document', 'source' or 'path'. Or remove the documents and ingest rows that have {key!r}",
            documents=len(rows),
            key=what,
        )


def _changed(row: Mapping[str, Any], change: NewLabels, policy: DataPolicy) -> dict[str, Any]:
    """Return the columns of a document that change, with their new values."""
    new: dict[str, Any] = {}
    source = row["source"] if change.source is None else change.source or None
    if change.domain is not None:
        new["domain"] = change.domain
    if change.source is not None:
        new["source"] = source
    if change.license is not None:
        new["license"] = _licence(change.license)
        new["releasable"] = policy.licences.find_licence(new["license"]).release
    kind = change.group or _kind_of(row)
    if kind is not None:
        new["group_key"] = _group(kind, source, row)
    return {name: value for name, value in new.items() if value != row[name]}


def _group(kind: GroupKind, source: str | None, row: Mapping[str, Any]) -> str | None:
    return make_group_name(kind, source, row["facts"] or {}, row["key"].partition(":")[0])


def _kind_of(row: Mapping[str, Any]) -> GroupKind | None:
    """Return the kind of group that gave a document its group key; None if the document is a group of its own.

    A new source changes the keys of some kinds.
    """
    if row["group_key"] is None:
        return None
    return next((kind for kind in KINDS if _group(kind, row["source"], row) == row["group_key"]), None)


# -- held-out documents ------------------------------------------------------------------------------------------------
def _trained_groups(
    ledger: Ledger, rows: Sequence[Mapping[str, Any]], changed: Mapping[str, Mapping[str, Any]]
) -> set[str]:
    """Return the new groups that contain a training document. A held-out document of such a group is held out as a group of its own."""
    names = {new["group_key"] for new in changed.values() if new.get("group_key")}
    found = {
        changed[row["key"]]["group_key"]
        for row in rows
        if row["token_shard"] and row["key"] in changed and "group_key" in changed[row["key"]]
    }
    some = sa.select(c.group_key).where(c.token_shard.is_not(None))
    for name in sorted(names - found):
        mine = ledger.select_rows(some.add_columns(c.key).where(c.group_key == name))
        if any(changed.get(row["key"], {}).get("group_key", name) == name for row in mine):
            found.add(name)
    return found & names


def _held(
    ledger: Ledger, changed: Mapping[str, Mapping[str, Any]], trained: set[str], said: list[str]
) -> dict[str, dict[str, Any]]:
    """Return, for each key, the columns of ``held_out`` that change, with their new values.

    A line about the halves of the new groups is added to ``said``.
    """
    h = held_out.c
    listed = sa.select(h.key, h.domain, h.group_key, h.sealed, c.fate, c.content_sha256)
    listed = listed.join(documents, c.key == h.key)
    old = {row["key"]: row for row in ledger.select_rows(listed)}
    new = {key: dict(row) for key, row in old.items()}
    for key in old.keys() & changed.keys():
        if "domain" in changed[key]:
            new[key]["domain"] = changed[key]["domain"]
        if "group_key" in changed[key]:
            name = changed[key]["group_key"]
            new[key]["group_key"] = key if name is None or name in trained else name
    regrouped = {new[key]["group_key"] for key in old if new[key]["group_key"] != old[key]["group_key"]}
    came, last_read = _came(ledger), _last_read(ledger)
    unread = {key for key in old if came.get(key.partition(":")[0], 0) > last_read}
    _deal(new, regrouped, unread, said)
    names = ("domain", "group_key", "sealed")
    found = {key: {n: new[key][n] for n in names if new[key][n] != old[key][n]} for key in sorted(old)}
    return {key: values for key, values in found.items() if values}


def _deal(held: Mapping[str, dict[str, Any]], regrouped: set[str], unread: set[str], said: list[str]) -> None:
    """Set ``sealed`` of the documents in the groups ``regrouped``. ``unread``: keys of documents that nothing has read."""
    members: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in held.values():
        members[row["group_key"]].append(row)
    kept = {name: [row for row in members[name] if row["key"] not in unread] for name in regrouped}
    for name in regrouped:
        if kept[name]:
            half = all(row["sealed"] for row in kept[name])  # one document of the dev half makes the whole group dev
            for row in members[name]:
                row["sealed"] = half
    dealt = [name for name in regrouped if not kept[name]]
    more: Counter[str] = Counter()  # by domain, groups in the sealed half minus groups in the dev half
    for name, rows in members.items():
        if name not in dealt:
            for domain in {row["domain"] for row in rows if row["fate"] != REMOVED_FATE}:
                more[domain] += 1 if rows[0]["sealed"] else -1
    unit = {
        name: name_held_out_draw_unit(None if name in held else name, members[name][0]["content_sha256"] or name)
        for name in dealt
    }
    for name in sorted(dealt, key=lambda name: (unit[name], name)):
        domains = {row["domain"] for row in members[name]}
        balance = sum(more[domain] for domain in domains)
        half = goes_to_sealed_half_on_tie(unit[name]) if balance == 0 else balance < 0
        for row in members[name]:
            row["sealed"] = half
        for domain in domains:
            more[domain] += 1 if half else -1
    if regrouped:
        said.append(
            Message(
                "data.halves",
                "the held-out documents form {groups:,|group|groups}. {dealt:,|group was|groups were} never read and are distributed "
                "over the dev half and the sealed half. {kept:,|group was|groups were} read before and stay in the same half",
                groups=len(regrouped),
                dealt=len(dealt),
                kept=len(regrouped) - len(dealt),
            )
        )


def _last_read(ledger: Ledger) -> int:
    """Return the number of the newest event of a reader of held-out documents; 0 if there is none. A number, because a clock may go back."""
    sql = f"""SELECT MAX(id) AS id FROM events WHERE kind IN ({", ".join(map(repr, READING))})
        OR kind = 'segment_planned' AND subject IN (SELECT 'segment:' || id FROM segments WHERE kind = 'average')"""
    return int(ledger.read(sql)[0]["id"] or 0)


def _came(ledger: Ledger) -> dict[str, int]:
    """Return, for the first 16 digits of each shard's SHA-256, the number of the event that recorded its ingest."""
    rows = ledger.read("SELECT subject, MAX(id) AS id FROM events WHERE kind = 'ingested' GROUP BY subject")
    return {row["subject"].removeprefix("shard:"): int(row["id"]) for row in rows}


# -- training documents ------------------------------------------------------------------------------------------------
def _moved(ledger: Ledger, rows: Sequence[Mapping[str, Any]], domain: str | None) -> dict[str, dict[str, str]]:
    """Return, for each token shard, the rows (by domain) whose domain after the change differs from the one in the token shard."""
    of: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row["token_shard"]:
            of[row["token_shard"]].add(row["key"])
    found = {}
    for row in ledger.select_rows(sa.select(token_shards)):
        if row["id"] not in of:
            continue
        try:
            keys = TokenShard(row["path"]).documents["key"].to_pylist()
        except (TokenShardError, OSError) as error:
            raise InputError(
                "data.token_shard",
                "{error}. Nothing was changed. To make the token shard again: 'factory check --repair'",
                error=error,
            ) from error
        now = {number: name for name, text in (row["moved"] or {}).items() for number in parse_row_ranges(text)}
        now |= {number: str(domain) for number, key in enumerate(keys) if key in of[row["id"]]}
        found[row["id"]] = {
            name: format_row_ranges(number for number, other in now.items() if other == name)
            for name in sorted(set(now.values()))
        }
    return found


# -- what follows ------------------------------------------------------------------------------------------------------
def _say(plant: Plant, policy: DataPolicy, rows: Sequence[Mapping[str, Any]], found: PlannedRelabelling) -> None:
    change, said = found.change, found.lines
    fates = Counter(FATES.get(row["fate"], row["fate"]) for row in rows if row["key"] in found.documents)
    first = Message(
        "data.relabels",
        "{changed:,} of {selected:,|selected document|selected documents} get new labels ({fates})",
        changed=len(found.documents),
        selected=found.selected,
        fates=[f"{count:,} {fate}" for fate, count in sorted(fates.items())],
    )
    said.insert(0, first)
    domains = {change.domain} if change.domain is not None else {row["domain"] for row in rows}
    if change.group is not None:
        groups = {found.documents.get(row["key"], row).get("group_key", row["group_key"]) or row["key"] for row in rows}
        said.append(
            Message(
                "data.groups",
                "the documents are grouped by {kind}: {groups:,|group|groups}",
                kind=change.group,
                groups=len(groups),
            )
        )
        others = sorted(
            domain
            for domain in domains
            if policy.find_domain_rules(domain).group not in (change.group, _same(change.group))
        )
        said += [
            Message(
                "data.policy_groups_otherwise",
                "data.yaml groups the domain {domain} by {old}. To group later documents in the new way, write 'group: {new}' in "
                "data.yaml",
                domain=domain,
                old=policy.find_domain_rules(domain).group,
                new=change.group,
            )
            for domain in others
        ]
    if found.held:
        said.append(
            Message(
                "data.suite_changes",
                "the held-out suite changes: the factory measures the champion again before it compares the next candidate",
            )
        )
    if found.token_shards:
        said += _refuse_or_say_plans(plant, rows, found)


def _same(kind: str) -> str:
    """Return the other name of a kind of group: 'document' and 'none' mean the same."""
    return {"document": "none", "none": "document"}.get(kind, kind)


def _refuse_or_say_plans(plant: Plant, rows: Sequence[Mapping[str, Any]], found: PlannedRelabelling) -> list[str]:
    """Lines for a person about later data plans. Raises: InputError if no data plan can be made after the change."""
    recipe = load_recipe(plant.workspace)
    other, gone = str(found.change.domain), {row["key"] for row in rows}
    trained = sa.select(c.key).where(c.token_shard.is_not(None))
    held = {
        row["domain"]
        for row in plant.ledger.select_rows(sa.select(c.domain).where(c.token_shard.is_not(None)).distinct())
    } | {other}
    for domain in {row["domain"] for row in rows} - {other}:
        if all(
            row["key"] in gone
            for row in plant.ledger.select_rows(trained.where(c.domain == domain).limit(len(gone) + 1))
        ):
            held.discard(domain)  # all its training documents get the new domain
    try:
        plan = DataPlan.make_for_segment(recipe.mixture, "trunk", [("a", "a", 0)], recipe.seed)
        plan.copy_without_missing_domains(held, 0, recipe.schedule.trunk_steps.first)
    except DataPlanError as error:
        raise InputError(
            "data.no_plan_left",
            "with this change, no segment could be planned with the recipe {recipe}: {error}. Nothing was changed. First give the "
            "domain {domain!r} a weight under mixture.weights",
            recipe=recipe.name,
            error=error,
            domain=other,
        ) from error
    said: list[str] = []
    if not recipe.mixture.weights.get(other, recipe.mixture.weights.get("*")):
        said.append(
            Message(
                "data.domain_without_weight",
                "the recipe {recipe} gives the domain {domain} no weight. To train on the domain, give it a "
                "weight under mixture.weights",
                recipe=recipe.name,
                domain=other,
            )
        )
    ids = set(found.token_shards)
    planned = SegmentRow.find_first(plant.ledger, "WHERE state = 'planned' ORDER BY id")
    if planned and ids & {shard["id"] for shard in read_data_plan(plant.ledger, planned)["token_shards"]}:
        said.append(
            Message(
                "data.planned_with_old_labels",
                "segment {segment} is planned already, with the old labels. To plan the segment again: 'factory rewind {segment}'",
                segment=planned.id,
            )
        )
    said.append(
        Message(
            "data.order_begins_anew",
            "later segments read the documents in their new domain. In the new domain and in the old domains, the data order starts "
            "from the beginning",
        )
    )
    return said
