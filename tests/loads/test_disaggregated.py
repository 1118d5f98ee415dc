"""Prefill and decode in two processes on one machine, by vLLM's ExampleConnector; one engine dies and comes back."""

import random

import numpy as np
import pytest
from disaggregated import SERVES, Remote, answers_of, whole_blocks_and_some
from engine import Engine
from loads import pair
from test_needles import NEEDLE

from vllm_evict.tools.eval import tasks, words
from vllm_evict.tools.eval.prompts import Prompts

POLICY = {"name": "h2o", "budget": 192, "buffer": 32, "sink": 32, "recent": 64, "allow": ["full"]}
SAMPLES, TOKENS, TOGETHER = 8, 40, 4


@pytest.fixture(scope="module")
def needles():
    """(prompt, its answer): texts of 400 tokens."""
    prompts, filler = Prompts(str(NEEDLE)), words.Filler()
    samples = [tasks.make("niah", 400, (i + 0.5) / SAMPLES, i, 0, prompts.count, filler) for i in range(SAMPLES)]
    return [(whole_blocks_and_some(prompts.ids(sample)), sample.answers[0]) for sample in samples]


def loads(rng, number):
    """Random prompts, half of which have a prefix that others have, too."""
    prompts = []
    for _ in range(number):
        prefix = random.Random(rng.randrange(3)).choices(range(256), k=200 * rng.randrange(2))
        prompts.append(whole_blocks_and_some([*prefix, *rng.choices(range(256), k=rng.randrange(300, 500))]))
    return prompts


def in_turn(prompts):
    return [prompts[at : at + TOGETHER] for at in range(0, len(prompts), TOGETHER)]


def alone(batches):
    """Answers of one engine, in which requests under `full` compute the prompts before."""
    server = Engine(NEEDLE, POLICY, **SERVES)
    answers = []
    for batch in batches:
        answers_of(server, batch, max_tokens=1, extra_args={"kv_policy": "full"})
        answers += answers_of(server, batch, max_tokens=TOKENS)
    server.assert_nothing_left()
    server.close()
    return answers


def test_the_engine_that_decodes_answers_as_one_engine_and_outlives_the_other(tmp_path, needles):
    rng, texts = random.Random(0), [prompt for prompt, _ in needles]
    first, second = loads(rng, 24), loads(rng, 24)
    prefill = Remote(NEEDLE, "kv_producer", tmp_path, POLICY)
    decode = Remote(NEEDLE, "kv_consumer", tmp_path, POLICY)
    expected = alone(in_turn([*texts, *first, *second]))
    found = []

    def serve(prompts):
        for batch in in_turn(prompts):
            prefill.ask(batch, 1)
            found.extend(decode.ask(batch, TOKENS))

    try:
        serve([*texts, *first])
        prefill.begin(second, 1)
        prefill.kill()
        # Nothing arrives: what was there before is, and the rest is computed here.
        strangers = loads(random.Random(1), TOGETHER)
        for *_, evicted, start in decode.ask(strangers, TOKENS):
            assert start <= 192 and sum(map(len, evicted)) > 0
        prefill = Remote(NEEDLE, "kv_producer", tmp_path, POLICY)
        serve(second)
        decode.begin(second, 200)
        decode.kill()
        prefill.ask(loads(rng, TOGETHER), 1)
        decode = Remote(NEEDLE, "kv_consumer", tmp_path, POLICY)
        after = [answer for batch in in_turn(texts) for answer in decode.ask(batch, TOKENS)]
    finally:
        prefill.kill()
        decode.kill()
    assert len(found) == len(expected)
    furthest = 0.0
    for prompt, answer, single in zip([*texts, *first, *second], found, expected):
        assert answer[3] == single[3] == (len(prompt) - 1) // 32 * 32, (
            "part of the prompt was computed by the engine that decodes"
        )
        assert answer[0] == single[0] and answer[2] == single[2] and sum(map(len, answer[2])) > 0
        furthest = max(furthest, np.abs(np.subtract(answer[1], single[1])).max())
    assert furthest < 1e-3
    for answer, before in zip(after, found):
        assert answer[0] == before[0] and answer[2:] == before[2:]
    tokenizer = Prompts(str(NEEDLE)).tokenizer
    hits = sum(said in tokenizer.decode(tokens) for (tokens, *_), (_, said) in zip(found, needles))
    print(f"{hits} of {SAMPLES} needles found; log-probabilities differ by at most {furthest:.1e}")
    assert hits >= SAMPLES // 2


def test_random_load_while_each_engine_dies_once():
    counts = pair.run({"name": "sink-window", "budget": 192, "sink": 32, "allow": ["full"]}, requests=64, every=3)
    assert counts["prefill killed"] and counts["decode killed"] and counts["evicted blocks"] > 100
