"""``factory demo --from`` with a small random model of transformers: killed while it trains, then every step by the command, and again at its end."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from factory.core.errors import InputError
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.demo.import_demo import OPENING, QUESTION, _ask
from factory.demo.import_demo_size import LEAST_ANNEAL, LEAST_TRUNK, check_continuing_minutes, plan_continuing
from factory.ledger.ledger import Ledger
from factory.ledger.rows import SegmentRow
from factory.ledger.status import read_status
from factory.presets.imported_workspace import ImportOptions, make_imported_workspace
from factory.training.planning import read_data_plan
from kernels.contract.message import Message
from tests.support.factory.command import Running, factory
from tests.support.factory.own_data import passages
from tests.support.patience import PATIENCE_S
from tests.support.tokenizers.families import FAMILIES
from tests.support.trainer.public_model import save_public_model


@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.long("imports, trains, measures, judges, serves and exports a model: four minutes of a busy core")
def test_a_small_model_goes_through_the_whole_demo(tmp_path: Path) -> None:
    source, home = tmp_path / "public", tmp_path / "demo"
    source.mkdir()
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_public_model(source, [one.text for one in passages()[::2]], vocab_size=1024, **sizes)
    words = ("demo", "--from", str(source), "--minutes", "1", "-w", str(home))
    killed = Running(*words, log=tmp_path / "killed.log")
    trains = lambda: any(file.stat().st_size for file in home.glob("segments/*-trunk/metrics.jsonl"))
    try:
        while not trains() and killed.poll() is None:
            time.sleep(0.05)
    finally:
        killed.kill()
    killed.wait()
    assert trains(), killed.log.read_text()[-3000:]
    done = factory(*words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    workspace = Workspace.open(home)
    facts = read_status(workspace)
    assert [row["kind"] for row in facts["segments"]] == ["import", "trunk", "anneal"]
    zero, new = facts["candidates"]
    before, after = (json.loads(json.dumps(one["summary"]["bpb"])) for one in (zero, new))
    assert before.keys() == after.keys() == {"docs", "english", "untrained-english"}
    for domain in ("docs", "english"):
        assert after[domain] < before[domain], "a random model gains by any training"
    assert new["verdict"]["outcome"] in ("promote", "hold"), new["verdict"]
    for number in (*before.values(), *after.values()):
        assert f"{number:.4f}" in done.stdout, "the table has the ledger's numbers"
    ledger = Ledger.open(workspace.ledger_url, workspace.root)
    plans = [read_data_plan(ledger, SegmentRow.get(ledger, number))["weights"] for number in (2, 3)]
    assert [set(weights) for weights in plans] == 2 * [{"docs", "english"}], "no batch has the third domain"
    assert (home / "cache" / "import-demo-losses.txt").read_text() in done.stdout.replace("\n  ", "\n")

    again = factory(*words)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert read_status(Workspace.open(home))["segments"] == facts["segments"], "a finished demo trains nothing"


@pytest.mark.slow("imports a model and starts a server")
@pytest.mark.parametrize("template", [True, False])
def test_the_served_model_is_asked_as_its_tokenizer_allows(
    template: bool, tmp_path: Path, code_repository: Path
) -> None:
    """A model without a chat template, such as most base models, continues a text."""
    source, texts = tmp_path / "public", [one.text for one in passages()[::4]]
    source.mkdir()
    save_public_model(source, texts, vocab_size=1536)
    (source / "chat_template.jinja").unlink()  # of another tokenizer
    family = FAMILIES["llama3"] if template else replace(FAMILIES["llama3"], template=None)
    shutil.copytree(family.write(tmp_path / "tokenizer", texts), source, dirs_exist_ok=True)
    facts = make_imported_workspace(tmp_path / "factory", ImportOptions(source), code_repository, SILENT)
    asked, *_ = _ask(Workspace.open(Path(facts["workspace"])))
    assert isinstance(asked, Message) and asked.data["question"] == (QUESTION if template else OPENING)


def test_the_steps_fill_the_minutes_and_keep_a_least_number() -> None:
    fitting = plan_continuing(15, spent=150, start=5, step=2.0, step_tokens=2048)
    assert fitting.trunk > fitting.anneal > LEAST_ANNEAL and abs(fitting.seconds - 900) <= 2.0
    slow = plan_continuing(15, spent=600, start=20, step=60.0, step_tokens=2048)
    assert (slow.trunk, slow.anneal) == (LEAST_TRUNK, LEAST_ANNEAL) and slow.seconds > 900
    fast = plan_continuing(60, spent=60, start=1, step=0.01, step_tokens=2048)
    assert fast.trunk + fast.anneal == 400 and fast.seconds < 120


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), 1e9])
def test_minutes_out_of_range_are_refused(minutes: float) -> None:
    with pytest.raises(InputError) as error:
        check_continuing_minutes(minutes)
    assert error.value.code == "import_demo_size.minutes"
