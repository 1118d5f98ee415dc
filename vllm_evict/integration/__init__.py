"""The only package that imports vLLM: subclasses of its scheduler, managers, specs and workers, and every patch.

| module | touches | why | until |
|---|---|---|---|
| `arguments` | `EngineArgs` | a flag and a field for the policy | vLLM lets plugins add engine arguments |
| `frontend` | `AsyncLLM`, endpoints, beam search, input processor, loggers | 400s, /metrics | vLLM has hooks |
| `usage` | what the front end decodes, outputs, models of `usage` | a request's usage | outputs have a free field |
| `carriers` | outputs, statistics and metrics | subclasses with fields of the plugin | messages have a free field |
| `allocation` | `KVCacheManager.allocate_slots` | blocks go instead of preemption | vLLM asks before it preempts |
| `allocation` | `….estimate_cached_tokens` | evicted blocks that are published count | vLLM counts what it published |
| `runners` | model runners V1 and V2 | holes into block tables, batch order | SchedulerOutput tells of them |
| `layers` | `Attention` layers after load | their backend behind a view | backends can be wrapped by configuration |
| `layers` | grouping of layers | views beside sliding windows before groups are known | a builder knows its group |
| `layers` | layers by name, KV sharing | pages for heads of many layers, in own KV groups | KV groups can hold heads |
| `positions` | rotary embeddings | rows past the model's positions, rotated keys | vLLM can rotate cached keys |
| `reorder` | weight loaders, `reload_weights` | heads of a class side by side | heads can have own tables |
| `fallback` | `VllmConfig` | Model Runner V1 for what is served on V1 alone | V2 serves it |
| `refusals` | `VllmConfig` | refuses unsupported models and settings by name | each is supported |
| `advice` | nothing | what refusals advise, by what vLLM takes on this device | |
| `stand_in` | the current platform, for `vllm-evict check` alone | configurations for other devices | |
| `versions` | version numbers | only tested releases are touched | |

`scheduler`, `managers`, `spec`, `cpu_worker` and `gpu_worker` subclass what a configuration of vLLM can name, or what
vLLM registers. tests/compat/test_guard.py holds what is replaced and called against the sources of every release in
`versions`.
"""
