"""Planning in a real ledger: token shards of made-up documents, a recipe that is changed, what was said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import yaml

from factory.core.workspace import Workspace
from factory.ledger.ledger import Ledger, events, shards, token_shards
from factory.training.planning import load_recipe
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard

STEP = 8 * 32  # positions of the tiny recipe's step


def ingested(workspace: Workspace, ledger: Ledger, **positions: int) -> None:
    """A token shard in the ledger with documents of about so many positions in each domain."""
    rng = np.random.default_rng(len(ledger.select_rows(sa.select(token_shards))))
    made = []
    domains: dict[str, dict[str, int]] = {}
    for domain, wanted in positions.items():
        for i in range(wanted // 20):
            ids = rng.integers(0, 512, 21, dtype=np.uint32)
            key = f"{domain}-{i}-{ids[0]}"
            made.append(TokenizedDocument(key, key, domain, "s", "MIT", ids, np.ones(21, np.bool_)))
        domains[domain] = {"documents": wanted // 20, "tokens": wanted, "supervised_tokens": wanted}
    shard = write_token_shard(workspace.shards, made, vocab_size=512, tokenizer_sha256="k")
    with ledger.begin() as tx:
        common: dict[str, Any] = {"domains": domains, "tokens": sum(len(d.tokens) for d in made)}
        tx.execute(
            shards.insert().values(
                sha256=shard.id, name="s", path="s", bytes=1, state="ingested", ingested_at=1.0, **common
            )
        )
        tx.execute(
            token_shards.insert().values(
                id=shard.id,
                shard=shard.id,
                path=str(shard.path),
                tokenizer="k",
                documents=len(made),
                created_at=1.0,
                **common,
            )
        )


def change_recipe(workspace: Workspace, **parts: dict[str, Any]) -> None:
    path = Path(workspace.root) / "policies" / "recipes" / "tiny.yaml"
    raw = yaml.safe_load(load_recipe(workspace).model_dump_json())
    for part, changes in parts.items():
        raw[part] |= changes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(raw))


def last_event(ledger: Ledger) -> dict[str, Any]:
    row = ledger.select_first(
        sa.select(events).where(events.c.kind == "segment_planned").order_by(events.c.id.desc()).limit(1)
    )
    assert row is not None
    return dict(row["detail"])
