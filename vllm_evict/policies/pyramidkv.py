"""PyramidKV: SnapKV with budgets that shrink with depth."""

from .snapkv import SnapKV


class PyramidKV(SnapKV):
    """Layers are cut into `bands`, each a KV group. What the budget leaves beside sinks and recent window falls with
    depth, linearly from 2 - 1/beta of its mean in the first layer to 1/beta in the last; a band has its layers' mean.
    """

    name = "pyramidkv"
    paper = "Cai et al., PyramidKV: Dynamic KV Cache Compression based on ..., 2024, arXiv:2406.02069"
    splits = "bands"
    options = SnapKV.options - {"context"} | {"bands", "beta"}
