"""Gives an engine configuration the scheduler and the worker that evict."""

from typing import Any

from vllm.logger import init_logger

from ...config import KVPolicyConfig, KVPolicyError
from . import attending, backends, connectors, versions
from .capabilities import refuse
from .of_features import SETTLED

logger = init_logger("vllm.evict")


def activate(vllm_config: Any, config: KVPolicyConfig) -> None:
    """Give an engine configuration the scheduler and worker that evict; a server that only prefills keeps vLLM's.

    Raises:
        KVPolicyError: the plugin cannot serve this vLLM, model or setting.
    """
    if connectors.prefills_alone(vllm_config):
        logger.info("KV policy %s: %s", config.name, connectors.PREFILLS)
        return
    versions.check(versions.release())
    backends.choose(vllm_config, config)
    config = refuse.check_config(vllm_config, config)
    model = vllm_config.model_config
    heads = attending.kv_heads(model)
    config = config.for_model(len(heads), min(heads), vllm_config.parallel_config.tensor_parallel_size)
    for settled in SETTLED:
        config = settled(vllm_config, config)
    config.check(
        vllm_config.cache_config.block_size,
        len(heads),
        min(heads),
        model.max_model_len,
        vllm_config.max_in_flight_tokens,
    )
    config.check_instruction(model.get_vocab_size())
    vllm_config.additional_config["kv_policy"] = config.to_dict()
    asynchronous = vllm_config.scheduler_config.async_scheduling
    vllm_config.scheduler_config.scheduler_cls = (
        f"vllm_evict.integration.engine.scheduler.{'AsyncEvictionScheduler' if asynchronous else 'EvictionScheduler'}"
    )
    worker = vllm_config.parallel_config.worker_cls
    if worker not in WORKERS:
        raise KVPolicyError(f"KV policies can't be used with worker class {worker!r}: leave --worker-cls out")
    vllm_config.parallel_config.worker_cls = WORKERS[worker]


#: vLLM's workers -> the plugin's.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_evict.integration.worker.cpu_worker.CPUEvictionWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_evict.integration.worker.gpu_worker.GPUEvictionWorker",
}
