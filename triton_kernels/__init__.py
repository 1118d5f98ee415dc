"""Triton kernels; installed as vllm_evict.triton_kernels because vLLM looks for a top-level package of this name."""
