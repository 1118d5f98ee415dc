"""Contract and torch reference of each kernel. A function here runs the kernel in C++, Triton or CUDA C++.

Kernels in C++ check all arguments before they write anything, those for a device check shapes and dtypes. References
check nothing.

Shapes are those of vLLM: T queries in a batch of R requests, H query heads, Hkv KV heads, head size D, blocks of bs
tokens. G = H / Hkv query heads share a KV head. Block tables of kernels are views: they have no holes.
"""
