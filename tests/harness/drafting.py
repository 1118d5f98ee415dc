"""Tiny drafters with layers, random weights, and doubles that make drafts right or wrong as a test says."""

import json
from importlib.metadata import version

import numpy as np
import pytest
import torch
from engine import V2
from oracle.tiny import write_tokenizer
from safetensors.torch import load_file, save_file

DRAFTS, VOCAB = 3, 4096
#: Of tests that speculate.
SERVED = pytest.mark.skipif(
    version("vllm").startswith("0.30."),
    reason="vLLM 0.30: its CPU engine fails on the first step with drafts, without the plugin too",
)
#: Of the model: `make_tiny_llama` with these has three layers in one KV group.
MODEL = dict(layers=3, heads=8, kv_heads=4, vocab=VOCAB)
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
HIDDEN, HEAD_DIM, INTERMEDIATE = 64, 32, 128


def speculative(method, model=None):
    """`speculative_config` of a drafter."""
    return {"method": method, "num_speculative_tokens": DRAFTS, **({} if model is None else {"model": str(model)})}


def _layer(normal, prefix, hidden=HIDDEN, inputs=None, like=None):
    """Weights of a layer with heads of `MODEL`, or of the configuration `like`."""
    heads, kv_heads, inputs = MODEL["heads"] * HEAD_DIM, MODEL["kv_heads"] * HEAD_DIM, inputs or hidden
    if like is not None:
        heads, kv_heads = (like[f"num_{name}_heads"] * like["head_dim"] for name in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (heads, inputs),
        "self_attn.k_proj": (kv_heads, inputs),
        "self_attn.v_proj": (kv_heads, inputs),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (INTERMEDIATE, hidden),
        "mlp.up_proj": (INTERMEDIATE, hidden),
        "mlp.down_proj": (hidden, INTERMEDIATE),
    }
    weights = {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return weights | {f"{prefix}{name}.weight": torch.ones(hidden) for name in norms}


def _normal(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator) * shape[-1] ** -0.5


def make_eagle(path, model, method):
    """An EAGLE head (`method` eagle or eagle3) of the tiny Llama `model`, with one layer of the model's shape."""
    normal = _normal(5)
    weights = {"fc.weight": normal(HIDDEN, HIDDEN * (2 if method == "eagle" else 3))}
    if method == "eagle":
        weights |= _layer(normal, "layers.0.")
        del weights["layers.0.input_layernorm.weight"]
    else:
        weights |= _layer(normal, "midlayer.", inputs=2 * HIDDEN)
        weights |= {name: torch.ones(HIDDEN) for name in ("midlayer.hidden_norm.weight", "norm.weight")}
        weights["lm_head.weight"] = normal(VOCAB, HIDDEN)
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 1, "draft_vocab_size": VOCAB}
    for field in ("layer_types", "sliding_window"):  # of the model's layers
        config.pop(field, None)
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_dflash(path, model, windows=(None,), **fields):
    """A DFlash head of the tiny Llama `model`, whose layers draft all tokens of a step at once, without a causal mask.

    Args:
        windows: window of each layer; None: it has full attention.
        fields: of the configuration.
    """
    config = json.loads((model / "config.json").read_text()) | {
        "num_hidden_layers": len(windows),
        "model_type": "qwen3",
    }
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    config |= {"architectures": ["DFlashDraftModel"], "draft_vocab_size": vocab, "intermediate_size": INTERMEDIATE}
    normal = _normal(7)
    weights = {"fc.weight": normal(hidden, 2 * hidden)}
    for number in range(len(windows)):
        weights |= _layer(normal, f"layers.{number}.", hidden, like=config)
        norms = (f"layers.{number}.self_attn.{name}_norm.weight" for name in "qk")
        weights |= {name: torch.ones(config["head_dim"]) for name in norms}
    weights |= {name: torch.ones(hidden) for name in ("hidden_norm.weight", "norm.weight")}
    if rank := fields.get("markov_rank"):
        weights |= {f"markov_head.markov_{name}.weight": normal(vocab, rank) for name in ("w1", "w2")}
    path.mkdir(parents=True)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    own = {"mask_token_id": 0, "target_layer_ids": [0, 1], "causal": False}
    own["swa_window_size"] = max(filter(None, windows), default=None)
    config |= {"dflash_config": own, "block_size": DRAFTS + 1}
    config["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


def make_dspark(path, model):
    """A DSpark head: a DFlash head, and a matrix of low rank by which each draft depends on the one before it."""
    return make_dflash(path, model, architectures=["Qwen3DSparkModel"], markov_rank=8)


def make_mimo(path, llama):
    """A tiny MiMo: the weights of `llama`, biases of 0 in its attention, and a layer for multi-token prediction (MTP)."""
    weights, normal, prefix = load_file(llama / "model.safetensors"), _normal(6), "model.mtp_layers.0."
    hidden = weights["model.norm.weight"].shape[0]
    weights |= _layer(normal, prefix, hidden) | {f"{prefix}input_proj.weight": normal(hidden, 2 * hidden)}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    weights |= {f"{prefix}{name}.weight": torch.ones(hidden) for name in norms}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]))
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path, VOCAB, 2048)
    return path


def add_mtp_to_mimo_v2(path):
    """Add a layer for multi-token prediction to a tiny MiMo-V2, in whose class it is like layers with windows."""
    weights, normal, prefix = load_file(path / "model.safetensors"), _normal(6), "model.mtp.layers.0."
    like, hidden = "model.layers.0.", weights["model.norm.weight"].shape[0]
    own = {name.replace(like, prefix): weight for name, weight in weights.items() if name.startswith(like)}
    own = {name: normal(*weight.shape) if weight.ndim == 2 else weight.clone() for name, weight in own.items()}
    own[f"{prefix}pre_mlp_layernorm.weight"] = own.pop(f"{prefix}post_attention_layernorm.weight")
    own |= {f"{prefix}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "final_layernorm")}
    own[f"{prefix}eh_proj.weight"] = normal(hidden, 2 * hidden)
    save_file(weights | own, path / "model.safetensors", metadata={"format": "pt"})
    return path


def drafter_of(runner):
    """vLLM's drafter of a model runner."""
    return runner.speculator if V2 else runner.drafter


class Drafter:
    """Takes the place of vLLM's n-gram drafter: drafts from known texts, of which some are wrong.

    Attributes:
        texts: prompts with their outputs.
        right: 0: drafts are right by chance alone; "some": in turn one or two of them, then all.
        proposed: (first tokens of a request, its length) -> drafts that it got.
    """

    def __init__(self, server):
        self.texts, self.right, self.proposed = [], 0, {}
        self.runner = server.worker.model_runner
        drafter = drafter_of(self.runner)
        self.stock = drafter.propose
        drafter.propose = self.propose_on_v2 if V2 else self.propose

    def propose(self, count, sampled, lengths, tokens, **_):
        return [self.draft(tokens[row], lengths[row], count) if ids else [] for row, ids in enumerate(sampled)]

    def propose_on_v2(self, batch, *args, **kwargs):
        drafts, states = self.stock(batch, *args, **kwargs), self.runner.req_states
        for row, slot in enumerate(batch.idx_mapping_np[: len(drafts)].tolist()):
            known, length = states.all_token_ids.gpu[slot], int(states.total_len.gpu[slot])
            drafts[row] = torch.tensor(self.draft(known, length, drafts.shape[1]))
        return drafts

    def draft(self, known, length, count):
        """Drafts that follow the first `length` tokens of a request; `known`: its first tokens at least."""
        following = next((text[length:] for text in self.texts if text[:20] == known[:20].tolist()), [])
        following = (following + [0] * count)[:count]
        right = {0: 0, "some": length % (count + 1)}[self.right]
        drafts = [token if at < right else (token + 1) % VOCAB for at, token in enumerate(following)]
        self.proposed[(*known[:20].tolist(),), int(length)] = drafts
        return drafts

    def tell(self, prompt, trace):
        """Put the drafts of a request's steps into its trace; the scheduler knows their number alone."""
        known = trace.start
        for step, (count, settled) in enumerate(zip(trace.steps, trace.settled)):
            if trace.drafts[step]:
                proposed = self.proposed[(*prompt[:20],), known + settled]
                trace.drafts[step] = proposed[: len(trace.drafts[step])]
            known += count


def see_views(builder, hidden=lambda: {}):
    """Assert that each pass of a drafter reads the table of its KV group without holes, and lengths without theirs.

    `hidden`: returns for each row the further blocks that it does not read.
    """
    build = builder.build_for_drafting

    def seen(common_attn_metadata, draft_index):
        common = common_attn_metadata
        size, lens = builder.kv_cache_spec.block_size, common.seq_lens.tolist()
        blocks = [row[: -(-length // size)].tolist() for row, length in zip(common.block_table_tensor, lens)]
        for row, unread in hidden().items():
            blocks[row] = [0 if block in unread else physical for block, physical in enumerate(blocks[row])]
        metadata = build(common_attn_metadata=common, draft_index=draft_index)
        for row, (its, length) in enumerate(zip(blocks, lens)) if hasattr(metadata, "block_table") else ():
            there = [block for block in its if block]
            assert metadata.block_table[row, : len(there)].tolist() == there
            assert metadata.seq_lens[row] == length - size * (len(its) - len(there))
        return metadata

    builder.build_for_drafting = seen


def drafting_builders(runner):
    """Metadata builders of a drafter's layers; on V2 those of its first pass, and those of further passes."""
    drafter = drafter_of(runner)
    if not V2:
        return [group.get_metadata_builder() for group in getattr(drafter, "draft_attn_groups", ())]
    groups = [group for each in (*runner.attn_groups, *drafter.attn_groups) for group in each]
    return [
        group.get_metadata_builder() for group in groups if drafter.draft_attn_layer_names.issuperset(group.layer_names)
    ]


class LayeredDrafter(Drafter):
    """Lets a drafter with layers run, sees that its views are right and its logits finite, and replaces its drafts.

    Attributes:
        runs: passes of the drafter that were seen.
    """

    def __init__(self, server):
        super().__init__(server)
        drafter = drafter_of(self.runner)
        name = next(each for each in ("compute_draft_logits", "compute_logits") if hasattr(drafter.model, each))
        self.runs, logits = 0, getattr(drafter.model, name)

        def finite(*args, **kwargs):
            values = logits(*args, **kwargs)
            assert values.isfinite().all(), "the drafter computed NaN"
            self.runs += 1
            return values

        setattr(drafter.model, name, finite)
        group = server.worker.kv_evict.groups[0]
        for builder in drafting_builders(self.runner):
            slides = getattr(builder.kv_cache_spec, "sliding_window", None) is not None  # in a KV group of its own
            see_views(builder, lambda slides=slides: {} if slides else dict(group.source.hidden(group.batch.req_ids)))

    def propose(self, **given):
        last = given["token_indices_to_sample"]
        if last is None:
            last = given["common_attn_metadata"].query_start_loc[1:] - 1
        # The token that was sampled follows the last one that was computed.
        lengths = (given["target_positions"][last.long()] + 2).tolist()
        drafts, known = self.stock(**given), self.runner.input_batch.token_ids_cpu
        replaced = [self.draft(known[row], length, drafts.shape[1]) for row, length in enumerate(lengths)]
        return torch.tensor(replaced, dtype=drafts.dtype)


def prompt_of(length, seed):
    return np.random.default_rng(seed).permutation(VOCAB)[:length].tolist()


def accepted(server):
    """Accepted drafts and all drafts."""
    values = server.metrics()
    return values["vllm:spec_decode_num_accepted_tokens"], values["vllm:spec_decode_num_draft_tokens"]


def serve(
    engine,
    model,
    policy,
    check,
    monkeypatch,
    speculative_config=NGRAM,
    double=Drafter,
    tokens=160,
    lengths=(250, 90),
    evicted=2,
    kept=10,
    **options,
):
    """Serve with a drafter that is right by chance alone, then by answers before.

    Evictions come at other tokens when drafts are right, so answers differ from those before.

    Args:
        tokens: of an answer.
        lengths: of prompts, in tokens.
        evicted: least number of blocks that a request loses.
        kept: more drafts than these are accepted.
        options: further arguments of the engine.
    """
    monkeypatch.setenv("VLLM_EVICT_POISON", "1")
    options = {"max_num_batched_tokens": 96, "speculative_config": speculative_config, **options}
    server = engine(policy, model=model, **options)
    drafter, prompts = double(server), [prompt_of(length, 60 + length) for length in lengths]
    requests = [(prompt, {"max_tokens": tokens, "logprobs": 1}) for prompt in prompts]
    for right in (0, "some"):
        drafter.right, before = right, accepted(server)
        outputs, traces = server.traced(requests)
        drafts, right_ones = (new - old for new, old in zip(accepted(server)[::-1], before[::-1]))
        assert drafts and (right_ones < 5 if right == 0 else right_ones > kept)
        drafter.texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs)]
        for prompt, output, trace in zip(prompts, outputs, traces):
            drafter.tell(prompt, trace)
            assert sum(map(len, trace.evicted)) >= evicted
            check(prompt, output, trace)
        server.llm.reset_prefix_cache()
    server.assert_nothing_left()
    return drafter
