"""README and docs name only what exists: commands with their options, files, links, make targets, modules; DESIGN.md also rooms and libraries."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator

import pytest

from tests.support.factory.command_tree import commands
from tests.support.paths import ROOT

HISTORY = frozenset({"LOG.md"})  # it says what was there on a day
DOCS = sorted(
    file.relative_to(ROOT).as_posix() for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    if file.name not in HISTORY
)  # fmt: skip
PACKAGES = ("factory", "agents", "trainer", "models", "kernels", "benchmarks", "tests", "policies", "docs")
PLACEHOLDER = re.compile(r"[A-Z]{2,}|…|\.\.\.|[<>{}*]|NAME|\bN\b")  # of what a reader fills in, or a pattern
NOT_OURS = frozenset(
    {"exports", "inbox", "shards", "policies"}
)  # folders of a workspace, unless a file of this name is here


def read(name: str) -> str:
    return (ROOT / name).read_text()


def code_of(text: str) -> Iterator[str]:
    """The lines of code blocks, and the texts between backticks or single quotes."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.S | re.M):
        yield from block.splitlines()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    yield from re.findall(r"`([^`\n]+)`", prose)
    yield from re.findall(r"'(factory [^'\n]+)'", prose)


def wrong_command(line: str) -> str:
    """The fault of a 'factory …' line of a document; '' if it has none, or is not such a line."""
    line = line.strip().removeprefix("$ ").partition("  #")[0].partition(" # ")[0].strip()
    match = re.match(r"(?:\S*/)?factory\s+(?P<rest>[a-z-].*)", line)
    if not match or not re.fullmatch(r"(?:\S*/)?factory", line.split()[0]):
        return ""
    try:
        words = shlex.split(match["rest"].replace("…", "").replace("|", " | "))
    except ValueError:
        words = match["rest"].split()
    known = commands()
    at: tuple[str, ...] = ()
    alternative = False
    for word in words:
        if word == "|":
            alternative = True
        elif word.startswith("-"):
            option = word.partition("=")[0].rstrip(",.;:")
            if re.fullmatch(r"--[a-z][a-z-]*|-[a-z]", option) and option not in known[at]:
                return f"'factory {' '.join(at)}' has no option {option}"
        elif (*at, word) in known:
            at = (*at, word)
        elif alternative and (*at[:-1], word) in known:
            at, alternative = (*at[:-1], word), False
        elif word in ("&&", ";", "&", ">", "2>&1"):
            break
        elif any(len(one) == len(at) + 1 and one[: len(at)] == at for one in known) and re.fullmatch(
            r"[a-z][a-z-]+", word
        ):
            return f"'factory {' '.join(at)}' has no command {word!r}" if not alternative else ""
        alternative = alternative and word == "|"
    return ""


def wrong_path(word: str) -> str:
    """The fault of a path that a document names; '' if it has none, or is not a path of this repository."""
    word = word.strip().rstrip(".,;:").partition("::")[0]
    first = word.split("/")[0]
    if PLACEHOLDER.search(word) or " " in word or first not in PACKAGES or "/" not in word:
        return ""
    if (
        (ROOT / word).exists()
        or (ROOT / f"{word}.py").exists()
        or first in NOT_OURS
        and not word.startswith("policies/recipes")
    ):
        return ""
    return f"there is no {word}"


def wrong_links(name: str, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists():
            yield f"{name}: a link to {target}, which does not exist"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"{name}: a link to {target}: there is no such heading"


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes from the headings of a document."""
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def wrong_of(name: str, text: str) -> list[str]:
    found = [*wrong_links(name, text)]
    targets = set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.M))
    for line in code_of(text):
        if wrong := wrong_command(line):
            found.append(f"{name}: {line.strip()!r}: {wrong}")
        foreign = re.match(r"[\w.-]+/[\w.-]+: ", line)  # a file of another project: 'owner/repository: path'
        for word in [] if foreign else re.split(r"[\s,()\[\]'\"=]+", line):
            if wrong := wrong_path(word):
                found.append(f"{name}: {wrong}")
        for target in re.findall(r"(?:^|&& )make ([a-z][a-z-]+)", line):
            if target not in targets:
                found.append(f"{name}: there is no 'make {target}'")
        for module in re.findall(r"python3? -m ([a-z_][a-z_.0-9]*)", line):
            if module.split(".")[0] in PACKAGES and importlib.util.find_spec(module) is None:
                found.append(f"{name}: there is no module {module}")
    return found


@pytest.mark.parametrize("name", DOCS)
def test_a_document_names_only_what_exists(name: str) -> None:
    assert wrong_of(name, read(name)) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`factory fly 3`", "has no command 'fly'"),
        ("`factory data lost`", "has no command 'lost'"),
        ("`factory data remove --sauce NAME`", "has no option --sauce"),
        ("'factory run --twice' does", "has no option --twice"),
        ("see `factory/ingest/lost.py`", "there is no factory/ingest/lost.py"),
        ("[here](docs/LOST.md)", "a link to docs/LOST.md"),
        ("[here](README.md#lost)", "there is no such heading"),
        ("```\nmake lost\n```", "there is no 'make lost'"),
        ("`python -m benchmarks.lost`", "there is no module benchmarks.lost"),
    ],
)  # fmt: skip
def test_the_check_names_things_that_do_not_exist(text: str, wrong: str) -> None:
    (found,) = wrong_of("README.md", text)
    assert wrong in found


def test_the_check_does_not_name_things_that_exist() -> None:
    text = (
        "# Home\n[home](README.md#home) `factory data remove --source NAME --dry-run` `factory releases list | show N | diff A B` `factory/ingest/` "
        "`my-factory/policies/data.yaml` `make test` 'factory status --json'\n```\npython -m benchmarks.gpu\nfactory run --once   # here\n```\n"
    )
    assert [one for one in wrong_of("README.md", text) if "no such heading" not in one] == []


# -- DESIGN.md ---------------------------------------------------------------------------------------------------------
def rooms() -> dict[str, set[str]]:
    """The rooms that DESIGN.md lists for each package, in its block of rooms."""
    (block,) = re.findall(r"The rooms[^\n]*\n```\n(.*?)```", read("docs/DESIGN.md"), re.S)
    found: dict[str, set[str]] = {}
    package = ""
    for line in block.splitlines():
        if match := re.match(r"([a-z]+)/\s", line):
            package, line = match[1], line[match.end() :]
        line = re.sub(r"\([^)]*\)", "", line)
        found.setdefault(package, set()).update(re.findall(r"([a-z_]+)/", re.sub(r"\{[^}]*\}", "", line)))
    return found


@pytest.mark.parametrize("package", ["kernels", "models", "trainer", "agents", "factory", "benchmarks"])
def test_the_design_lists_every_room_and_no_other(package: str) -> None:
    there = {one.name for one in (ROOT / package).iterdir() if one.is_dir() and any(one.rglob("*.py"))}
    there |= {"results", "baselines"} if package == "benchmarks" else set()
    assert rooms()[package] == there


def test_the_design_names_every_library_and_no_other() -> None:
    """The dependencies of pyproject.toml and the table in section 6 name the same libraries."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    lines = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    wanted = {re.match(r"[A-Za-z0-9-]+", line)[0].lower() for line in lines}  # type: ignore[index]
    section = read("docs/DESIGN.md").partition("## 6.")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| library")]
    named = {word.lower() for row in rows for word in re.findall(r"[A-Za-z][A-Za-z0-9-]*", row.split("|")[1])}
    assert named == wanted
