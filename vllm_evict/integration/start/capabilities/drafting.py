"""What a server that drafts may be, and what of a policy or of itself that cannot stand."""

from .. import drafters
from .environment import UNTRIED, Environment
from .features import ANY, CONTEXT, HOST, KVZIP, MEAN, SELECT, SPLIT, TOKENS
from .server import NGRAM

#: Methods of speculative decoding that are served.
METHODS = (*drafters.WITHOUT_LAYERS, *drafters.WITH_LAYERS)

LATENT_STATES = Environment(
    "latents (MLA) beside linear attention", lambda server: server.model.use_mla and server.states, {}
)
V2 = Environment("Model Runner V2", lambda server: server.vllm_config.use_v2_model_runner, {}, "{use_v1}")
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
        LATENT_STATES: UNTRIED,
        CONTEXT: "",
        KVZIP: "which has no drafts for the requests that repeat prompts",
        MEAN: "where the queries of drafts do not count",
        HOST: "",
        SELECT: "",
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
    NGRAM,
)
ASYNC_DRAFTS = Environment(
    "speculative decoding by {drafts.method!r} under async scheduling",
    lambda server: server.drafts and server.scheduler.async_scheduling,
    {
        TOKENS: "where the host does not know how many drafts of the step before were accepted, on which depends which "
        "tokens it compacts",
    },
    f"set --no-async-scheduling, or {NGRAM}",
)
DRAFTER_BESIDE = Environment(
    "speculative decoding by {drafts.method!r} beside {beside}",
    lambda server: server.drafter and server.beside,
    {TOKENS: UNTRIED},
    "{ngram_by_token}",
)
SHARING_DRAFTER = Environment(
    "speculative decoding by an assistant that reads the model's cache",
    lambda server: server.drafts and getattr(server.drafts, "use_gemma4_mtp", bool)(),
    {ANY: UNTRIED},
    NGRAM,
)
PARALLEL_DRAFTER = Environment(
    "speculative decoding by {drafts.method!r} in parallel",
    lambda server: server.drafter and server.drafts.parallel_drafting and server.drafts.method not in drafters.ON_V2,
    {ANY: UNTRIED},
    f'leave "parallel_drafting" out of --speculative-config, or {NGRAM}',
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
    f'set "num_speculative_tokens": 1 in --speculative-config, or {NGRAM}',
)
DFLASH = Environment(
    "speculative decoding by 'dflash'", lambda server: server.by_dflash, {TOKENS: UNTRIED}, "{ngram_by_token}"
)
DFLASH_BESIDE = Environment(
    "speculative decoding by 'dflash' beside {beside}",
    lambda server: server.by_dflash and server.beside,
    {ANY: UNTRIED},
    "{other_drafter}",
)
OTHER_DFLASH = Environment(
    "the DFlash drafter {other_dflash}",
    lambda server: server.by_dflash and server.other_dflash,
    {ANY: UNTRIED},
    "{other_drafter}",
)
