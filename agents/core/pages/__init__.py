"""HTML pages for people: ``base.html.jinja`` with the one stylesheet, ``parts.html.jinja`` with what a page is laid out with.

Whatever a page shows (documents, samples, patches, source lines, model output) is untrusted text: Jinja escapes every value,
``shown`` replaces what a browser would obey but not show, and the page's content policy allows no script, image or address.
"""

from __future__ import annotations

import html
import math
from pathlib import Path

from agents.core.untrusted import shown


def render(template: Path, **values: object) -> str:
    """A page from a template that extends ``base.html.jinja``. Only what a template marks as ``safe`` is not escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else shown(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    return environment.get_template(template.name).render(values)


def text(value: object) -> str:
    """Any value as HTML text, for drawings: escaped, without invisible characters, always encodable."""
    return html.escape(shown(str(value)), quote=True)


def number(value: object, digits: int = 3) -> str:
    """A number for a person, ``–`` for what was not measured."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"
