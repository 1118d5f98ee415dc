"""PyramidKV: SnapKV with a budget that falls with depth."""

from ..config import KVPolicyConfig
from ..config.fields import BANDS, TIER
from ..config.options import TOO_MANY, Option, names_of, real, without
from .snapkv import SnapKV

BETA = Option("beta", real(ge=1, lt=TOO_MANY), 20.0, "the last layer's budget is 1 / `beta` of the mean")


class PyramidKV(SnapKV):
    """Cuts the layers into `bands` of successive layers, each a KV group with a budget of its own.

    The budget beside sinks and recent window falls linearly with depth, from 2 - 1/beta of its mean in the first layer
    to 1/beta in the last. A band gets the mean of its layers.
    """

    name = "pyramidkv"
    paper = "Cai et al., PyramidKV: Dynamic KV Cache Compression based on ..., 2024, arXiv:2406.02069"
    splits = "bands"
    declares = (*without(SnapKV.declares, "context", *names_of(TIER)), BANDS, BETA)

    def shares(self, config: KVPolicyConfig, bands: int) -> list[float]:
        # Bands take equal memory, however many layers they have, so the mean over bands is the budget.
        depth = config._depth or bands
        middles = [(depth * band // bands + depth * (band + 1) // bands - 1) / 2 for band in range(bands)]
        slope = (2 - 2 / config.beta) / max(depth - 1, 1)
        return [1 + slope * (sum(middles) / bands - middle) for middle in middles]
