"""`vllm-evict show`: one prompt under a policy and under full attention.

record    the run, and the fate of each block              page      an HTML document of it
"""
