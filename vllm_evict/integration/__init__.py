"""The only package that imports vLLM: subclasses of its scheduler, managers, specs and workers, and every patch.

| module | touches | why | until |
|---|---|---|---|
| `arguments` | `EngineArgs` | a flag and a field for the policy | vLLM lets plugins add engine arguments |
| `frontend` | `AsyncLLM`, /v1/responses, processors, loggers | 400s, usage, /metrics | vLLM has hooks |
| `stats` | a request's metrics | its usage, where outputs become rows (Ray Data) | outputs have a free field |
| `allocation` | `KVCacheManager.allocate_slots` | evictions instead of preemption | vLLM asks before it preempts |
| `allocation` | `….estimate_cached_tokens` | evicted published blocks count | vLLM counts all published blocks |
| `runners` | model runners V1 and V2 | holes in block tables, batch order | SchedulerOutput names holes |
| `layers` | `Attention` layers after load | their backend behind a view | backends can be wrapped by configuration |
| `layers` | grouping of layers | views beside sliding windows before groups are known | a builder knows its group |
| `layers` | layers by name, KV sharing | pages for heads of many layers, in own KV groups | KV groups can hold heads |
| `positions` | rotary embeddings | rows past the model's positions, rotated keys | vLLM can rotate cached keys |
| `reorder` | weight loaders of attention projections | heads of a class side by side | heads can have own tables |
| `refusals` | `VllmConfig` | refuses unsupported models and settings by name | each is supported |
| `versions` | version numbers | only tested releases are touched | |

`scheduler`, `managers`, `spec`, `cpu_worker` and `gpu_worker` have subclasses of classes that a configuration of vLLM
can name or vLLM registers. tests/test_compat.py compares each touch with the sources of every release in `versions`.
"""
