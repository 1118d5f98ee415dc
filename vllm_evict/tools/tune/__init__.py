"""`vllm-evict tune`: a budget for prompts of a user's own, by audits in place of right answers.

audited   engine or server that audits all answers         search    bisection, confirmation, statistics
run       a run, resumable                                 report    table, picture, page, and the flag to use
"""
