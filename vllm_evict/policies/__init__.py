"""Eviction policies, one file each.

To add a policy to the package, write its file and name its class below. To add one from another distribution, name its
class in that distribution's entry points, group `vllm_evict.policies`. Configuration, help and documentation follow
from the class.
"""

from collections.abc import Mapping
from typing import cast

from ..config import REGISTRY
from .adakv import AdaKV
from .base import (
    BUDGET_OPTIONS,
    CACHED,
    KEY_BOUND,
    MASS_OPTIONS,
    QUERIED,
    REDUCTIONS,
    RUNNING,
    TOKEN_OPTIONS,
    Blocks,
    Policy,
)
from .duo import Duo
from .fastgen import FastGen
from .full import Full
from .h2o import H2O
from .keybound import KeyBound
from .keydiff import KeyDiff
from .knorm import KNorm
from .kvzip import KVzip
from .outside import add_from_outside
from .pagedeviction import PagedEviction
from .pyramidkv import PyramidKV
from .random import Random
from .rkv import RKV
from .scissorhands import Scissorhands
from .sink_window import SinkWindow
from .snapkv import SnapKV
from .strided import Strided
from .tova import TOVA

for _policy in (
    Full, SinkWindow, Strided, H2O, Scissorhands, TOVA, SnapKV, KVzip, RKV, KNorm, KeyDiff, PagedEviction, KeyBound,
    Random, Duo, PyramidKV, AdaKV, FastGen,
):  # fmt: skip
    REGISTRY.add(_policy())

#: All policies by name.
POLICIES = cast(Mapping[str, Policy], REGISTRY)

__all__ = [
    "BUDGET_OPTIONS", "CACHED", "KEY_BOUND", "MASS_OPTIONS", "POLICIES", "QUERIED", "REDUCTIONS", "RUNNING",
    "TOKEN_OPTIONS", "Blocks", "Policy",
]  # fmt: skip

add_from_outside()
