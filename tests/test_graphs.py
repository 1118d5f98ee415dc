"""Full CUDA graphs of stock vLLM without a GPU (graphs.py)."""

from collections import Counter

import pytest
from engine import V2, logprobs_of, random_prompt
from test_device_backends import backend, on, server  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("backend", [on("triton"), on("fa3")], indirect=True)
def test_graphs_are_stock(server, graphs):
    import time
    prompts = [random_prompt(20, 0), random_prompt(25, 1), random_prompt(30, 2)]
    t=time.time()
    subject = server(**graphs.options, enable_prefix_caching=False)
    print("capture", time.time()-t); t=time.time()
    for g in graphs.captured: print(Counter(g.names))
    with graphs.without(subject):
        stock = subject.generate(prompts, max_tokens=6, logprobs=0)
    print("stock", time.time()-t, len(graphs.replayed)); t=time.time()
    got = subject.generate(prompts, max_tokens=6, logprobs=0)
    print("run", time.time()-t); t=time.time()
    print({d: g.replays for d, g in graphs.of(subject).items()})
    for one, other in zip(got, stock, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert logprobs_of(one).tolist() == logprobs_of(other).tolist()
