"""The page of `vllm-evict show` in Chromium: what it marks is what the dense oracle says, at 400 and at 8,000 tokens."""

import json
import shutil
from itertools import accumulate
from pathlib import Path

import pytest
from browser import browsing, executable
from oracle.model import DenseLlama
from oracle.replay import Config, generate
from parity import oracle_config

from vllm_evict import KVPolicyConfig
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.tasks import make
from vllm_evict.tools.eval.words import Filler
from vllm_evict.tools.show.page import page
from vllm_evict.tools.show.record import HeadSet, Shown, ShownStep, run

MODEL = Path(__file__).parents[2] / "examples/needle/model"
SIZES = {"sink": 32, "recent": 64, "buffer": 0}
#: Tokens of the text -> policy, tokens of a chunk. Of many blocks some have scores that only rounding tells apart.
CASES = {
    400: ({"name": "h2o", "budget": 160, **SIZES}, 96),
    8000: ({"name": "sink-window", "budget": 1024, **SIZES}, 1024),
}
TOKENS = 16
PHONE, SCREEN = 360, 1280

pytestmark = pytest.mark.skipif(executable() is None, reason="no Chromium here: scripts/browser.sh")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The embedded model, with positions for longer texts."""
    folder = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 9216}))
    return str(folder)


def asked(length):
    """A needle question as text, and its token ids."""
    prompts = Prompts(str(MODEL))
    sample = make("niah", length, 0.3, 0, 0, prompts.count, Filler())
    text = prompts.tokenizer.decode(prompts.ids(sample)[1:])
    return text, prompts.tokenizer(text)["input_ids"]


def gone_on_page(browser):
    """Blocks whose text the page strikes out."""
    struck = "[...document.querySelectorAll('#text .b')].flatMap((b, at) =>"
    struck += " getComputedStyle(b).textDecorationLine === 'line-through' ? [at] : [])"
    return set(browser.ask(struck))


def fits(browser):
    """Nothing is wider than the window, or than the element that it is in."""
    assert browser.ask("document.documentElement.scrollWidth") <= browser.ask("innerWidth")
    wide = "[...document.querySelectorAll('body *')].filter((e) => getComputedStyle(e).display !== 'inline' &&"
    wide += " e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0).map((e) => e.outerHTML.slice(0, 80))"
    assert browser.ask(wide) == []
    out = "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1)"
    assert browser.ask(f"{out}.length") == 0


@pytest.mark.parametrize("length", CASES)
def test_the_page_marks_what_the_oracle_says_was_evicted(browser, model, async_stays, tmp_path, length):
    """Bar 10. The slider goes through all decisions; the first word that differs is marked; it fits a phone."""
    policy, chunk = CASES[length]
    options = {"dtype": "float32", "max_model_len": length + 256, "block_size": 32, "enforce_eager": True}
    options |= {"kv_cache_memory_bytes": 256 << 20, "num_gpu_blocks_override": 320, "max_num_batched_tokens": chunk}
    text, ids = asked(length)
    shown = run(model, KVPolicyConfig.parse(policy), text, TOKENS, options)
    path = tmp_path / "kept.html"
    path.write_text(page(shown, f"needle, {length} tokens"), encoding="utf-8")

    dense, chunks = DenseLlama(model), [chunk] * (len(ids) // chunk) + [len(ids) % chunk] * (len(ids) % chunk > 0)
    own, replay = generate(dense, ids, chunks, len(shown.answer), oracle_config(policy, ids))
    # The request has ended with the last step, so nothing is decided then.
    last = len(ids) + len(shown.answer) - 1
    decided = [(each.n, set(each.evicted)) for each in replay.decisions if each.evicted and each.n < last]
    evicted = [set(), *accumulate((blocks for _, blocks in decided), set.union)]
    assert len(evicted) > 3

    for width in (SCREEN, PHONE):
        browser.open(path, width)
        assert not browser.errors and browser.asked == [path.resolve().as_uri()]
        fits(browser)
        assert gone_on_page(browser) == evicted[-1]
        steps = int(browser.ask("step.max"))
        assert steps == len(evicted) - 1
        browser.ask("step.focus()")
        for at in range(steps - 1, -1, -1):
            browser.press("ArrowLeft", 37)
            assert int(browser.ask("step.value")) == at
            assert gone_on_page(browser) == evicted[at]
            held = -(-decided[max(at - 1, 0)][0] // 32) - len(evicted[at])
            assert f": {held} of " in browser.ask("said.textContent")
        # A tap on the picture's last row goes to the last step, and one on a token tells what became of it.
        last = "(() => { picture.scrollIntoView({block: 'center'}); const r = picture.getBoundingClientRect();"
        browser.click(*browser.ask(f"{last} return [r.left + r.width / 2, r.bottom - 2]; }})()"))
        assert gone_on_page(browser) == evicted[-1]
        block = min(evicted[-1])
        place = f"(() => {{ const b = document.querySelectorAll('#text .b')[{block}]; b.scrollIntoView({{block: 'center'}});"
        browser.click(*browser.ask(f"{place} const r = b.getClientRects()[0]; return [r.right - 3, r.top + 5]; }})()"))
        step = next(at for at, blocks in enumerate(evicted) if block in blocks)
        known = f"Tokens {32 * block} to {32 * block + 31}: evicted by step {step}, at {decided[step - 1][0]} tokens"
        assert known in browser.ask("about.textContent")
        browser.ask("document.querySelector('details').open = true")
        fits(browser)

    marked = browser.ask("[...document.querySelectorAll('mark')].map((m) => m.textContent)")
    assert marked == [texts[shown.same] for texts in (shown.answer, shown.full) if shown.same < len(texts)]
    if length == 400:
        full, _ = generate(dense, ids, chunks, len(shown.full), Config(block_size=32))
        differ = next(at for at, pair in enumerate(zip(own, full)) if pair[0] != pair[1])
        assert marked == [shown.answer[differ], shown.full[differ]]


def test_the_page_shows_heads_and_what_decodes_read_on_the_host(browser, tmp_path):
    """A choice of layer and heads changes what is marked; on a phone too."""
    parts = [HeadSet("layer 0, KV head 0 (band-0)", 1, 0, 0), HeadSet("layer 0, KV head 1 (band-1)", 1, 1, None)]
    parts.append(HeadSet("layer 1, KV heads 0, 1 (band-0)", 2, 0, 1))
    steps = [
        ShownStep(64, ["k09h", "k..."], []),
        ShownStep(70, ["k09hk", "k...k"], [[3], []]),
        ShownStep(71, ["k0.hk", "k...k"], [[], [3]]),
    ]
    words = [f"w{at}<b>&{'x' * 40 * (at % 9 == 0)} " for at in range(64)]
    shown = Shown(words, ["a", " b", " c"] + ["d"] * 7, ["a", " b", " x"], steps, 16, parts)
    (path := tmp_path / "kept.html").write_text(page(shown, "heads <&>"), encoding="utf-8")
    browser.open(path, PHONE)
    assert not browser.errors and gone_on_page(browser) == {2}
    fits(browser)
    assert browser.ask("said.textContent").endswith(
        "at 71 tokens: 2.8 of 5 blocks kept, 0.8 on the host, 1.5 evicted (mean of all heads)."
    )

    def read():
        return browser.ask(
            "[...document.querySelectorAll('#text .b')].flatMap((b, at) => b.matches('.read') ? [at] : [])"
        )

    def pick(part, step):
        browser.ask(
            f"part.value = '{part}'; part.dispatchEvent(new Event('change')); step.value = {step}; step.dispatchEvent(new Event('input'))"
        )

    assert read() == [3]
    for part, gone, reads in (("0", {2}, []), ("1", {1, 2, 3}, []), ("2", {2}, [3])):
        pick(part, 3)
        assert (gone_on_page(browser), read()) == (gone, reads)
    pick("0", 2)
    assert (gone_on_page(browser), read()) == (set(), [3])
    shades = browser.ask(
        "[...document.querySelectorAll('#text .kept')].map((b) => +b.style.getPropertyValue('--shade'))"
    )
    assert shades[1] < shades[2] <= shades[0]  # importance 0 and 9, and a sink
    assert browser.ask("document.querySelectorAll('#text .b')[3].matches('.host')")
    assert browser.ask("document.querySelector('mark').textContent") == " c"
    assert browser.ask("document.querySelectorAll('b, i').length") == 2  # the heading, and the answer's element
