"""A page that shows what a policy evicted of one prompt, and where its answer differs from full attention's."""

from collections.abc import Iterator
from html import escape

from ..integration.show import Shown

STYLE = """
:root { color-scheme: light dark; --gone: #c0392b; --line: #8886; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.2rem; } h2 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.6 ui-monospace, monospace; margin: 0; }
.box { border: 1px solid var(--line); border-radius: 6px; padding: .6rem; }
.kept { background: #2e86c126; } .gone { color: var(--gone); text-decoration: line-through; opacity: .55; }
.b { border-radius: 3px; box-shadow: inset 0 -1px var(--line); } mark { background: #f4d03f; color: #000; }
.bar { position: sticky; top: 0; background: Canvas; padding: .5rem 0; border-bottom: 1px solid var(--line); }
input { width: 100%; } table { border-collapse: collapse; } td, th { text-align: right; padding: .1rem .8rem .1rem 0; }
"""
SCRIPT = """
const slider = document.getElementById("step"), said = document.getElementById("said");
const blocks = [...document.querySelectorAll(".b")], rows = [...document.querySelectorAll("tbody tr")];
function show() {
  const step = +slider.value, row = rows[step - 1];
  let kept = 0;
  for (const block of blocks) {
    const gone = +block.dataset.gone <= step;
    block.classList.toggle("gone", gone);
    block.classList.toggle("kept", !gone);
    kept += !gone;
  }
  said.textContent = `After decision ${step} of ${rows.length}` + (row ? `, at ${row.dataset.computed} tokens` : "") +
    `: ${kept} of ${blocks.length} blocks kept.`;
}
slider.addEventListener("input", show); show();
"""


def page(shown: Shown, title: str) -> str:
    """Return the page: one HTML document that needs no other file.

    Args:
        shown: what became of the prompt.
        title: model and policy, for the heading.
    """
    steps = len(shown.decisions)
    differs = shown.same < max(len(shown.answer), len(shown.full))
    said = f"The answers differ from token {shown.same + 1} on." if differs else "Both answers are the same."
    rows = "".join(
        f'<tr data-computed="{each.computed}"><td>{step}</td><td>{each.computed}</td><td>{len(each.blocks)}</td></tr>'
        for step, each in enumerate(shown.decisions, 1)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{len(shown.prompt)} tokens of prompt in blocks of {shown.block_size}; {steps} decisions. {said}</p>
<div class="bar"><input id="step" type="range" min="0" max="{steps}" value="{steps}" aria-label="decision">
<div id="said"></div></div>
<h2>Prompt and answer: kept, <span class="gone">evicted</span></h2><pre class="box">{"".join(_blocks(shown))}</pre>
<h2>Answer under the policy</h2><pre class="box">{_answer(shown.answer, shown.same)}</pre>
<h2>Answer under full attention</h2><pre class="box">{_answer(shown.full, shown.same)}</pre>
<h2>Decisions</h2><table><thead><tr><th>decision</th><th>tokens computed</th><th>blocks evicted</th></tr></thead>
<tbody>{rows}</tbody></table>
<script>{SCRIPT}</script></body></html>
"""


def _blocks(shown: Shown) -> Iterator[str]:
    """Yield an element for each block of prompt and answer, with the number of the decision that evicted it."""
    texts, size = shown.prompt + shown.answer, shown.block_size
    gone = {block: step for step, each in enumerate(shown.decisions, 1) for block in each.blocks}
    for block, start in enumerate(range(0, len(texts), size)):
        end, step = min(start + size, len(texts)), gone.get(block)
        fate = f"evicted by decision {step}" if step else "kept"
        data = f' data-gone="{step}"' if step else ""
        data += f' title="tokens {start} to {end - 1}, {fate}"'
        text = escape("".join(texts[start:end]))
        yield f'<span class="b {"gone" if step else "kept"}"{data}>{text}</span>'


def _answer(texts: list[str], same: int) -> str:
    """Return an answer with the first token that differs marked."""
    before, first, after = texts[:same], texts[same : same + 1], texts[same + 1 :]
    marked = f"<mark>{escape(''.join(first))}</mark>" if first else ""
    return escape("".join(before)) + marked + escape("".join(after))
