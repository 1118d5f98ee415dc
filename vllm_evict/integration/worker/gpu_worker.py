"""The CUDA engine's worker."""

from vllm.v1.worker.gpu_worker import Worker

from .worker import EvictionWorkerMixin


class GPUEvictionWorker(EvictionWorkerMixin, Worker):
    """vLLM's GPU `Worker` with eviction."""
