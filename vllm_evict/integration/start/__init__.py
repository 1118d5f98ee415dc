"""Before the engine, in each process: flags, refusals, versions, what vLLM's configuration becomes.

| module | touches | why | until |
|---|---|---|---|
| `arguments` | `EngineArgs` | a flag and a field for the policy | vLLM lets plugins add engine arguments |
| `fallback` | `VllmConfig` | Model Runner V1 for what is served on V1 alone | V2 serves it |
| `capabilities` | `VllmConfig` | refuses unsupported models and settings by name | each is supported |
| `advice` | nothing | what refusals advise, by what vLLM takes on this device | |
| `versions` | version numbers | only tested releases are touched | |
"""
