"""The paths of a bundle's files, and the limits on their sizes."""

from __future__ import annotations

FORMAT = 1  # raise this number when the content of a file changes, or the text of a generated document

MODEL = "model"  # the export that was judged
FIXTURE = "fixture.json"
POLICY = "evidence/policy.json"
EVIDENCE = "evidence/evidence.json"
VERDICT = "evidence/verdict.json"
ITEMS = "evidence/items.jsonl"
TASK_ITEMS = "evidence/task_items.jsonl"  # only if tasks were measured
MEASUREMENTS = "evidence/measurements.json"
HELD_OUT = "evidence/held_out.json"
LICENCES = "evidence/licences.json"
ANOMALIES = "evidence/anomalies.json"
SHARDS = "data/token_shards.jsonl"
DOCUMENTS = "data/documents.jsonl"
TRACES = "traces"
PROVENANCE = "provenance.json"
PUBLIC_KEY = "signing_key.pem"
# These three are generated from the other files. 'factory verify' generates them again and compares.
CARD = "README.md"
CROISSANT = "croissant.json"
SPDX = "spdx.json"
GENERATED = (CARD, CROISSANT, SPDX)
# The manifest lists every file except itself and the signature. The signature covers every file except itself.
MANIFEST = "manifest.json"
SIGNATURE = "model.sig"

CANDIDATE, CHAMPION = "candidate", "champion"  # the two models that items and measurements belong to

FILES_AT_MOST = 20_000
DEPTH = 8  # nested folders
JSON_BYTES = 64 << 20
TOKENIZER_BYTES = 256 << 20
LINE_BYTES = 32 << 20  # one line of JSON Lines
ROWS_BYTES = 256 << 20  # a JSON Lines file that is held in memory
