"""Triton kernels; imported as vllm_evict.triton_kernels because vLLM looks for a top-level package of this name.

Nothing is imported here: a CPU installation may lack Triton. Each module has one kernel, its launcher and its torch
reference, or the name of the one that the CPU kernel of the same contract has. Launchers check shapes and dtypes, which
cost no synchronisation; what lies in device memory (block ids, lengths) is the caller's to get right.
"""
