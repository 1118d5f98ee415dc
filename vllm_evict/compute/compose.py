"""Makes the parts of a KV group's runtime from the configuration. No other file asks which parts a policy needs."""

from typing import NamedTuple

from ..config import KVPolicyConfig
from ..features.audit.worker import AnswerMass
from ..features.context.worker import Originals
from ..features.kvzip.worker import PromptScores
from ..features.read.worker import Read
from ..policies import CACHED, QUERIED, RUNNING
from .cached import CachedStatistics
from .compaction import Compactor, Judge
from .holes import Holes
from .host_copies import HostCopies
from .index import BlockIndex
from .last_query import LastQuery
from .mass import BlockMass, TokenMass
from .parts import Mover
from .probes import Probe
from .reach import Reach
from .shape import Shape
from .source import Source
from .store import Store
from .sums import RunningSums
from .tokens import TokenSums


class Parts(NamedTuple):
    """The parts of a KV group's runtime.

    Attributes:
        source: what layers read.
        probes: what measures; reports get their statistics in this order.
        movers: what carries out orders.
    """

    source: Source
    probes: list[Probe]
    movers: list[Mover]


def compose(config: KVPolicyConfig, shape: Shape, store: Store, holes: Holes) -> Parts:
    """Return the parts that a policy needs.

    Args:
        config: policy of the group's heads.
        shape: sizes of the group.
        store: KV cache of the group.
        holes: of the group.
    """
    size, device, by_token = shape.block_size, shape.device, config.granularity == "token"
    source = Read(config, shape, store) if config.sparse else Source()
    probes: list[Probe] = []
    movers: list[Mover] = []
    judges: dict[bool, Judge] = {}
    if config.statistics & RUNNING:
        sizes, reduced = (shape.kv_heads, shape.layers, shape.max_blocks, size), (config.heads, config.layers)
        sums = RunningSums(shape.max_requests, *sizes, *reduced, device, shape.of_layers)
        tests = "pivots" in config.statistics
        # A graph tests rows of one query.
        tests_in_graphs = "pivots" in config.policy.measures and shape.graph_queries == 1
        probes.append(BlockMass(sums, tests, tests_in_graphs, in_graphs=not by_token))
    if config.audit and not by_token:
        probes.append(AnswerMass(shape))
    if config.statistics & RUNNING and by_token:
        tokens = TokenSums(shape.max_requests, shape.kv_heads, shape.layers, size, shape.max_blocks, device)
        probes.append(TokenMass(tokens, shape.max_requests * shape.held_blocks))
        judges[False] = tokens
    if config.reconstructs and by_token:
        prompts = PromptScores(shape.kv_heads, shape.layers, size, device)
        probes.append(prompts)
        judges[True] = prompts
    if config.statistics & CACHED:
        probes.append(CachedStatistics(store.read, shape.of_layers, config.heads, config.layers))
    if config.statistics & QUERIED:
        probes.append(LastQuery(device))
    if config.reaches:
        index = BlockIndex(config.index, store, shape)
        host = HostCopies(store, index, device)
        source = Reach(config, shape, store, index, host)
        movers.append(host)
    if config.context is not None:
        movers.append(Originals(store, holes, size, shape.held_blocks, device))
    if by_token:
        movers.append(Compactor(store, judges, size, bool(config.merge), device))
    return Parts(source, probes, movers)
