"""Independent reference for block eviction: a dense Llama with boolean masks.

Written from the papers (StreamingLLM, arXiv:2309.17453; H2O, arXiv:2306.14048)
and the project's stated semantics. It shares no code with the plugin and
imports neither it nor vLLM.
"""
