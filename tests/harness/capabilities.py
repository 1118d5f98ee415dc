"""Prints what a policy cannot be used with, for docs/limits.md: the table in vllm_evict/integration/start/capabilities.

python tests/harness/capabilities.py
"""

import re

from vllm_evict.config.features import ANY, Feature
from vllm_evict.integration.start.capabilities import drafting
from vllm_evict.integration.start.capabilities import environments as of
from vllm_evict.integration.start.capabilities.environment import Environment
from vllm_evict.integration.start.capabilities.environments import ENVIRONMENTS
from vllm_evict.integration.start.capabilities.server import NGRAM

#: What a row is about, where messages name it by facts of a server, or where models of the kind have names.
SHOWN: dict[Environment | Feature, str] = {
    of.PLATFORM: "engines of vLLM for TPU, XPU, ROCm and others",
    of.OLD_GPU: "a GPU before Ampere",
    of.DSA: "sparse attention (DSA: DeepSeek V3.2, GLM-5)",
    of.CSA: "compressed sparse attention (CSA: DeepSeek V4)",
    of.MSA: "block-sparse attention (MSA: MiniMax M3)",
    of.DIFFKV: "keys and values of unlike dimensions (MiMo-V2)",
    of.PREFIX_LM: "images whose tokens attend to each other (Gemma 3 4b, 12b, 27b, Gemma 4)",
    of.CHUNKED: "chunked-local attention layers (Llama 4), in chunks below --max-model-len",
    of.WINDOWS: "sliding windows or chunks of local attention beside full attention",
    of.WINDOWS_ALONE: "sliding-window attention in all layers, in windows below --max-model-len",
    of.DISTANCES: "ALiBi (Bloom, Falcon)",
    of.UNLIKE_HEADS: "layers that differ in KV heads",
    of.UNREAD_HEADS: "heads below 16 or above 512 dimensions on a GPU",
    of.UNDECODED_HEADS: "heads below 16 or above 256 dimensions on a GPU (Gemma 4)",
    of.UNREACHED_CONNECTOR: "KV connectors but OffloadingConnector and SimpleCPUOffloadConnector",
    drafting.METHOD: "speculative decoding by Medusa, MLP speculators and others",
    drafting.OTHER_RUNNER: "speculative decoding by ngram_gpu, DFlash and DSpark on Model Runner V1, and by all on V2 before vLLM 0.32",
    drafting.MANY_DRAFTS: "as many draft tokens as a block has tokens",
    drafting.DRAFTER: "drafters with layers",
    drafting.ASYNC_DRAFTS: "speculative decoding under async scheduling",
    drafting.DRAFTER_BESIDE: "drafters with layers beside latents, states or sliding windows",
    drafting.DRAFT_MODEL_BESIDE: "draft models beside latents, states or sliding windows",
    drafting.PARALLEL_DRAFTER: "drafters that draft in parallel",
    drafting.IN_PARALLEL: "DFlash and DSpark",
    drafting.UNTRIED_DRAFTER: "DFlash and DSpark beside latents, other drafters with layers than MTP beside keys and values of unlike dimensions, drafters with layers beside chunks of local attention or beside latents with linear attention",
    drafting.OTHER_IN_PARALLEL: "drafters of other architectures than DFlashDraftModel and Qwen3DSparkModel (DFlash2, LiLiCorr)",
    of.OTHER_CONNECTOR: "LMCacheConnectorV1, FlexKV, Mooncake's store, HF3FS, MoRIIO, HiSparse and KV connectors of your own",
    of.BOTH_WAYS: "bidirectional_kv_xfer",
    of.CONNECTOR: "KV connectors",
    of.ASYNC_CONNECTOR: "KV connectors under async scheduling",
    of.BACKEND: "attention backends that are not [listed](#backends-and-model-runners)",
    of.WHOLE_LAYER_BACKEND: "the attention backend FLASHINFER with other kernels than TensorRT-LLM's (Blackwell)",
    of.FEW_SIZES_BACKEND: "the attention backend FLASHINFER before vLLM 0.32",
    of.UNREAD_DTYPE: "KV cache dtypes other than the model's, fp8, fp8_e4m3, and fp8_e5m2 on a CPU",
    of.FP8_ON_OLD_GPU: "fp8 caches on a GPU before Ada (8.9)",
    of.SMALL_MACHINE: "host: more bytes than the machine has for all engines",
}
#: What a user sets, where messages have names that depend on the server.
INSTEAD: dict[Environment | Feature, str] = {
    drafting.IN_PARALLEL: drafting.DRAFTER.instead,
    drafting.DRAFTER_BESIDE: drafting.DRAFTER.instead,
    **dict.fromkeys(
        (drafting.DRAFT_MODEL_BESIDE, drafting.UNTRIED_DRAFTER, drafting.OTHER_IN_PARALLEL),
        'set "method" in --speculative-config to what the message names',
    ),
    of.OTHER_CONNECTOR: "use a KV connector that the message names, or leave kv_connector_module_path out",
    of.UNREACHED_CONNECTOR: "use OffloadingConnector or SimpleCPUOffloadConnector, for full attention without drafts, or leave --kv-transfer-config and --kv-offloading-size out",
    of.EMPTY_STAGE: "set VLLM_PP_LAYER_PARTITION to a layer or more of each stage, or use --tensor-parallel-size in place of --pipeline-parallel-size",
    of.LMCACHE: "use a KV connector that the message names",
    of.CHUNKED: "set --max-model-len to at most the chunk",
    of.ONE_TABLE: "leave --disable-hybrid-kv-cache-manager out, or use the KV connector, drafter or variable that the message names",
    drafting.METHOD: 'set "method" in --speculative-config to one that the message names, or leave --speculative-config out',
    drafting.OTHER_RUNNER: 'set "method" in --speculative-config, or VLLM_USE_V2_MODEL_RUNNER, to what the message names',
    of.BACKEND: "set --attention-backend to one that the message names",
    of.WHOLE_LAYER_BACKEND: "set --attention-backend to FLASH_ATTN or TRITON_ATTN",
    **dict.fromkeys(
        (of.SPLITTING_BACKEND, of.ROWS_OF_REQUESTS_BACKEND), "set --attention-backend to what the message names"
    ),
    of.FEW_SIZES_BACKEND: "set --attention-backend to what the message names",
    of.UNREAD_DTYPE: "use --kv-cache-dtype auto or what the message names",
    of.FP8_ON_OLD_GPU: "use --kv-cache-dtype auto or what the message names",
}
#: Flags, variables, fields and their values.
CODE = re.compile(
    r"(?<![`\w])(--[a-z][\w.-]*|VLLM_\w+|(?:heads or )?\w+: (?:host|token|max|mean|pressure)|(?:kvzip|kv_role)\b"
    r'|^read(?:_prompts)?\b|"\w+"(?:: "\w+")?)'
)


def words(text: str) -> str:
    """Return a text of the table without facts of a server, with code in backticks."""
    return CODE.sub(r"`\1`", re.sub(r"\{[^}]*\}", "…", text.replace("{ngram}", NGRAM)))


def shown(part: Environment | Feature) -> str:
    return words(SHOWN.get(part, part.name))


def refused(environment: Environment) -> str:
    """Return what an environment cannot stand, and why: parts with one reason together."""
    parts: dict[str, list[str]] = {}
    for other, why in environment.cannot_stand.items():
        parts.setdefault("" if other is ANY else words(why), []).append(shown(other))
    return "; ".join(", ".join(names) + f" ({why})" * bool(why) for why, names in parts.items())


def table() -> str:
    """One row for each environment that cannot stand something."""
    lines = ["| server | refused with it | do |", "|---|---|---|"]
    for each in filter(lambda each: each.cannot_stand, ENVIRONMENTS):
        why = each.cannot_stand.get(ANY)
        name = f"{shown(each)}, {words(why)}" if why else shown(each)
        lines.append(f"| {name} | {refused(each)} | {words(INSTEAD.get(each, each.instead))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
