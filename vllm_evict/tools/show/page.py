"""A page that shows what a policy evicted of one prompt, and where its answer differs from full attention's."""

import json
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

from .record import GONE, HOST, Shown, ShownStep

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
#: Fates for the table -> their heads.
MOVES = {"gone": "blocks evicted", "host": "to the host", "back": "back", "read": "read on the host"}


def page(shown: Shown, title: str) -> str:
    """Return the page: one HTML document that needs no other file.

    Args:
        shown: what became of the prompt.
        title: model and policy, for the heading.
    """
    steps = len(shown.steps)
    differs = shown.same < max(len(shown.answer), len(shown.full))
    alike = " Their texts are alike: they have other tokens." * ("".join(shown.answer) == "".join(shown.full))
    said = f"The answers differ from token {shown.same + 1} on.{alike}" if differs else "Both answers are the same."
    moves = [name for name in MOVES if any(counts[name] for counts in _moves(shown.steps))] or ["gone"]
    heads = "".join(f"<th>{MOVES[name]}</th>" for name in moves)
    rows = "".join(
        f'<tr data-computed="{each.computed}"><td>{step}</td><td>{each.computed}</td>'
        + "".join(f"<td>{counts[name]}</td>" for name in moves)
        for step, (each, counts) in enumerate(zip(shown.steps, _moves(shown.steps)), 1)
    )
    options = "".join(f'<option value="{at}">{escape(part.name)}</option>' for at, part in enumerate(shown.parts))
    hidden = " hidden" if len(shown.parts) == 1 else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{len(shown.prompt)} tokens of prompt in blocks of {shown.block_size}; {steps} steps. {said}</p>
<div class="bar"><div class="controls"><button id="before" aria-label="step before">&lt;</button>
<input id="step" type="range" min="0" max="{steps}" value="{steps}" aria-label="step">
<button id="after" aria-label="next step">&gt;</button></div>
<select id="part" aria-label="layer and heads"{hidden}><option value="">all layers and heads</option>{options}</select>
<div id="said" role="status"></div><div id="about" role="status">Tap a token to read what became of it.</div></div>
<h2>A row for each step, a column for each block</h2>
<div id="rows" class="box"><canvas id="picture" role="img" aria-label="fates of blocks by step"></canvas>
<div id="now"></div></div>
<h2>Prompt and <b>answer</b></h2>
<p class="legend"><span class="b kept" style="--shade:.2">kept, less important</span>
<span class="b kept" style="--shade:.8">more important</span> <span class="b host">on the host</span>
<span class="b read host">read by this decode</span> <span class="b gone">evicted</span>
<span class="b later">not computed yet</span></p>
<pre class="box" id="text">{"".join(_blocks(shown))}</pre>
<div class="two">
<section><h2>Answer under the policy</h2><pre class="box">{_answer(shown.answer, shown.same)}</pre></section>
<section><h2>Answer under full attention</h2><pre class="box">{_answer(shown.full, shown.same)}</pre></section></div>
<details><summary>Steps in numbers</summary><table><thead><tr><th>step</th><th>tokens computed</th>{heads}</tr></thead>
<tbody>{rows}</tbody></table></details>
<script type="application/json" id="data">{_data(shown)}</script><script>{SCRIPT}</script></body></html>
"""


def _data(shown: Shown) -> str:
    """Return what the script reads, as JSON that can stand in a page."""
    parts = [part._asdict() for part in shown.parts]
    steps = [step._asdict() for step in shown.steps]
    known = {"size": shown.block_size, "tokens": len(shown.prompt) + len(shown.answer), "parts": parts, "steps": steps}
    return json.dumps(known, separators=(",", ":")).replace("<", "\\u003c")


def _moves(steps: list[ShownStep]) -> Iterator[Counter[str]]:
    """Yield for each step how many blocks went where, over all KV groups; and blocks read, over all layers."""
    before: list[str] = []
    for step in steps:
        counts = Counter(read=sum(map(len, step.reads)))
        for group, fates in enumerate(step.fates):
            known = before[group] if before else ""
            for was, now in zip(known.ljust(len(fates), "k"), fates):
                counts["gone"] += now == GONE != was
                counts["host"] += now == HOST != was
                counts["back"] += was == HOST and now not in (GONE, HOST)
        before = step.fates
        yield counts


def _blocks(shown: Shown) -> Iterator[str]:
    """Yield an element for each block of prompt and answer; the answer is bold."""
    texts, size, prompt = shown.prompt + shown.answer, shown.block_size, len(shown.prompt)
    for start in range(0, len(texts), size):
        end = min(start + size, len(texts))
        asked, answered = "".join(texts[start : min(end, prompt)]), "".join(texts[max(start, prompt) : end])
        bold = f"<b>{escape(answered)}</b>" if answered else ""
        yield f'<span class="b">{escape(asked)}{bold}</span>'


def _answer(texts: list[str], same: int) -> str:
    """Return an answer with the first token that differs marked; with one of its character, if that has several."""
    end = next((at for at in range(same, len(texts)) if texts[at]), len(texts)) + 1
    before, first, after = ("".join(part) for part in (texts[:same], texts[same:end], texts[end:]))
    return escape(before) + (f"<mark>{escape(first)}</mark>" if first else "") + escape(after)
