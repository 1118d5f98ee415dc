"""Eviction policies: one short file each.

To add one, write its file and name its class here; the test matrix and the documentation table pick it up.
"""

from .adakv import AdaKV
from .base import BUDGET_OPTIONS, CACHED, MASS_OPTIONS, REDUCTIONS, RUNNING, TOKEN_OPTIONS, Blocks, Policy
from .duo import Duo
from .fastgen import FastGen
from .full import Full
from .h2o import H2O
from .keydiff import KeyDiff
from .knorm import KNorm
from .kvzip import KVzip
from .pagedeviction import PagedEviction
from .pyramidkv import PyramidKV
from .random import Random
from .rkv import RKV
from .scissorhands import Scissorhands
from .sink_window import SinkWindow
from .snapkv import SnapKV
from .strided import Strided
from .tova import TOVA

POLICIES: dict[str, Policy] = {
    policy.name: policy()
    for policy in (
        Full, SinkWindow, Strided, H2O, Scissorhands, TOVA, SnapKV, KVzip, RKV, KNorm, KeyDiff, PagedEviction, Random,
        Duo, PyramidKV, AdaKV, FastGen,
    )
}  # fmt: skip

__all__ = [
    "BUDGET_OPTIONS", "CACHED", "MASS_OPTIONS", "POLICIES", "REDUCTIONS", "RUNNING", "TOKEN_OPTIONS", "Blocks",
    "Policy",
]  # fmt: skip
