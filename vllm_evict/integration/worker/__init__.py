"""Workers: their model runners, layers, attention backends, CUDA graphs and ranks.

| module | touches | why | until |
|---|---|---|---|
| `runners` | model runners V1 and V2 | holes into block tables, batch order | SchedulerOutput tells of them |
| `layers` | `Attention` layers after load | their backend behind a view | backends can be wrapped by configuration |
| `layers` | grouping of layers | views beside sliding windows before groups are known | a builder knows its group |
| `layers` | layers by name, KV sharing | pages for heads of many layers, in own KV groups | KV groups can hold heads |
| `positions` | rotary embeddings | rows past the model's positions, rotated keys | vLLM can rotate cached keys |
| `reorder` | weight loaders, `reload_weights` | heads of a class side by side | heads can have own tables |
"""
