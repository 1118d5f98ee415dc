"""The API process: fields of requests, usage, /metrics.

| module | touches | why | until |
|---|---|---|---|
| `entrypoints` | `AsyncLLM`, endpoints, beam search, input processor, loggers | 400s, /metrics | vLLM has hooks |
| `usage` | what the front end decodes, outputs, models of `usage` | a request's usage | outputs have a free field |
"""
