"""Independent reference for block eviction: a dense Llama with boolean masks.

Written from the papers (docs/policies.md names them) and the project's stated
semantics. It shares no code with the plugin and
imports neither it nor vLLM.
"""
