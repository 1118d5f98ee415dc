"""The advice of a refusal is itself served: each way out that a message names is gone, and none of them goes in
circles.
"""

import re

import pytest
from test_capabilities import POLICIES, SERVERS, connector, drafts, server_of
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_evict.config import KVPolicyConfig
from vllm_evict.integration.start.capabilities import refuse
from vllm_evict.integration.start.drafters import IN_PARALLEL

NAMES = re.compile(r"[\w.]+")
#: Steps after which a user who follows the first way out of each message is served.
MOST = 6


def changed(before, changes):
    """Return what was set before, with changes; None leaves a field out."""
    return {name: value for name, value in {**before, **changes}.items() if value is not None or name not in changes}


def server(**changes):
    """A way that sets fields of the server."""
    return lambda before, policy, _: [(changed(before, changes), policy)]


def field(**changes):
    """A way that sets fields of the policy."""
    return lambda before, policy, _: [(before, changed(policy, changes))]


def each(make):
    """A way that names settings, of which each is to work: `make` returns fields of the server for a name, or None."""
    return lambda before, policy, found: [
        (before | made, policy) for name in NAMES.findall(found[1]) if (made := make(name, before)) is not None
    ]


def policies(*made):
    """A way that names policies: functions of the one before."""
    return lambda before, policy, _: [(before, make(policy)) for make in made]


def redrafted(**fields):
    """A way that sets fields of the server's drafts."""

    def way(before, policy, _):
        own = dict(vars(before["speculative_config"]), **fields)
        own = {name: value for name, value in own.items() if name != "use_eagle" and value is not None}
        tokens, parallel = own.pop("num_speculative_tokens"), own.pop("parallel_drafting")
        return [(before | drafts(own.pop("method"), tokens, parallel, **own), policy)]

    return way


def reconnected(before, policy, _):
    transfer = before["kv_transfer_config"]
    return [(before | connector(transfer.kv_connector, transfer.kv_role), policy)]


def to_ngram(before, policy, found):
    asynchronous = {} if found[1] else before
    return [(changed(before | drafts("ngram"), {name: asynchronous.get(name) for name in ASYNC}), policy)]


def to_method(name, before):
    return drafts(name, parallel=name in IN_PARALLEL) if name not in ("or", "to") else None


def to_connector(name, before):
    parts = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]
    return connector(name, "kv_both", parts=parts) if name.endswith("Connector") else None


def to_backend(name, before):
    on_gpu = before.get("device_config__device_type") == "cuda"
    served = name in AttentionBackendEnum.__members__ and name.startswith("CPU") != on_gpu
    return {"attention_config__backend": AttentionBackendEnum[name]} if served else None


def to_dtype(name, before):
    return {"cache_config__cache_dtype": name} if name != "or" else None


def without_kvzip(policy):
    return {**policy, "name": "h2o" if policy["name"] == "kvzip" else policy["name"], "allow": []}


#: What makes scheduling asynchronous. vLLM refuses it beside n-grams.
ASYNC = ("scheduler_config__async_scheduling", "max_concurrent_batches")
PLAIN = {"name": "sink-window", "allow": []}
#: Words of a message -> (server, policy, match) -> servers and policies of who does what they advise. None: there is no policy.
WAYS = {
    r"leave --kv-policy out.*": None,
    r"leave --data-parallel-size out": server(model_config__is_moe=None),
    r"leave data_parallel_size out": server(parallel_config__data_parallel_size=1),
    r"serve with --data-parallel-size": server(parallel_config__distributed_executor_backend=None),
    r"leave --distributed-executor-backend out": server(parallel_config__distributed_executor_backend=None),
    r"leave --disable-hybrid-kv-cache-manager out": server(scheduler_config__disable_hybrid_kv_cache_manager=None),
    r"leave --ec-transfer-config out": server(ec_transfer_config=None),
    r"leave --enable-dbo and --ubatch-size out": server(parallel_config__use_ubatching=None),
    r"leave --enable-lora out": server(lora_config=None),
    r"leave --kv-cache-dtype-skip-layers out": server(cache_config__kv_cache_dtype_skip_layers=None),
    r"leave --kv-sharing-fast-prefill out": server(cache_config__kv_sharing_fast_prefill=None),
    r"leave --kv-transfer-config and --kv-offloading-size out": server(kv_transfer_config=None),
    r"(?:leave|set) (--no-)enable-prefix-caching(?: out)?": lambda before, policy, found: server(
        cache_config__enable_prefix_caching=None if found[0].startswith("leave") else False
    )(before, policy, found),
    r"leave --scheduler-cls out": server(scheduler_config__scheduler_cls=None),
    r"leave --speculative-config out": server(speculative_config=None),
    r"leave (?:bidirectional_kv_xfer|kv_connector_module_path) out": reconnected,
    r'leave "parallel_drafting" out of --speculative-config': redrafted(parallel_drafting=False),
    r'set "enable_adaptive_verification": false in --speculative-config': redrafted(enable_adaptive_verification=False),
    r'set "num_speculative_tokens" in --speculative-config to less than 16': redrafted(num_speculative_tokens=15),
    r'set "num_speculative_tokens": 1 in --speculative-config': redrafted(num_speculative_tokens=1, use_multi_module_mtp=None),
    r'set "method" in --speculative-config to (?:one of )?((?:\w+(?:, | or )?)+).*': each(to_method),
    r'set "method": "ngram" in --speculative-config(, without --async-scheduling)?': to_ngram,
    r"serve on vLLM's CPU or CUDA engine": server(device_config__device_type=None),
    r"set --attention-backend to (.*)": each(to_backend),
    r"set --decode-context-parallel-size 1 and --prefill-context-parallel-size 1": server(
        parallel_config__decode_context_parallel_size=None, parallel_config__prefill_context_parallel_size=None
    ),
    r"set --hf-overrides.rswa_window null, .*": server(model_config__rswa_window=None),
    r"set --language-model-only, .*": server(model_config__is_mm_prefix_lm=None),
    r"set --max-model-len (\d+) or less, .*": lambda before, policy, found: server(
        model_config__max_model_len=int(found[1])
    )(before, policy, found),
    r"set --no-async-scheduling": server(**dict.fromkeys(ASYNC)),
    r"use --tensor-parallel-size in place of --pipeline-parallel-size": server(
        parallel_config__pipeline_parallel_size=None
    ),
    r"use --kv-cache-dtype (.*)": each(to_dtype),
    r"use ((?:\w*Connector\w*(?:, | or )?)+).*": each(to_connector),
    r"leave audit out": field(audit=None),
    r"leave context out": field(context=None),
    r"leave read_prompts out": field(read_prompts=None),
    r"leave read out, with .*": field(
        read=None, leaders=None, dense_layers=None, hold=None, index=None, read_prompts=None
    ),
    r"set dense_layers: 0 and leaders: 1": field(dense_layers=0, leaders=1),
    r'leave kvzip out of name and "allow" .*': policies(without_kvzip),
    r"set accumulate: sum, ema or last": policies(*(lambda policy, name=name: {**policy, "accumulate": name} for name in ("sum", "ema", "last"))),
    r"set sum or mean": policies(*(lambda policy, name=name: {**policy, "layers": name} for name in ("sum", "mean"))),
    r"set evict: drop, and leave out .*": field(
        evict="drop", budget=None, host=None, fetch=None, read=None, leaders=None, hold=None, index=None
    ),
    r"set granularity: block": field(granularity="block"),
    r"set when: budget": field(when="budget"),
    r"set untried: true": field(untried=True),
    r'set read under full or sink-window, .* "allow"': policies(
        *(lambda policy, name=name: {"name": name, "read": policy["read"], "allow": []} for name in ("full", "sink-window"))
    ),
    r"use a policy for whole layers, such as h2o, snapkv or sink-window": policies(
        *(lambda policy, name=name: {"name": name} for name in ("h2o", "snapkv", "sink-window"))
    ),
    r'use (?:a policy without scores, .*|sink-window, .*) "allow"': policies(lambda policy: PLAIN),
    r'use \{"name": "full", "allow": \[\]\}, which evicts nothing': policies(lambda policy: {"name": "full", "allow": []}),
}  # fmt: skip


def messages_of(changes, policy):
    """Return what -> ways out, of each message that refuses a policy on a server."""
    try:
        refuse.check_config(server_of(changes), KVPolicyConfig.parse(policy))
    except refuse.Refused as error:
        split = (re.fullmatch(r"(.*?): ((?:set|use|leave|serve|unset) .*)", message) for message in error.messages)
        return {found[1]: re.split(r", or (?=(?:set|use|leave|serve|unset) )", found[2]) for found in split}
    return {}


def taken(way, changes, policy):
    """(server, policy) of each who does what a message advises; []: the server has no policy any more."""
    (found,) = [(match, way_out) for words, way_out in WAYS.items() if (match := re.fullmatch(words, way))]
    return [] if found[1] is None else found[1](changes, policy, found[0])


@pytest.mark.parametrize("name", SERVERS)
def test_each_way_out_leaves_what_was_refused_and_ends_at_a_server(name):
    for fields in POLICIES.values():
        changes, policy = SERVERS[name][0], fields
        for what, ways in messages_of(changes, policy).items():
            for way in ways:
                for after in taken(way, changes, policy):
                    refused = messages_of(*after)
                    assert what not in refused, (what, way)
                    assert "backend" not in way or not any("backend" in other for other in refused), (way, refused)
                    assert "ngram" not in way or not after[0].get(ASYNC[0]), way
        for _ in range(MOST):
            if not (refused := messages_of(changes, policy)):
                break
            if not (after := taken(next(iter(refused.values()))[0], changes, policy)):
                break
            changes, policy = after[0]
        else:
            pytest.fail(f"{name} with {fields} is still refused {refused}")
