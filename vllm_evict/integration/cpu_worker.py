"""The CPU engine's worker."""

from vllm.v1.worker.cpu_worker import CPUWorker

from .worker import EvictionWorkerMixin


class CPUEvictionWorker(EvictionWorkerMixin, CPUWorker):
    """vLLM's `CPUWorker` with eviction."""
