"""`vllm-evict show`: one page of a prompt, with what became of each block, and where the answer differs."""

import itertools
import json
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest

from vllm_evict import KVPolicyConfig, KVPolicyError
from vllm_evict.tools.eval.prompts import Prompts
from vllm_evict.tools.eval.tasks import make
from vllm_evict.tools.eval.words import Filler
from vllm_evict.tools.show.page import page
from vllm_evict.tools.show.record import GONE, HOST, Shown, ShownStep, pieces, run

MODEL = str(Path(__file__).parents[2] / "examples/needle/model")
SIZES = {"budget": 192, "sink": 32, "recent": 64, "buffer": 32}
POLICY = {"name": "sink-window", **SIZES}
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
    """Elements of a page: texts of blocks, marked words, rows of the table, what its script reads, and what is loaded."""

    def __init__(self, text):
        super().__init__()
        self.blocks, self.marked, self.rows, self.loaded, self._open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.loaded += [attributes[name] for name in ("src", "href") if name in attributes]
        if tag == "span" and attributes.get("class") == "b":
            self.blocks.append("")
        elif tag == "mark":
            self.marked.append("")
        elif tag == "tr" and "data-computed" in attributes:
            self.rows.append(int(attributes["data-computed"]))
        if tag not in ("meta", "input"):  # these have no end
            self._open.append("block" if attributes.get("class") == "b" else attributes.get("id", tag))

    def handle_data(self, data):
        if "block" in self._open:
            self.blocks[-1] += data
        elif "mark" in self._open:
            self.marked[-1] += data
        elif self._open[-1:] == ["data"]:
            self.data = json.loads(data)

    def handle_endtag(self, tag):
        self._open.pop()


def asked(chat=False):
    """A needle question of 600 tokens, as text: with the chat template around it, or what a user of a `chat` writes."""
    prompts = Prompts(MODEL)
    sample = make("niah", 600, 0.3, 0, 0, prompts.count, Filler())
    return sample.text if chat else prompts.tokenizer.decode(prompts.ids(sample)[1:])


def where(shown, fate, group=0):
    """After each step the blocks of which this became."""
    return [{at for at, its in enumerate(step.fates[group]) if its == fate} for step in shown.steps]


def test_a_page_says_what_became_of_a_prompt(async_stays):
    shown = run(MODEL, KVPolicyConfig.parse(POLICY), text := asked(), 24, OPTIONS)
    assert "".join(shown.prompt).endswith(text) and shown.block_size == 32
    assert shown.answer[: shown.same] == shown.full[: shown.same]
    # What sink-window evicts, in its order: after the sinks, from the oldest block on.
    gone = where(shown, GONE)
    assert all(each == set(range(1, 1 + len(each))) for each in gone) and len(gone[-1]) > 10
    assert all(before < after for before, after in itertools.pairwise(gone))
    computed = [each.computed for each in shown.steps]
    assert computed == sorted(computed) and computed[-1] <= len(shown.prompt) + len(shown.answer)
    held = [each for each in shown.steps[-1].fates[0] if each != GONE]
    assert len(held) == 192 // 32 and held[0] == held[-1] == "k"
    ages = held[1:-2]  # what the decision compared, the oldest least important
    assert ages == sorted(ages) and ages[0] < ages[-1]

    found = Page(page(shown, "needle <& sink-window>"))
    assert not found.loaded and found.rows == computed
    assert len(found.blocks) == -(-(len(shown.prompt) + len(shown.answer)) // 32)
    assert "".join(found.blocks) == "".join(shown.prompt + shown.answer)
    assert [each["fates"] for each in found.data["steps"]] == [each.fates for each in shown.steps]
    differ = [texts[shown.same] for texts in (shown.answer, shown.full) if shown.same < len(texts)]
    assert found.marked == differ


def test_what_layers_read_on_the_host_is_shown(async_stays):
    """Each layer reads as many blocks of the host as it chooses; answers are compared with stock full attention's."""
    reach = {"name": "full", "evict": "host", "host": "64MiB", **SIZES, "read": 160}
    said = []
    shown = run(MODEL, KVPolicyConfig.parse(reach), asked()[:-30], 8, OPTIONS, said.append)
    assert [line.split(" ", 2)[:2] for line in said] == [["starting", "vLLM"], ["answering", "a"]] * 2
    assert "the first of two engines" in said[0] and " again, for full attention" in said[2]
    decodes = [step for step in shown.steps if step.reads]
    assert len(decodes) == len(shown.answer) - 1 > 0 and len(shown.full) > 1
    for step in decodes:
        on_host = {at for at, its in enumerate(step.fates[0]) if its == HOST}
        # 5 blocks, of which a sink and 3 of recent tokens: what is chosen may be in the pool too.
        assert len(step.reads) == 4 and all(len(blocks) <= 2 for blocks in step.reads)
        assert any(on_host & {*blocks} for blocks in step.reads)
    assert len(decodes) > 2  # some of them read the choice of the step before (`hold`)
    assert [part.name for part in shown.parts] == [f"layer {layer}" for layer in range(4)]


@pytest.mark.parametrize("name", ["adakv", "duo"])
def test_heads_that_are_split_are_shown_apart(async_stays, name):
    policies = {
        "adakv": {"name": "adakv", **SIZES},
        "duo": {"name": "duo", "pattern": ["10", "10", "01", "11"], "sink": 32, "recent": 64},
    }
    options, said = OPTIONS | {"num_gpu_blocks_override": 256}, []
    shown = run(MODEL, KVPolicyConfig.parse(policies[name]), asked(chat=True), 8, options, said.append, chat=True)
    assert "".join(shown.prompt).endswith(asked())
    assert sum(part.heads for part in shown.parts) == 8
    if name == "adakv":
        assert shown.parts[0].name == "layer 0, KV head 0 (band-0)"
        assert where(shown, GONE, 0)[-1] != where(shown, GONE, 1)[-1]
    else:
        lost = {part.name: bool(where(shown, GONE, part.group)[-1]) for part in shown.parts}
        assert lost == {
            "layer 0, KV head 0 (retrieval)": False,
            "layer 0, KV head 1 (streaming)": True,
            "layer 1, KV head 0 (retrieval)": False,
            "layer 1, KV head 1 (streaming)": True,
            "layer 2, KV head 1 (retrieval)": False,
            "layer 2, KV head 0 (streaming)": True,
            "layer 3, KV heads 0, 1 (retrieval)": False,
        }
    Page(page(shown, name))


def test_a_page_of_8000_tokens_marks_the_first_difference():
    words = [f"w{at}<b> " for at in range(8000)]
    shown = Shown(words, ["a", " b", " c"], ["a", " b", " d"], [ShownStep(8000, ["k" * 500], [])] * 250, 16)
    found = Page(text := page(shown, "m"))
    assert len(found.blocks) == 501 and len(text) < 1_000_000
    assert found.marked == [" c", " d"] and "differ from token 3 on" in text
    assert "Both answers are the same" in page(shown._replace(full=shown.answer), "m")


def test_answers_are_compared_by_tokens_and_a_part_of_a_character_is_marked_with_its_rest():
    one = Shown(["q"], ["a", "", "é", "z"], ["a", "", "è", "z"], [], 16, ids=([1, 2, 3, 9], [1, 4, 5, 9]))
    assert one.same == 1 and Page(page(one, "m")).marked == ["é", "è"]
    alike = one._replace(full=one.answer)
    assert alike.same == 1 and "differ from token 2 on. Their texts are alike" in page(alike, "m")
    assert "Both answers are the same" in page(alike._replace(ids=(alike.ids[0],) * 2), "m")


class Bytes:
    """A tokenizer of single bytes; what is no text yet is shown as `errors` says."""

    def __init__(self, errors):
        self.errors = errors

    def decode(self, ids):
        return bytes(ids).decode(errors=self.errors)


class Runs:
    """Words above 255, which begin with a space that the first one drops. A run of bytes is text as a whole, or no part of it."""

    def decode(self, ids):
        words, run = [], b""
        for each in [*ids, None]:
            if each is not None and each < 256:
                run += bytes([each])
                continue
            try:
                words.append(run.decode())
            except UnicodeDecodeError:
                words.append("�" * len(run))
            words, run = [*words, "" if each is None else f" w{each}"], b""
        return "".join(words).removeprefix(" ")


class Joining(Runs):
    """A word that changes the end of the text before it."""

    def decode(self, ids):
        return super().decode(ids).replace("w300 w301", "v'")


class Shouting(Runs):
    """A part of a text is decoded otherwise than the whole."""

    def decode(self, ids):
        return super().decode(ids).upper() if len(ids) < 400 else super().decode(ids)


@pytest.mark.parametrize(
    "tokenizer",
    [Bytes("replace"), Bytes("ignore"), Runs(), Joining(), Shouting()],
    ids=lambda each: type(each).__name__,
)
def test_no_character_is_lost_wherever_a_token_ends(tokenizer):
    for pad in range(1, 66):
        for text in ("a" * pad + "日本語のテキスト" * 20, "a" * pad + "🙂é字" * 40):
            # A character stands with the last of its bytes.
            placed = [part for each in text for part in [""] * (len(each.encode()) - 1) + [each]]
            if type(tokenizer) is not Shouting:
                assert pieces(tokenizer, list(text.encode())) == placed
    rng = random.Random(0)
    for length in (*range(1, 100, 3), 900):
        parts = ([300], [301], [302], *(list(each.encode()) for each in "字🙂�a"), [0xE6])
        ids = [each for _ in range(length) for each in rng.choice(parts)]
        if type(tokenizer) is Bytes:
            ids = [rng.randrange(256) for _ in ids]
        found = pieces(tokenizer, ids)
        assert len(found) == len(ids) and "".join(found) == tokenizer.decode(ids)


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
        ({"name": "h2o", "budget": 256, "context": 512}, "a context"),
    ],
)
def test_what_cannot_be_shown_is_refused(change, what):
    with pytest.raises(KVPolicyError, match=f"show got {what}; expected a policy that evicts whole blocks, or moves"):
        run(MODEL, KVPolicyConfig.parse(change), "text", 8, OPTIONS)
