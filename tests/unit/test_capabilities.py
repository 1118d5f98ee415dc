"""The table of capabilities: which features of a policy are refused on which server, pair by pair, each with its words."""

import json
import re
from types import SimpleNamespace

import matrix
import pytest
from test_refusals_backends import plain_config
from vllm.config import KVTransferConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_evict.config import KVPolicyConfig, features
from vllm_evict.integration.start.capabilities import drafting, environments, refuse
from vllm_evict.integration.start.capabilities.environment import UNTRIED
from vllm_evict.integration.start.capabilities.environments import ENVIRONMENTS
from vllm_evict.integration.start.capabilities.server import Layers, Server
from vllm_evict.integration.start.drafters import IN_PARALLEL

H2O = {"name": "h2o", "budget": 512, "recent": 64}
#: Column -> a policy with that feature, and with no other of the columns but those in brackets.
POLICIES = {
    "full": {"name": "full", "allow": []},
    "places": {"name": "sink-window", "allow": []},
    "h2o": H2O,
    "split": {"name": "duo", "pattern": ["10"], "allow": ["duo"]},
    "tokens": {**H2O, "granularity": "token"},
    "kvzip": {"name": "h2o", "allow": ["kvzip"]},
    "context": {"name": "sink-window", "context": 512, "allow": []},
    "host": {"name": "full", "evict": "host", "host": "1MiB"},
    "read": {"name": "sink-window", "read": 1024, "allow": []},
    "layers": {"name": "full", "read": 1024, "leaders": [0, 2]},
    "prompts": {"name": "full", "read": 1024, "read_prompts": 1024},
    "scored": {"name": "keydiff", "read": 1024},
    "max": {**H2O, "layers": "max"},
    "mean": {**H2O, "accumulate": "mean"},
    "pressure": {**H2O, "when": "pressure"},
    "audit": {**H2O, "audit": 0.1},
}


def drafts(method, tokens=3, parallel=False, **fields):
    settings = dict(method=method, num_speculative_tokens=tokens, parallel_drafting=parallel, **fields)
    settings["use_eagle"] = lambda: method in ("eagle", "eagle3", "mtp", "dflash", "dspark")
    return {"speculative_config": SimpleNamespace(**settings)}


def connector(name="NixlConnector", role="kv_consumer", module=None, both_ways=False, parts=()):
    extra = {"bidirectional_kv_xfer": both_ways, "connectors": parts}
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector=name, kv_role=role, kv_connector_module_path=module, kv_connector_extra_config=extra
        )
    }


def role_of(name):
    return {"kv_connector": name, "kv_role": "kv_both"}


CUDA = {"device_config__device_type": "cuda"}
MLA, HYBRID = {"model_config__use_mla": True}, {"model_config__is_hybrid": True}
ASYNC = {"scheduler_config__async_scheduling": True, "max_concurrent_batches": 2}
STAGES, V2 = {"parallel_config__pipeline_parallel_size": 2}, {"use_v2_model_runner": True}
UNCACHED = {"cache_config__enable_prefix_caching": False}
WINDOWS = {
    "model_config__hf_text_config": SimpleNamespace(layer_types=["sliding_attention", "full_attention"]),
    "model_config__get_sliding_window": lambda: 64,
}


def text(**fields):
    return {"model_config__hf_text_config": SimpleNamespace(**fields)}


CHUNKS, UNLIKE = text(attention_chunk_size=128), text(head_dim=192, v_head_dim=128)
ALL = " ".join(POLICIES)
#: Server -> what is refused on it: names of `POLICIES`. Functions refused the same by hand, before there was a table.
SERVERS = {
    "plain": ({}, ""),
    "a GPU": (CUDA, "layers scored"),
    "another platform": ({"device_config__device_type": "xpu"}, ALL),
    "pooling": ({"model_config__runner_type": "pooling"}, ALL),
    "DSA": (text(index_topk=64), ALL),
    "CSA": (text(compress_ratios=[4]), ALL),
    "MSA": (text(sparse_attention_config={}), ALL),
    "unlike keys and values": (
        UNLIKE,
        "split tokens kvzip context layers prompts scored",
    ),
    "no attention": ({"model_config__is_attention_free": True}, ALL),
    "windows in all layers": ({**WINDOWS, "cache_config__sliding_window": 64}, ALL),
    "encoder-decoder": ({"model_config__is_encoder_decoder": True}, ALL),
    "prefix-LM": (
        {"model_config__is_mm_prefix_lm": True},
        "split tokens kvzip context layers prompts scored",
    ),
    "diffusion": ({"model_config__is_diffusion": True}, ALL),
    "chunks": (CHUNKS, "split tokens kvzip context audit layers"),
    "Inkling": ({"model_config__architectures": ["InklingForConditionalGeneration"]}, ALL),
    "R-SWA": ({"model_config__rswa_window": 64}, ALL),
    "ALiBi": ({"model_config__uses_alibi": True}, ALL.replace("full ", "")),
    "ALiBi by its class": ({"model_config__architectures": ["Step1ForCausalLM"]}, ALL.replace("full ", "")),
    "M-RoPE": ({"model_config__uses_mrope": True}, "context"),
    "LongRoPE": (text(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "context"),
    "LongRoPE of some layers": (text(rope_parameters={"full_attention": {"rope_type": "longrope"}}), "context"),
    "YaRN": (text(rope_parameters={"rope_type": "yarn"}), ""),
    "layers of unlike heads": (
        {"model_config__model_arch_config": SimpleNamespace(per_layer_overrides=[{}, {"total_num_kv_heads": 4}])},
        "split",
    ),
    "heads of 512": ({**CUDA, "model_config__get_head_size": lambda: 512}, "split layers scored"),
    "large heads": (
        {**CUDA, "model_config__get_head_size": lambda: 528},
        "h2o split tokens kvzip context read layers prompts scored max mean pressure audit host",
    ),
    "latents": (MLA, "split tokens kvzip context layers prompts scored"),
    "latents that a backend copies tables for": (
        {**MLA, "attention_config__backend": AttentionBackendEnum.AMX_MLA},
        "split tokens kvzip context layers prompts scored",
    ),
    "latents beside states": ({**MLA, **HYBRID}, "split tokens kvzip context layers prompts scored audit"),
    "states": (HYBRID, "split kvzip context layers audit"),
    "windows": (WINDOWS, "split kvzip context layers audit"),
    "shared caches": (text(num_kv_shared_layers=1), "split kvzip context layers"),
    "another backend": ({"attention_config__backend": AttentionBackendEnum.FLEX_ATTENTION}, ALL),
    "another backend on a GPU": ({**CUDA, "attention_config__backend": AttentionBackendEnum.FLEX_ATTENTION}, ALL),
    "a CPU's backend on a GPU": ({**CUDA, "attention_config__backend": AttentionBackendEnum.CPU_ATTN}, ALL),
    "latents on a backend without": ({**MLA, "attention_config__backend": AttentionBackendEnum.FLASH_ATTN}, ALL),
    "two ranks": ({"parallel_config__tensor_parallel_size": 2}, ""),
    "FlashInfer": (
        {**CUDA, "attention_config__backend": AttentionBackendEnum.FLASHINFER},
        "split layers prompts scored",
    ),
    "FlashInfer beside states": (
        {**CUDA, **HYBRID, "attention_config__backend": AttentionBackendEnum.FLASHINFER},
        "split kvzip context host read layers prompts scored audit",
    ),
    "one table beside states": ({**HYBRID, "scheduler_config__disable_hybrid_kv_cache_manager": True}, ALL),
    "one table beside windows": ({**WINDOWS, "scheduler_config__disable_hybrid_kv_cache_manager": True}, ALL),
    "fast prefill": ({"cache_config__kv_sharing_fast_prefill": True}, ALL),
    "TurboQuant": (
        {"cache_config__cache_dtype": "turboquant_k8v4", "cache_config__kv_cache_dtype_skip_layers": ["0"]},
        ALL,
    ),
    "fp8": ({"cache_config__cache_dtype": "fp8_e5m2"}, ""),
    "fp8 latents": (
        {**MLA, "cache_config__cache_dtype": "fp8"},
        "h2o split tokens kvzip context host read layers prompts scored max mean pressure audit",
    ),
    "an unread dtype": (
        {"cache_config__cache_dtype": "int8_per_token_head"},
        "h2o tokens kvzip context read layers prompts scored max mean pressure audit host",
    ),
    "unlike dtypes": (
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        "h2o tokens kvzip context read layers prompts scored max mean pressure audit host",
    ),
    "no prefix cache": (UNCACHED, "kvzip"),
    "n-grams": (drafts("ngram"), "kvzip context layers scored mean audit"),
    "n-grams on V2": ({**drafts("ngram"), **V2}, "kvzip context layers scored mean audit"),
    "n-grams beside cached states": ({**drafts("ngram"), **HYBRID}, ALL),
    "n-grams beside cached states on V2": (
        {**drafts("ngram"), **HYBRID, **V2},
        "split tokens kvzip context layers scored mean audit",
    ),
    "n-grams beside uncached states": (
        {**drafts("ngram"), **HYBRID, **UNCACHED},
        "split tokens kvzip context layers scored mean audit",
    ),
    "n-grams beside latents and states": (
        {**drafts("ngram"), **HYBRID, **MLA, **UNCACHED},
        "split tokens kvzip context layers prompts scored mean audit",
    ),
    "MTP beside latents and states": ({**drafts("mtp"), **HYBRID, **MLA, **UNCACHED}, ALL),
    "n-grams beside chunks": (
        {**drafts("ngram"), **CHUNKS},
        "split tokens kvzip context layers scored mean audit",
    ),
    "EAGLE beside chunks": ({**drafts("eagle"), **CHUNKS}, ALL),
    "EAGLE beside unlike keys and values": ({**drafts("eagle"), **UNLIKE}, ALL),
    "MTP beside unlike keys and values": (
        {**drafts("mtp"), **UNLIKE},
        "split tokens kvzip context layers prompts scored mean audit",
    ),
    "DSpark on V1": (drafts("dspark", parallel=True), ALL),
    "DSpark": (
        {**drafts("dspark", parallel=True), **V2},
        "split tokens kvzip context layers scored mean audit",
    ),
    "n-grams on a GPU, on V1": (drafts("ngram_gpu"), ALL),
    "n-grams on a GPU, on V2": (
        {**drafts("ngram_gpu"), **V2},
        "kvzip context layers scored mean audit",
    ),
    "DFlash on V1": (drafts("dflash", parallel=True), ALL),
    "DFlash": (
        {**drafts("dflash", parallel=True), **V2},
        "split tokens kvzip context layers scored mean audit",
    ),
    "DFlash beside latents": ({**drafts("dflash", parallel=True), **V2, **MLA}, ALL),
    "DSpark beside states": (
        {**drafts("dspark", parallel=True), **V2, **HYBRID},
        "split tokens kvzip context layers scored mean audit",
    ),
    "DFlash beside windows": (
        {**drafts("dflash", parallel=True), **V2, **WINDOWS},
        "split tokens kvzip context layers scored mean audit",
    ),
    "DFlash by another architecture": (
        {
            **drafts("dflash", parallel=True, draft_model_config=SimpleNamespace(architectures=["DFlash2DraftModel"])),
            **V2,
        },
        ALL,
    ),
    "adaptive verification": (drafts("mtp", enable_adaptive_verification=True), ALL),
    "several MTP modules": (
        drafts("mtp", use_multi_module_mtp=lambda: True),
        "split kvzip context layers scored mean audit",
    ),
    "several MTP modules on V2": ({**drafts("mtp", use_multi_module_mtp=lambda: True), **V2}, ALL),
    "another method": (drafts("medusa"), ALL),
    "as many drafts as a block has tokens": (drafts("ngram", 16), ALL),
    "MTP": (drafts("mtp"), "split kvzip context layers scored mean audit"),
    "MTP in parallel": (drafts("mtp", parallel=True), ALL),
    "MTP under async scheduling": (
        {**drafts("mtp"), **ASYNC},
        "split tokens kvzip context layers scored mean audit",
    ),
    "MTP beside latents": (
        {**drafts("mtp"), **MLA},
        "split tokens kvzip context layers prompts scored mean audit",
    ),
    "MTP beside latents under async scheduling": (
        {**drafts("mtp"), **MLA, **ASYNC},
        "split tokens kvzip context layers prompts scored mean audit",
    ),
    "MTP beside windows": (
        {**drafts("mtp"), **WINDOWS},
        "split tokens kvzip context layers scored mean audit",
    ),
    "a draft model beside windows": ({**drafts("draft_model"), **WINDOWS}, ALL),
    "EAGLE beside latents": (
        {**drafts("eagle"), **MLA},
        "split tokens kvzip context layers prompts scored mean audit",
    ),
    "a connector": (connector(), "split kvzip context host read layers prompts scored audit"),
    "a connector under async scheduling": (
        {**connector(), **ASYNC},
        "split kvzip context host read layers prompts scored pressure audit",
    ),
    "a connector beside latents": (
        {**connector(), **MLA},
        "split tokens kvzip context host read layers prompts scored audit",
    ),
    "a connector beside states": (
        {**connector(), **HYBRID},
        "split kvzip context host read layers prompts scored audit",
    ),
    "a connector beside windows": (
        {**connector(), **WINDOWS},
        "split kvzip context host read layers prompts scored audit",
    ),
    "LMCache beside latents": (
        {**connector("LMCacheMPConnector", "kv_both"), **MLA},
        "split tokens kvzip context host read layers prompts scored audit",
    ),
    "LMCache beside states": ({**connector("LMCacheMPConnector", "kv_both"), **HYBRID}, ALL),
    "offloading beside states": (
        {**connector("SimpleCPUOffloadConnector", "kv_both"), **HYBRID},
        "split kvzip context read layers prompts scored audit",
    ),
    "offloading beside windows": (
        {**connector("OffloadingConnector", "kv_both"), **WINDOWS},
        "split kvzip context read layers prompts scored audit",
    ),
    "a connector and n-grams": (
        {**connector(), **drafts("ngram")},
        "split kvzip context host read layers prompts scored mean audit",
    ),
    "a connector of both sides": (
        connector(role="kv_both"),
        "split kvzip context host read layers prompts scored audit",
    ),
    "a connector that reads ended requests": (connector(both_ways=True), ALL),
    "another connector": (connector("HF3FSKVConnector"), ALL),
    "connectors that are served": (
        connector("MultiConnector", "kv_both", parts=[role_of("NixlConnector"), role_of("OffloadingConnector")]),
        "split kvzip context host read layers prompts scored audit",
    ),
    "connectors one of which is another": (
        connector("MultiConnector", "kv_both", parts=[role_of("NixlConnector"), role_of("FlexKVConnectorV1")]),
        ALL,
    ),
    "a connector of one's own": (connector(module="mine"), ALL),
    "an encoder-cache connector": ({"ec_transfer_config": object()}, ALL),
    "DCP": ({"parallel_config__decode_context_parallel_size": 2}, ALL),
    "PCP": ({"parallel_config__prefill_context_parallel_size": 2}, ALL),
    "stages": (STAGES, "split tokens kvzip context host read layers prompts scored max audit"),
    "stages beside latents": ({**STAGES, **MLA}, ALL),
    "stages beside states": ({**STAGES, **HYBRID}, ALL),
    "stages beside windows": ({**STAGES, **WINDOWS}, ALL),
    "stages and n-grams": ({**STAGES, **drafts("ngram")}, ALL),
    "stages and a connector": ({**STAGES, **connector()}, ALL),
    "stages on V2": ({**STAGES, **V2}, "split tokens kvzip context host max audit read layers prompts scored"),
    "a stage without layers": ({"parallel_config__pipeline_parallel_size": 3}, ALL),
    "stages under a launcher": (
        {
            **STAGES,
            "parallel_config__data_parallel_size": 1,
            "parallel_config__distributed_executor_backend": "external_launcher",
        },
        ALL,
    ),
    "ranks under a launcher": ({"parallel_config__distributed_executor_backend": "external_launcher"}, ALL),
    "microbatches": ({"parallel_config__use_ubatching": True}, ALL),
    "adapters": ({"lora_config": object()}, "audit"),
    "ranks of experts": ({"model_config__is_moe": True}, "audit"),
    "a scheduler of one's own": ({"scheduler_config__scheduler_cls": "my.Scheduler"}, ALL),
}
#: Environments that other tests refuse, because a machine, an executor or a variable makes them.
ELSEWHERE = {"OLD_GPU", "FP8_ON_OLD_GPU", "BATCH_INVARIANT", "RUST", "OLD_RAY", "SMALL_MACHINE", "OLD_V2", "LAUNCHER"}
ELSEWHERE |= {"FEW_SIZES_BACKEND"}


def server_of(changes):
    config = plain_config(**{path: value for path, value in changes.items() if "__" in path})
    vars(config).update((path, value) for path, value in changes.items() if "__" not in path)
    return config


@pytest.mark.parametrize("name", SERVERS)
def test_what_was_refused_by_hand_is_refused_by_the_table(name):
    """By one clear message for each pair, which names no fact by its braces; nothing else is refused."""
    changes, refused = SERVERS[name]
    messages = {}
    for policy, fields in POLICIES.items():
        try:
            refuse.check_config(server_of(changes), KVPolicyConfig.parse(fields))
        except refuse.Refused as error:
            messages[policy] = error.messages
    assert sorted(messages) == sorted(refused.split())
    for message in (message for told in messages.values() for message in told):
        assert re.fullmatch(r"KV policy '[\w-]+' can't be used with [^:].*: (set|use|leave|serve) .+[^:,]", message)
        assert "\n" not in message and not re.search(r"\{(?!\"name\")|, or $|: $|, ,|  ", message), message


#: Layers beside plain full attention, or in their place.
LAYERS = {
    "plain": {},
    "latents": MLA,
    "states": {**HYBRID, **UNCACHED},
    "latents beside states": {**MLA, **HYBRID, **UNCACHED},
    "windows": WINDOWS,
    "chunks": CHUNKS,
    "unlike keys and values": UNLIKE,
}


def refusals_of(**changes):
    """Messages that refuse h2o on a server; none if it is served."""
    try:
        refuse.check_config(server_of(changes), KVPolicyConfig.parse(H2O))
    except refuse.Refused as error:
        return error.messages
    return ()


@pytest.mark.parametrize("runner", [{}, V2], ids=["V1", "V2"])
@pytest.mark.parametrize("layers", LAYERS)
def test_methods_and_connectors_that_messages_name_are_served(layers, runner):
    (message,) = refusals_of(**LAYERS[layers], **runner, **drafts("medusa"))
    advised = re.search(r"to one of ([\w, ]+), or", message)[1].split(", ")
    for method in advised:
        assert not refusals_of(**LAYERS[layers], **runner, **drafts(method, parallel=method in IN_PARALLEL)), method
    for method in ("eagle", "draft_model", "dflash"):
        for message in refusals_of(**LAYERS[layers], **runner, **drafts(method, parallel=method in IN_PARALLEL)):
            (said,) = re.findall(r'set "method"(?:: "| in --speculative-config to )(.*)', message)
            named = set(re.findall("ngram|eagle3?|mtp|draft_model|dflash|dspark", said))
            assert named and named <= {*advised}, message
    for other in connector("HF3FSKVConnector"), connector("HF3FSKVConnector", module="mine"):
        (message,) = refusals_of(**LAYERS[layers], **runner, **other)
        for name in re.findall(r"\w+Connector\b", message.split(": use ")[1].split(", or Multi")[0]):
            assert not refusals_of(**LAYERS[layers], **runner, **connector(name, "kv_both")), name
    if layers in ("states", "windows", "chunks"):
        one_table = {"scheduler_config__disable_hybrid_kv_cache_manager": True}
        message, *_ = refusals_of(**LAYERS[layers], **runner, **one_table, **connector("ExampleConnector"))
        assert re.search(r"use NixlConnector, .* in place of ExampleConnector, for which vLLM switches it off", message)


def test_lmcaches_connector_comes_with_vllm():
    (message,) = refusals_of(**connector("LMCacheMPConnector", "kv_both", module="lmcache.integration.vllm"))
    assert ": leave kv_connector_module_path out, or leave --kv-policy out" in message


def test_every_environment_of_the_table_has_been_met():
    named = {name: each for name, each in (vars(environments) | vars(drafting)).items() if each in ENVIRONMENTS}
    policies = [KVPolicyConfig.parse(POLICIES[name]) for name in ("split", "audit")]
    servers = [Server(server_of(changes), policy) for changes, _ in SERVERS.values() for policy in policies]
    met = {name for name, each in named.items() if name not in ELSEWHERE and any(map(each.of, servers))}
    assert met == named.keys() - ELSEWHERE and len(named) == len(ENVIRONMENTS) > 45


def test_layers_tell_what_a_configuration_does_not():
    split, context = (KVPolicyConfig.parse(POLICIES[name]) for name in ("split", "context"))
    for layers, what in (
        (Layers(shared=True), "layers that share a cache"),
        (Layers(windows=True), "sliding-window attention beside full attention"),
        (Layers(states=True), "Mamba, linear attention or short convolutions beside full attention"),
    ):
        for config in (split, context):
            with pytest.raises(refuse.Refused, match=what):
                refuse.check_layers(plain_config(), config, layers)
        refuse.check_layers(plain_config(), KVPolicyConfig.parse(H2O), layers)
    for layers in (Layers(False, windows=True), Layers(False, states=True)):
        with pytest.raises(refuse.Refused, match="in all layers, .* nothing to evict: leave --kv-policy out$"):
            refuse.check_layers(plain_config(), KVPolicyConfig.parse(H2O), layers)


#: Class of models, and column, of benchmarks/results/matrix.json -> in the table.
CLASSES = {
    "latents": environments.MLA,
    "hybrids": environments.STATES,
    "sliding windows": environments.WINDOWS,
    "soft caps, learned sinks": environments.WINDOWS,
    "shared caches": environments.SHARED,
}
COLUMNS = {
    "tokens": features.TOKENS,
    "split heads": features.SPLIT,
    "kvzip": features.KVZIP,
    "context": features.CONTEXT,
    "host": features.HOST,
    "pressure": features.PRESSURE,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_what_tests_wrote_down_is_what_the_table_says(kind):
    """Pairs that the table refuses have not run, "no test runs" included, and what ran is not refused."""
    known = json.loads(matrix.RESULTS.read_text())
    cannot = {column for column, feature in COLUMNS.items() if feature in CLASSES[kind].cannot_stand}
    assert cannot == set(known["refused"][kind]) & COLUMNS.keys()
    ran = {
        column
        for runs in known["ran"].values()
        for kinds in runs.values()
        for columns in kinds.get(kind, {}).values()
        for column in columns
    }
    assert ran and not ran & cannot


def test_what_no_test_runs_runs_where_the_user_says_so(caplog):
    """Each such pair is named in one warning; pairs with a known reason stay refused."""
    allowed = {"name": "kvzip", "untried": True}
    config = KVPolicyConfig.parse({"name": "kvzip", "allow": []})
    shared = text(num_kv_shared_layers=1)
    with pytest.raises(refuse.Refused, match="share a cache, which no test runs: .*, or set untried: true$"):
        refuse.check_config(server_of(shared), config)
    with caplog.at_level("WARNING", "vllm.evict"):
        served = refuse.check_config(server_of(shared), KVPolicyConfig.parse(allowed))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("KV policy kvzip runs, because untried is true, with ") and "share a cache" in line
    assert "kvzip" in served.allowed and refuse.untried(server_of(shared), served) == [line.split(" with ", 1)[1]]
    assert refuse.untried(server_of({}), served) == refuse.untried(server_of(shared), config) == []
    with pytest.raises(refuse.Refused, match="latent attention") as refused:
        refuse.check_config(server_of(MLA), KVPolicyConfig.parse({"name": "duo", "pattern": ["10"], "untried": True}))
    assert "untried" not in str(refused.value)


def test_no_reason_says_that_something_is_untried_in_words_of_its_own():
    reasons = [why for each in ENVIRONMENTS for why in each.cannot_stand.values()]
    assert sum(why.startswith(UNTRIED) for why in reasons) > 10
    assert not [why for why in reasons if "test" in why.removeprefix(UNTRIED)]
