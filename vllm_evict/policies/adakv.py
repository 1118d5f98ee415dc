"""Ada-KV: SnapKV with one budget that all heads of a request share."""

from ..config.fields import BANDS, PER_TOKEN, TIER
from ..config.options import Option, names_of, real, without
from .snapkv import SnapKV

FLOOR = Option("floor", real(ge=0, le=1), 0.2, "share of an even split of the budget that each KV group keeps")


class AdaKV(SnapKV):
    """Deals the heads of each layer to `bands` KV groups, and ranks the blocks of all groups together.

    A decision leaves each group at least the share `floor` of an even split of the budget (the paper's safeguard).
    """

    name = "adakv"
    paper = "Feng et al., Ada-KV: Optimizing KV Cache Eviction by ..., 2024, arXiv:2407.11550"
    splits = "heads"
    pools = True
    declares = (*without(SnapKV.declares, "context", *names_of((*PER_TOKEN, *TIER))), BANDS, FLOOR)
