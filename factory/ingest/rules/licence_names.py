"""Reads licence names as SPDX expressions (specification 3.0.1, annex B).

``AND`` binds more strongly than ``OR``, and ``WITH`` more strongly than both. Case and blanks are ignored when names are compared. Unlike in SPDX,
a name may have several words, since data policies list such names. A text that is not an expression is one name. A common spelling of a licence
stands for the id in the SPDX License List (https://spdx.org/licenses/). A name that leaves the version open ('BSD', 'GPL', 'CC-BY') stands only for
itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

A = TypeVar("A")
DEEPEST_NESTING = 20  # the deepest nesting of parentheses that is read
_TOKEN = re.compile(r"[()]|[^\s()]+")


@lru_cache(maxsize=4096)
def normalise_licence_name(name: str | None) -> str:
    """Return a name in the form in which names are compared: the SPDX id if the name is a spelling of it; '' if there is no name.

    >>> (normalise_licence_name("  CC-BY-4.0 "), normalise_licence_name("Apache 2.0"), normalise_licence_name("Public-Domain"),
    ...  normalise_licence_name("My  Own"), normalise_licence_name(None))
    ('cc-by-4.0', 'apache-2.0', 'public domain', 'my own', '')
    """
    return find_spdx_id(name or "") or " ".join((name or "").split()).casefold()


@dataclass(frozen=True)
class LicenceEvaluator(Generic[A]):
    """Evaluates an expression of licence names. ``known`` has the value of each folded name, and ``unknown`` is the value of any other name.
    ``all_of`` combines the values of licences that all apply (AND). ``one_of`` combines the values of licences to choose from (OR).

    >>> reader = LicenceEvaluator({"mit": 2, "gpl": 1, "gpl with x": 3, "public domain": 4}, 0, min, max)
    >>> [reader.evaluate(name) for name in ("mit", "MIT AND GPL", "(mit or gpl) and MIT", "MIT OR GPL AND other")]
    [2, 1, 2, 2]
    >>> [reader.evaluate(name) for name in ("GPL WITH X", "GPL WITH other", "Public Domain OR other", "MIT OR (GPL", "MIT, GPL")]
    [3, 1, 4, 0, 0]
    """

    known: dict[str, A]
    unknown: A
    all_of: Callable[[Sequence[A]], A]
    one_of: Callable[[Sequence[A]], A]

    def evaluate(self, name: str) -> A:
        if (whole := normalise_licence_name(name)) in self.known:
            return self.known[whole]
        if find_spdx_id(name):  # 'GPL v3 or later' is one name, not an expression
            return self.unknown
        tokens = _TOKEN.findall(name)
        try:
            found = self._either(tokens, 0)
        except ValueError:
            return self.unknown
        return self.unknown if tokens else found

    def _either(self, tokens: list[str], depth: int) -> A:
        """Evaluate the expression at the beginning of ``tokens``, and remove the tokens that were read. Raises: ValueError if there is no
        expression."""
        parts = [self._both(tokens, depth)]
        while _took(tokens, "OR"):
            parts.append(self._both(tokens, depth))
        return self.one_of(parts)

    def _both(self, tokens: list[str], depth: int) -> A:
        parts = [self._simple(tokens, depth)]
        while _took(tokens, "AND"):
            parts.append(self._simple(tokens, depth))
        return self.all_of(parts)

    def _simple(self, tokens: list[str], depth: int) -> A:
        if _took(tokens, "("):
            if depth == DEEPEST_NESTING:
                raise ValueError
            found = self._either(tokens, depth + 1)
            if not _took(tokens, ")"):
                raise ValueError
            return found
        name = _name(tokens)
        # An exception adds permissions. A licence with an unlisted exception allows at least what the licence alone allows.
        whole = f"{name} with {_name(tokens)}" if _took(tokens, "WITH") else name
        return self.known.get(whole, self.known.get(name, self.unknown))


def _took(tokens: list[str], token: str) -> bool:
    """Remove the first token if it is this operator, in upper or lower case. Returns whether it was."""
    return bool(tokens) and tokens[0] in (token, token.lower()) and bool(tokens.pop(0))


def _name(tokens: list[str]) -> str:
    words: list[str] = []
    while tokens and tokens[0] not in ("(", ")", "AND", "and", "OR", "or", "WITH", "with"):
        words.append(tokens.pop(0))
    if not words:
        raise ValueError
    return normalise_licence_name(" ".join(words))


PUBLIC_DOMAIN = "public domain"  # this is not a licence, so SPDX has no id for it; data policies use this name

_IDS = """
    0BSD AFL-3.0 AGPL-3.0-only AGPL-3.0-or-later Apache-1.1 Apache-2.0 Artistic-2.0 BSD-2-Clause BSD-3-Clause BSD-3-Clause-Clear BSD-4-Clause
    BSL-1.0 CC-PDDC CC0-1.0 CDLA-Permissive-1.0 CDLA-Permissive-2.0 CDLA-Sharing-1.0 CECILL-2.1 ECL-2.0 EPL-1.0 EPL-2.0 EUPL-1.1 EUPL-1.2 FSFAP
    GFDL-1.3-only GFDL-1.3-or-later GPL-1.0-only GPL-1.0-or-later GPL-2.0-only GPL-2.0-or-later GPL-3.0-only GPL-3.0-or-later HPND ISC
    LGPL-2.0-only LGPL-2.0-or-later LGPL-2.1-only LGPL-2.1-or-later LGPL-3.0-only LGPL-3.0-or-later LPPL-1.3c MIT MIT-0 MPL-1.1 MPL-2.0 MS-PL
    MulanPSL-2.0 NCSA OGL-UK-3.0 ODbL-1.0 ODC-By-1.0 OFL-1.1 OSL-3.0 PDDL-1.0 PostgreSQL PSF-2.0 Python-2.0 Unlicense UPL-1.0 Vim W3C WTFPL X11
    Zlib etalab-2.0
"""

# Other spellings, in the form that ``_form`` returns. (In SPDX's list, ids of GNU licences without '-only' are deprecated and mean '-only'.)
_OTHER = {
    "cc0": "cc0-1.0", "cc-0": "cc0-1.0", "cc-zero": "cc0-1.0", "creative-commons-zero": "cc0-1.0", "cc0-1": "cc0-1.0", "cc-0-1.0": "cc0-1.0",
    "cc0-universal": "cc0-1.0", "cc0-1.0-universal": "cc0-1.0", "creative-commons-zero-1.0-universal": "cc0-1.0",
    "public-domain": PUBLIC_DOMAIN, "publicdomain": PUBLIC_DOMAIN, "in-public-domain": PUBLIC_DOMAIN, "public-domain-mark-1.0": PUBLIC_DOMAIN,
    "public-domain-mark": PUBLIC_DOMAIN, "pdm-1.0": PUBLIC_DOMAIN,
    "expat": "mit", "mit-mit": "mit", "mit-expat": "mit", "mit-no-attribution": "mit-0",
    "apache-2": "apache-2.0", "apache2": "apache-2.0", "apache2.0": "apache-2.0", "apache-software-2.0": "apache-2.0", "asl-2.0": "apache-2.0",
    "al-2.0": "apache-2.0",
    "bsd-2": "bsd-2-clause", "bsd2": "bsd-2-clause", "2-clause-bsd": "bsd-2-clause", "simplified-bsd": "bsd-2-clause",
    "bsd-2clause": "bsd-2-clause",
    "bsd-3": "bsd-3-clause", "bsd3": "bsd-3-clause", "3-clause-bsd": "bsd-3-clause", "new-bsd": "bsd-3-clause", "modified-bsd": "bsd-3-clause",
    "revised-bsd": "bsd-3-clause", "bsd-3clause": "bsd-3-clause", "bsd-new": "bsd-3-clause", "bsd-3-clause-new-or-revised": "bsd-3-clause",
    "boost-1.0": "bsl-1.0", "boost-software-1.0": "bsl-1.0", "mpl-2": "mpl-2.0", "mozilla-public-2.0": "mpl-2.0", "eclipse-public-2.0": "epl-2.0",
    "eclipse-public-1.0": "epl-1.0", "postgresql": "postgresql", "psf-2": "psf-2.0",
    "odbl": "odbl-1.0", "odc-by": "odc-by-1.0", "odc-odbl": "odbl-1.0", "pddl": "pddl-1.0", "odc-pddl": "pddl-1.0",
    "open-database-1.0": "odbl-1.0", "cdla-permissive-2": "cdla-permissive-2.0", "ogl-3.0": "ogl-uk-3.0", "open-government-3.0": "ogl-uk-3.0",
}  # fmt: skip
_BY_FORM = {one.casefold(): one.casefold() for one in _IDS.split()} | _OTHER

# Addresses of licences, each with the form of the name that it stands for.
_WEBSITES = (
    (re.compile(r"creativecommons\.org/licenses/([a-z-]+)/(\d\.\d)(?:/([a-z]{2})(?=/|$))?"), r"cc-\1-\2-\3"),
    (re.compile(r"creativecommons\.org/publicdomain/zero/1\.0"), "cc0-1.0"),
    (re.compile(r"creativecommons\.org/publicdomain/mark/1\.0"), "public-domain"),
    (re.compile(r"opendatacommons\.org/licenses/(by|odbl|pddl)/1[.-]0"), r"odc-\1"),
    (re.compile(r"(?:spdx|opensource)\.org/licenses?/([a-z0-9.+-]+?)(?:\.html)?(?:/|$)"), r"\1"),
    (re.compile(r"apache\.org/licenses/license-(\d\.\d)"), r"apache-\1"),
    (re.compile(r"gnu\.org/licenses/(?:old-licenses/)?((?:a|l|f)?gpl|fdl)-(\d\.\d)"), r"\1-\2"),
    (re.compile(r"mozilla\.org/(?:[a-z-]+/)?mpl/(\d\.\d)"), r"mpl-\1"),
    (re.compile(r"unlicense\.org"), "unlicense"),
)
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(\S+\.(?:org|html|txt)\S*)\Z")
_CREATIVE = re.compile(r"cc-(by|by-sa|by-nd|by-nc|by-nc-sa|by-nc-nd)-(1\.0|2\.0|2\.5|3\.0|4\.0)(-[a-z]{2})?\Z")
_GNU = re.compile(r"(?:gnu-)?(a|l|f|)gpl-?([123])(\.\d)?(\+|-only|-or-later|-or-newer|-or-any-later)?\Z")
_CREATIVE_WORDS = (
    ("creative-commons", "cc"), ("attribution", "by"), ("sharealike", "sa"), ("share-alike", "sa"), ("noncommercial", "nc"),
    ("non-commercial", "nc"), ("noderivatives", "nd"), ("noderivs", "nd"), ("no-derivatives", "nd"), ("-international", ""), ("-unported", ""),
    ("-generic", ""), ("ccby", "cc-by"),
)  # fmt: skip
_GNU_WORDS = (
    ("affero-general-public", "agpl"), ("lesser-general-public", "lgpl"), ("library-general-public", "lgpl"), ("general-public", "gpl"),
)  # fmt: skip
_NO_NAME = {"the", "license", "licence", "licenses", "licensed", "under", "version"}


def find_spdx_id(name: str) -> str | None:
    """Return the SPDX id of a name in lower case, or 'public domain'. Returns None if the name is unknown or ambiguous.

    >>> [find_spdx_id(name) for name in ("CC0", "cc-by-4.0 ", "MIT License", "Apache 2.0", "Apache License, Version 2.0", "public-domain")]
    ['cc0-1.0', 'cc-by-4.0', 'mit', 'apache-2.0', 'apache-2.0', 'public domain']
    >>> [find_spdx_id(name) for name in ("https://creativecommons.org/licenses/by-sa/3.0/", "GPLv3", "GPL-2.0+", "CC BY-NC 4.0 International")]
    ['cc-by-sa-3.0', 'gpl-3.0-only', 'gpl-2.0-or-later', 'cc-by-nc-4.0']
    >>> [find_spdx_id(name) for name in ("BSD", "GPL", "CC-BY", "MIT OR Apache-2.0", "mine", "")]
    [None, None, None, None, None, None]
    """
    form = _form(name)
    if address := _ADDRESS.match(name.strip().casefold()):
        for website, rest in _WEBSITES:
            if found := website.match(address[1]):
                form = found.expand(rest).strip("-")
    if (known := _BY_FORM.get(form)) is not None:
        return known
    creative = form
    for words, short in _CREATIVE_WORDS:
        creative = creative.replace(words, short)
    if _CREATIVE.match(creative := creative.removesuffix("-deed")):
        return creative
    for words, short in _GNU_WORDS:
        form = form.replace(words, short)
    if found := _GNU.match(form.replace("fdl", "fgpl") if "gfdl" not in form else form.replace("gfdl", "fgpl")):
        kind, major, minor, later = found.groups()
        gnu = f"{'gfdl' if kind == 'f' else f'{kind}gpl'}-{major}{minor or '.0'}-{'only' if later in (None, '-only') else 'or-later'}"
        return _BY_FORM.get(gnu)
    return None


def _form(name: str) -> str:
    """Return the words of a name in lower case, joined by '-', without filler words.

    >>> _form("The Apache License, Version 2.0"), _form("CC_BY_4.0"), _form("GPL v3")
    ('apache-2.0', 'cc-by-4.0', 'gpl-3')
    """
    words = re.sub(r'[\s_,;:"“”()-]+', "-", name.casefold()).strip("-.").split("-")
    words = [re.sub(r"^v\.?(?=\d)", "", word) for word in words if word and word not in _NO_NAME]
    return re.sub(r"(?<=gpl)v(?=\d)", "", "-".join(words))
