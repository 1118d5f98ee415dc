"""Heads in another order: the same answers from permuted weights, and a refusal by name of what can't be permuted."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
import vllm
from engine import Engine, logprobs_of, random_prompt
from packaging.version import Version
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
    RowvLLMParameter,
)
from vllm.utils.network_utils import get_open_port
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_evict import KVPolicyError
from vllm_evict.integration.worker import reorder
from vllm_evict.integration.worker.reorder import HeadOrder, check_reload, reordering

pytestmark = pytest.mark.minutes

LAYERS, HEADS, KV_HEADS, SIZE = 3, 8, 4, 32
#: The middle layer keeps its order.
ORDER = np.array([[2, 0, 3, 1], [0, 1, 2, 3], [3, 2, 0, 1]])
SHAPE = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
    initializer_range=0.2,
)
WITH_HEAD_SIZE = SHAPE | {"head_dim": SIZE}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**WITH_HEAD_SIZE),
    "biases": lambda: transformers.LlamaConfig(**WITH_HEAD_SIZE, attention_bias=True),
    # Its head size is what the hidden size leaves; vLLM's CPU kernels need 32.
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE | {"hidden_size": HEADS * SIZE}),
    "qwen3": lambda: transformers.Qwen3Config(**WITH_HEAD_SIZE),
    "phi3": lambda: transformers.Phi3Config(**SHAPE | {"hidden_size": HEADS * SIZE}),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE | {"hidden_size": HEADS * SIZE}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Path of a random model by its name in CONFIGS, made once."""
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(("bias", "q_norm.weight", "k_norm.weight")):
                    nn.init.normal_(parameter, 1.0, 0.5)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make


@pytest.fixture
def load(monkeypatch):
    """`load(path, order)`: an engine with its heads in this order, and its attention's weights as they were loaded."""
    engines = []

    def make(path, order=None, **kwargs):
        loaded = {}
        original, process = CPUWorker.load_model, base_loader.process_weights_after_loading

        def load_model(self, **kwargs):
            with reordering(self.vllm_config, order):
                original(self, **kwargs)

        def look(model, *args):
            # vLLM's CPU kernels take the weights away and keep them packed.
            loaded.update(
                {name: weight.detach().clone() for name, weight in model.named_parameters() if "self_attn" in name}
            )
            process(model, *args)

        with monkeypatch.context() as patch:
            patch.setattr(base_loader, "process_weights_after_loading", look)
            if order is not None:
                patch.setattr(CPUWorker, "load_model", load_model)
            initialize = base_loader.initialize_model
            try:
                engines.append(Engine(path, skip_tokenizer_init=True, max_model_len=256, **kwargs))
            finally:
                assert base_loader.initialize_model is initialize
        return engines[-1], loaded

    yield make
    for engine in engines:
        engine.close()
    cleanup_dist_env_and_memory()  # of those that were refused


def in_order(weight, order, dim, heads, size):
    """`weight` with head `order[i]` in place i along `dim`, one by one."""
    group = heads // len(order)
    rows = [np.arange(size) + size * (head * group + query) for head in order for query in range(group)]
    return np.take(weight.numpy(), np.concatenate(rows), axis=dim)


def permuted(name, weight, order):
    """Return a parameter of vLLM's as it should be loaded, from the one in the checkpoint's order."""
    if "qkv_proj" in name:
        q, k, v = weight.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE])
        parts = [(q, HEADS), (k, KV_HEADS), (v, KV_HEADS)]
        return np.concatenate([in_order(part, order, 0, heads, SIZE) for part, heads in parts])
    if name.endswith("o_proj.weight"):
        return in_order(weight, order, 1, HEADS, SIZE)
    return weight.numpy()


PROMPTS = [random_prompt(60, seed) for seed in range(3)]


def answers(engine):
    outputs = engine.generate(PROMPTS, max_tokens=12, logprobs=1)
    return [list(output.outputs[0].token_ids) for output in outputs], np.concatenate([*map(logprobs_of, outputs)])


@pytest.mark.parametrize("name", ["llama", "biases", "qwen2", "qwen3", "phi3"])
def test_answers_are_the_same_from_permuted_weights(load, checkpoint, name):
    stock, before = load(checkpoint(name))
    tokens, logprobs = answers(stock)
    engine, after = load(checkpoint(name), ORDER)
    assert before.keys() == after.keys()
    for weight_name, weight in before.items():
        order = ORDER[int(weight_name.split(".")[2])]
        expected = permuted(weight_name, weight, order)
        np.testing.assert_array_equal(after[weight_name].numpy(), expected, err_msg=weight_name)
        if "qkv_proj" in weight_name or weight_name.endswith("o_proj.weight"):
            assert (expected == weight.numpy()).all() == (".1." in weight_name), "a layer that moves moves"
    other_tokens, other_logprobs = answers(engine)
    assert other_tokens == tokens
    np.testing.assert_allclose(other_logprobs, logprobs, atol=1e-3)


def test_weights_that_are_loaded_again_come_in_the_same_order(load, checkpoint):
    engine, _ = load(checkpoint("biases"), ORDER)
    expected = answers(engine)
    engine.llm.collective_rpc("reload_weights")
    engine.llm.reset_prefix_cache()
    tokens, logprobs = answers(engine)
    assert tokens == expected[0]
    np.testing.assert_allclose(logprobs, expected[1], atol=1e-5)


def test_dummy_weights_need_no_loader(load, checkpoint):
    engine, _ = load(checkpoint("llama"), ORDER, load_format="dummy")
    assert len(answers(engine)[0]) == len(PROMPTS)


# Refusals


def test_a_norm_over_all_heads_is_refused_by_name(load, checkpoint):
    """The model runs on vLLM's Transformers backend, which names layers without their path up to vLLM 0.31."""
    named = r"layers\.0\.self_attn\.attn can't be split: \S+q_norm\.weight of shape \[256\]"
    unnamed = "0.attn can't be split: the model has no module 0"
    with pytest.raises(KVPolicyError, match=named if Version(vllm.__version__) >= Version("0.32") else unnamed):
        load(checkpoint("olmo2"), ORDER)


@pytest.mark.parametrize(
    "order, words",
    [
        (ORDER[:2], "the heads of 2 layers can't be split: the model has 3"),
        (np.array([[1, 0]] * 3), r"layers\.0\.self_attn\.attn can't be split: it has 4 KV heads, not 2"),
    ],
)
def test_a_pattern_of_another_shape_is_refused(load, checkpoint, order, words):
    with pytest.raises(KVPolicyError, match=words):
        load(checkpoint("llama"), order)


def test_lora_is_refused():
    with (
        pytest.raises(KVPolicyError, match="with LoRA.*leave --enable-lora out"),
        reordering(SimpleNamespace(lora_config=object()), ORDER),
    ):
        pytest.fail("not reached")


def test_weights_that_come_past_the_loaders_are_refused():
    config = SimpleNamespace(lora_config=None, weight_transfer_config=SimpleNamespace(backend="sparse_nccl"))
    with pytest.raises(KVPolicyError, match="'sparse_nccl' transfers.*use nccl or ipc"), reordering(config, ORDER):
        pytest.fail("not reached")
    check_reload()
    check_reload(None, "path", is_checkpoint_format=True)
    for args, kwargs in (((iter(()), None, False), {}), ((), {"is_checkpoint_format": False})):
        with pytest.raises(KVPolicyError, match="reload with is_checkpoint_format=True"):
            check_reload(*args, **kwargs)


def test_a_loader_that_builds_models_itself_is_refused(load, checkpoint, monkeypatch):
    from vllm.model_executor.model_loader.utils import initialize_model

    def create_model(self, vllm_config, model_config, prefix=""):
        return initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    monkeypatch.setattr(DefaultModelLoader, "create_model", create_model)
    with pytest.raises(KVPolicyError, match="--load-format auto builds models in its own way; use --load-format auto,"):
        load(checkpoint("llama"), ORDER)


def test_a_loader_that_passes_weight_loaders_by_is_refused(load, checkpoint, monkeypatch):
    def load_weights(self, model, model_config):
        weights = dict(self.get_all_weights(model_config, model))
        out = model.model.layers[2].self_attn.o_proj
        out.weight.data.copy_(weights.pop("model.layers.2.self_attn.o_proj.weight"))
        model.load_weights(weights.items())

    monkeypatch.setattr(DefaultModelLoader, "load_weights", load_weights)
    with pytest.raises(KVPolicyError, match=r"did not load model\.layers\.2\.self_attn\.o_proj\.weight through"):
        load(checkpoint("llama"), ORDER)


AUTO = SimpleNamespace(load_format="auto")


def test_a_second_model_is_refused(monkeypatch):
    monkeypatch.setattr(base_loader, "initialize_model", lambda *args, **kwargs: nn.Module())
    monkeypatch.setattr(reorder, "get_layers_from_vllm_config", lambda *args: {})
    config = SimpleNamespace(lora_config=None, weight_transfer_config=None, load_config=AUTO)
    with reordering(config, ORDER[:0]):
        base_loader.initialize_model()
        with pytest.raises(KVPolicyError, match="second model"):
            base_loader.initialize_model()


def test_an_error_of_the_loader_is_not_hidden():
    config = SimpleNamespace(lora_config=None, weight_transfer_config=None, load_config=AUTO)
    with pytest.raises(RuntimeError, match="disk"), reordering(config, ORDER):
        raise RuntimeError("disk")


class Model(nn.Module):
    """One attention layer, `block.self_attn.attn`."""

    def __init__(self):
        super().__init__()
        self.block = nn.Module()
        self.block.self_attn = part = nn.Module()
        part.qkv_proj = QKVParallelLinear(64, SIZE, HEADS, KV_HEADS, bias=False)
        part.o_proj = RowParallelLinear(HEADS * SIZE, 64, bias=False)
        part.attn = Attention(HEADS, SIZE, 1.0, num_kv_heads=KV_HEADS, prefix="block.self_attn.attn")


@pytest.fixture
def model(tiny):
    """A `Model`, and `model.wrap()` as `reordering` does it. No engine: one process that is a group by itself."""
    config = EngineArgs(str(tiny), dtype="float32").create_engine_config()
    try:
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
            initialize_model_parallel(1, 1)
            made = Model()
            made.wrap = lambda: reorder._wrap(made, config, ORDER[:1])
            yield made
    finally:
        cleanup_dist_env_and_memory()


class ANorm(nn.Module):
    """A norm with a weight for each element of a head, and a cache."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.register_buffer("cache", torch.ones(100, 7), persistent=False)


def replaced(name, make):
    return lambda part: setattr(part, name, make())


NAME = r"block\.self_attn\.attn can't be split: "
CHANGES = {
    "a sink": (lambda part: setattr(part.attn, "has_sink", True), "it has a sink or an ALiBi slope"),
    "slopes": (lambda part: setattr(part.attn.impl, "alibi_slopes", torch.ones(8)), "a sink or an ALiBi slope"),
    "scales": (lambda part: part.attn.register_buffer("a_scale", torch.ones(4)), "its a_scale has 4"),
    "a parameter": (
        lambda part: part.register_parameter("tau", nn.Parameter(torch.ones(HEADS, 3))),
        r"block\.self_attn\.tau of shape \[8, 3\] may depend",
    ),
    "a parameter of a head's size": (
        lambda part: part.register_parameter("tau", nn.Parameter(torch.ones(SIZE))),
        r"tau of shape \[32\] may depend",
    ),
    "a buffer": (lambda part: part.register_buffer("slopes", torch.ones(HEADS)), r"slopes of shape \[8\]"),
    "a gate": (
        replaced("g_proj", lambda: nn.Linear(64, HEADS)),
        r"block\.self_attn\.g_proj\.weight of shape \[8, 64\]",
    ),
    "a norm of all heads": (replaced("q_norm", lambda: ANorm(HEADS * SIZE)), r"q_norm\.weight of shape \[256\]"),
    "a norm of each head": (replaced("q_norm", lambda: ANorm(HEADS, SIZE)), r"q_norm\.weight of shape \[8, 32\]"),
    "two output projections": (
        replaced("down_proj", lambda: RowParallelLinear(256, 64, bias=False)),
        r"block\.self_attn has 2 RowParallelLinear layers, not one",
    ),
    "no projection": (lambda part: delattr(part, "qkv_proj"), "has 0 QKVParallelLinear layers, not one"),
    "a gate in the projection": (
        replaced("qkv_proj", lambda: QKVParallelLinear(64, SIZE, 2 * HEADS, KV_HEADS, bias=False)),
        r"projects 16 \+ 4 heads",
    ),
    "another output": (
        replaced("o_proj", lambda: RowParallelLinear(128, 64, bias=False)),
        "has no output projection of 256 inputs",
    ),
    "another place": (
        lambda part: setattr(part, "attn", nn.Module()),
        "has no module block.self_attn that it belongs to",
    ),
    "interleaved": (
        lambda part: setattr(part, "__class__", type("InternLM2Attention", (nn.Module,), {})),
        "InternLM2Attention holds q, k and v of each head side by side",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_depends_on_the_order_of_heads_is_refused(model, change):
    edit, words = CHANGES[change]
    edit(model.block.self_attn)
    with pytest.raises(KVPolicyError, match=NAME + ".*" + words):
        model.wrap()


def test_what_is_the_same_for_each_head_is_not_in_the_way(model):
    part = model.block.self_attn
    part.q_norm, part.k_norm = ANorm(SIZE), ANorm(SIZE)
    part.scale = nn.Parameter(torch.ones(1))
    awaited = model.wrap()
    name = "block.self_attn.qkv_proj.weight"
    assert awaited == {(name, "q"), (name, "k"), (name, "v"), ("block.self_attn.o_proj.weight", "")}


# Quantized parameters, by their weight loaders


def added(linear, name, cls, shape, dtype=torch.float32, **kwargs):
    """A parameter of vLLM's, loaded by the layer's own loader."""
    parameter = cls(data=torch.zeros(shape, dtype=dtype), weight_loader=linear.weight_loader_v2, **kwargs)
    linear.register_parameter(name, parameter)
    return parameter


def test_quantized_parameters_are_permuted_by_what_a_head_has_of_them(model):
    qkv, out = model.block.self_attn.qkv_proj, model.block.self_attn.o_proj
    total = (HEADS + 2 * KV_HEADS) * SIZE
    packed = added(
        qkv, "qweight", PackedvLLMParameter, (64, total // 8), torch.int32,
        input_dim=0, output_dim=1, packed_dim=1, packed_factor=8,
    )  # fmt: skip
    channel = added(qkv, "scales", ChannelQuantScaleParameter, (total, 1), output_dim=0)
    tensor = added(qkv, "one_scale", PerTensorScaleParameter, (3,))
    groups = added(out, "scales", GroupQuantScaleParameter, (HEADS * SIZE // 16, 64), input_dim=0, output_dim=1)
    small = added(out, "weight_8", RowvLLMParameter, (64, HEADS * SIZE), torch.float8_e4m3fn, input_dim=1)
    awaited = model.wrap()
    q = torch.arange(64 * HEADS * 4, dtype=torch.int32).reshape(64, -1)
    k = -q[:, : KV_HEADS * 4]
    for shard, loaded in (("q", q), ("k", k), ("v", k * 2)):
        packed.weight_loader(packed, loaded, shard)
        channel.weight_loader(channel, loaded[0].repeat_interleave(8)[:, None].float(), loaded_shard_id=shard)
        tensor.weight_loader(tensor, torch.tensor(float(len(loaded))), shard)
    order = ORDER[0]
    expected = [
        in_order(q, order, 1, HEADS, 4),
        in_order(k, order, 1, KV_HEADS, 4),
        in_order(k * 2, order, 1, KV_HEADS, 4),
    ]
    np.testing.assert_array_equal(packed.data.numpy(), np.concatenate(expected, axis=1))
    np.testing.assert_array_equal(channel.data[::8, 0].numpy(), np.concatenate([part[0] for part in expected]))
    assert tensor.data.tolist() == [64, 64, 64]
    scales = torch.rand(HEADS * SIZE // 16, 64)
    groups.weight_loader(groups, scales)
    np.testing.assert_array_equal(groups.data.numpy(), in_order(scales, order, 0, HEADS, 2))
    weight = torch.randn(64, HEADS * SIZE).to(torch.float8_e4m3fn)
    small.weight_loader(small, weight)
    np.testing.assert_array_equal(small.data.float().numpy(), in_order(weight.float(), order, 1, HEADS, SIZE))
    assert {name.split(".", 2)[2] for name, _ in awaited} == {"qkv_proj.weight", "o_proj.weight"}, "the rest came"


def test_fused_projections_are_permuted_once(model):
    qkv = model.block.self_attn.qkv_proj
    awaited = model.wrap()
    weight = torch.rand((HEADS + 2 * KV_HEADS) * SIZE, 64)
    qkv.weight.weight_loader(qkv.weight, weight)
    np.testing.assert_array_equal(qkv.weight.data.numpy(), permuted("qkv_proj.weight", weight, ORDER[0]))
    assert awaited == {("block.self_attn.o_proj.weight", "")}


def test_a_group_that_spans_heads_is_refused_by_name(model):
    out = model.block.self_attn.o_proj
    scales = added(out, "scales", GroupQuantScaleParameter, (2, 64), input_dim=0, output_dim=1)
    model.wrap()
    with pytest.raises(
        KVPolicyError, match=r"block\.self_attn\.o_proj\.scales can't be split: it is loaded with 2 entries for 8 heads"
    ):
        scales.weight_loader(scales, torch.rand(2, 64))
    with pytest.raises(
        KVPolicyError, match=r"qkv_proj\.weight can't be split: it is loaded with 130 entries for 4 heads"
    ):
        qkv = model.block.self_attn.qkv_proj
        qkv.weight.weight_loader(qkv.weight, torch.rand(130, 64), "k")


def loads_itself(out):
    out.weight.weight_loader = lambda param, loaded_weight: None


def cut_already(out):
    out.weight.is_sharded_weight = True


def with_blocks(out):
    out.weight_block_size = [128, 128]
    added(out, "weight_scale_inv", BlockQuantScaleParameter, (1, 2), input_dim=1, output_dim=0)


@pytest.mark.parametrize(
    "edit, words",
    [
        (loads_itself, r"o_proj\.weight can't be split: it is quantized while it is loaded"),
        (cut_already, r"o_proj\.weight can't be split: its checkpoint is cut for tensor-parallel ranks"),
        (
            with_blocks,
            r"o_proj\.weight_scale_inv can't be split: it has a scale for 128 rows or columns, a head has 32",
        ),
        (
            lambda out: added(out, "g_idx", RowvLLMParameter, (256,), torch.int32, input_dim=0),
            r"o_proj\.g_idx can't be split: it is quantized in groups of inputs in an order of their own",
        ),
        (
            lambda out: setattr(out, "transform", nn.Linear(2, 2)),
            r"o_proj\.transform\.weight can't be split: it transforms the projection's weights",
        ),
    ],
)
def test_parameters_that_cannot_be_permuted_are_refused_by_name(model, edit, words):
    edit(model.block.self_attn.o_proj)
    with pytest.raises(KVPolicyError, match=r"block\.self_attn\." + words):
        model.wrap()


@pytest.mark.parametrize("shape, dim", [((), 0), ((1,), 0), ((5,), None), ((64, 1), 1)])
def test_what_holds_for_all_heads_is_left_alone(shape, dim):
    tensor = torch.rand(shape)
    assert reorder._permute("scale", tensor, dim, [HeadOrder(SIZE, torch.tensor([1, 0]))]) is tensor
