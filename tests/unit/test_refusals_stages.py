"""What is refused under pipeline parallelism, by name and with the way around."""

from types import SimpleNamespace

import pytest
from test_refusals import H2O, NGRAM, engine_config, refusal, with_config
from test_refusals_backends import plain_config

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.integration import refusals

#: Policy, arguments, changes of the model's configuration, what to change.
STAGED = {
    "pipeline parallelism, because it puts heads": (
        {"name": "pyramidkv", "bands": 2},
        {},
        {},
        "use a policy for whole",
    ),
    "heads or layers: max and pipeline": ({**H2O, "layers": "max"}, {}, {}, "set sum or mean, or use --tensor"),
    "granularity: token and pipeline": ({**H2O, "granularity": "token"}, {}, {}, "set granularity: block, or use"),
    "kvzip and pipeline": ({**H2O, "allow": ["kvzip"]}, {}, {}, 'leave kvzip out of name and "allow", or use'),
    "a context and pipeline": ({**H2O, "context": "model"}, dict(max_num_batched_tokens=256), {}, "leave context out"),
    "evict: host and pipeline": ({**H2O, "evict": "host", "host": "1MiB"}, {}, {}, "set evict: drop, or use"),
    "select and pipeline": ({"name": "sink-window", "select": 1024, "allow": []}, {}, {}, "leave select out, or use"),
    "layers with sliding windows or states, which vLLM groups over all stages": (
        H2O,
        {},
        dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"]),
        "use --tensor-parallel-size in place of --pipeline-parallel-size",
    ),
    "pipeline parallelism and speculative decoding": (H2O, dict(speculative_config=NGRAM), {}, "use --tensor"),
    "pipeline parallelism and a KV connector": (
        H2O,
        dict(kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}),
        {},
        "leave --kv-transfer-config and --kv-offloading-size out, or use",
    ),
}


@pytest.mark.parametrize("what", STAGED)
def test_what_stages_of_a_pipeline_cannot_serve_is_refused_by_name(tmp_path, what):
    policy, arguments, changes, instead = STAGED[what]
    message = refusal(engine_config, with_config(tmp_path, **changes), policy, pipeline_parallel_size=2, **arguments)
    assert what in message and instead in message


def test_stages_on_runners_and_launchers_that_no_test_runs_are_refused():
    config = plain_config(parallel_config__pipeline_parallel_size=2)
    config.use_v2_model_runner = False
    refusals.check_config(config, KVPolicyConfig.parse(H2O))
    config.model_config.use_mla = True
    with pytest.raises(KVPolicyError, match=r"pipeline parallelism and multi-head latent attention \(MLA\).*: use"):
        refusals.check_config(config, KVPolicyConfig.parse(H2O))
    config.model_config.use_mla, config.use_v2_model_runner = False, True
    with pytest.raises(
        KVPolicyError, match="pipeline parallelism on Model Runner V2.*: set VLLM_USE_V2_MODEL_RUNNER=0"
    ):
        refusals.check_config(config, KVPolicyConfig.parse(H2O))
    config.use_v2_model_runner, config.parallel_config.distributed_executor_backend = False, "external_launcher"
    config.parallel_config.data_parallel_size = 1
    with pytest.raises(KVPolicyError, match="under an external launcher, whose stages each have a scheduler: leave"):
        refusals.check_config(config, KVPolicyConfig.parse(H2O))


@pytest.mark.since("0.31", "its Model Runner V1 has stages under async scheduling")
@pytest.mark.parametrize("runner", [None, "0"])
def test_async_scheduling_asked_for_beside_stages_is_refused_by_name(tiny, monkeypatch, async_stays, runner):
    """Stages run on Model Runner V1, where vLLM lacks async scheduling; by itself vLLM leaves it out."""
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    message = refusal(engine_config, tiny, pipeline_parallel_size=2, async_scheduling=True)
    assert message == (
        "pipeline parallelism under a KV policy got pipeline parallelism with async scheduling; expected Model Runner "
        "V1, which alone serves the former and does not support the latter; leave --async-scheduling out"
    )
    assert not engine_config(tiny, pipeline_parallel_size=2).scheduler_config.async_scheduling


@pytest.mark.parametrize("served", ["stages", "drafts"])
def test_what_needs_the_other_runner_is_named_where_v1_is_needed(served):
    """vLLM takes Model Runner V2 for a watermark, whatever VLLM_USE_V2_MODEL_RUNNER says."""
    config = plain_config(scheduler_config__async_scheduling=True)
    config.use_v2_model_runner = True
    if served == "stages":
        config.parallel_config.pipeline_parallel_size = 2
        instead = "set VLLM_USE_V2_MODEL_RUNNER=0, leave --async-scheduling out, or use --tensor"
    else:
        config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=3, parallel_drafting=False)
        config.cache_config.block_size, instead = 16, "set VLLM_USE_V2_MODEL_RUNNER=0, or leave --speculative-config"
    with pytest.raises(KVPolicyError, match=f"on Model Runner V2.*: {instead}"):
        refusals.check_config(config, KVPolicyConfig.parse(H2O))
    config.watermark_config = object()
    with pytest.raises(KVPolicyError, match="on Model Runner V2.*: leave --watermark-config out, which needs"):
        refusals.check_config(config, KVPolicyConfig.parse(H2O))
