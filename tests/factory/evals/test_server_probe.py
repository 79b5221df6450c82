"""The probe of the server in its own process, on a real export of each family, and the code that it must never load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from factory.evals.parity import _logits, _server, _smoke
from factory.evals.probes import server
from factory.evals.probes.server import ProbeAnswer, run_transformers_probe
from factory.evals.reference_model import ReferenceModel
from factory.ingest.tokenizer import Tokenizer, train_tokenizer
from tests.support.factory.exports import FAMILIES, VOCAB, corpus, save_export, tiny_model
from tests.support.messages import says

IDS = list(range(3, 60))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = (document.content["text"] for document in corpus() if "text" in document.content)
    return train_tokenizer(texts, VOCAB, tmp_path_factory.mktemp("tokenizer"))


def ask(export: Path) -> ProbeAnswer:
    request: dict[str, Any] = {
        "export": str(export), "texts": ["def f(): pass"], "chats": [], "waiting": [], "tools": [], "logits_of": IDS, "generate": IDS[:8],
        "stop_ids": [0, 2], "max_new_tokens": 12, "memory_mib": 8192,
    }  # fmt: skip
    return run_transformers_probe(request, 120)


@pytest.mark.slow("a server for each family; tests/factory/gates/test_release_gate.py asks one of the first")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_served_with_the_evaluators_logits_and_stops(
    tmp_path: Path, tokenizer: Tokenizer, family: str
) -> None:
    export = save_export(tiny_model(7, family), tmp_path, tokenizer)
    served = ask(export)
    assert not served.problem, served.problem
    for check in (_logits(ReferenceModel.load(export), IDS, served), _smoke(served)):
        assert check.ok, check
    assert all(len(ids) == 3 and ids[-1] == int(stop) for stop, ids in served.answer["stopped"].items())


@pytest.mark.parametrize(
    "changes",
    [{"architectures": ["PhiForCausalLM"], "model_type": "phi"}, {"architectures": ["Evil"]}],
    ids=str,
)
@pytest.mark.slow("transformers in a process of its own")
def test_no_other_class_is_loaded_and_no_code_of_the_export_is_run(
    tmp_path: Path, tokenizer: Tokenizer, changes: dict[str, Any]
) -> None:
    export, marker = save_export(tiny_model(), tmp_path / "export", tokenizer), tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n"
    (export / "modeling.py").write_text(code)
    config = json.loads((export / "config.json").read_text())
    config |= changes | {"auto_map": {"AutoModelForCausalLM": "modeling.Evil", "AutoTokenizer": "modeling.Evil"}}
    (export / "config.json").write_text(json.dumps(config))
    served = ask(export)
    assert "no known architecture" in served.problem, served.problem
    assert not marker.exists() and served.logits_TV is None


def test_a_time_limit_is_not_held_against_the_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real process that never ends, tried twice; the checks that it was for could not be made."""
    endless = tmp_path / "endless.py"
    endless.write_text("import time\nwhile True: time.sleep(1)\n")
    monkeypatch.setattr(server, "PROBE", endless)
    monkeypatch.setattr(server, "AGAIN", 2)
    served = run_transformers_probe({}, 1)
    assert (
        served.out_of_time
        and says(served.problem, ("server.late", {"seconds": 2}))
        and "probe_seconds" in served.problem
    )
    nothing: Any = None
    checks = [*_server(nothing, nothing, [], served), _smoke(served)]
    assert [check.ok for check in checks] == [None] * 9 and says(checks[-1].detail, ("server.late", {"seconds": 2}))
    refused = ProbeAnswer({}, None, "exit 1: no known architecture")
    assert [check.ok for check in _server(nothing, nothing, [], refused)] == [False] * 8
