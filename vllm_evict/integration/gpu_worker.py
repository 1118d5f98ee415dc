"""The CUDA engine's worker. No GPU has run it yet."""

from vllm.v1.worker.gpu_worker import Worker

from .worker import EvictionWorkerMixin


class GPUEvictionWorker(EvictionWorkerMixin, Worker):
    """vLLM's GPU `Worker` with eviction."""
