"""The quality harness: runs tasks through vLLM under every policy and budget, offline or over HTTP.

tasks      needles, look-ups, variables, text, made from a seed          words     the words of these tasks
external   RULER, LongBench, 2StageRetr in their published schema        score     every metric
policies   contenders, and the fewest engines that serve them            backends  `LLM`; served: OpenAI servers
rows       one JSON line a request, resumable                            run       the matrix
stats      intervals, and tests of differences                           sessions  turns of one request, offline
summary, pictures, report                                                prompts   token ids
questions  prompts of a user's own, from JSONL                           ruler     RULER's generators
"""


class EvalError(Exception):
    """A wrong input of a user; the message says what is wrong and what to do."""


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
