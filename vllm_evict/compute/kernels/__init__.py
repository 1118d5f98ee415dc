"""Contract, checks and torch reference of each kernel. A function here runs the kernel in C++, Triton or CUDA C++.

Shapes are those of vLLM: T queries in a batch of R requests, H query heads, Hkv KV heads, head size D, blocks of bs
tokens. G = H / Hkv query heads share a KV head. Block tables of kernels are views: they have no holes.
"""
