"""Servers that would be wrong are refused at start: by name, with what to do instead, and only with a policy."""

import argparse
import ast
import json
import re
from pathlib import Path

import pytest
import vllm.envs as envs
from oracle.tiny import make_tiny_llama
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.v1.executor.abstract import Executor

from vllm_evict.config import KVPolicyError
from vllm_evict.integration.start import activation, connectors
from vllm_evict.policies import POLICIES

SOURCES = Path(__file__).parents[2] / "vllm_evict"

#: vLLM 0.32 has one of this name, which cannot be made without Ray.
RayDistributedExecutor = type("RayDistributedExecutor", (Executor,), {})
H2O = {"name": "h2o", "budget": 512, "recent": 64}
UNMEASURED = {"name": "sink-window", "budget": 512, "allow": []}


def engine_config(model, policy=H2O, **arguments):
    arguments = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, **arguments}
    return EngineArgs(model=str(model), kv_policy=policy, **arguments).create_engine_config()


def refusal(check, *args, **arguments):
    """The message with which a call is refused."""
    with pytest.raises(KVPolicyError) as refused:
        check(*args, **arguments)
    return str(refused.value)


def with_config(path, **changes):
    """The tiny Llama's directory with another config.json: enough for all that is decided before weights are read."""
    make_tiny_llama(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


LLAMA4 = dict(num_local_experts=1, num_experts_per_tok=1, interleave_moe_layer_step=1)
WHISPER = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
MODELS = {
    "sliding window": (
        dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64),
        "sliding-window attention in all layers",
    ),
    "a window in each layer": (
        dict(
            architectures=["Gemma3ForCausalLM"],
            model_type="gemma3_text",
            sliding_window=64,
            layer_types=["sliding_attention", "sliding_attention"],
        ),
        "sliding-window attention in all layers",
    ),
    "sparse MLA": (
        dict(
            architectures=["DeepseekV32ForCausalLM"],
            model_type="deepseek_v32",
            index_topk=64,
            index_n_heads=2,
            index_head_dim=32,
            kv_lora_rank=16,
            q_lora_rank=None,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
            n_routed_experts=2,
            first_k_dense_replace=2,
            moe_intermediate_size=32,
        ),
        "sparse attention (DSA), whose indexer",
    ),
    "Mamba": (
        dict(
            architectures=["MambaForCausalLM"],
            model_type="mamba",
            state_size=16,
            conv_kernel=4,
            expand=2,
            time_step_rank=4,
        ),
        "Mamba",
    ),
    "encoder-decoder": (
        dict(
            architectures=["WhisperForConditionalGeneration"],
            model_type="whisper",
            d_model=64,
            max_source_positions=64,
            max_target_positions=1024,
            **WHISPER,
        ),
        "encoder-decoder",
    ),
    "encoder": (dict(architectures=["BertModel"], model_type="bert"), "pooling"),
    "classifier": (dict(architectures=["LlamaForSequenceClassification"], num_labels=2), "pooling"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_served_are_refused_by_what_they_have(tmp_path, name):
    changes, what = MODELS[name]
    model = with_config(tmp_path, **changes)
    for policy in (H2O, UNMEASURED):
        message = refusal(engine_config, model, policy)
        assert f"KV policy {policy['name']!r} can't be used with " in message and what in message
        assert "leave --kv-policy out" in message and "\n" not in message
    stock = engine_config(model, None)
    assert stock.scheduler_config.scheduler_cls is None, "without a policy the plugin must not mind"


JAMBA = dict(
    architectures=["JambaForCausalLM"],
    model_type="jamba",
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    num_experts=1,
)
#: Settings and policies that layers with sliding windows or with states leave no room for.
BESIDE = {
    "vLLM's hybrid KV cache manager switched off": (
        H2O,
        dict(disable_hybrid_kv_cache_manager=True),
        "leave --disable-hybrid-kv-cache-manager out",
    ),
    "puts heads into pages": (
        {"name": "pyramidkv", "budget": 512, "recent": 64},
        {},
        "use a policy for whole layers, such as h2o, snapkv or sink-window",
    ),
}


@pytest.mark.parametrize("what", BESIDE)
def test_what_cannot_be_served_beside_sliding_windows_is_refused_by_name(tmp_path, what):
    policy, arguments, instead = BESIDE[what]
    windows = with_config(tmp_path / "windows", sliding_window=64, layer_types=["sliding_attention", "full_attention"])
    full = with_config(tmp_path / "full", sliding_window=64, layer_types=["full_attention"] * 2)
    message = refusal(engine_config, windows, policy, **arguments)
    assert message.startswith(f"KV policy {policy['name']!r} can't be used with ") and "\n" not in message
    assert "sliding-window attention beside full attention" in message
    assert what in message and f": {instead}" in message
    engine_config(windows, H2O)
    engine_config(full, policy, **arguments)
    engine_config(windows, policy, **arguments, disable_sliding_window=True, max_model_len=64, block_size=32)


@pytest.mark.parametrize("what", BESIDE)
def test_what_cannot_be_served_beside_states_is_refused_by_name(tmp_path, what):
    policy, arguments, instead = BESIDE[what]
    hybrid = with_config(tmp_path, **JAMBA)
    message = refusal(engine_config, hybrid, policy, **arguments)
    kinds = "Mamba, linear attention or short convolutions beside full attention"
    assert message.startswith(f"KV policy {policy['name']!r} can't be used with ") and kinds in message
    assert what in message and f": {instead}" in message and "\n" not in message
    engine_config(hybrid, H2O)


def test_no_context_with_positions_of_several_dimensions(tmp_path):
    """Those of a picture are fewer than its tokens."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    several = with_config(tmp_path, rope_parameters=rope)
    with pytest.raises(KVPolicyError, match=r"several dimensions \(M-RoPE\).*: leave context out"):
        engine_config(several, {**H2O, "context": "model"}, max_num_batched_tokens=256)
    assert engine_config(several).model_config.uses_mrope, "without a context they are served"


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "model": "{model}", "num_speculative_tokens": 2}
SETTINGS = {
    "speculative decoding by 'ngram_gpu' on Model Runner V1, which no test runs": (
        dict(speculative_config={**NGRAM, "method": "ngram_gpu"}),
        "if the model has layers for it, or to ngram, or leave --kv-policy out",
    ),
    "speculative decoding by 'draft_model', because the policy puts heads into pages of its own": (
        dict(policy={"name": "adakv", "budget": 512, "recent": 64}, speculative_config=DRAFT),
        'set "method": "ngram" in --speculative-config, or use a policy for whole layers, such as h2o, snapkv or sink-window',
    ),
    "speculative decoding by 'draft_model' in parallel": (
        dict(speculative_config={**DRAFT, "parallel_drafting": True}),
        'leave "parallel_drafting" out of --speculative-config',
    ),
    "32 draft tokens in blocks of 32 tokens": (
        dict(speculative_config={**NGRAM, "num_speculative_tokens": 32}, block_size=32),
        '"num_speculative_tokens" in --speculative-config to less than 32',
    ),
    "encoder-cache connector": (
        dict(ec_transfer_config={"ec_connector": "ExampleConnector", "ec_role": "ec_both"}),
        "leave --ec-transfer-config out",
    ),
    "fast prefill": (dict(kv_sharing_fast_prefill=True), "leave --kv-sharing-fast-prefill out"),
    "KV cache dtype 'fp8_per_token_head', which the plugin can't read on vLLM's cpu engine": (
        dict(kv_cache_dtype="fp8_per_token_head"),
        "--kv-cache-dtype auto or fp8 (fp8_e4m3, fp8_e5m2), or use a policy without scores",
    ),
    "scheduler class": (dict(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"), "leave --scheduler-cls out"),
    "worker class 'my.Worker'": (dict(worker_cls="my.Worker"), "leave --worker-cls out"),
    "pooling": (dict(runner="pooling"), "leave --kv-policy out"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_cannot_be_served_are_refused_by_name(tiny, what):
    arguments, instead = SETTINGS[what]
    if (speculative := arguments.get("speculative_config")) is not None:
        speculative = {key: str(tiny) if value == "{model}" else value for key, value in speculative.items()}
        arguments = {**arguments, "speculative_config": speculative}
    message = refusal(engine_config, tiny, **arguments)
    assert what in message and instead in message and "\n" not in message


def connected(name="NixlConnector", role="kv_consumer", **fields):
    return dict(kv_transfer_config={"kv_connector": name, "kv_role": role, **fields})


CHILDREN = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("NixlConnector", "OffloadingConnector")]
#: Policy, arguments, what to change.
CONNECTORS = {
    "KV connector HF3FSKVConnector, which may store": (
        H2O,
        connected("HF3FSKVConnector", "kv_both"),
        "use NixlConnector, ",
    ),
    "KV connector ShelfConnector of your own": (
        H2O,
        connected("ShelfConnector", kv_connector_module_path="connector"),
        "use NixlConnector, ",
    ),
    "bidirectional_kv_xfer": (
        H2O,
        connected(kv_connector_extra_config={"bidirectional_kv_xfer": True}),
        "leave bidirectional_kv_xfer out",
    ),
}


@pytest.mark.parametrize("what", CONNECTORS)
def test_what_cannot_be_served_beside_a_kv_connector_is_refused_by_name(tiny, what):
    policy, arguments, instead = CONNECTORS[what]
    message = refusal(engine_config, tiny, policy, **arguments)
    assert f"KV policy {policy['name']!r} can't be used with " in message and "\n" not in message
    assert what in message and re.search(f": (.*, or )?{re.escape(instead)}", message)


def test_kv_connectors_that_are_served(tiny):
    for arguments in (
        connected(),
        connected("MooncakeConnector"),
        connected("OffloadingConnector", "kv_both"),
        connected("SimpleCPUOffloadConnector", "kv_both"),
        connected("NixlConnector", "kv_both"),
        connected("ExampleConnector", "kv_both"),
        connected("MultiConnector", "kv_both", kv_connector_extra_config={"connectors": CHILDREN}),
        dict(kv_offloading_size=1),
    ):
        for policy in (H2O, UNMEASURED, {**H2O, "granularity": "token"}, {**H2O, "when": "pressure"}):
            assert engine_config(tiny, policy, **arguments).kv_transfer_config.kv_connector


def test_a_server_that_only_prefills_is_vllms_own(tiny, tmp_path, monkeypatch):
    """Whatever the policy and the model are: it evicts nothing, and one line says so."""
    alibi, said = with_config(tmp_path, **JAMBA), []
    monkeypatch.setattr(activation.logger, "info", lambda *args: said.append(args[0] % args[1:]))
    for model, policy in (
        (tiny, H2O),
        (tiny, "sink-window"),
        (alibi, {"name": "full", "evict": "host", "host": "1MiB"}),
    ):
        config = engine_config(model, policy, **connected(role="kv_producer"))
        assert config.scheduler_config.scheduler_cls is None
        assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert [f"KV policy {name}: {connectors.PREFILLS}" for name in ("h2o", "sink-window", "full")] == said


def test_an_instruction_that_the_model_does_not_know_is_refused_at_start(tiny):
    """The engine would end with the first prompt that is repeated."""
    policy = {"name": "kvzip", "budget": 512, "instruction": [7, 255]}
    assert engine_config(tiny, policy).scheduler_config.scheduler_cls
    with pytest.raises(KVPolicyError, match="instruction: 256 is no token of the model, whose ids are below 256"):
        engine_config(tiny, {**policy, "instruction": [7, 256]})


@pytest.mark.parametrize("additional", ["[1]", 5])
def test_a_policy_needs_an_additional_config_that_can_carry_it(tiny, additional):
    with pytest.raises(KVPolicyError, match="additional_config got .*; expected a dict"):
        engine_config(tiny, additional_config=additional)


def test_two_policies_that_differ_are_refused(tiny):
    with pytest.raises(KVPolicyError, match="two different KV policies"):
        engine_config(tiny, "h2o", additional_config={"kv_policy": "sink-window"})
    same = engine_config(tiny, "h2o", additional_config={"kv_policy": {"name": "h2o"}, "mine": 1})
    assert same.additional_config["mine"] == 1 and same.additional_config["kv_policy"]["name"] == "h2o"


@pytest.mark.parametrize("policy", [{"name": "h3o"}, {"name": "h2o", "budget": -1}, "missing.yaml", 3])
def test_a_policy_that_is_none_is_refused_by_every_way_in(tiny, policy):
    with pytest.raises(KVPolicyError):
        engine_config(tiny, policy)
    with pytest.raises(KVPolicyError):
        engine_config(tiny, None, additional_config={"kv_policy": policy})


def strings(module):
    """Text that a module has outside of docstrings."""
    tree = ast.parse(Path(module).read_text())
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said]


def test_what_messages_advise_is_there():
    """Flags and variables are vLLM's or the plugin's, and policies are there, one of them without scores."""
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    flags = {option for action in parser._actions for option in action.option_strings}
    modules = [*(SOURCES / "integration").rglob("*.py"), *(SOURCES / "config").glob("*.py")]
    texts = [text for module in modules for text in strings(module) if isinstance(text, str)]
    named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)}
    flags |= {"--device", "--max-tokens"}  # of vllm-evict check and show
    flags |= {flag.replace("--", "--no-", 1) for flag in flags} | {flag.replace("--no-", "--", 1) for flag in flags}
    assert len(named) > 30 and named <= flags, named - flags
    variables = {each for text in texts for each in re.findall(r"\bVLLM_[A-Z0-9_]+", text)}
    assert {each for each in variables if "_EVICT_" not in each} <= envs.environment_variables.keys(), variables
    for names in (names for text in texts for names in re.findall(r"whole layers, such as ([\w, -]+ or [\w-]+)", text)):
        assert {*re.split(", | or ", names)} <= POLICIES.keys()
    assert not POLICIES["sink-window"].measures
