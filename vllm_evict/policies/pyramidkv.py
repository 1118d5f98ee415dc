"""PyramidKV: SnapKV with a budget that falls with depth."""

from ..config.allocators import ALLOCATORS
from .snapkv import SnapKV


class PyramidKV(SnapKV):
    """`snapkv` with `allocate: pyramid`, under the paper's name (see `config.allocators.Pyramid`)."""

    name = "pyramidkv"
    paper = "Cai et al., PyramidKV: Dynamic KV Cache Compression based on ..., 2024, arXiv:2406.02069"
    declares = ALLOCATORS["pyramid"].fields(SnapKV.declares)
    fixed = {**SnapKV.fixed, "allocate": "pyramid"}
