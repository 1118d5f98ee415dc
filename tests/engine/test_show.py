"""`vllm-evict show`: one page of a prompt, with what became of each block, and where the answer differs."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from vllm_evict import KVPolicyConfig, KVPolicyError
from vllm_evict.eval.prompts import Prompts
from vllm_evict.eval.show import page
from vllm_evict.eval.tasks import make
from vllm_evict.eval.words import Filler
from vllm_evict.integration.show import Shown, pieces, run

MODEL = str(Path(__file__).parents[2] / "examples/needle/model")
POLICY = {"name": "sink-window", "budget": 192, "sink": 32, "recent": 64, "buffer": 32}
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": 32,
    "num_gpu_blocks_override": 64,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_batched_tokens": 128,
    "enforce_eager": True,
}


class Page(HTMLParser):
    """Elements of a page: blocks as (attributes, text), marked words, rows of the table, and what is loaded."""

    def __init__(self, text):
        super().__init__()
        self.blocks, self.marked, self.rows, self.loaded, self._at = [], [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.loaded += [attributes[name] for name in ("src", "href") if name in attributes]
        if tag == "span" and attributes.get("class", "").startswith("b "):
            self.blocks.append([attributes, ""])
            self._at = self.blocks[-1]
        if tag == "mark":
            self._at = [{}, ""]
            self.marked.append(self._at)
        if tag == "tr" and "data-computed" in attributes:
            self.rows.append(int(attributes["data-computed"]))

    def handle_data(self, data):
        if self._at is not None:
            self._at[1] += data

    def handle_endtag(self, tag):
        if tag in ("span", "mark"):
            self._at = None


def test_a_page_says_what_became_of_a_prompt(async_stays):
    prompts = Prompts(MODEL)
    sample = make("niah", 600, 0.3, 0, 0, prompts.count, Filler())
    text = prompts.tokenizer.decode(prompts.ids(sample)[1:])
    shown = run(MODEL, KVPolicyConfig.parse(POLICY), text, 24, OPTIONS)
    assert "".join(shown.prompt).endswith(text) and shown.block_size == 32
    assert shown.answer[: shown.same] == shown.full[: shown.same]
    gone = [block for each in shown.decisions for block in each.blocks]
    # What sink-window evicts, in its order: after the sinks, from the oldest block on.
    assert gone == list(range(1, 1 + len(gone))) and len(gone) > 10
    computed = [each.computed for each in shown.decisions]
    assert computed == sorted(computed) and computed[-1] <= len(shown.prompt) + len(shown.answer)
    held = -(-computed[-1] // 32) - len(gone)
    assert held == 192 // 32

    found = Page(page(shown, "needle <& sink-window>"))
    assert not found.loaded and found.rows == computed
    assert len(found.blocks) == -(-(len(shown.prompt) + len(shown.answer)) // 32)
    assert "".join(text for _, text in found.blocks) == "".join(shown.prompt + shown.answer)
    for at, (attributes, _) in enumerate(found.blocks):
        step = next((number for number, each in enumerate(shown.decisions, 1) if at in each.blocks), None)
        assert attributes.get("data-gone") == (None if step is None else str(step))
        assert attributes["class"] == ("b kept" if step is None else "b gone")
        assert attributes["title"].startswith(f"tokens {32 * at} to ")
    differ = [texts[shown.same] for texts in (shown.answer, shown.full) if shown.same < len(texts)]
    assert [text for _, text in found.marked] == differ


def test_a_page_of_8000_tokens_marks_the_first_difference():
    words = [f"w{at}<b> " for at in range(8000)]
    shown = Shown(words, ["a", " b", " c"], ["a", " b", " d"], 2, [], 16)
    found = Page(text := page(shown, "m"))
    assert len(found.blocks) == 501 and len(text) < 1_000_000
    assert [marked for _, marked in found.marked] == [" c", " d"] and "differ from token 3 on" in text
    assert "Both answers are the same" in page(shown._replace(full=shown.answer, same=3), "m")


def test_pieces_of_tokens_are_the_text():
    tokenizer = Prompts(MODEL).tokenizer
    text = "The code of  lantern is 4,711. Ünï – 漢字 🙂 end." * 20
    ids = tokenizer(text)["input_ids"]
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids) and "".join(found) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "change, what",
    [
        ({"name": "full"}, "full, which evicts nothing"),
        ({"name": "h2o", "budget": 256, "granularity": "token"}, "granularity: token"),
        ({"name": "adakv", "budget": 256}, "a policy that splits heads"),
    ],
)
def test_what_cannot_be_shown_is_refused(change, what):
    with pytest.raises(KVPolicyError, match=f"show got {what}; expected a policy that evicts whole blocks"):
        run(MODEL, KVPolicyConfig.parse(change), "text", 8, OPTIONS)
