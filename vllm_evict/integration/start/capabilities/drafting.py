"""Rows of the table of refusals (`environments`) for servers that draft tokens."""

from ....config.features import (
    ANY,
    CONTEXT,
    KVZIP,
    MEAN,
    READ_OF_LAYERS,
    READ_OF_SOME,
    SPLIT,
    TOKENS,
)
from .. import drafters
from .environment import UNTRIED, Environment

#: Methods of speculative decoding that are served.
METHODS = (*drafters.WITHOUT_LAYERS, *drafters.WITH_LAYERS)

OLD_V2 = Environment(
    "Model Runner V2 before vLLM 0.32", lambda server: server.runner == "V2" and not server.serves_on_v2, {}, "{use_v1}"
)
CACHED_STATES = Environment(
    "prefix caching of states on Model Runner V1",
    lambda server: server.runner == "V1" and server.model.is_hybrid and server.cache.enable_prefix_caching,
    {},
    "set --no-enable-prefix-caching",
)
METHOD = Environment(
    "speculative decoding by {drafts.method!r}",
    lambda server: server.drafts and server.drafts.method not in METHODS,
    {ANY: ""},
    'set "method" in --speculative-config to one of {methods}, or leave --speculative-config out',
)
OTHER_RUNNER = Environment(
    "speculative decoding by {drafts.method!r} on Model Runner {runner}",
    lambda server: server.drafts and not server.drafts_here,
    {ANY: UNTRIED},
    "{other_way_to_draft}",
)
SPECULATION = Environment(
    "speculative decoding",
    lambda server: server.drafts,
    {
        CACHED_STATES: f"{UNTRIED}, since vLLM copies these states by kernels for GPUs",
        CONTEXT: "",
        KVZIP: "which has no drafts for the requests that repeat prompts",
        MEAN: "where the queries of drafts do not count",
        READ_OF_LAYERS: "whose rows have one length for all layers",
        READ_OF_SOME: UNTRIED,
    },
    "leave --speculative-config out",
)
DRAFTS_BESIDE_STATES = Environment(
    "speculative decoding beside states",
    lambda server: server.drafts and server.states,
    {TOKENS: UNTRIED},
    "leave --speculative-config out",
)
MANY_DRAFTS = Environment(
    "{drafts.num_speculative_tokens} draft tokens in blocks of {cache.block_size} tokens",
    lambda server: server.drafts and 0 < (server.cache.block_size or 0) <= server.drafts.num_speculative_tokens,
    {ANY: ""},
    'set "num_speculative_tokens" in --speculative-config to less than {cache.block_size}',
)
DRAFT_MODEL_BESIDE = Environment(
    "a draft model beside {beside}",
    lambda server: server.drafts and server.drafts.method == "draft_model" and server.beside,
    {ANY: "which vLLM 0.32.0 gives lengths or blocks that are not its own"},
    "{other_drafter}",
)
DRAFTER = Environment(
    "speculative decoding by {drafts.method!r}",
    lambda server: server.drafter,
    {SPLIT: "which the drafter's layers do not have"},
    "{ngram}",
)
ASYNC_DRAFTS = Environment(
    "speculative decoding by {drafts.method!r} under async scheduling",
    lambda server: server.drafts and server.scheduler.async_scheduling,
    {
        TOKENS: "where the host does not know how many drafts of the step before were accepted, on which depends which "
        "tokens it compacts",
    },
    "set --no-async-scheduling, or {ngram}",
)
DRAFTER_BESIDE = Environment(
    "speculative decoding by {drafts.method!r} beside {beside}",
    lambda server: server.drafter and server.beside,
    {TOKENS: UNTRIED},
    "{ngram_by_token}",
)
PARALLEL_DRAFTER = Environment(
    "speculative decoding by {drafts.method!r} in parallel",
    lambda server: server.drafter and server.drafts.parallel_drafting and not server.in_parallel,
    {ANY: UNTRIED},
    'leave "parallel_drafting" out of --speculative-config, or {ngram}',
)
ADAPTIVE = Environment(
    "adaptive verification of drafts",
    lambda server: getattr(server.drafts, "enable_adaptive_verification", False),
    {ANY: UNTRIED},
    'set "enable_adaptive_verification": false in --speculative-config',
)
MANY_MODULES = Environment(
    "several modules for multi-token prediction (MTP) on Model Runner V2",
    lambda server: server.runner == "V2" and getattr(server.drafts, "use_multi_module_mtp", bool)(),
    {ANY: UNTRIED},
    'set "num_speculative_tokens": 1 in --speculative-config, or {ngram}',
)
IN_PARALLEL = Environment(
    "speculative decoding by {drafts.method!r}",
    lambda server: server.in_parallel,
    {TOKENS: UNTRIED},
    "{ngram_by_token}",
)
UNTRIED_DRAFTER = Environment(
    "speculative decoding by {drafts.method!r} beside {beside}",
    lambda server: server.untried_drafter,
    {ANY: UNTRIED},
    "{other_drafter}",
)
OTHER_IN_PARALLEL = Environment(
    "the {drafts.method} drafter {other_in_parallel}",
    lambda server: server.in_parallel and server.other_in_parallel,
    {ANY: UNTRIED},
    "{other_drafter}",
)
