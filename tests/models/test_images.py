"""Images in prompts: their blocks are evicted like blocks of text, and positions of several dimensions stay."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from drafting import DRAFTS, NGRAM, Drafter, LayeredDrafter, accepted
from engine import exactly, greedy, random_prompt
from oracle.images import BFLOAT16, END, IMAGE, KINDS, START, DenseImages, make_tiny
from oracle.logits import make_assistant
from parity import assert_like_oracle
from PIL import Image
from test_hybrids import NOISE, apart
from test_reach import REACH, assert_reaches_like_dense
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_evict.config import KVPolicyError

pytestmark = pytest.mark.since("0.32", "its CPU engine has no kernels of states", kind="qwen3_5")
pytest.importorskip("torchvision", reason="scripts/setup.sh installs torchvision")

BASE = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64}
POLICIES = {name: {"name": name, **BASE} for name in ("h2o", "sink-window")}
POLICIES["snapkv"] = {"name": "snapkv", **BASE, "window": 24}
#: No request is answered with parts of an image.
WORDS = {"logprobs": 1, "allowed_token_ids": list(range(IMAGE))}
NAN = "vLLM 0.32's V2 answers NaN on a CPU, without a policy too"
OPTIONS = {"limit_mm_per_prompt": {"image": 2}, "max_num_batched_tokens": 192, "skip_mm_profiling": True}


def options_of(kind):
    return OPTIONS | ({"dtype": "bfloat16"} if kind in BFLOAT16 else {})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Kind -> its directory and dense model."""
    folder = tmp_path_factory.mktemp("images")

    @cache
    def make(kind):
        path = make_tiny(folder / kind, kind)
        return path, DenseImages(path, kind)

    return make


def image(seed, width=392, height=280):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def asked(length, images, seed=0):
    """A prompt of words with images behind its first 70 and before its last 40 words."""
    words = random_prompt(length, seed, vocab=IMAGE)
    for place, _ in zip((70, -40), images):
        words[place:place] = [START, IMAGE, END]
    return {"prompt_token_ids": words, "multi_modal_data": {"image": list(images)}}


@pytest.mark.oracle("images")
@pytest.mark.v1("qwen3_5-h2o", why=NAN)
@pytest.mark.both_runners("qwen2_5_vl-sink-window")
@pytest.mark.parametrize(
    "kind, name", [("llava", "h2o"), ("qwen2_5_vl", "sink-window"), ("qwen3_vl", "snapkv"), ("qwen3_5", "h2o")]
)
def test_evictions_and_logprobs_match_transformers(engine, models, kind, name):
    """Of two images in one prompt and one in another, in one batch, in chunks that end inside an image."""
    path, dense = models(kind)
    server = engine(POLICIES[name], model=path, **options_of(kind))
    mean, most = NOISE["qwen3_next"] if kind in BFLOAT16 else (1e-5, 3e-5)
    shown = ([image(1), image(2, 196, 336)], [image(3)])
    requests = [(asked(400, images, seed), {"max_tokens": 60, **WORDS}) for seed, images in enumerate(shown)]
    evicted = 0
    for images, output, trace in zip(shown, *server.traced(requests)):
        prompt = output.prompt_token_ids
        assert prompt.count(IMAGE) >= 60 * len(images)
        dense.see(prompt, images)
        tie = 5e-3 if kind in BFLOAT16 else 1e-4
        evicted += assert_like_oracle(dense, prompt, output, trace, POLICIES[name], atol=most, tie=tie)
        assert apart(dense, prompt, output, trace).mean() <= mean
        of_images = {token // 32 for token, word in enumerate(prompt) if word == IMAGE}
        assert of_images.intersection(*[set().union(*trace.evicted)])
    assert evicted > 16
    server.assert_nothing_left()


# On Model Runner V2 stock vLLM's log-probabilities of Qwen3.5 with an image are NaN.
@pytest.mark.v1("qwen3_5", why=NAN)
@pytest.mark.parametrize("kind", KINDS)
def test_full_is_stock_to_the_byte(engine, models, kind):
    path, _ = models(kind)
    outputs = []
    for policy in (None, {"name": "full"}, {**POLICIES["h2o"], "budget": 1024}):
        server = engine(policy, model=path, **options_of(kind))
        (output,) = server.llm.generate([asked(300, [image(1)])], greedy(20, logprobs=0), use_tqdm=False)
        outputs.append(exactly([output]))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_prefixes_are_hit_with_the_same_image_alone(engine, models, poisoned, kind):
    """After an eviction: blocks computed over holes are hit under no image, and nothing of freed blocks is read."""
    path, dense = models(kind)
    server = engine({**POLICIES["h2o"], "allow": ["full"]}, model=path, **OPTIONS)
    (_,), (trace,) = server.traced([(asked(500, [image(1)]), {"max_tokens": 40, **WORDS})])
    assert sum(map(len, trace.evicted)) > 8
    for seen, hit in (([image(1)], "image"), ([image(2)], "words"), ([image(1)], "all")):
        extra = {"kv_policy": "full"}
        (output,), (trace,) = server.traced([(asked(500, seen), {"max_tokens": 12, **WORDS, "extra_args": extra})])
        prompt = output.prompt_token_ids
        last = max(token for token, word in enumerate(prompt) if word == IMAGE)
        if hit == "words":
            assert output.num_cached_tokens == 64
        elif hit == "image":
            assert last < output.num_cached_tokens == 384, "what was computed before the first hole"
        else:
            assert output.num_cached_tokens >= len(prompt) - 32
        dense.see(prompt, seen)
        assert assert_like_oracle(dense, prompt, output, trace, {"name": "full"}, atol=3e-5) == 0
    server.assert_nothing_left()


@pytest.mark.parametrize("online", [False, True])
def test_the_image_of_a_refused_request_is_sent_with_the_next_one(engine, models, online):
    """vLLM sends an image to the engine core once, and fails requests whose image the core has not got."""
    (path, _), prompt, refused = models("llava"), asked(100, [image(7)]), greedy(4, extra_args={"kv_budget": 10**9})
    llm = engine(POLICIES["h2o"], model=path, **OPTIONS).llm
    with pytest.raises(VLLMValidationError, match="kv_budget"):
        if online:  # a server makes the prompt before it asks the engine
            (made,) = llm.renderer.render_cmpl([parse_model_prompt(llm.model_config, prompt)])
            front = SimpleNamespace(vllm_config=llm.llm_engine.vllm_config, renderer=llm.renderer)
            AsyncLLM.generate(front, made, refused)
        else:
            llm.generate([prompt], refused, use_tqdm=False)
    (output,) = llm.generate([prompt], greedy(4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.oracle("images")
def test_images_whose_tokens_attend_to_each_other_on_a_gpu_are_served(engine, tmp_path):
    """Gemma 3. On a CPU vLLM has all tokens attend to those before them. For a GPU see test_images_devices.py."""
    path, shown = make_tiny(tmp_path / "gemma3", "gemma3"), [image(1)]
    words = random_prompt(300, vocab=246)
    prompt = {"prompt_token_ids": [*words[:70], START, *words[70:]], "multi_modal_data": {"image": shown}}
    outputs = []
    for policy in (None, {"name": "full"}):
        server = engine(policy, model=path, **OPTIONS)
        (output,) = server.llm.generate([prompt], greedy(8, logprobs=0), use_tqdm=False)
        outputs.append(exactly([output]))
    assert outputs[0] == outputs[1]
    server = engine(POLICIES["h2o"], model=path, **OPTIONS)
    (output,), (trace,) = server.traced([(prompt, {"max_tokens": 20, **WORDS})])
    dense = DenseImages(path, "gemma3")
    dense.see(output.prompt_token_ids, shown)
    assert assert_like_oracle(dense, output.prompt_token_ids, output, trace, POLICIES["h2o"], atol=1e-4) > 2
    with pytest.raises(KVPolicyError, match="attend to each other.* which no test runs: set --language-model-only"):
        EngineArgs(str(path), kv_policy={**POLICIES["h2o"], "granularity": "token"}).create_engine_config()
    server = engine(POLICIES["h2o"], model=path, language_model_only=True, load_format="dummy")
    (output,) = server.generate([random_prompt(400)], max_tokens=8)
    assert output.kv_usage.evicted_blocks > 4
    server.assert_nothing_left()


@pytest.mark.oracle("images")
@pytest.mark.both_runners("h2o-ngram", "h2o-assistant")
@pytest.mark.parametrize("drafter", ["ngram", "assistant"])
@pytest.mark.parametrize("name", ["h2o", "host"])
def test_drafts_beside_images_that_attend_to_each_other(engine, tmp_path, poisoned, name, drafter):
    """Gemma 4, by n-grams and by its assistant, whose layers read the model's caches: first no draft is right, then some are."""
    path = make_tiny(tmp_path / "gemma4", "gemma4")
    config, double = NGRAM, Drafter
    if drafter == "assistant":
        assistant = make_assistant(tmp_path / "assistant", path)
        config, double = {"num_speculative_tokens": DRAFTS, "model": str(assistant)}, LayeredDrafter
    policy, read = (REACH, {"read": 160, "hold": 3}) if name == "host" else (POLICIES["h2o"], {})
    server = engine({**policy, **read}, model=path, speculative_config=config, **OPTIONS)
    dense, drafts, images = DenseImages(path, "gemma4"), double(server), [image(1), image(2, 196, 336)]
    # With the host, choices by the queries of drafts soon lead to another answer; of two words half are right all the same.
    words = {**WORDS, "allowed_token_ids": [30, 60]} if name == "host" else WORDS
    for right in (0, "some"):
        drafts.right, before = right, accepted(server)
        (output,), (trace,) = server.traced([(asked(300, images), {"max_tokens": 40, **words})])
        prompt = output.prompt_token_ids
        assert prompt.count(IMAGE) > 100
        dense.see(prompt, images)
        if name == "host":
            drafts.tell(prompt, trace)
            assert assert_reaches_like_dense(None, prompt, output, trace, dense=dense, **read) > 4
        else:
            assert assert_like_oracle(dense, prompt, output, trace, policy, atol=1e-4) > 4
        kept = accepted(server)[0] - before[0]
        assert kept < 5 if right == 0 else kept > (10 if name == "h2o" else 1)
        drafts.texts = [[*prompt, *output.outputs[0].token_ids]]
        server.llm.reset_prefix_cache()
    assert drafter == "ngram" or drafts.runs > 20
    server.assert_nothing_left()
