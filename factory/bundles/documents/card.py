"""Writes README.md, the model card in the format of Hugging Face."""

from __future__ import annotations

import json
from typing import Any

from factory.bundles.documents.facts import NO_ASSERTION, BundleFacts
from factory.bundles.files import layout

HOW_TO_RUN = f"""## How to run

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{layout.MODEL}")
model = AutoModelForCausalLM.from_pretrained("{layout.MODEL}")
```

or `vllm serve {layout.MODEL}`. Weights are safetensors; nothing here asks for remote code.

## How to check it

```
factory verify FOLDER --public-key PUBLISHED_KEY.pem
```

needs no workspace, no ledger and no network. It hashes every file, checks the signature, judges the release again from the recorded
items, makes the parity fixture again from weights and tokenizer, and this card from the other files. Take the public key from its
publisher, not from this folder: a forger would put another one here.
"""


def write_card(facts: BundleFacts) -> str:
    """Return the text of the model card. Every number comes from the bundle's other files."""
    parts = [
        _front(facts),
        f"# {facts.name}\n",
        _summary(facts),
        _data(facts),
        _evaluation(facts),
        _limits(facts),
        HOW_TO_RUN,
    ]
    return "\n".join(parts)


def _front(facts: BundleFacts) -> str:
    licence = facts.licences["model"]
    lines = [f"license: {'other' if licence == NO_ASSERTION else licence.lower()}", "library_name: transformers"]
    lines += ["pipeline_tag: text-generation", f"model_name: {json.dumps(facts.name)}"]
    return "---\n" + "\n".join(lines) + "\n---\n"


def _summary(facts: BundleFacts) -> str:
    first, last = facts.segments[0], facts.segments[-1]
    machines = sorted({str((row.get("machine") or {}).get("name", "not recorded")) for row in facts.segments})
    licence = facts.licences["model"]
    rows = {
        "architecture": ", ".join(map(str, facts.config.get("architectures") or ["not named"])),
        "layers × width": f"{facts.config['num_hidden_layers']} × {facts.config['hidden_size']}",
        "vocabulary, context": f"{facts.config['vocab_size']} tokens, {facts.config['max_position_embeddings']} tokens",
        "recipe": f"{last['recipe']} (sha256 {str(last['recipe_sha256'])[:12]})",
        "trained": f"{len(facts.segments)} segments, steps {first['first_step']} to {last['last_step']}",
        "code": f"commit {last['code_commit']}",
        "machine": ", ".join(machines),
        "released": f"{facts.released_at}, approved by {facts.verdict['approved_by'] or 'policy'}{_overridden(facts)}",
        "licence of the weights": "not stated by the publisher" if licence == NO_ASSERTION else licence,
    }
    return _table(["", ""], [[name, value] for name, value in rows.items()])


def _overridden(facts: BundleFacts) -> str:
    over = facts.verdict.get("override")
    return f", though the release gate held it: {over['why']}" if over else ""


def _data(facts: BundleFacts) -> str:
    documents, tokens = facts.sum_column_by_licence("documents"), facts.sum_column_by_licence("supervised_tokens")
    allowed = facts.licences["release_allowed"]
    included = {row["license"] for row in facts.shards if row["included"]}
    rows = [
        [name, count, tokens[name], "yes" if allowed[name] else "no", "yes" if name in included else "no"]
        for name, count in documents.items()
    ]
    shards = len({row["token_shard"] for row in facts.shards})
    words = f"## Training data\n\n{shards} token shards; each with its licences in `{layout.SHARDS}` and `{layout.CROISSANT}`.\n"
    heads = ["licence", "documents", "supervised tokens", "may be released", "documents in this bundle"]
    synthetic = _synthetic(facts, sum(tokens.values()))
    taken = len(facts.anomalies["quarantined"])
    table = _table(heads, rows)
    return f"{words}\n{table}\n{synthetic}{taken} of these documents were quarantined later: the model saw them (`{layout.ANOMALIES}`).\n"


def _synthetic(facts: BundleFacts, total: int) -> str:
    """Return the part about data that models wrote, with the share of each model; '' without such data."""
    if not facts.synthetic_tokens:
        return ""
    share = lambda count: f"{count / max(1, total):.1%}"
    rows = [
        [maker, count, share(count)] for maker, count in sorted(facts.synthetic_tokens.items(), key=lambda one: -one[1])
    ]
    words = (
        f"Models wrote {share(sum(facts.synthetic_tokens.values()))} of the supervised tokens, as the documents say:"
    )
    return f"{words}\n\n{_table(['written by', 'supervised tokens', 'share'], rows)}\n"


def _evaluation(facts: BundleFacts) -> str:
    ours, theirs = facts.measurements["candidate"], facts.measurements.get("champion") or {}
    rows = []
    for domain, bits in sorted(ours["bpb"].items()):
        trigram = (ours.get("baselines", {}).get(domain) or {}).get("trigram")
        values = (bits, (theirs.get("bpb") or {}).get(domain), trigram)
        rows.append([domain, ours["documents"].get(domain), *(_number(value) for value in values)])
    against = facts.verdict["against"]
    heads = [
        "domain",
        "held-out documents",
        "bits per byte",
        str(against or "champion").replace(":", " "),
        "byte trigram",
    ]
    cloze = ours["cloze"]
    lines = [f"## Evaluation\n\n{_table(heads, rows)}"]
    if cloze["items"]:
        lines.append(
            f"Cloze: {cloze['share_right']:.3f} of {cloze['items']} items right (chance {cloze['chance']:.2f}).\n"
        )
    over = facts.verdict.get("override")
    words = (
        f"; {_plain(over['by'])} released it all the same: {_plain(over['why'])}. What the gate said" if over else ""
    )
    lines.append(f"The release gate said **{facts.verdict['outcome']}**{words}:\n")
    lines += [f"- {_plain(reason)}" for reason in facts.verdict["reasons"]]
    names = f"`{layout.POLICY}`, `{layout.EVIDENCE}`, `{layout.ITEMS}`"
    lines.append(
        f"\nPolicy, evidence and item-level results: {names}. Held-out documents are named by hash in `{layout.HELD_OUT}`.\n"
    )
    return "\n".join(lines)


def _limits(facts: BundleFacts) -> str:
    found = facts.anomalies["anomalies"]
    open_ = sum(row["state"] == "open" for row in found)
    lines = [
        f"- Judged on the domains {', '.join(facts.evidence['domains'])} alone, on held-out documents of its own data: no more is known.",
        "- Not judged for safety, bias or facts: it may write what is wrong or harmful.",
        f"- Its training had {len(found)} recorded anomalies, {open_} of them open (`{layout.ANOMALIES}`).",
        "- It stops at the end tokens in `generation_config.json`, and knows the chat template in `chat_template.jinja` alone.",
    ]
    return "## Limits\n\n" + "\n".join(lines) + "\n"


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_plain(cell) for cell in line)} |" for line in lines) + "\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _plain(value: Any) -> str:
    """Return untrusted text for Markdown: on one line, with table bars and HTML escaped."""
    words = " ".join(str(value).split())
    return words.replace("|", "\\|").replace("<", "&lt;")
