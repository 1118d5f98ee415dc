"""Parses and validates what users write: policies and their fields, sizes in blocks, arguments of one request.

    options    declaration of a field            fields     fields that many policies share
    registry   all policies by name              schema     `KVPolicyConfig`
    allocators who shares a budget among layers and heads
    sizes      limits of a request in blocks     groups     KV groups of allocators that split heads or layers
    request    arguments of one request          sources    names, presets, JSON and files
    gates      files of gates of heads           retired    fields of earlier releases
    features   what does not go together         errors     refusals
    room       room of a pool for one request

`vllm_evict.policies` builds on this package and fills the registry.
"""

from .errors import KVPolicyError
from .fields import REDUCTION_NAMES
from .gates import HeadGates, HeadPattern, HeadsError
from .groups import DEFAULT_BANDS, RETRIEVAL, STREAMING
from .options import TOO_MANY
from .registry import REGISTRY
from .request import BEAM, MOST_COMPARED, REQUEST_FIELDS, REQUEST_SIZES, TURN_FIELDS, given
from .room import Beside, Room
from .schema import KVPolicyConfig
from .sizes import NEVER, Limits
from .sources import policy_named, presets

__all__ = [
    "BEAM", "DEFAULT_BANDS", "MOST_COMPARED", "NEVER", "REDUCTION_NAMES", "REGISTRY", "REQUEST_FIELDS",
    "REQUEST_SIZES", "RETRIEVAL", "STREAMING", "TOO_MANY", "TURN_FIELDS", "Beside", "HeadGates", "HeadPattern",
    "HeadsError", "KVPolicyConfig", "KVPolicyError", "Limits", "Room", "given", "policy_named", "presets",
]  # fmt: skip
