"""Quality measured where it is served: tasks run through vLLM under every policy and budget, offline or over HTTP.

    tasks      needles, look-ups, variables, text: made here from a seed      words     the language they are in
    external   RULER, LongBench, 2StageRetr in their published schema         score     every metric
    policies   what to compare, and the fewest engines that serve it          backends  `LLM`, and any OpenAI server
    rows       one JSON line a request, resumable                             run       the matrix
    stats      intervals, and what is noise                                   summary, pictures, report

`python -m vllm_evict.eval` is the command `vllm-evict`.
"""


class EvalError(Exception):
    """Something a user can get wrong; the message says what, and what to do."""
