"""PyramidKV: SnapKV with budgets that shrink with depth."""

from ..config import KVPolicyConfig
from ..config.fields import BANDS
from ..config.options import TOO_MANY, Option, real, without
from .snapkv import SnapKV

BETA = Option("beta", real(ge=1, lt=TOO_MANY), 20.0, "the last layer's budget is 1 / `beta` of the mean")


class PyramidKV(SnapKV):
    """Layers are cut into `bands`, each a KV group. What the budget leaves beside sinks and recent window falls with
    depth, linearly from 2 - 1/beta of its mean in the first layer to 1/beta in the last; a band has its layers' mean.
    """

    name = "pyramidkv"
    paper = "Cai et al., PyramidKV: Dynamic KV Cache Compression based on ..., 2024, arXiv:2406.02069"
    splits = "bands"
    declares = (*without(SnapKV.declares, "context"), BANDS, BETA)

    def shares(self, config: KVPolicyConfig, bands: int) -> list[float]:
        # Linear from 2 - 1 / beta at the first layer to 1 / beta at the last; a band has its layers' mean. Bands take
        # as much memory each, however many layers they have, so it is their mean that is the budget.
        depth = config._depth or bands
        middles = [(depth * band // bands + depth * (band + 1) // bands - 1) / 2 for band in range(bands)]
        slope = (2 - 2 / config.beta) / max(depth - 1, 1)
        return [1 + slope * (sum(middles) / bands - middle) for middle in middles]
