"""Images whose tokens attend to each other (Gemma 3), on vLLM's Triton backend, which runs under Triton's interpreter."""

import pytest
import test_device_backends
import test_images
from oracle.images import IMAGE, START, DenseImages, make_tiny
from parity import assert_like_oracle
from test_device_backends import BASE, BLOCK, on
from test_images import WORDS, image
from test_reach import REACH, assert_nothing_left, assert_reaches_like_dense
from test_read import READ, assert_reads_like_dense

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"), pytest.mark.on_triton]
backend, server = test_device_backends.backend, test_device_backends.server
OPTIONS = dict(limit_mm_per_prompt={"image": 2}, skip_mm_profiling=True, disable_chunked_mm_input=True, blocks=96)
POLICY = {"name": "h2o", **BASE, "budget": 96, "allow": ["full"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("images") / "gemma3", "gemma3")


def asked(length, seed, images):
    """A prompt of words with an image behind its first 10 and before its last 12 words."""
    words = test_images.asked(length, [], seed)["prompt_token_ids"]
    for place, _ in zip((10, -12), images):
        words[place:place] = [START]
    return {"prompt_token_ids": words, "multi_modal_data": {"image": list(images)}}


@pytest.mark.oracle("images")
@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_evictions_and_logprobs_match_transformers(server, model):
    """The second image comes after holes, in the first one too; queries of images count in scores what they see."""
    subject = server(POLICY, model=model, max_num_batched_tokens=80, max_model_len=320, **OPTIONS)
    dense, images = DenseImages(model, "gemma3", together=True), [image(1), image(2)]
    shown = {"full": asked(30, 2, images[:1]), "h2o": asked(60, 1, images[::-1])}
    requests = [
        (prompt, {"max_tokens": 6, **WORDS, "extra_args": {"kv_policy": name}}) for name, prompt in shown.items()
    ]
    for name, (prompt, _), output, trace in zip(shown, requests, *subject.traced(requests)):
        dense.see(output.prompt_token_ids, prompt["multi_modal_data"]["image"])
        policy = {**POLICY, "name": name} if name != "full" else {"name": "full"}
        lost = assert_like_oracle(dense, output.prompt_token_ids, output, trace, policy, block_size=BLOCK, atol=1e-3)
        assert lost > 3 or name == "full"
        of_images = {token // BLOCK for token, word in enumerate(output.prompt_token_ids) if word == IMAGE}
        assert name == "full" or of_images.intersection(*[set().union(*trace.evicted)])
    subject.assert_nothing_left()


@pytest.mark.oracle("images")
@pytest.mark.both_runners("triton-host")
@pytest.mark.parametrize("where", ["host", "read"])
@pytest.mark.parametrize("backend", [on("triton")], indirect=True)
def test_layers_that_choose_blocks_choose_those_of_images(server, tmp_path, poisoned, where):
    """The second image attends to itself in a chunk for which the first one comes back from the host."""
    kinds = ["full_attention", "sliding_attention"] * 2
    model = make_tiny(tmp_path / "model", "gemma3", layer_types=kinds, num_hidden_layers=4)
    policy = {"host": {**REACH, "read": 160, "hold": 3}, "read": {"name": "full", **READ, "read": 160, "hold": 3}}[
        where
    ]
    options = OPTIONS | {"blocks": 64, "block_size": 32, "max_num_batched_tokens": 160, "max_model_len": 640}
    subject = server(policy, model=model, **options)
    dense, images, chosen = DenseImages(model, "gemma3", together=True), [image(1), image(2)], 0
    shown = asked(280, 1, images), asked(40, 2, images[:1])
    requests = [(prompt, {"max_tokens": 8, **WORDS}) for prompt in shown]
    like = {"host": assert_reaches_like_dense, "read": assert_reads_like_dense}[where]
    given = {"read": 160, "hold": 3} if where == "host" else {**READ, "read": 160, "hold": 3}
    for (prompt, _), output, trace in zip(requests, *subject.traced(requests)):
        dense.see(output.prompt_token_ids, prompt["multi_modal_data"]["image"])
        chosen += like(None, output.prompt_token_ids, output, trace, dense=dense, tables=False, **given)
    assert chosen > 4
    if where == "host":
        assert_nothing_left(subject)
    else:
        subject.assert_nothing_left()
