"""Refusals under pipeline parallelism, by name and with the way around."""

from types import SimpleNamespace

import pytest
from test_refusals import H2O, NGRAM, engine_config, refusal, with_config
from test_refusals_backends import plain_config

from vllm_evict.config import KVPolicyConfig, KVPolicyError
from vllm_evict.integration.start import fallback, versions
from vllm_evict.integration.start.capabilities import refuse

#: Policy, arguments, changes of the model's configuration, what to change.
STAGED = {
    "pipeline parallelism, because the policy puts heads": (
        {"name": "pyramidkv", "bands": 2},
        {},
        {},
        "or use a policy for whole",
    ),
    "evict: host and pipeline": ({**H2O, "evict": "host", "host": "1MiB"}, {}, {}, "-size, or set evict: drop"),
    "sliding-window attention beside full attention and pipeline parallelism, where vLLM groups layers over all stages": (
        H2O,
        {},
        dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"]),
        "use --tensor-parallel-size in place of --pipeline-parallel-size",
    ),
    "speculative decoding and pipeline parallelism": (H2O, dict(speculative_config=NGRAM), {}, "use --tensor"),
    "the KV connector NixlConnector and pipeline parallelism": (
        H2O,
        dict(kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}),
        {},
        "-size, or leave --kv-transfer-config and --kv-offloading-size out",
    ),
}


@pytest.mark.parametrize("what", STAGED)
def test_what_stages_of_a_pipeline_cannot_serve_is_refused_by_name(tmp_path, what):
    policy, arguments, changes, instead = STAGED[what]
    message = refusal(engine_config, with_config(tmp_path, **changes), policy, pipeline_parallel_size=2, **arguments)
    assert what in message and instead in message


def test_a_stage_without_layers_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,0")
    message = refusal(engine_config, tiny, pipeline_parallel_size=2)
    assert "a stage of the pipeline without layers, which no test runs: set VLLM_PP_LAYER_PARTITION to a lay" in message
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")
    engine_config(tiny, pipeline_parallel_size=2)


@pytest.mark.since("0.31", "its Model Runner V1 has stages under async scheduling")
def test_async_scheduling_asked_for_beside_stages_is_refused_by_name(tiny, monkeypatch, async_stays):
    """Before vLLM 0.32 stages run on Model Runner V1, where vLLM lacks async scheduling; by itself vLLM leaves it out."""
    monkeypatch.setattr(versions, "serves_on_v2", lambda: False)
    message = refusal(engine_config, tiny, pipeline_parallel_size=2, async_scheduling=True)
    assert message == (
        "pipeline parallelism under a KV policy got pipeline parallelism with async scheduling; expected Model Runner "
        "V1, which alone serves the former and does not support the latter; leave --async-scheduling out"
    )
    assert not engine_config(tiny, pipeline_parallel_size=2).scheduler_config.async_scheduling


def test_what_needs_the_other_runner_is_named_where_v1_is_needed(monkeypatch):
    """vLLM takes Model Runner V2 for a watermark, whatever VLLM_USE_V2_MODEL_RUNNER says."""
    config = plain_config(scheduler_config__async_scheduling=True)
    config.use_v2_model_runner, config.additional_config = True, {}
    monkeypatch.setattr(versions, "release", lambda: "0.31.0")

    def refused(message):
        with pytest.raises(KVPolicyError, match=message):
            refuse.check_config(config, KVPolicyConfig.parse(H2O))

    config.parallel_config.pipeline_parallel_size = 2
    refused(
        "Model Runner V2 .* and .*: use --tensor.*, or set VLLM_USE_V2_MODEL_RUNNER=0, leave --async-scheduling out"
    )
    config.watermark_config = object()
    refused("Model Runner V2 .* and .*, or leave --watermark-config out, which needs")
    config.watermark_config, config.parallel_config.pipeline_parallel_size = None, 1
    config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=3, parallel_drafting=False)
    refused(
        "by 'ngram' on Model Runner V2, which no test runs: set VLLM_USE_V2_MODEL_RUNNER=0, or leave --kv-policy out"
    )
    assert fallback.on_v1_alone(config) == []  # without a policy
    config.additional_config = {"kv_policy": "h2o"}
    assert fallback.on_v1_alone(config) == ["speculative decoding under a KV policy"]
