"""The evidence in the first message to the model: what it needs for a first patch of one target, and nothing else.

It has the machine, the target's lines, the arguments of its calls, its registered implementations with their times, its sources and what was tried
before. What takes less of the step than ``LEAST_ROW`` is left out, and so is every key of the recipe that sets no size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from agents.core.untrusted import fold_to_one_line, quote_as_data
from agents.core.workbench import EarlierProposal, UnreadableFileError, Workbench
from agents.kernel_engineer.targets import ProfileTarget
from agents.loop import tools

LEAST_ROW = 0.002  # of the step: no patch of a smaller line can be noticed
MOST_LINES = 12  # of the target
MOST_OPS = 8
MOST_EDGES = 10
MOST_NEIGHBOURS = 6
MOST_ATTEMPTS = 4  # of each neighbour
SOURCE_CHARACTERS = 22_000  # of all sources together
FILE_CHARACTERS = 14_000  # of one file
AROUND = 12  # lines of source above and below a hot line, if the target is a file
SIZES = ("d_model", "layers", "heads", "kv_heads", "head_dim", "d_ff", "vocab_size", "context")


def collect_evidence(profile: Mapping[str, Any], workbench: Workbench, target: ProfileTarget) -> str:
    """The evidence for a target, from a parsed profile.json and the workbench. Everything is marked as data."""
    parts = [
        quote_as_data("machine and step", "\n".join([*describe_machine(profile), *describe_step(profile)])),
        quote_as_data("lines of the target", "\n".join(describe_lines(profile, target)) or "none"),
    ]
    if target.op:
        parts.append(
            quote_as_data("the op, as the recipe calls it", "\n".join(describe_op(profile, target.op)) or "none")
        )
    if graph := describe_neighbourhood(profile, target):
        parts.append(quote_as_data("data flow of these lines", "\n".join(graph)))
    parts.append(describe_earlier_work(profile, workbench, target))
    parts += quote_sources(profile, workbench, target)
    return "\n\n".join(parts)


def describe_machine(profile: Mapping[str, Any]) -> list[str]:
    """The machine's facts and its rates."""
    facts = "; ".join(f"{name}: {fact}" for name, fact in profile.get("machine_facts", {}).items())
    rates = profile["matmul_flops_per_s"] / 1e9, profile["memory_bytes_per_s"] / 1e9
    return [
        f"device: {profile.get('machine') or profile['device']}; torch {profile['torch']}",
        *([facts] if facts else []),
        f"roofline: matrix products {rates[0]:.1f} GFLOP/s, memory {rates[1]:.1f} GB/s, the best that were measured here",
    ]


def describe_step(profile: Mapping[str, Any]) -> list[str]:
    """The step: its time, the sizes of the recipe, and the slowest ops."""
    recipe = profile["recipe"]
    model, batch = recipe.get("model", {}), recipe.get("batch", {})
    sizes = {key: model[key] for key in SIZES if model.get(key) is not None}
    sizes |= {key: batch[key] for key in ("sequences", "micro_sequences") if batch.get(key) is not None}
    how = "with its blocks compiled by torch.compile" if profile.get("compiled") else "eager"
    times = f"step: {profile.get('step_s', profile['eager_step_s']) * 1e3:.1f} ms {how}"
    if profile.get("compiled"):
        times += f" ({profile['eager_step_s'] * 1e3:.1f} ms eager). A fused kernel's time is divided among its lines by their eager time"
    ops = sorted((op for op in profile["ops"] if op["share"] >= LEAST_ROW), key=lambda op: -op["share"])[:MOST_OPS]
    shares = ", ".join(f"{op['op']} ({op['implementation']}) {op['share']:.1%}" for op in ops)
    return [
        times,
        f"recipe: {', '.join(f'{key} {value}' for key, value in sizes.items())}, precision {recipe.get('precision', '?')}, "
        f"{recipe.get('optimizer', {}).get('name', 'adamw')}",
        *([f"ops, of the step: {shares}"] if shares else []),
    ]


def describe_lines(profile: Mapping[str, Any], target: ProfileTarget) -> list[str]:
    """The target's lines that take enough of the step, hottest first."""
    file = "" if target.op else target.name.partition(":")[2]
    own = [
        line
        for line in profile["lines"]
        if (line["op"] == target.op if target.op else line["file"] == file and not line["op"])
    ]
    return [describe_row(line) for line in own if line["share"] >= LEAST_ROW][:MOST_LINES]


def describe_row(line: Mapping[str, Any]) -> str:
    """One line of the profile, as one line of text."""
    times = ", ".join(
        f"{name} {line[key] * 1e3:.2f} ms"
        for name, key in (("forward", "forward_s"), ("backward", "backward_s"), ("host", "host_s"))
        if line[key] > 0
    )
    return (
        f"{line['file']}:{line['line']} {line['op'] or '-'} {line['share']:.2%} of the step ({times}), {line['calls']:g} calls, "
        f"{line['bytes'] / 1e6:.2f} MB, {line['flops'] / 1e6:.2f} MFLOP, bound by {line['bound']}, {line['roofline']:.0%} of the roofline"
        f" | {fold_to_one_line(line['source'], 120)}"
    )


def describe_op(profile: Mapping[str, Any], name: str) -> list[str]:
    """The arguments of an op's calls, and its implementations with their times."""
    op = next((op for op in profile["ops"] if op["op"] == name), None)
    if op is None:
        return []
    words = [
        f"{call['calls']} calls a step with ({'; '.join(call['arguments'])})" for call in op.get("called_with", ())
    ]
    times = op.get("implementation_s", {})
    for implementation, about in op["implementations"].items():
        now = " (runs now)" if implementation == op["implementation"] else ""
        took = f"{times[implementation] * 1e3:.3f} ms" if implementation in times else "not timed"
        words.append(f"implementation {implementation}{now}: {took} alone, forward and backward of one call. {about}")
    return words


def describe_neighbourhood(profile: Mapping[str, Any], target: ProfileTarget) -> list[str]:
    """What feeds the target's lines, what they feed, and the fusion candidates that they belong to."""
    own = set(target.lines)
    is_own = lambda name: name.partition("#")[0] in own
    edges = [edge for edge in profile["edges"] if is_own(edge["source"]) != is_own(edge["target"])]
    edges.sort(key=lambda edge: -edge["bytes"])
    words = [f"{e['source']} → {e['target']}: {e['bytes'] / 1e6:.2f} MB read" for e in edges[:MOST_EDGES]]
    return (
        words
        + [
            f"could be fused: {' + '.join(c['lines'][:8])}: {c['bytes_saved'] / 1e6:.2f} MB less"
            for c in profile["fusion_candidates"]
            if any(map(is_own, c["lines"])) and c["gain_share"] >= LEAST_ROW
        ][:MOST_EDGES]
    )


def find_neighbours(profile: Mapping[str, Any], target: ProfileTarget) -> list[str]:
    """The names of the targets that exchange the most bytes with a target."""
    own = set(target.lines)
    moved: dict[str, float] = {}
    for edge in profile["edges"]:
        ends = [edge["source"], edge["target"]]
        other = [end for end in ends if end.partition("#")[0] not in own]
        if len(other) == 1:
            place, _, op = other[0].partition("#")
            name = f"kernel:{op}" if op else f"file:{place.rpartition(':')[0]}"
            if name != target.name:
                moved[name] = moved.get(name, 0.0) + edge["bytes"]
    return sorted(moved, key=lambda name: -moved[name])[:MOST_NEIGHBOURS]


def describe_earlier_work(profile: Mapping[str, Any], workbench: Workbench, target: ProfileTarget) -> str:
    """What was proposed and tried for the target and for its neighbours, with verdicts and reasons."""
    found = [
        tools.quote_earlier_proposals(
            workbench.list_earlier_proposals(target.name), workbench.list_earlier_tries(target.name)
        )
    ]
    words = []
    for name in find_neighbours(profile, target):
        for attempt in list(workbench.list_earlier_proposals(name))[-MOST_ATTEMPTS:]:
            words.append(f"{name}: {attempt.outcome or 'not judged'}: {attempt.title}: {_shorten_reason(attempt)}")
        words += [
            f"{name}: {fold_to_one_line(tried, 200)}" for tried in workbench.list_earlier_tries(name)[-MOST_ATTEMPTS:]
        ]
    if words:
        found.append(quote_as_data("earlier work on neighbouring targets", "\n".join(words), 4000))
    return "\n\n".join(found)


def _shorten_reason(attempt: EarlierProposal) -> str:
    return fold_to_one_line(str(attempt.reason), 200)


def quote_sources(profile: Mapping[str, Any], workbench: Workbench, target: ProfileTarget) -> list[str]:
    """The target's sources within ``SOURCE_CHARACTERS``, each as data, and the names of those that do not fit.

    Of an op: its definition, then the files of the present implementation (``.py`` with ``.cpp`` or ``.cu``), then the others, smallest first. Of a
    file: the functions around its hot lines.
    """
    if not target.op:
        return _quote_around_lines(workbench, target)
    op = next((op for op in profile["ops"] if op["op"] == target.op), None)
    left, parts, left_out = SOURCE_CHARACTERS, [], []
    for path in _order_files(workbench, target, op["implementation"] if op else ""):
        try:
            text = workbench.read(path)
        except UnreadableFileError:
            continue
        if len(text) > min(left, FILE_CHARACTERS):
            left_out.append(f"{path} ({len(text):,} characters)")
            continue
        left -= len(text)
        lines = text.count("\n") + 1
        parts.append(
            tools.describe_agent_written_lines(workbench, path, 1, lines) + quote_as_data(path, text, FILE_CHARACTERS)
        )
    if left_out:
        parts.append(f"Not shown here; `read_file` shows them: {', '.join(left_out)}.")
    return parts


def _order_files(workbench: Workbench, target: ProfileTarget, implementation: str) -> list[str]:
    """The files of the op, and files elsewhere that its hot lines name, most useful first."""
    folder = f"kernels/{target.op}/"
    files = [path for path in workbench.files() if path.startswith(folder)]
    hot = list(dict.fromkeys(line.rpartition(":")[0] for line in target.lines))
    runs = {"native": ("cpp",)}.get(implementation, (implementation,))
    stems = {PurePosixPath(path).stem for path in hot if path.startswith(folder)} | set(runs)

    def rank(path: str) -> tuple[int, str]:
        stem = PurePosixPath(path).stem
        native = PurePosixPath(path).suffix != ".py" and "cpp" in stems
        return (0 if path == f"{folder}__init__.py" else 1 if stem in stems or native else 2, path)

    elsewhere = [path for path in hot if path not in files and path in set(workbench.files())]
    first = [path for path in sorted(files, key=rank) if rank(path)[0] < 2]
    return [*first, *elsewhere, *(path for path in sorted(files, key=rank) if rank(path)[0] == 2)]


def _quote_around_lines(workbench: Workbench, target: ProfileTarget) -> list[str]:
    path = target.name.partition(":")[2]
    try:
        text = workbench.read(path)
    except UnreadableFileError:
        return []
    if len(text) <= FILE_CHARACTERS:
        return [
            tools.describe_agent_written_lines(workbench, path, 1, text.count("\n") + 1)
            + quote_as_data(path, text, FILE_CHARACTERS)
        ]
    lines = text.split("\n")
    hot = [int(line.rpartition(":")[2]) for line in target.lines]
    parts, left = [], SOURCE_CHARACTERS
    for first, last in find_stretches(hot, len(lines)):
        shown = "\n".join(lines[first - 1 : last])
        if len(shown) > left:
            break
        left -= len(shown)
        parts.append(tools.read_file(workbench, path, first, last))
    return parts


def find_stretches(hot: Iterable[int], of: int, around: int = AROUND) -> Sequence[tuple[int, int]]:
    """Stretches of lines, (first, last), that show ``around`` lines above and below each hot line of a file with ``of`` lines, in order.

    >>> find_stretches([40, 5, 44], 50, around=3)
    [(2, 8), (37, 47)]
    """
    found: list[tuple[int, int]] = []
    for line in sorted(hot):
        first, last = max(1, line - around), min(of, line + around)
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found
