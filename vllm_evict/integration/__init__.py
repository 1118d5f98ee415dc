"""The only room that imports vLLM: its subclasses of vLLM's scheduler, managers, specs and workers, and every patch.

| module | touches | why | until |
|---|---|---|---|
| `arguments` | `EngineArgs` | a flag and a field for the policy | vLLM lets plugins add engine arguments |
| `frontend` | `AsyncLLM`, /v1/responses, processors, loggers | 400s, usage, /metrics | vLLM has hooks |
| `stats` | a request's metrics | its usage, where outputs are made into rows (Ray Data) | outputs have a free field |
| `allocation` | `KVCacheManager.allocate_slots` | blocks go instead of preemption | vLLM asks before it preempts |
| `allocation` | `….estimate_cached_tokens` | evicted blocks that are published count | vLLM counts what it published |
| `runners` | model runners V1 and V2 | holes into block tables, batch order | SchedulerOutput tells of them |
| `layers` | `Attention` layers after load | their backend behind a view | backends can be wrapped by configuration |
| `layers` | how KV groups are made | views beside sliding windows before groups are known | a builder knows its group |
| `layers` | layers by name, KV sharing | pages for heads of many layers, in own KV groups | KV groups can hold heads |
| `positions` | rotary embeddings | rows for positions past the model's own, keys turned on | keys can move in vLLM |
| `reorder` | weight loaders of attention projections | heads of a class side by side | heads can have own tables |
| `refusals` | `VllmConfig` | what can't be served right is refused by name | each entry until it is served |
| `versions` | version numbers | only tested releases are touched | |

`scheduler`, `managers`, `spec`, `cpu_worker` and `gpu_worker` subclass what a configuration of vLLM can name, or what
vLLM registers. tests/test_compat.py guards each touch against the sources of every release in `versions`.
"""
