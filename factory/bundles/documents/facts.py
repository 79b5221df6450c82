"""Reads the facts from a bundle's files, from which model card, Croissant and SPDX are generated."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from factory.bundles.files import layout
from factory.bundles.files.folder import BundleFolder, FileHash
from factory.gates.release.trained_licences import NONE
from factory.release.published_link import MODEL_NAME

# Common identifiers of the SPDX licence list. Any other name becomes a LicenseRef.
SPDX_LICENCES = frozenset(
    {
        "0BSD", "AGPL-3.0-only", "AGPL-3.0-or-later", "Apache-2.0", "Artistic-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0",
        "CC-BY-3.0", "CC-BY-4.0", "CC-BY-NC-4.0", "CC-BY-NC-SA-4.0", "CC-BY-ND-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC0-1.0",
        "EPL-2.0", "EUPL-1.2", "GFDL-1.3-only", "GPL-2.0-only", "GPL-2.0-or-later", "GPL-3.0-only", "GPL-3.0-or-later", "ISC",
        "LGPL-2.1-only", "LGPL-2.1-or-later", "LGPL-3.0-only", "LGPL-3.0-or-later", "MIT", "MPL-2.0", "ODC-By-1.0", "ODbL-1.0",
        "PDDL-1.0", "PSF-2.0", "Python-2.0", "Unlicense", "WTFPL", "Zlib",
    }
)  # fmt: skip
NO_ASSERTION = "NOASSERTION"


@dataclass(frozen=True)
class BundleFacts:
    """The facts of one bundle."""

    verdict: dict[str, Any]
    evidence: dict[str, Any]
    measurements: dict[str, Any]
    licences: dict[str, Any]
    anomalies: dict[str, Any]
    shards: list[dict[str, Any]]
    provenance: dict[str, Any]
    config: dict[str, Any]  # of the model
    files: Mapping[str, FileHash]  # all except the generated documents, the manifest and the signature

    @classmethod
    def read(cls, folder: BundleFolder) -> BundleFacts:
        """Read the facts from a bundle. Raises: BundleError."""
        apart = (*layout.GENERATED, layout.MANIFEST, layout.SIGNATURE)
        return cls(
            folder.read_object(layout.VERDICT),
            folder.read_object(layout.EVIDENCE),
            folder.read_object(layout.MEASUREMENTS),
            folder.read_object(layout.LICENCES),
            folder.read_object(layout.ANOMALIES),
            list(folder.read_rows(layout.SHARDS)),
            folder.read_object(layout.PROVENANCE),
            folder.read_object(f"{layout.MODEL}/config.json"),
            {path: hashed for path, hashed in folder.file_hashes.items() if path not in apart},
        )

    @property
    def name(self) -> str:
        return f"{MODEL_NAME} release {self.verdict['release']}"

    @property
    def released_at(self) -> str:
        return datetime.fromtimestamp(self.verdict["released_at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    @property
    def segments(self) -> list[dict[str, Any]]:
        """The segments that trained the model, in order."""
        return list(self.provenance["predicate"]["buildDefinition"]["internalParameters"]["segments"])

    @property
    def synthetic_tokens(self) -> dict[str, int]:
        """The supervised tokens of synthetic documents, by the model that wrote them. Empty in a bundle of an older factory."""
        return dict(self.licences.get("synthetic") or {})

    def sum_column_by_licence(self, column: str) -> dict[str, int]:
        """Return the sum of a column of the token shards' rows, by licence."""
        found: Counter[str] = Counter()
        for row in self.shards:
            found[row["license"]] += row[column]
        return dict(sorted(found.items()))


def to_spdx_expression(name: str) -> str:
    """Return a licence as an SPDX expression.

    >>> to_spdx_expression("MIT"), to_spdx_expression("public domain"), to_spdx_expression("no licence")
    ('MIT', 'LicenseRef-public-domain', 'NOASSERTION')
    """
    if name in SPDX_LICENCES or name == NO_ASSERTION:
        return name
    return (
        NO_ASSERTION if name == NONE else "LicenseRef-" + (re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-") or "other")
    )
