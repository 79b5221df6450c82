"""Renders HTML pages for people. ``base.html.jinja`` has the stylesheet of all pages, ``parts.html.jinja`` the parts of a page's layout.

The values on a page (documents, samples, patches, source lines, model output) are untrusted text. Jinja escapes every value,
``replace_invisible_characters`` replaces invisible control characters, and the page's content policy allows no script, image or address.
"""

from __future__ import annotations

import functools
import html
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from agents.core.untrusted import replace_invisible_characters

if TYPE_CHECKING:
    from jinja2 import Environment

MARGIN, SCALE = (
    12,
    0.85,
)  # margin in pixels of a picture that is a file; its scale relative to the same picture on a page


def render_page(template: Path, **values: object) -> str:
    """A page from a template that extends ``base.html.jinja``. Values are escaped unless the template marks them as ``safe``."""
    return _environment(template.parent).get_template(template.name).render(values)


@functools.cache
def _environment(folder: Path) -> Environment:
    """The Jinja environment of a folder's templates, cached because it holds the compiled templates."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else replace_invisible_characters(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = format_number
    return environment


def make_svg_file_text(svg: str) -> str:
    """A page's drawing as an SVG file of its own, with the pages' colours and a margin."""
    style = (Path(__file__).parent / "palette.css.jinja").read_text(encoding="utf-8")
    found = re.match(r'<svg viewBox="0 0 (\d+) (\d+)"', svg)
    assert found, "an SVG that agents or the factory drew"
    width, height = int(found[1]) + 2 * MARGIN, int(found[2]) + 2 * MARGIN
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-MARGIN} {-MARGIN} {width} {height}" width="{width * SCALE:.0f}"'
    own = f"<style>{style}svg{{font:12px system-ui,sans-serif;background:var(--paper)}}</style>"
    return svg.replace(found[0], start, 1).replace(">", f">{own}", 1)


def escape_html(value: object) -> str:
    """Any value as HTML text, for drawings: escaped, without invisible characters, always encodable."""
    return html.escape(replace_invisible_characters(str(value)), quote=True)


def format_number(value: object, digits: int = 3) -> str:
    """A number as text for a person; ``–`` if it was not measured or is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"
