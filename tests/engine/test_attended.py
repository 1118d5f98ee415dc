"""Models that go round their layers' attention are refused, or end loudly: the plugin's kernels could not do their part."""

import pytest
import test_device_backends
import test_full_graphs
from engine import random_prompt
from test_device_backends import BLOCK, POLICIES, on
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from vllm_evict.config import KVPolicyError
from vllm_evict.integration.worker import runners

backend, server, view_launches = (
    getattr(test_device_backends, name) for name in ("backend", "server", "view_launches")
)
replaying = test_full_graphs.replaying
BYPASSED = r"model\.layers\.\d+\.self_attn\.attn.* got past by the model's own attention kernel.*leave --kv-policy out"
SIZES = {"budget": 192, "buffer": 64, "sink": 32, "recent": 64}
H2O = {"name": "h2o", **SIZES}


def goes_round(layer, when):
    """A model's own kernel in the place of a layer's attention, for steps that `when` (metadata -> bool) names.

    It reads the metadata that the backend's builder made, as the stock kernel does.
    """
    own, impl = layer.impl.forward, layer.impl

    def forward(*args, **kwargs):
        metadata = args[5]
        if metadata is not None and when(metadata):
            return type(impl).__mro__[1].forward(impl, *args, **kwargs)
        return own(*args, **kwargs)

    impl.forward = forward


@pytest.fixture
def bypassing(monkeypatch):
    """Has the attention layers of these numbers, of models made in the test, be gone round in steps that `when` names."""
    from vllm_evict.integration.worker import layers

    def bypass(when, numbers=(0, 1)):
        install = layers.install

        def installed(vllm_config, *args, **kwargs):
            runtime = install(vllm_config, *args, **kwargs)
            for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items():
                if int(name.split(".")[2]) in numbers:
                    goes_round(layer, when)
            return runtime

        monkeypatch.setattr(layers, "install", installed)

    return bypass


STEPS = {
    "decodes": lambda metadata: metadata.max_query_len == 1,
    "prompts": lambda metadata: metadata.max_query_len > 1,
}


@pytest.mark.both_runners("decodes-one-layer")
@pytest.mark.parametrize("numbers", [(1,), (0, 1)], ids=["one-layer", "all-layers"])
@pytest.mark.parametrize("steps", STEPS)
def test_the_cpu_engine_ends_before_it_answers_wrong(engine, bypassing, steps, numbers):
    """Nothing warms up an eager CPU engine. The first step in which a layer is missing gives no token."""
    bypassing(STEPS[steps], numbers)
    server = engine({**H2O, "exact": False}, enable_prefix_caching=False)
    server.add(random_prompt(300), "measured", max_tokens=40)
    server.add(random_prompt(40), "other", max_tokens=40, extra_args={"kv_policy": "sink-window"})
    with pytest.raises(RuntimeError, match=BYPASSED):
        server.run()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("backend", [on("fa3"), on("triton")], indirect=True)
def test_a_server_on_a_device_is_refused_at_start(server, backend, bypassing, steps):
    bypassing(STEPS[steps], (1,))
    with pytest.raises(KVPolicyError, match=BYPASSED):
        server(POLICIES["h2o"], block_size=BLOCK)


@pytest.mark.parametrize("backend", [on("fa3"), on("triton")], indirect=True)
def test_a_full_graph_that_goes_round_a_layer_is_refused_at_start(replaying, graphs, backend, bypassing, monkeypatch):
    """Capture alone shows it: a replay calls no layer."""
    monkeypatch.setattr(runners, "check_paths", lambda *_: pytest.fail("nothing was refused at capture"))
    bypassing(STEPS["decodes"], (0,))
    with pytest.raises(KVPolicyError, match=BYPASSED):
        replaying(POLICIES["h2o"])


@pytest.mark.parametrize("name", ["adakv", "pyramidkv"])
def test_split_heads_of_a_model_that_writes_its_keys_itself_end_loudly(engine, monkeypatch, name):
    call = Attention.forward

    def forward(self, query, key, value, *args, **kwargs):
        return call(self, query, None, None, *args, **kwargs)

    monkeypatch.setattr(Attention, "forward", forward)
    server = engine({"name": name, **SIZES})
    with pytest.raises(
        KVPolicyError, match="the model writes them into its cache itself.*use a policy for whole layers"
    ):
        server.generate([random_prompt(40)])
