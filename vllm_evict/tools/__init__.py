"""The commands of `vllm-evict`. Tools import the product; the product imports none of them.

    check   whether a server would start under a policy        eval    answers of every policy and budget
    tune    a budget by audits of a user's own prompts         show    a page: which blocks of a prompt were evicted
    heads   gates of retrieval heads                           listing the policies and their fields

`cli` has the command line of all but `check`, which needs no package of the extra `eval`.
"""
