"""Policies on a model that can find needles: what is kept of a prompt before anybody asks."""

from pathlib import Path

from vllm_evict.tools.eval import tasks, words
from vllm_evict.tools.eval.prompts import Prompts

NEEDLE = Path(__file__).parents[2] / "examples" / "needle" / "model"
QUARTER = {"budget": 256, "buffer": 0, "sink": 32, "recent": 64}
SAMPLES = 8


def test_needles_are_kept_before_anybody_asks(engine, record_property):
    """Texts of 1,024 tokens, a quarter of each is kept. The question comes 4 tokens at a time, so that its end, and the
    answer, see what is left."""
    prompts, filler = Prompts(str(NEEDLE)), words.Filler()
    samples = [tasks.make("niah", 1024, (i + 0.5) / SAMPLES, i, 0, prompts.count, filler) for i in range(SAMPLES)]
    found = {}
    one_set = {"granularity": "token", "sets": "all"}
    for name, options in {"kvzip": {}, "kvzip tokens": one_set, "h2o": {}}.items():
        server = engine(
            {"name": name.split()[0], **QUARTER, **options}, NEEDLE, dtype="bfloat16", blocks=512, max_model_len=4096
        )
        found[name] = 0
        for sample in samples:
            ids = prompts.ids(sample)
            assert len(ids) == 1032
            if name != "h2o":
                server.scheduler.max_num_scheduled_tokens = 256
                (alone,) = server.generate([ids[:1024]], max_tokens=40)
                assert alone.kv_usage.evicted_blocks > 0, "it is reconstructed"
            said, evicted = answer(server, prompts, ids)
            assert evicted >= 25
            found[name] += sample.answers[0] in said
        server.assert_nothing_left()
    record_property("needles found", str(found))
    print(found)
    assert min(found["kvzip"], found["kvzip tokens"]) >= found["h2o"] + SAMPLES // 4, found


def answer(server, prompts, ids):
    """Return the answer to a prompt, whose last 8 tokens come 4 at a time, and blocks evicted."""

    def slow_down(server):
        for request in server.scheduler.running:
            server.scheduler.max_num_scheduled_tokens = 32 if request.num_computed_tokens < 1024 else 4

    server.scheduler.max_num_scheduled_tokens = 32
    request_id = server.add(ids, max_tokens=24, ignore_eos=False)
    output = server.run(slow_down)[request_id]
    said = prompts.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    return said, output.kv_usage.evicted_blocks
