"""Builds croissant.json, which describes the training data as a Croissant 1.1 (MLCommons) dataset in JSON-LD.

Its key ``distribution`` lists only files of the bundle. Its key ``isBasedOn`` lists every token shard with its licence, also shards that the
bundle does not include.
"""

from __future__ import annotations

from typing import Any

from factory.bundles.documents.facts import BundleFacts, to_spdx_expression
from factory.bundles.files import layout

CONFORMS = "http://mlcommons.org/croissant/1.1"
SPDX_PAGE = "https://spdx.org/licenses/"
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{
        name: f"cr:{name}"
        for name in (
            "annotation", "arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "excludes", "extract", "field", "fileObject",
            "fileProperty", "fileSet", "format", "includes", "isArray", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path",
            "readLines", "recordSet", "references", "regex", "repeated", "replace", "samplingRate", "separator", "source", "subField",
            "transform", "unArchive", "value",
        )
    },
}  # fmt: skip
SHARD_FIELDS = {
    "token_shard": "sc:Text", "generation": "sc:Integer", "shard": "sc:Text", "shard_sha256": "sc:Text", "shard_bytes": "sc:Integer",
    "license": "sc:Text", "releasable": "sc:Boolean", "included": "sc:Boolean", "documents": "sc:Integer", "tokens": "sc:Integer",
    "supervised_tokens": "sc:Integer", "quarantined": "sc:Integer",
}  # fmt: skip
DOCUMENT_FIELDS = {"id": "sc:Text", "text": "sc:Text", "domain": "sc:Text", "source": "sc:Text", "license": "sc:Text"}
OF_SYNTHETIC = {layout.SHARDS: {"synthetic_tokens": "sc:Integer"}, layout.DOCUMENTS: {"synthetic_by": "sc:Text"}}
DESCRIBED = {layout.SHARDS: ("token-shards", SHARD_FIELDS), layout.DOCUMENTS: ("documents", DOCUMENT_FIELDS)}


def build_croissant(facts: BundleFacts) -> dict[str, Any]:
    """Return the JSON-LD object of croissant.json."""
    there = [path for path in DESCRIBED if path in facts.files]
    fields = lambda path: DESCRIBED[path][1] | (OF_SYNTHETIC[path] if facts.synthetic_tokens else {})
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "@id": "training-data",
        "name": f"{facts.name}: training data",
        "description": "The token shards that the model was trained on, their licences, and which of their documents are in this bundle.",
        "conformsTo": CONFORMS,
        "url": layout.CARD,
        "version": f"{facts.verdict['release']}.0.0",
        "datePublished": facts.released_at,
        "creator": {"@type": "sc:Organization", "name": "the publisher of this bundle"},
        "license": [_licence(name) for name in facts.sum_column_by_licence("documents")],
        "distribution": [_file(facts, path) for path in there],
        "recordSet": [_records(path, DESCRIBED[path][0], fields(path)) for path in there],
        "isBasedOn": [_shard(row) for row in facts.shards],
    }


def _file(facts: BundleFacts, path: str) -> dict[str, Any]:
    hashed = facts.files[path]
    return {
        "@type": "cr:FileObject",
        "@id": path,
        "name": path,
        "contentUrl": path,
        "contentSize": f"{hashed.bytes} B",
        "encodingFormat": "application/jsonlines",
        "sha256": hashed.sha256,
    }


def _records(path: str, name: str, fields: dict[str, str]) -> dict[str, Any]:
    source = lambda field: {"fileObject": {"@id": path}, "extract": {"column": field}}
    listed = [
        {"@type": "cr:Field", "@id": f"{name}/{field}", "name": field, "dataType": kind, "source": source(field)}
        for field, kind in fields.items()
    ]
    return {"@type": "cr:RecordSet", "@id": name, "name": name, "field": listed}


def _shard(row: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of one licence of one token shard. The bundle need not include its documents."""
    return {
        "@type": "sc:Dataset",
        "@id": f"token-shard:{row['token_shard']}:{to_spdx_expression(row['license'])}",
        "name": row["shard"],
        "identifier": f"sha256:{row['shard_sha256']}",
        "license": _licence(row["license"]),
        "size": f"{row['documents']} documents, {row['supervised_tokens']} supervised tokens",
        "isAccessibleForFree": row["included"],
        "conditionsOfAccess": "in this bundle" if row["included"] else "not in this bundle",
        "usageInfo": "may be released" if row["releasable"] else "may not be released",
    }


def _licence(name: str) -> str:
    expression = to_spdx_expression(name)
    return name if expression.startswith(("LicenseRef-", "NOASSERTION")) else f"{SPDX_PAGE}{expression}.html"
