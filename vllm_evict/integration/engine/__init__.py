"""The engine core: the scheduler, the managers of KV groups, and what tells the front end.

| module | touches | why | until |
|---|---|---|---|
| `carriers` | outputs, statistics and metrics | subclasses with fields of the plugin | messages have a free field |
| `allocation` | `KVCacheManager.allocate_slots` | blocks go instead of preemption | vLLM asks before it preempts |
| `allocation` | `….estimate_cached_tokens` | evicted blocks that are published count | vLLM counts what it published |
"""
