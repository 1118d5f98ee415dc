"""The quality harness: runs tasks through vLLM under every policy and budget, offline or over HTTP.

    tasks      needles, look-ups, variables, text, made from a seed          words     the words of these tasks
    external   RULER, LongBench, 2StageRetr in their published schema        score     every metric
    policies   contenders, and the fewest engines that serve them            backends  `LLM`, and any OpenAI server
    rows       one JSON line a request, resumable                            run       the matrix
    stats      intervals, and tests of differences                           sessions  turns of one request, offline
    summary, pictures, report                                                prompts   token ids

`python -m vllm_evict.eval` is the command `vllm-evict`.
"""


class EvalError(Exception):
    """A wrong input of a user; the message says what is wrong and what to do."""
