"""A pytest plugin that runs vLLM's own tests on the plugin: its schedulers and spec, or `--kv-policy` for its servers.

vLLM's tests come with its source distribution, and need its test requirements and the models that they name. From the
folder that holds their `tests/`, with this one on PYTHONPATH (another `tests` of ours must not be):

    UPSTREAM_POLICY='{"name": "h2o", "budget": 100000, "sink": 32, "recent": 32}' \\
        pytest -p upstream tests/v1/core/test_scheduler.py
    UPSTREAM_SERVE='--block-size 32 --kv-policy {"name":"h2o","budget":96,"sink":32,"recent":32,"buffer":0}' \\
        pytest -p upstream tests/entrypoints/openai/completion/test_completion.py

Without either nothing is changed: the same command tells what stock vLLM passes there.
"""

import json
import os

if policy := os.environ.get("UPSTREAM_POLICY"):
    import tests.v1.core.utils as core
    import tests.v1.kv_connector.unit.utils as connectors

    from vllm_evict.integration.engine.scheduler import AsyncEvictionScheduler, EvictionScheduler
    from vllm_evict.integration.engine.spec import EvictableSpec

    make_config = core.VllmConfig

    def with_policy(*args, **kwargs):
        return make_config(*args, **kwargs, additional_config={"kv_policy": json.loads(policy)})

    for module in (core, connectors):
        module.VllmConfig, module.FullAttentionSpec = with_policy, EvictableSpec
        module.Scheduler, module.AsyncScheduler = EvictionScheduler, AsyncEvictionScheduler

if arguments := os.environ.get("UPSTREAM_SERVE"):
    from tests.utils import RemoteOpenAIServer

    start = RemoteOpenAIServer._start_server
    RemoteOpenAIServer._start_server = lambda self, model, args, env: start(
        self, model, [*args, *arguments.split()], env
    )
