"""Our engine beside kvpress on one model, prompt and budget: the tokens that each KV head keeps, and the text after it.

kvpress asks for an older transformers than vLLM, so it is no extra; CONTRIBUTING.md says how to install it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from evaluation import NEEDLE, needle_model, sample_of
from oracle.tiny import make_tiny_llama
from presses import Transformers, compared

from vllm_evict.tools.eval.prompts import Prompts

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed (CONTRIBUTING.md says how)")

from kvpress import KeyDiffPress, KnormPress, ObservedAttentionPress, StreamingLLMPress, TOVAPress  # noqa: E402

BLOCK, VOCAB, LENGTH = 32, 4096, 512
#: Layers, KV heads and query heads.
MODELS = {"gqa": (3, 4, 8), "one KV head": (3, 1, 4), "one layer": (1, 4, 8)}
BUDGET = {"budget": 256, "buffer": 64}
#: Sinks and recent tokens may go, as they may there.
BARE = {**BUDGET, "protect": False}
TOKENS = {**BARE, "granularity": "token"}
#: There the observation window stays, and takes no part in pooling.
WINDOW = {**BUDGET, "sink": 0, "recent": 32, "window": 32, "kernel": 1}
POOLED = {**WINDOW, "granularity": "token"}
PATTERN = ["0110", "1111", "0001"]


class SnapKV(kvpress.SnapKVPress):
    def __init__(self, ratio, kernel=1):
        super().__init__(ratio, window_size=32, kernel_size=kernel)


class ByBlock:
    """A token scores what its block does on average."""

    def score(self, *args):
        return super().score(*args).unflatten(-1, (-1, BLOCK)).mean(-1).repeat_interleave(BLOCK, -1)


class SnapKVByBlock(ByBlock, SnapKV):
    pass


class KnormByBlock(ByBlock, KnormPress):
    pass


class KnormPyramid(kvpress.PyramidKVPress):
    """kvpress' pyramid is not a wrapper: a subclass has other scores."""

    score = KnormPress.score


class Duo(kvpress.DuoAttentionPress):
    @staticmethod
    def load_attention_pattern(model):
        return 32, 96, np.array([[float(digit) for digit in row] for row in PATTERN])


def by_chunk(press):
    return lambda ratio: kvpress.ChunkKVPress(press(ratio), BLOCK)


def pyramid(beta):
    return lambda ratio: kvpress.PyramidKVPress(ratio, window_size=32, kernel_size=1, beta=beta)


def kvzip(ratio):
    return kvpress.KVzipPress(ratio, layerwise=True, n_sink=32)


class Case(NamedTuple):
    #: Compression ratio -> press.
    press: Callable[[float], kvpress.BasePress]
    policy: dict
    model: str = "gqa"
    attention: str = "sdpa"
    length: int = LENGTH
    #: Of a prefill.
    chunk: int = LENGTH + 1
    budgets: tuple = (256, 128)
    #: Whether what follows is the same as well.
    text: bool = True


SAME = {
    "knorm": Case(KnormPress, {"name": "knorm", **TOKENS}),
    "keydiff": Case(KeyDiffPress, {"name": "keydiff", **TOKENS}),
    # The paper's way, in chunks. There they have all been computed before the first is evicted from: so one layer.
    "keydiff, chunks": Case(
        lambda ratio: kvpress.BlockPress(KeyDiffPress(ratio), 128),
        {"name": "keydiff", **TOKENS},
        "one layer",
        chunk=128,
        budgets=(256,),
        text=False,
    ),
    "h2o, mean": Case(ObservedAttentionPress, {"name": "h2o", **TOKENS, "accumulate": "mean"}, attention="eager"),
    "snapkv": Case(SnapKV, {"name": "snapkv", **POOLED}),
    # All heads of a layer have one set there.
    "tova": Case(
        lambda ratio: TOVAPress(ratio - 1e-6),
        {"name": "tova", **BUDGET, "sink": 0, "recent": 1, "granularity": "token"},
        "one KV head",
        length=LENGTH + 1,
    ),
    "sink-window": Case(lambda ratio: StreamingLLMPress(ratio, 32), {"name": "sink-window", **BUDGET, "sink": 32}),
    # There the window is part of what falls with depth: 384, 256 and 128 tokens either way.
    "pyramidkv": Case(pyramid(2), {"name": "pyramidkv", **POOLED, "bands": 3, "beta": 7 / 3}, budgets=(256,)),
    "knorm, pyramid": Case(
        lambda ratio: KnormPyramid(ratio, window_size=1, beta=2),
        {"name": "knorm", **TOKENS, "allocate": "pyramid", "bands": 3, "beta": 2},
        budgets=(256,),
    ),
    # There heads of each layer share its budget; groups of heads of all layers here.
    "adakv": Case(
        lambda ratio: kvpress.AdaKVPress(SnapKVByBlock(ratio), 0.25),
        {"name": "adakv", **WINDOW, "bands": 4, "floor": 0.25},
        "one layer",
    ),
    "knorm, ada": Case(
        lambda ratio: kvpress.AdaKVPress(KnormByBlock(ratio), 0.25),
        {"name": "knorm", **BARE, "allocate": "ada", "bands": 4, "floor": 0.25},
        "one layer",
    ),
    # Heads share a budget there. The instruction is five words that the model does not know.
    "kvzip": Case(
        kvzip,
        {"name": "kvzip", **BUDGET, "sink": 32, "recent": 0, "granularity": "token", "instruction": [0] * 5},
        "one KV head",
    ),
    # The window does not move on there.
    "duo": Case(
        lambda _: Duo(5 / 12),
        {"name": "duo", "pattern": PATTERN, "sink": 32, "recent": 96},
        budgets=(None,),
        text=False,
    ),
    # All heads of a layer keep the same chunks there, of all layers here.
    "knorm, blocks": Case(by_chunk(KnormPress), {"name": "knorm", **BARE}, "one layer"),
    "keydiff, blocks": Case(by_chunk(KeyDiffPress), {"name": "keydiff", **BARE}, "one layer"),
    "snapkv, blocks": Case(by_chunk(SnapKV), {"name": "snapkv", **WINDOW}, "one layer"),
}
#: The first layer that is compared: in layer 0 the keys of a word that comes again are as long as before.
ON_NEEDLES = {"knorm": 1, "keydiff": 0, "h2o, mean": 0, "snapkv": 0, "sink-window": 0}
#: Where formulas differ; what is common is printed (-rP).
OTHERWISE = {
    "h2o": Case(ObservedAttentionPress, {"name": "h2o", **TOKENS}, attention="eager"),
    "snapkv, kernel 5": Case(lambda ratio: SnapKV(ratio, 5), {"name": "snapkv", **POOLED, "kernel": 5}),
    "tova": Case(TOVAPress, {"name": "tova", **TOKENS}),
    "pyramidkv": Case(pyramid(20), {"name": "pyramidkv", **POOLED, "bands": 4}),
    # The authors' words, and how the chat template ends.
    "kvzip": Case(kvzip, {**SAME["kvzip"].policy, "instruction": [0, 231, 0, 0, 0, 6, 5, 4]}),
}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    def make(name):
        layers, kv_heads, heads = MODELS[name]
        path = tmp_path_factory.mktemp("kvpress") / "model"
        return make_tiny_llama(path, layers=layers, heads=heads, kv_heads=kv_heads, vocab=VOCAB)

    return make


def prompt_of(length):
    """No token twice, and no head whose last two candidates are as good as each other."""
    return np.random.default_rng(3).permutation(VOCAB)[:length].tolist()


def needle(index):
    """A context of 1,024 tokens with a needle in it, and the question."""
    prompts = Prompts(str(NEEDLE))
    ids = prompts.ids(sample_of("niah", 1024, (0.17, 0.47, 0.79)[index], index, count=prompts.count))
    return ids[:1024], ids[1024:]


@pytest.mark.parametrize("name", SAME)
def test_heads_keep_the_same_tokens(engine, path_of, name):
    case = SAME[name]
    for want, want_text, got, got_text in compared(engine, path_of(case.model), case, prompt_of(case.length)):
        assert not want.all() and torch.equal(got, want)
        assert not case.text or got_text == want_text


@needle_model
@pytest.mark.parametrize("name", ON_NEEDLES)
def test_needles_are_found_and_lost_alike(engine, name):
    case, first = SAME[name]._replace(chunk=1024), ON_NEEDLES[name]
    for index in range(3):
        for want, want_text, got, got_text in compared(engine, NEEDLE, case, *needle(index)):
            assert torch.equal(got[first:], want[first:]) and got_text == want_text


@needle_model
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_other_formulas_keep(engine, name):
    case, shares = OTHERWISE[name]._replace(chunk=1024, budgets=(256,)), []
    for index in range(3):
        ((want, _, got, _),) = compared(engine, NEEDLE, case, *needle(index))
        shares.append(((want & got).sum() / want.sum()).item())
    print(f"{name}: {np.mean(shares):.1%} of the tokens that kvpress keeps")
    assert want.float().mean() < np.mean(shares) < 1


def test_requests_that_are_evicted_from_while_they_decode(engine, path_of):
    """Three decisions, 96 tokens from one to the next, back to seven blocks and the token before each."""
    theirs, prompt, count = Transformers(path_of("one KV head")), prompt_of(225), 300
    press = kvpress.DecodingPress(TOVAPress(), compression_interval=96, target_size=225, hidden_states_buffer_size=1)
    with press(theirs.model):
        want = theirs.generate(prompt, count)
    server = engine(SAME["tova"].policy, model=theirs.model.config.name_or_path)
    (output,) = server.generate([prompt], max_tokens=count)
    assert list(output.outputs[0].token_ids) == want and output.kv_usage.evicted_blocks == 9
