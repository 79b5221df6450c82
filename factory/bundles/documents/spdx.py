"""Builds spdx.json, which describes the bundle as an SPDX 3.0.1 document in JSON-LD. Profiles: core, software, AI, dataset, simple licensing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from factory.bundles.documents.facts import NO_ASSERTION, BundleFacts, to_spdx_expression
from factory.bundles.files import layout

CONTEXT = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
CREATION = "_:creation"


def build_spdx(facts: BundleFacts) -> dict[str, Any]:
    """Return the JSON-LD object of spdx.json. Its namespace is a hash of the release and its files, so two bundles never share a namespace."""
    identity = json.dumps([facts.name, {path: hashed.sha256 for path, hashed in sorted(facts.files.items())}])
    space = f"urn:llm-factory:{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
    graph = _Graph(space, facts)
    return {"@context": CONTEXT, "@graph": graph.elements()}


class _Graph:
    """Collects the elements of the document, and gives each element an id in the document's namespace."""

    def __init__(self, space: str, facts: BundleFacts) -> None:
        self.space, self.facts = space, facts
        self.found: list[dict[str, Any]] = []

    def elements(self) -> list[dict[str, Any]]:
        facts = self.facts
        self.found = [{"@id": CREATION, "type": "CreationInfo", "specVersion": "3.0.1", "created": facts.released_at}]
        publisher = self._add("Agent", "publisher", name="the publisher of this bundle")
        self.found[0]["createdBy"] = [publisher]
        model, data = self._model(publisher), self._data(publisher)
        files = [self._file(path) for path in sorted(facts.files)]
        inside = f"{layout.MODEL}/"
        weights = [name for name, path in zip(files, sorted(facts.files)) if path.startswith(inside)]
        listed = [name for name, path in zip(files, sorted(facts.files)) if path in (layout.SHARDS, layout.DOCUMENTS)]
        self._relation("contains", model, weights)
        self._relation("contains", data, listed)
        self._relation("trainedOn", model, [data])
        self._relation("hasEvidence", model, [self._id(f"file/{layout.EVIDENCE}")])
        self._licences(model, data)
        document = self._id("document")
        others = [one["spdxId"] for one in self.found if "spdxId" in one]
        profiles = ["core", "software", "ai", "dataset", "simpleLicensing"]
        self._add(
            "SpdxDocument",
            "document",
            name=facts.name,
            profileConformance=profiles,
            rootElement=[model],
            element=others,
        )
        assert self.found[-1]["spdxId"] == document
        return self.found

    def _model(self, publisher: str) -> str:
        facts = self.facts
        measured = facts.measurements["candidate"]
        metrics = {f"bits per byte, {domain}": f"{value:.6f}" for domain, value in sorted(measured["bpb"].items())}
        if measured["cloze"]["items"]:
            metrics["cloze, share right"] = f"{measured['cloze']['share_right']:.6f}"
        recipe = facts.provenance["predicate"]["buildDefinition"]["externalParameters"]["recipe"]
        hyper = {"recipe": str(recipe["name"]), "recipe sha256": str(recipe["sha256"])}
        hyper |= {key: str(facts.config[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
        tokens = sum(facts.sum_column_by_licence("supervised_tokens").values())
        return self._add(
            "ai_AIPackage",
            "model",
            name=facts.name,
            suppliedBy=publisher,
            releaseTime=facts.released_at,
            builtTime=facts.provenance["predicate"]["runDetails"]["metadata"]["finishedOn"],
            software_packageVersion=str(facts.verdict["release"]),
            software_primaryPurpose="model",
            software_downloadLocation=f"{self.space}/model",
            software_copyrightText=NO_ASSERTION,
            ai_typeOfModel=["transformer", "causal language model"],
            ai_informationAboutTraining=f"{len(facts.segments)} segments on {tokens} supervised tokens of data; see {layout.PROVENANCE}",
            ai_limitation=f"judged on held-out documents of its own domains alone; see {layout.CARD}",
            ai_metric=_entries(metrics),
            ai_hyperparameter=_entries(hyper),
        )

    def _data(self, publisher: str) -> str:
        facts = self.facts
        return self._add(
            "dataset_DatasetPackage",
            "data",
            name=f"{facts.name}: training data",
            suppliedBy=publisher,
            releaseTime=facts.released_at,
            builtTime=facts.released_at,
            originatedBy=[publisher],
            software_packageVersion=str(facts.verdict["release"]),
            software_primaryPurpose="data",
            software_downloadLocation=f"{self.space}/data",
            software_copyrightText=NO_ASSERTION,
            dataset_datasetType=["text"],
            dataset_datasetSize=sum(
                row["shard_bytes"] for row in {r["shard_sha256"]: r for r in facts.shards}.values()
            ),
            dataset_dataCollectionProcess=f"token shards named in {layout.SHARDS}",
            dataset_datasetAvailability="directDownload"
            if any(row["included"] for row in facts.shards)
            else "registration",
        )

    def _file(self, path: str) -> str:
        hashed = {"type": "Hash", "algorithm": "sha256", "hashValue": self.facts.files[path].sha256}
        return self._add("software_File", f"file/{path}", name=path, verifiedUsing=[hashed])

    def _licences(self, model: str, data: str) -> None:
        """Add one declared and one concluded licence for the model, and the same for the data."""
        names = sorted(
            {to_spdx_expression(name) for name in self.facts.sum_column_by_licence("documents")} - {NO_ASSERTION}
        )
        known = len(names) == len({to_spdx_expression(name) for name in self.facts.sum_column_by_licence("documents")})
        together = " AND ".join(names) if names and known else NO_ASSERTION
        texts = {}
        for name in self.facts.sum_column_by_licence("documents"):
            expression = to_spdx_expression(name)
            if expression.startswith("LicenseRef-"):
                words = f"The licence that the data name {name!r}; its text is the data owner's."
                texts[expression] = self._add(
                    "simplelicensing_SimpleLicensingText",
                    f"licence/{expression}",
                    name=name,
                    simplelicensing_licenseText=words,
                )
        custom = [{"type": "DictionaryEntry", "key": key, "value": place} for key, place in sorted(texts.items())]
        for number, (element, expression) in enumerate(((model, self.facts.licences["model"]), (data, together))):
            more = {"simplelicensing_customIdToUri": custom} if custom and "LicenseRef-" in expression else {}
            licence = self._add(
                "simplelicensing_LicenseExpression",
                f"expression/{number}",
                simplelicensing_licenseExpression=expression,
                **more,
            )
            for kind in ("hasDeclaredLicense", "hasConcludedLicense"):
                self._relation(kind, element, [licence])

    def _relation(self, kind: str, begin: str, ends: list[str]) -> None:
        number = sum(one["type"] == "Relationship" for one in self.found)
        self._add("Relationship", f"relationship/{number}", **{"from": begin, "relationshipType": kind, "to": ends})

    def _add(self, kind: str, own: str, /, **values: Any) -> str:
        self.found.append({"type": kind, "spdxId": self._id(own), "creationInfo": CREATION, **values})
        return self._id(own)

    def _id(self, name: str) -> str:
        return f"{self.space}#{name}"


def _entries(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"type": "DictionaryEntry", "key": key, "value": value} for key, value in values.items()]
