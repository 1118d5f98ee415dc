"""Images in prompts: their blocks are evicted like blocks of text, and positions of several dimensions stay."""

from functools import cache

import numpy as np
import pytest
from engine import exactly, greedy, random_prompt
from oracle.images import BFLOAT16, END, IMAGE, KINDS, START, TEXT, DenseImages, make_tiny
from oracle.tiny import write_tokenizer
from parity import assert_like_oracle
from PIL import Image
from test_hybrids import NOISE, apart
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_evict.config import KVPolicyError

pytestmark = pytest.mark.since("0.32", "its CPU engine has no kernels of states", kind="qwen3_5")
pytest.importorskip("torchvision", reason="scripts/setup.sh installs torchvision")

BASE = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64}
POLICIES = {name: {"name": name, **BASE} for name in ("h2o", "sink-window")}
POLICIES["snapkv"] = {"name": "snapkv", **BASE, "window": 24}
#: No request is answered with parts of an image.
WORDS = {"logprobs": 1, "allowed_token_ids": list(range(IMAGE))}
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
@pytest.mark.nightly(push=("llava-h2o", "qwen2_5_vl-sink-window", "qwen3_vl-snapkv"))
@pytest.mark.both_runners("qwen2_5_vl-h2o")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
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
@pytest.mark.both_runners(nightly=("llava", "qwen2_5_vl", "qwen3_vl"))
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


@pytest.fixture(scope="module")
def prefix_lm(tmp_path_factory):
    """A tiny Gemma 3 with images, whose tokens attend to each other."""
    path = tmp_path_factory.mktemp("images") / "gemma3"
    text = dict(TEXT, query_pre_attn_scalar=32, sliding_window=48, layer_types=["sliding_attention", "full_attention"])
    vision = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=56)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    config.save_pretrained(path)
    write_tokenizer(path, 256, 2048)
    return path


def test_images_whose_tokens_attend_to_each_other_are_refused_with_the_flag_that_serves_text(engine, prefix_lm):
    with pytest.raises(
        KVPolicyError, match="attention over images: set --language-model-only, which serves text alone"
    ):
        EngineArgs(str(prefix_lm), kv_policy=POLICIES["h2o"]).create_engine_config()
    server = engine(POLICIES["h2o"], model=prefix_lm, language_model_only=True, load_format="dummy")
    (output,) = server.generate([random_prompt(400)], max_tokens=8)
    assert output.kv_usage.evicted_blocks > 4
    server.assert_nothing_left()
