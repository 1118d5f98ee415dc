"""DuoAttention: retrieval heads keep what their own policy says, streaming heads keep sinks and a recent window."""

from .full import Full


class Duo(Full):
    """Splits the KV heads of each layer in two classes, each under a policy of its own (`KVPolicyConfig.of_class`).

    It decides nothing itself: streaming heads are under sink-window, retrieval heads under `full` or any policy given.
    """

    name = "duo"
    paper = "Xiao et al., DuoAttention: Efficient Long-Context LLM Inference ..., ICLR 2025, arXiv:2410.10819"
    splits = "classes"
    options = frozenset({"heads", "threshold", "sparsity", "sink", "recent", "retrieval", "pattern"})
    defaults = {}
    triggers = ("budget",)
