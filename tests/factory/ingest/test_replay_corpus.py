"""Documents that stand for what an imported model knew: ingested once as a domain of their own, repeated in training, and a guard."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import sqlalchemy as sa
import yaml

from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.duties.duty import DutyState
from factory.duties.upkeep import INGEST_REPLAY
from factory.evals.evaluator import evaluate_candidate
from factory.ingest.chain import ingest_shard
from factory.ingest.inbox import ingest_and_move
from factory.ingest.replay_corpus import find_waiting_replay_corpus, ingest_replay_corpus
from factory.ingest.rules.policy import REPLAY_DOMAIN
from factory.ledger.ledger import Ledger, documents
from factory.ledger.plant import Plant
from factory.ledger.rows import EvaluationRow, SegmentRow
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.synthetic.generating import GenerationRequest, generate_shard, plan_generation
from factory.training.planning import forecast_trunk, load_recipe, plan_trunk, read_data_plan
from tests.support.factory.made_up_text import prose
from tests.support.killed_at import killed_at
from tests.support.messages import refused
from tests.support.trainer.public_model import save_public_model

CODE = "def f{n}(a):\n    b{n} = a + {n}\n    return b{n} * {n}\n"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Old documents in three formats. One names a domain of its own, which counts no more."""
    folder = tmp_path_factory.mktemp("replay") / "old"
    (folder / "texts").mkdir(parents=True)
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(prose(number))
    rows = [{"text": prose(100 + n), "domain": "wiki", "license": "MIT"} for n in range(40)]
    with gzip.open(folder / "wiki.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    (folder / "program.py").write_text("".join(CODE.format(n=n) for n in range(20)))
    (folder / "picture.png").write_bytes(b"no text")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "small"
    folder.mkdir()
    save_public_model(folder, [prose(i) for i in range(60)])
    return folder


@pytest.fixture
def plant(tmp_path: Path, model: Path, old: Path, code_repository: Path) -> Plant:
    options = ImportOptions(model, context=64, replay=old)
    facts = make_imported_workspace(tmp_path / "factory", options, code_repository, SILENT)
    workspace = Workspace.open(Path(facts["workspace"]))
    return Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root))


def fates(plant: Plant) -> dict[tuple[str, str], int]:
    c = documents.c
    query = sa.select(c.domain, c.fate, sa.func.count().label("n")).group_by(c.domain, c.fate)
    return {(row["domain"], row["fate"]): row["n"] for row in plant.ledger.select_rows(query)}


def write_new_data(plant: Plant, tmp_path: Path) -> Path:
    path = tmp_path / "new.jsonl"
    rows = [{"text": prose(1000 + n), "domain": "news", "source": f"s{n}"} for n in range(120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(root: Path) -> Plant:
    workspace = Workspace.open(root)
    return Plant(workspace, Ledger.open(workspace.ledger_url, workspace.root))


def is_due(plant: Plant) -> list[object]:
    return list(INGEST_REPLAY.due(DutyState(plant, plant.ledger)))


def test_a_replay_corpus_is_ingested_once_as_its_own_domain_and_release_0_is_measured_on_it(
    plant: Plant, old: Path, tmp_path: Path
) -> None:
    assert load_recipe(plant.workspace).mixture.weights == {"*": 0.75, REPLAY_DOMAIN: 0.25}
    assert is_due(plant) == [old.resolve()]
    killed_at(20, lambda: ingest_replay_corpus(opened(plant.workspace.root), old), ("replay_corpus.py",))
    assert is_due(plant) == [old.resolve()], "a killed ingest is done again"
    INGEST_REPLAY.do(plant, old)
    assert is_due(plant) == []
    found = fates(plant)
    assert {domain for domain, _ in found} == {REPLAY_DOMAIN}, "also of the row that names another domain"
    assert sum(found.values()) == 40 + 40 + 1 and found[REPLAY_DOMAIN, "held_out"] >= 8
    names = {row["name"] for row in plant.ledger.read("SELECT name FROM shards")}
    assert all(name.startswith("replay-") for name in names), names
    assert ingest_replay_corpus(plant, old) and fates(plant) == found, "a second ingest adds nothing"

    assert forecast_trunk(plant).steps == 0, "the model would learn nothing new"
    with refused("training.only_replay", InputError, domain=REPLAY_DOMAIN):
        plan_trunk(plant)
    ingest_shard(plant, write_new_data(plant, tmp_path))
    recipe = plant.workspace.recipe_path()
    text = yaml.safe_load(recipe.read_text())
    schedule = {"warmup_steps": 1, "trunk_steps": {"first": 2, "later": 2}, "anneal_steps": 1}
    recipe.write_text(yaml.safe_dump(text | {"batch": {"sequences": 4}, "schedule": schedule, "precision": "fp32"}))
    planned = read_data_plan(plant.ledger, SegmentRow.get(plant.ledger, plan_trunk(plant)))
    assert planned["weights"] == {"*": 0.75, REPLAY_DOMAIN: 0.25}
    evaluate_candidate(plant, 1)
    evaluation = EvaluationRow.find_newest(plant.ledger, 1)
    assert evaluation is not None and evaluation.summary["bpb"].keys() == {"news", REPLAY_DOMAIN}


def test_a_replay_corpus_that_is_no_folder_or_holds_no_document_is_refused(
    plant: Plant, model: Path, tmp_path: Path
) -> None:
    with refused("imported_workspace.no_replay", InputError):
        make_imported_workspace(tmp_path / "other", ImportOptions(model, replay=tmp_path / "none"), None, SILENT)
    assert not (tmp_path / "other").exists()
    with refused("imported_workspace.other_replay", InputError):
        make_imported_workspace(plant.workspace.root, ImportOptions(model, replay=tmp_path), None, SILENT)
    policy = plant.workspace.policy_path("data.yaml")
    empty = tmp_path / "empty"
    policy.write_text(yaml.safe_dump(yaml.safe_load(policy.read_text()) | {"replay_corpus": str(empty)}))
    with refused("ingest.no_replay_corpus", InputError):
        ingest_replay_corpus(plant, empty)
    empty.mkdir()
    (empty / "a.png").write_bytes(b"x")
    with refused("ingest.empty_replay_corpus", InputError):
        ingest_replay_corpus(plant, empty)
    assert find_waiting_replay_corpus(plant) == empty.resolve()


@pytest.mark.slow("an engine that writes")
def test_release_0_writes_documents_of_the_domain_replay_from_nothing(plant: Plant) -> None:
    request = GenerationRequest(count=18, tokens=24, temperature=1.0, replay=True)
    made = generate_shard(plant, request, inbox=True)
    rows = [json.loads(line) for line in made.path.read_text().splitlines()]
    assert len(rows) == made.documents == 18 - made.ends.get("empty", 0) > 8
    assert len({row["text"] for row in rows}) == len(rows), "each document has its own seed"
    assert {(row["domain"], row["license"]) for row in rows} == {(REPLAY_DOMAIN, "apache-2.0")}
    assert {row["synthetic_by"].split(" (")[0] for row in rows} == {"release 0"}
    ingest_and_move(plant, Path(made.inbox))
    assert {domain for domain, fate in fates(plant) if fate in ("train", "held_out")} <= {REPLAY_DOMAIN}
    assert (REPLAY_DOMAIN, "held_out") not in fates(plant), "text that a model wrote measures no model"
    with refused("synthetic.replay_options", InputError):
        plan_generation(plant, GenerationRequest(replay=True, domain="news"))
