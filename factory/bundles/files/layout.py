"""Where each thing of a bundle lies, and how much of it is ever read at once."""

from __future__ import annotations

FORMAT = 1  # raised when what a file holds, or the text of a document that follows from others, changes

MODEL = "model"  # the export, as it was judged
FIXTURE = "fixture.json"
POLICY = "evidence/policy.json"
EVIDENCE = "evidence/evidence.json"
VERDICT = "evidence/verdict.json"
ITEMS = "evidence/items.jsonl"
TASK_ITEMS = "evidence/task_items.jsonl"  # where tasks were measured
MEASUREMENTS = "evidence/measurements.json"
HELD_OUT = "evidence/held_out.json"
LICENCES = "evidence/licences.json"
ANOMALIES = "evidence/anomalies.json"
SHARDS = "data/token_shards.jsonl"
DOCUMENTS = "data/documents.jsonl"
TRACES = "traces"
PROVENANCE = "provenance.json"
PUBLIC_KEY = "signing_key.pem"
# These follow from the others, and are made again by who verifies.
CARD = "README.md"
CROISSANT = "croissant.json"
SPDX = "spdx.json"
GENERATED = (CARD, CROISSANT, SPDX)
# The manifest names every file but itself and the signature; the signature is of every file but itself.
MANIFEST = "manifest.json"
SIGNATURE = "model.sig"

CANDIDATE, CHAMPION = "candidate", "champion"  # whose items and measurements

FILES_AT_MOST = 20_000
DEPTH = 8  # of folders in folders
JSON_BYTES = 64 << 20
TOKENIZER_BYTES = 256 << 20
LINE_BYTES = 32 << 20  # of a line of JSON Lines
ROWS_BYTES = 256 << 20  # of JSON Lines that are held at once
