"""Ada-KV: SnapKV with one budget that all heads of a request share."""

from ..config.allocators import ALLOCATORS
from .snapkv import SnapKV


class AdaKV(SnapKV):
    """`snapkv` with `allocate: ada`, under the paper's name (see `config.allocators.Ada`)."""

    name = "adakv"
    paper = "Feng et al., Ada-KV: Optimizing KV Cache Eviction by ..., 2024, arXiv:2407.11550"
    declares = ALLOCATORS["ada"].fields(SnapKV.declares)
    fixed = {**SnapKV.fixed, "allocate": "ada"}
