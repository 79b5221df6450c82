from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.trainer.segments import TINY, MakeShard, plan_of, recipe_with, write_spec
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.packing import STRATEGIES
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard
from trainer.tools.packing_report import PackingReport, main, measure_all_packings, measure_packing


def shard_of(folder: Path, lengths: list[int]) -> Path:
    """A token shard of one domain; documents of so many positions."""
    documents = [
        TokenizedDocument(str(i), str(i), "code", "s", "", np.ones(n + 1, np.uint32), np.ones(n + 1, bool))
        for i, n in enumerate(lengths)
    ]
    return write_token_shard(folder, documents, vocab_size=512, tokenizer_sha256="t").path


def found_in(folder: Path, lengths: list[int], steps: int, rows: int, context: int) -> dict[str, PackingReport]:
    from trainer.contract.data.token_shard import TokenShard

    recipe = recipe_with(model__context=context, batch__sequences=rows)
    plan = plan_of(TokenShard(shard_of(folder, lengths)), weights={"*": 1.0}, max_epochs=1)
    return {report.packing: report for report in measure_all_packings(plan, recipe, steps)}


def test_shares_equal_those_of_data_with_known_packing(tmp_path: Path) -> None:
    """40 documents of 3/4 of a row: alone in it, or end to end in three quarters as many."""
    found = found_in(tmp_path, [24] * 40, steps=5, rows=4, context=32)
    for packing in ("document", "token-budget", "length-bucketed", "best-fit"):
        report = found[packing]
        assert (report.steps, report.positions, report.used) == (5, 5 * 4 * 32, 5 * 4 * 24)
        assert report.padding_share == pytest.approx(0.25) and report.used_share == pytest.approx(0.75)
        assert report.cut_document_share == report.cut_token_share == report.cross_document_share == 0
        assert report.largest_document_share == pytest.approx(1 / 4)
        assert report.length_spread == 0
    run_on = found["truncate-and-concatenate"]
    # 24 8|16 16|8 24 and again: of four documents two are cut; 27 are begun, and the last is cut too
    assert run_on.padding_share == 0 and run_on.cross_document_share == 1
    assert run_on.cut_document_share == pytest.approx(14 / 27)
    assert run_on.largest_document_share == pytest.approx(24 / 128)


def test_long_documents_are_recut_and_not_counted_as_cut(tmp_path: Path) -> None:
    # two of 20 share no row of 32; documents of 64 are cut in the middle anyway, and fill the gaps of 12
    found = found_in(tmp_path, [20] * 150 + [64] * 75, steps=20, rows=8, context=32)
    best = found["best-fit"]
    assert best.cut_document_share == best.cut_token_share == 0
    assert best.padding_share < 0.01 and best.recut_piece_share > 0
    assert found["token-budget"].recut_piece_share == 0 and found["token-budget"].padding_share > 0.1


def test_shares_equal_a_manual_count(make_shard: MakeShard) -> None:
    recipe = recipe_with(batch__packing="truncate-and-concatenate")
    plan = plan_of(make_shard())
    order = DataOrder(plan, context=32, batch=recipe.batch, vocab_size=512)
    before = order.state_dict()
    report = measure_packing("truncate-and-concatenate", order, 10)
    assert order.state_dict() == before
    fits = lambda p: p.document_positions <= 32
    steps = [order.draw_next_rows() for _ in range(10)]
    parts: Counter[tuple[str, int]] = Counter()
    begun: set[tuple[str, int]] = set()
    for row in (row for rows in steps for row in rows):
        for piece in filter(fits, row):
            if piece.start == 0:
                begun.add((piece.stream, piece.document))
            parts[piece.stream, piece.document] += 1
    unfinished = {(p.stream, p.document) for p in order.pending if p.start % 32 and fits(p)}
    cut = {document for document, count in parts.items() if count > 1} | unfinished
    assert report.cut_document_share == pytest.approx(len(cut) / len(begun))


def test_the_command_reads_a_segment_or_a_recipe_and_shards(
    tmp_path: Path, make_shard: MakeShard, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = make_shard(counts={"code": 300, "docs": 100})
    folder = write_spec(tmp_path / "segment", plan_of(shard, weights={"code": 0.7, "docs": 0.3}))
    assert main([str(folder), "--steps", "7"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in STRATEGIES)
    assert main([str(TINY), str(shard.path.parent), "--steps", "7", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [(r["packing"], r["steps"]) for r in json.loads(out)] == [(name, 7) for name in STRATEGIES]
    assert "domains are left out" in err and err.rstrip().endswith(": chat")
    assert main([str(tmp_path)]) == 2 and "error[plan.no_spec]" in capsys.readouterr().err
    assert main([str(TINY)]) == 2 and "error[trainer.not_a_segment]" in capsys.readouterr().err
    assert (
        main([str(TINY), str(tmp_path / "segment")]) == 2 and "error[trainer.no_token_shard]" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "RECIPE.yaml SHARD" in capsys.readouterr().out
