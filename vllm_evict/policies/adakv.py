"""Ada-KV: SnapKV with a budget that heads share: what one head does not need goes to another."""

from .base import TOKEN_OPTIONS
from .snapkv import SnapKV


class AdaKV(SnapKV):
    """Each layer's heads are dealt to `bands` KV groups. A decision ranks the blocks of all groups together, and leaves
    every group the share `floor` of an even split (the paper's safeguard).
    """

    name = "adakv"
    paper = "Feng et al., Ada-KV: Optimizing KV Cache Eviction by ..., 2024, arXiv:2407.11550"
    splits = "heads"
    pools = True
    options = SnapKV.options - TOKEN_OPTIONS - {"context"} | {"bands", "floor"}
