"""``python -m benchmarks.training.opened_documents``: what a rank pays for the documents of its data plan.

Makes token shards of a million documents (the last may be smaller) and opens the data order of 10⁵, 10⁶ and 10⁷ documents, each in a fresh
process. Prints the seconds until the order is open and checked, and until the first batch; the time of a batch; and the anonymous memory of the
process (``RssAnon``), which ranks do not share. Pages of mapped files are shared, and are printed apart (``RssFile``).

Token ids are zeros that fill no disk, so that 10⁸ documents need some 15 GB. All other files are as ``write_token_shard`` leaves them.

    python -m benchmarks.training.opened_documents
    python -m benchmarks.training.opened_documents --documents 100000000 --folder /data/many --masked 1000
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.batch import make_batch
from trainer.contract.data.data_order import DataOrder, list_document_keys
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.token_shard import TokenShard, hash_file
from trainer.contract.plan.feasibility import refuse_impossible_run
from trainer.contract.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "policies" / "recipes" / "demo.yaml"
DOCUMENTS = (10**5, 10**6, 10**7)
A_SHARD = 10**6
BATCHES = 50
DOMAINS = ("code", "docs", "web")
LONGEST = 600  # tokens of a document, 2 to this many


@dataclass(frozen=True)
class OpenedCost:
    """Of one process that opened the data order of so many documents."""

    documents: int
    shards: int
    masked: int
    opened_s: float  # the data order is open
    checked_s: float  # and the plan is known to feed the steps
    first_batch_s: float
    batch_ms: float  # median of the batches after
    keys_ms: float  # the keys of the documents of one batch
    private_mib: float  # anonymous memory that opening and the batches added
    mapped_mib: float  # pages of files that the process touched, which all ranks share


def make_shard(parent: Path, number: int, documents: int) -> Path:
    """A token shard of random lengths and three domains, as ``write_token_shard`` lays it out; its token ids are a hole in the file."""
    marker = parent / f"made-{number}-{documents}"
    if marker.exists():
        return parent / marker.read_text()
    rng = np.random.default_rng(number)
    length = rng.integers(2, LONGEST, documents)
    start = np.concatenate(([0], np.cumsum(length)[:-1]))
    tokens = int(length.sum())
    aside = parent / f".made-{number}"
    aside.mkdir(parents=True)
    for name, size in (("tokens.bin", 2 * tokens), ("loss_mask.bin", (tokens + 7) // 8)):
        with open(aside / name, "wb") as file:
            file.truncate(size)
    prefix = hashlib.sha256(str(number).encode()).hexdigest()[:16]
    keys = [f"{prefix}:{row}" for row in range(documents)]
    domain = pa.DictionaryArray.from_arrays(pa.array(rng.integers(0, len(DOMAINS), documents)), list(DOMAINS))
    table = {"key": pa.array(keys), "id": pa.array([f"document-{key}" for key in keys]), "start": pa.array(start)}
    table |= {"length": pa.array(length), "supervised_tokens": pa.array(length), "domain": domain.cast(pa.string())}
    table |= {name: pa.array([text] * documents) for name, text in (("source", "a source of text"), ("license", "MIT"))}
    pq.write_table(pa.table(table), aside / "documents.parquet")
    counts = {"documents": documents, "tokens": tokens, "supervised_tokens": tokens}
    files = {"documents.parquet": hash_file(aside / "documents.parquet")} | dict.fromkeys(
        ("tokens.bin", "loss_mask.bin"), "0" * 64
    )
    manifest = {"format": 1, "dtype": "<u2", "vocab_size": 512, "tokenizer_sha256": "", "files": files} | counts
    encoded = json.dumps(manifest, sort_keys=True, indent=1).encode()
    (aside / "manifest.json").write_bytes(encoded)
    found = aside.rename(parent / hashlib.sha256(encoded).hexdigest()[:32])
    marker.write_text(found.name)
    return found


def make_shards(parent: Path, documents: int) -> list[Path]:
    sizes = [A_SHARD] * (documents // A_SHARD) + [documents % A_SHARD] * (documents % A_SHARD > 0)
    return [make_shard(parent, number, size) for number, size in enumerate(sizes)]


def make_plan(recipe: Recipe, shards: list[Path], masked: int) -> DataPlan:
    mixture = recipe.mixture.model_copy(update={"weights": {"*": 1.0}, "phases": []})
    plan = DataPlan.make_for_segment(mixture, "trunk", [(path.name, str(path), 0) for path in shards], recipe.seed)
    step = max(1, len(shards) * A_SHARD // masked) if masked else 1
    keys = []
    for number in range(masked):
        shard, row = divmod(number * step, A_SHARD)
        if shard < len(shards) and row < TokenShard(shards[shard]).manifest["documents"]:
            keys.append(f"{hashlib.sha256(str(shard).encode()).hexdigest()[:16]}:{row}")
    return plan.copy_with_masked_documents(keys)


def read_memory(key: str) -> float:
    """A line of this process's status, in MiB."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def measure(recipe: Recipe, plan: DataPlan, documents: int) -> OpenedCost:
    """In this process."""
    anonymous, mapped, began = read_memory("RssAnon"), read_memory("RssFile"), time.perf_counter()
    order = DataOrder(plan, context=recipe.model.context, batch=recipe.batch, vocab_size=recipe.model.vocab_size)
    opened = time.perf_counter()
    refuse_impossible_run(order, recipe, 0, 100)
    checked = time.perf_counter()
    make_batch(order)
    first = time.perf_counter()
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        batch = make_batch(order)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    list_document_keys(order, batch.rows)
    keys = time.perf_counter() - start
    return OpenedCost(
        documents=documents,
        shards=len(plan.token_shards),
        masked=len(plan.masked),
        opened_s=opened - began,
        checked_s=checked - began,
        first_batch_s=first - checked,
        batch_ms=statistics.median(times) * 1e3,
        keys_ms=keys * 1e3,
        private_mib=read_memory("RssAnon") - anonymous,
        mapped_mib=read_memory("RssFile") - mapped,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.opened_documents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--documents", type=int, action="append", help=f"default: {', '.join(map(str, DOCUMENTS))}")
    parser.add_argument("--masked", type=int, default=0, help="number of documents that the plan masks")
    parser.add_argument("--folder", type=Path, help="where the shards are made and kept; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="print the measurements as a JSON list")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)  # a fresh process
    asked = parser.parse_args(arguments)
    recipe = Recipe.load(RECIPE)
    if asked.plan is not None:
        print(json.dumps(asdict(measure(recipe, DataPlan.from_json(asked.plan.read_text()), asked.documents[0]))))
        return 0
    found = []
    with tempfile.TemporaryDirectory(prefix="opened-documents-") as scratch:
        folder = asked.folder or Path(scratch)
        folder.mkdir(exist_ok=True)
        for documents in asked.documents or DOCUMENTS:
            plan = make_plan(recipe, make_shards(folder, documents), asked.masked)
            written = Path(scratch) / "plan.json"
            written.write_text(plan.to_json())
            command = [sys.executable, "-m", "benchmarks.training.opened_documents", "--plan", str(written)]
            for _ in range(2):  # the first makes columns.bin, where it is missing, and warms the page cache
                done = subprocess.run(
                    [*command, "--documents", str(documents)], cwd=ROOT, check=True, capture_output=True, text=True
                )
                found.append(OpenedCost(**json.loads(done.stdout)))
    if asked.json:
        print(json.dumps([asdict(cost) for cost in found], indent=1))
        return 0
    print(
        f"{'documents':>12}{'shards':>8}{'masked':>8}{'opened':>10}{'checked':>10}{'1st batch':>11}{'a batch':>10}{'keys':>11}"
        f"{'private':>13}{'mapped':>13}"
    )
    for cost in found:
        print(
            f"{cost.documents:>12,}{cost.shards:>8,}{cost.masked:>8,}{cost.opened_s:>8.2f} s{cost.checked_s:>8.2f} s"
            f"{cost.first_batch_s * 1e3:>8.1f} ms{cost.batch_ms:>7.2f} ms{cost.keys_ms:>8.1f} ms{cost.private_mib:>9.1f} MiB"
            f"{cost.mapped_mib:>9.1f} MiB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
