"""Builds the untrained model by hand: a Llama whose heads already look back, match and copy.

Content-based induction is the slowest skill for a small model to learn. Here it is written into the weights; everything
else (and all of this) is then trained. The residual stream is divided into named subspaces (`Space`), and RoPE into two
parts: the fastest pairs of dimensions tell near positions apart, the slowest hardly turn within the context and match
content. What the circuits do:

    layer 0   heads 0, 1: code of the previous token -> prev, of the one before it -> prev2, first operand -> left
              MLP: left + right operand -> code of their sum, in the place of the key's own code
    layer 1   head 0: code of the nearest key before this token -> topic
    layer 2   head 0: where the topic is this one and the previous word is "equals": the key found there -> alias
    layer 3   head 0: where the topic is this topic (or its alias) and the previous token is like this one: copy -> out
              head 2: where the two tokens before are the last two ones: copy -> out (induction for plain text)

The second model (`kind="aggregates"`) copies by two tokens in layer 1, and has two more circuits:

    layer 2   head 2: where the token is like this one: its topic -> label
    layer 3   head 2: the nearest thing (ITEMS) before this token: its label -> out

The third (`kind="counts"`) has two layers, whose only circuits are these. Training leaves the first as it is (`fixed`):

    layer 0   head 0: where the token is like this one, and the first token: the share of the first token -> share
    layer 1   head 0: the nearest thing before this token: its share -> times
    lm_head   the number word whose share is nearest

All other weights are small random numbers.

    python build.py DIR      # save it, untrained: a fixture whose retrieval heads are known (RETRIEVAL)
"""

import math
import sys
from collections.abc import Sequence

import torch
from data import ASSISTANT, BOS, END, ITEMS, KEYS, MIXTURES, NUMBERS, build_tokenizer, vocabulary
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 4608
CODE = 19  # dimensions of a code that attention matches; two codes fill the slow pairs
FREE = 26  # dimensions of a token's identity that only the copying heads need
SCALE = 6.0  # factor of RMSNorm on a subspace of unit norm, approximately
RETRIEVAL = ((2, 0), (3, 0), (3, 2))  # (layer, head) of heads that match content anywhere
SLOW = 13  # first RoPE pair that turns less than 0.4 rad in 4,096 tokens


def config(context: int = CONTEXT, more: Sequence[str] = (), layers: int = 4) -> LlamaConfig:
    """The architecture: 4 query and 2 KV heads of 64; with 4 layers 2.6 M parameters, with 2 layers 1.5 M."""
    return LlamaConfig(
        vocab_size=len(vocabulary(more)),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=context,
        rope_theta=1e10,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=END,
    )


class Space:
    """Named slices of the residual stream."""

    key, code, free = slice(0, 19), slice(19, 38), slice(38, 64)  # the token itself
    token = slice(0, 64)
    prev, prev2 = slice(64, 83), slice(83, 102)
    right, left = slice(102, 112), slice(112, 122)  # one-hot digits: this word, the word two before
    topic, alias = slice(122, 141), slice(141, 160)
    out = slice(160, 224)
    one, is_key, is_bos, fill = 224, 225, 226, 227  # fill: equal norms, so that RMSNorm scales all tokens alike
    label, is_item = slice(228, 247), 247  # of the second model
    share, times = slice(248, 249), slice(249, 250)  # of the third


def spread(n: int, dim: int, seed: int, steps: int = 300) -> torch.Tensor:
    """n unit vectors that are pushed apart -> [n, dim]."""
    x = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.02)
    for _ in range(steps):
        u = torch.nn.functional.normalize(x, dim=1)
        loss = torch.logsumexp(20 * (u @ u.T - 2 * torch.eye(n)).flatten(), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.nn.functional.normalize(x.detach(), dim=1)


@torch.enable_grad()
def embeddings(more: Sequence[str] = ()) -> torch.Tensor:
    """Codes of all tokens -> [vocabulary, hidden]. Tokens before an answer share the code of 'is'."""
    ids = {t: i for i, t in enumerate(vocabulary(more))}
    e = torch.zeros(len(ids), 256)
    e[:, Space.code], e[:, Space.free] = spread(len(ids), CODE, 1), spread(len(ids), FREE, 2)
    e[[ids["▁="], ASSISTANT], Space.code] = e[ids["▁is"], Space.code]
    keys = [ids["▁" + k] for k in KEYS + NUMBERS]
    e[keys, Space.key] = spread(len(keys), CODE, 3)
    e[keys, Space.is_key] = 1.0
    if more:
        e[[ids["▁" + item] for item in ITEMS], Space.is_item] = 1.0
    for digit, name in enumerate(NUMBERS[:10]):
        e[ids["▁" + name], Space.right.start + digit] = 1.0
    e[BOS] = 0
    e[BOS, Space.is_bos] = 1.5
    e[:, Space.one] = 1.0
    e[:, Space.fill] = (6.5 - e.square().sum(1)).sqrt()
    return e


class Head:
    """Writes one attention head of a layer. q, k, v are [64, hidden] views of its projections, o is [hidden, 64]."""

    def __init__(self, model: LlamaForCausalLM, layer: int, head: int):
        attention = model.model.layers[layer].self_attn
        kv = head // 2
        self.q = attention.q_proj.weight[64 * head : 64 * head + 64]
        self.k = attention.k_proj.weight[64 * kv : 64 * kv + 64]
        self.v = attention.v_proj.weight[64 * kv : 64 * kv + 64]
        self.o = attention.o_proj.weight[:, 64 * head : 64 * head + 64]
        for block in (self.q, self.k, self.v, self.o):
            block.zero_()

    def near(self, distance: float, source: int, strengths: list[float]) -> None:
        """Prefer tokens with `source` at this distance; strengths are logits of the pairs, the fastest first."""
        for pair, strength in enumerate(strengths):
            angle = -distance * 1e10 ** (-pair / 32)
            self.k[pair, source] = math.sqrt(8 * strength) / SCALE
            self.q[pair, Space.one] = math.sqrt(8 * strength) / SCALE * math.cos(angle)
            self.q[pair + 32, Space.one] = math.sqrt(8 * strength) / SCALE * math.sin(angle)

    def match(self, half: int, query: list[slice | torch.Tensor], source: slice, strength: float) -> None:
        """Match codes in one half of the slow pairs: the query is a sum of subspaces, or a constant code [CODE]."""
        rows = torch.arange(SLOW, 32) + 32 * half
        gain = math.sqrt(8 * strength) / SCALE
        self.k[rows, torch.arange(source.start, source.stop)] = gain
        for term in query:
            if isinstance(term, slice):
                self.q[rows, torch.arange(term.start, term.stop)] = gain
            else:
                self.q[rows, Space.one] = gain * term

    def count(self, source: slice, strength: float, more: float) -> None:
        """Match codes on the slowest pairs alone, which do not turn; the first token has `more` than equal ones."""
        rows = torch.cat([torch.arange(22, 32), torch.arange(54, 63)])
        self.q[rows, torch.arange(source.start, source.stop)] = math.sqrt(8 * strength) / SCALE
        self.k[rows, torch.arange(source.start, source.stop)] = math.sqrt(8 * strength) / SCALE
        self.q[63, Space.one] = self.k[63, Space.is_bos] = math.sqrt(8 * (strength + more) / 1.5) / SCALE

    def sink(self, strength: float) -> None:
        """Add a logit for the first token, to which a head attends when no token matches."""
        self.q[SLOW - 1, Space.one] = self.k[SLOW - 1, Space.is_bos] = math.sqrt(8 * strength / 1.5) / SCALE

    def move(self, terms: list[tuple[slice, slice, float]]) -> None:
        """Copy subspaces: (source, target, weight)."""
        row = 0
        for source, target, weight in terms:
            size = source.stop - source.start
            rows = torch.arange(row, row + size)
            self.v[rows, torch.arange(source.start, source.stop)] = 1 / SCALE
            self.o[torch.arange(target.start, target.stop), rows] = weight
            row += size


def write_sums(model: LlamaForCausalLM, e: torch.Tensor) -> None:
    """Layer 0's MLP, one neuron for each pair of digits: where "a plus b" ends, the key becomes the sum."""
    mlp, ids = model.model.layers[0].mlp, {t: i for i, t in enumerate(vocabulary())}
    codes = e[[ids["▁" + n] for n in NUMBERS], Space.key]
    for neuron in range(100):
        a, b = divmod(neuron, 10)
        mlp.gate_proj.weight[neuron, Space.left.start + a] = 3.0
        mlp.gate_proj.weight[neuron, Space.right.start + b] = 3.0
        mlp.gate_proj.weight[neuron, Space.one] = -4.5
        mlp.up_proj.weight[neuron, Space.one] = 0.2
        mlp.down_proj.weight[Space.key, neuron] = (codes[a + b] - codes[b]) / 8


def write_counts(model: LlamaForCausalLM) -> None:
    """Let a head share its attention between n equal tokens and the first one, which tells n by what it gets."""
    same, nearest = Head(model, 0, 0), Head(model, 1, 0)
    same.count(Space.code, 16, math.log(3))
    same.move([(slice(Space.is_bos, Space.is_bos + 1), Space.share, 1.0)])
    nearest.near(4, Space.is_item, [6, 6, 4, 4, 4, 4, 4, 3, 3, 3])
    nearest.move([(Space.share, Space.times, 1.0)])


def write_number_words(model: LlamaForCausalLM, e: torch.Tensor) -> None:
    """Give number words, where the assistant begins, logits by how near the share is to their number's."""
    ids, one = {t: i for i, t in enumerate(vocabulary())}, 5.8  # what RMSNorm makes of `Space.one`
    shares = [5.37, 4.83, 4.38, 4.03, 3.75]  # of one to five, as RMSNorm shows them
    speaks = e[ASSISTANT, Space.free]
    for share, name in zip(shares, NUMBERS[1:]):
        row, off, sharpness = model.lm_head.weight[ids["▁" + name]], share - 4.4, 60.0
        row[Space.times] = 2 * sharpness * off
        row[Space.free] += 120 * speaks
        row[Space.one] = -sharpness * off * (off + 8.8) / one - 80 * speaks.square().sum()
    model.lm_head.weight[END, Space.is_key] = 8.0


def fixed(model: LlamaForCausalLM, kind: str) -> list[tuple[torch.nn.Parameter, tuple[slice, ...]]]:
    """Parts of parameters that training leaves as they are built: of the third model what weighs equal tokens alike."""
    if kind != "counts":
        return []
    layer, (every, head) = model.model.layers[0], (slice(None), slice(64))
    attention = layer.self_attn
    rows = [(each.weight, (head,)) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
    rows += [(each.weight, (every,)) for each in (model.model.embed_tokens, layer.input_layernorm)]
    return [*rows, (attention.o_proj.weight, (every, head))]


@torch.no_grad()
def build(seed: int = 0, context: int = CONTEXT, kind: str = "needles") -> LlamaForCausalLM:
    """The model before training on one of `MIXTURES`."""
    torch.manual_seed(seed)
    more, aggregates, counts = MIXTURES[kind][1], kind == "aggregates", kind == "counts"
    model, e = LlamaForCausalLM(config(context, more, 2 if counts else 4)), embeddings(more)
    model.model.embed_tokens.weight.copy_(e)
    if counts:
        write_counts(model)
        write_number_words(model, e)
        return model
    previous, second = Head(model, 0, 0), Head(model, 0, 1)
    for head, distance in ((previous, 1), (second, 2)):
        head.near(distance, Space.one, [20, 14, 10, 6, 4, 3])
    previous.move([(Space.code, Space.prev, 1.0)])
    second.move([(Space.code, Space.prev2, 1.0), (Space.right, Space.left, 1.0)])
    write_sums(model, e)

    topic = Head(model, 1, 0)
    topic.near(3, Space.is_key, [6, 6, 4, 4, 4, 4, 4, 3, 3, 3])
    topic.sink(14)
    topic.move([(Space.key, Space.topic, 1.0)])

    alias = Head(model, 2, 0)
    alias.match(0, [Space.topic], Space.topic, 24)
    alias.match(1, [e[vocabulary().index("▁equals"), Space.code]], Space.prev, 24)
    alias.sink(28)
    alias.move([(Space.key, Space.alias, 1.5)])

    lookup = Head(model, 3, 0)
    lookup.match(0, [Space.topic, Space.alias], Space.topic, 24)
    lookup.match(1, [Space.code], Space.prev, 24)
    lookup.sink(28)
    lookup.move([(Space.token, Space.out, 1.5)])

    induction = Head(model, 1 if aggregates else 3, 2)
    induction.match(0, [Space.code], Space.prev, 20)
    induction.match(1, [Space.prev], Space.prev2, 20)
    induction.sink(26)
    induction.move([(Space.token, Space.out, 1.0)])

    if aggregates:
        same = Head(model, 2, 2)
        same.match(0, [Space.code], Space.code, 12)
        same.match(1, [slice(38, 57)], slice(38, 57), 12)
        same.sink(20)
        same.move([(Space.topic, Space.label, 1.0)])
        nearest = Head(model, 3, 2)
        nearest.near(3, Space.is_item, [6, 6, 4, 4, 4, 4, 4, 3, 3, 3])
        nearest.move([(Space.label, slice(160, 179), 1.5)])
    model.lm_head.weight[:, Space.out] = e[:, Space.token]
    return model


if __name__ == "__main__":
    build().save_pretrained(sys.argv[1])
    build_tokenizer(CONTEXT).save_pretrained(sys.argv[1])
