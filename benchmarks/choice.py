"""Which choice of blocks keeps a model's answers: simulated in plain torch, without vLLM and the plugin's kernels.

A prompt is computed once with full attention. Then tokens after it are computed as decodes that read a part of the
blocks in each layer with full attention: sinks, recent blocks, and those that an index of keys finds best. Tasks:

- `needle`: a number in essays. A prompt counts if full attention gives the number's tokens; a choice answers it if it
  gives the same tokens.
- `text`: the log-likelihood of the next 256 tokens of an essay.

A choice is a name of parts: `INDEX[:BY][:hN|:cX|:kX|:mX][:bN][:sN][:rN]`, for example `c2x32:kv:h8`.

- INDEX: `exact` (keys themselves), `signs` and `box` (the plugin's), `c2xG` (two bits a number by channel, a least
  value and a step for each group of G tokens), `c2xGe` and `c2xGi` (the same two in 8 bits: float8_e4m3, or integers of
  one scale for all channels of a head), `n2xG` (two bits around the mean, by deviation), `all`.
- BY: `layer` (the default) or `kv`: whose sets of blocks these are.
- hN: a choice stands for N steps. cX, kX, mX: until the cosine of a query with the one that chose is below X: the mean
  of a layer's heads, the mean of sums over the heads of a KV head, or the least of heads. A choice also ends when a
  block is begun.
- bN: tokens of a block, 32 by default. sN, rN: sinks and recent blocks.

Prompts are kept with their keys and values in `--cache`, and each prompt's results are appended to `--raw`: a run goes
on where another one ended. `--table` prints cells of `--raw`.

    python benchmarks/choice.py MODEL ESSAYS --tokens 2048 --prompts 24 --share 0.1 --choices exact signs box c2x32
"""

import argparse
import glob
import json
import math
import os
import random
import re
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from reports import hardware, listed
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: Keys of needles.
WORDS = ("apple", "drum", "lamp", "river", "stone", "glass", "paper", "cloud", "tiger", "castle", "violin", "rocket")
WORDS += ("garden", "hammer", "pencil", "mirror")
#: Tokens of a text's continuation.
CONTINUED = 256
#: Levels of a normal distribution that lose least at two bits, in deviations.
NORMAL = 0.4528, 1.510


def sentences(folder):
    """Return the text of a folder's files, and its sentences."""
    files = [Path(file).read_text(errors="ignore") for file in sorted(glob.glob(f"{folder}/*.txt"))]
    text = " ".join(files).replace("\n", " ")
    return text, [each.strip() + "." for each in text.split(". ") if 20 < len(each) < 400]


def needle(tokenizer, body_of, tokens, number, count):
    """Return a prompt's ids and its answer's ids."""
    drawn = random.Random(f"s{number}")
    key, value = drawn.choice(WORDS), str(drawn.randrange(1000000, 9999999))
    start, body, size = drawn.randrange(len(body_of) - 900), [], 0
    while size < tokens - 110:
        body.append(body_of[start % len(body_of)])
        start, size = start + 1, size + len(tokenizer(body[-1])["input_ids"])
    body.insert(
        int((0.05 + 0.9 * (number % count) / max(count - 1, 1)) * len(body)),
        f"The special magic number for {key} is: {value}.",
    )
    prompt = f"{' '.join(body)}\nQuestion: What is the special magic number for {key}?"
    prompt += f"\nAnswer: The special magic number for {key} is:"
    ids = tokenizer(prompt)["input_ids"]
    answer = tokenizer(f"{prompt} {value}")["input_ids"]
    return ids, answer[len(ids) :]


def text(tokenizer, whole, tokens, number):
    """Return ids of a text, and those of its continuation."""
    place = random.Random(f"t{number}").randrange(len(whole) - 8 * (tokens + CONTINUED))
    ids = tokenizer(whole[place : place + 8 * (tokens + CONTINUED)])["input_ids"]
    return ids[:tokens], ids[tokens : tokens + CONTINUED]


class Choice:
    """A way to choose, from its name."""

    def __init__(self, name):
        self.name, (self.index, *parts) = name, name.split(":")
        self.kv, self.hold, self.block = False, 1, 32
        self.sinks = self.recent = self.cosine = None
        self.least = self.summed = False
        for part in parts:
            if part in ("kv", "layer"):
                self.kv = part == "kv"
            elif part[0] in "ckm":
                self.summed = part[0] == "k"
                self.cosine, self.least, self.hold = float(part[1:]), part[0] == "m", 1 << 30
            else:
                setattr(self, {"h": "hold", "b": "block", "s": "sinks", "r": "recent"}[part[0]], int(part[1:]))

    def sizes(self, share, tokens):
        """Return blocks that are read in all, sinks, and recent ones: the plugin's rule where the name has none."""
        blocks = math.ceil(math.ceil(share * tokens) / self.block)
        sinks = max(blocks // 8, 1) if self.sinks is None else self.sinks
        recent = max(blocks // 4, 1) if self.recent is None else self.recent
        if self.sinks is None:
            sinks = min(sinks, -(-64 // self.block))
        if self.recent is None:  # wherever the newest token lies in its block
            recent = min(recent, -(-256 // self.block)) + 1
        return blocks, sinks, recent


def dequantised(index, keys):
    """Return what an index has for keys [..., n, block, D]: [..., n, block, D] float32."""
    if index == "exact":
        return keys
    if index == "signs":
        centre = keys.mean(-2, keepdim=True)
        rest = keys - centre
        return centre + torch.where(rest >= 0, 1.0, -1.0) * rest.abs().mean(-1, keepdim=True)
    kind, group, form = re.fullmatch(r"(c2|n2|c1|c3)x(\d+)([ei]?)", index).groups()
    group = min(int(group), keys.shape[-2])
    parts = keys.unflatten(-2, (-1, group))
    if kind == "n2":
        mean = parts.mean(-2, keepdim=True)
        deviation = (parts - mean).square().mean(-2, keepdim=True).sqrt()
        rest = (parts - mean) / deviation.clamp(min=1e-9)
        near, far = NORMAL
        return (mean + deviation * rest.sign() * torch.where(rest.abs() > (near + far) / 2, far, near)).flatten(-3, -2)
    levels = {"c1": 1, "c2": 3, "c3": 7}[kind]
    least, most = parts.amin(-2, keepdim=True), parts.amax(-2, keepdim=True)
    middle, step = eight_bits(form, (least + most) / 2), eight_bits(form, (most - least) / levels)
    codes = ((parts - middle) / step.clamp(min=1e-9) + levels / 2).round().clamp(0, levels)
    return (middle + (codes - levels / 2) * step).flatten(-3, -2)


def eight_bits(form, values):
    if form == "e":
        return values.to(torch.float8_e4m3fn).float()
    if form == "i":
        unit = (values.abs().amax(-1, keepdim=True) / 127).bfloat16().float().clamp(min=1e-9)
        return (values / unit).round() * unit
    return values.bfloat16().float()


class Decodes:
    """Attention of decodes after a prompt, a choice a row of the batch.

    `keys`, `values`: of the prompt, by layer [Hkv, N, D]. `scored`, `chosen`: decodes of all layers, and those of them
    that chose, by choice.
    """

    def __init__(self, prompt, choices, share):
        self.keys, self.values = prompt
        self.choices, self.share = choices, share
        self.scored, self.chose = 0, [0.0] * len(choices)
        self.kept = {}

    def index(self, layer, choice, own):
        """Return what stands for full blocks: [Hkv, n, block, D] of the prompt, or of one row's tokens too."""
        name = layer, choice.index, choice.block
        if own is None and name in self.kept:
            return self.kept[name]
        keys = self.keys[layer].float() if own is None else own
        keys = keys[:, : keys.shape[1] // choice.block * choice.block].unflatten(1, (-1, choice.block))
        made = (
            torch.stack((keys.amin(2), keys.amax(2)), 2) if choice.index == "box" else dequantised(choice.index, keys)
        )
        if own is None:
            self.kept[name] = made
        return made

    def scores(self, choice, index, query, full):
        """Return shares of attention of blocks: [Hkv, T, n], summed over the heads of a KV head."""
        blocks, hidden = index.shape[1], torch.arange(index.shape[1]) >= full[:, None]
        if choice.index == "box":
            least, most = (each[:, None, None] for each in index.unbind(2))
            logits = torch.maximum(query[..., None, :] * least, query[..., None, :] * most).sum(-1)
            return logits.masked_fill(hidden, -torch.inf).softmax(-1).sum(1)
        logits = products(query, index.flatten(1, 2))
        logits.masked_fill_(hidden.repeat_interleave(choice.block, -1), -torch.inf)
        return logits.softmax(-1).sum(1).unflatten(-1, (blocks, -1)).sum(-1)

    def reads(self, choice, scores, query, lengths):
        """Return the blocks that decodes read: bool [Hkv or 1, T, W], and how many decodes chose."""
        size, tokens = choice.block, int(lengths[0]) - 1
        blocks, sinks, recent = choice.sizes(self.share, tokens)
        full, width = lengths // size, -(-int(lengths[-1]) // size)
        ends = (full + 1 - recent).clamp(max=scores.shape[-1])
        if not choice.kv:
            scores = scores.sum(0, keepdim=True)
        place = torch.arange(scores.shape[-1])
        candidates = (place >= sinks) & (place < ends[:, None])
        best = scores.masked_fill(~candidates, -1.0).topk(min(max(blocks - sinks - recent, 1), len(place)), -1).indices
        source, since, chose = [], 0, 0
        its = query.sum(1) if choice.summed else query.flatten(0, 1)  # [H, T, D]
        unit = F.normalize(its, dim=-1)
        cosines = unit @ unit.mT
        cosines = cosines.amin(0) if choice.least else cosines.mean(0)
        for step in range(len(lengths)):
            moved = choice.cosine is not None and float(cosines[step, since]) < choice.cosine
            if step == 0 or step - since >= choice.hold or moved or full[step] != full[step - 1]:
                since, chose = step, chose + 1
            source.append(since)
        read = torch.zeros(len(scores), len(lengths), width, dtype=torch.bool)
        read.scatter_(2, best[:, source], True)
        place = torch.arange(width)
        return read | (place < sinks) | (place >= ends[:, None]), chose

    def __call__(self, module, query, key, value, attention_mask, scaling, sliding_window=None, **_):
        """Attend: query [C, H, T, D] of C choices, key and value [C, Hkv, T, D] of their new tokens."""
        layer, (rows, _, count, _) = module.layer_idx, query.shape
        known, values = self.keys[layer].float(), self.values[layer].float()
        tokens, query = known.shape[1], query.float().unflatten(1, (len(known), -1)) * scaling
        key, value = key.float(), value.float()
        logits = torch.cat((products(query.transpose(0, 1), known).transpose(0, 1), query @ key[:, :, None].mT), -1)
        lengths = torch.arange(count) + tokens + 1
        place = torch.arange(tokens + count)
        seen = place < lengths[:, None]
        if sliding_window:
            logits.masked_fill_(~(seen & (place >= lengths[:, None] - sliding_window)), -torch.inf)
        else:
            self.scored += count
            for row, choice in enumerate(self.choices):
                if choice.index == "all":
                    logits[row].masked_fill_(~seen, -torch.inf)
                    continue
                own = torch.cat((known, key[row]), 1) if rows == 1 else None
                index = self.index(layer, choice, own)
                scores = self.scores(choice, index, query[row], lengths // choice.block)
                read, chose = self.reads(choice, scores, query[row], lengths)
                self.chose[row] += chose
                read = read.repeat_interleave(choice.block, -1)[..., : tokens + count]
                logits[row].masked_fill_(~(read & seen)[:, None], -torch.inf)
        shares = logits.softmax(-1)
        old, new = shares.split((tokens, count), -1)
        out = products(old.transpose(0, 1), values.mT).transpose(0, 1) + new @ value[:, :, None]
        return out.flatten(1, 2).transpose(1, 2).to(torch.bfloat16), None


def products(rows, columns):
    """Return the products of rows [H, ..., D] and columns [H, N, D] of heads: [H, ..., N]."""
    return (rows.flatten(1, -2) @ columns.mT).unflatten(1, rows.shape[1:-1])


class NewTokens(DynamicCache):
    """Hands layers their new tokens alone, after so many others."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens

    def update(self, key, value, layer, *args, **options):
        return key, value

    def get_seq_length(self, layer_idx=0):
        return self.tokens


@torch.inference_mode()
def prefill(model, ids, file):
    """Return keys and values of a prompt, and the token that follows it."""
    if file.exists():
        return torch.load(file)
    cache = DynamicCache()
    model.set_attn_implementation("sdpa")
    logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    layers = cache.layers
    made = (
        [each.keys[0].bfloat16().clone() for each in layers],
        [each.values[0].bfloat16().clone() for each in layers],
        logits.float(),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(made, file)
    return made


@torch.inference_mode()
def decode(model, prompt, ids, choices, share):
    """Return log-probabilities of the tokens after each of `ids`: [C, T, V], and what share of decodes chose."""
    decodes = Decodes(prompt[:2], choices, share)
    ALL_ATTENTION_FUNCTIONS.register("choice", decodes)
    model.set_attn_implementation("choice")
    tokens = prompt[0][0].shape[1]
    rows = torch.tensor([ids] * len(choices))
    places = torch.arange(tokens, tokens + len(ids))[None].expand(len(choices), -1)
    logits = model(
        rows, position_ids=places, past_key_values=NewTokens(tokens), use_cache=True, attention_mask=none_of(model)
    ).logits
    return logits.float().log_softmax(-1), [each / max(decodes.scored, 1) for each in decodes.chose]


def none_of(model):
    """Return masks of no effect: `Decodes` masks."""
    types = set(getattr(model.config, "layer_types", None) or ())
    return {each: None for each in types} if types else torch.zeros(1, 1, 1, 1)


def run(args, model, tokenizer, name, number, share, choices):
    whole, body = sentences(args.essays)
    made = (
        text(tokenizer, whole, args.tokens, number)
        if args.task == "text"
        else needle(tokenizer, body, args.tokens, number, args.prompts)
    )
    ids, after = made
    prompt = prefill(model, ids, Path(args.cache) / f"{name}-{args.task}-{args.tokens}-{args.prompts}-{number}.pt")
    found = {}
    if args.task == "text":
        target = torch.tensor(after[1:])
        for choice in choices:
            logs, chose = decode(model, prompt, after[:-1], [choice], share)
            found[choice.name] = -float(logs[0].gather(-1, target[:, None]).mean()), chose[0]
        return found
    if int(prompt[2].argmax()) != after[0]:
        return {choice.name: (None, 0) for choice in choices}
    for first in range(0, len(choices), args.rows):
        some = choices[first : first + args.rows]
        if len(some) == 1:
            some = some * 2
        logs, chose = decode(model, prompt, after[:-1], some, share)
        right = (logs.argmax(-1) == torch.tensor(after[1:])).all(-1)
        found.update({choice.name: (int(each), part) for choice, each, part in zip(some, right, chose)})
    return found


def table(raw):
    """Print cells of a file of results."""
    cells = defaultdict(dict)
    for line in Path(raw).read_text().splitlines():
        row = json.loads(line)
        for choice, (value, chose) in row["found"].items():
            cells[row["model"], row["task"], row["tokens"], row["share"], choice][row["number"]] = value, chose
    print("model,task,tokens,share,choice,prompts,full,value,of_full,chose")
    for key, its in sorted(cells.items(), key=lambda each: tuple(map(str, each[0]))):
        full = cells.get((*key[:4], "all"), {})
        both = [n for n in its if n in full and full[n][0] is not None]
        if key[1] == "text":
            ours, theirs = (math.exp(sum(each[n][0] for n in both) / max(len(both), 1)) for each in (its, full))
            ratio = ours / theirs
        else:
            both = [n for n in both if full[n][0]]
            ours, theirs = sum(its[n][0] for n in both), len(both)
            ratio = ours / max(theirs, 1)
        chose = sum(its[n][1] for n in both) / max(len(both), 1)
        print(",".join(map(str, (*key, len(its), round(theirs, 3), round(ours, 3), round(ratio, 4), round(chose, 3)))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("essays", nargs="?")
    parser.add_argument("--task", choices=("needle", "text"), default="needle")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stop", type=int, help="of the prompts only those from --first to before this one")
    parser.add_argument("--share", type=float, nargs="+", default=[0.1])
    parser.add_argument("--choices", nargs="+", default=["exact", "signs", "box", "c2x32"])
    parser.add_argument("--rows", type=int, default=16, help="choices that one call computes")
    parser.add_argument("--raw", default="choice.jsonl")
    parser.add_argument("--cache", default="choice-cache")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return table(args.raw)
    name = os.path.basename(args.model.rstrip("/"))
    done = defaultdict(set)
    if os.path.exists(args.raw):
        for row in map(json.loads, Path(args.raw).read_text().splitlines()):
            done[row["model"], row["task"], row["tokens"], row["share"], row["number"]] |= row["found"].keys()
    about = f"torch {torch.__version__}, transformers {transformers.__version__}; {listed(hardware())}"
    made = None
    for number in range(args.first, args.stop or args.prompts):
        for share in args.share:
            key = name, args.task, args.tokens, share, number
            missing = [Choice(each) for each in dict.fromkeys(["all", *args.choices]) if each not in done[key]]
            if not missing:
                continue
            if made is None:
                model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
                made = model, AutoTokenizer.from_pretrained(args.model)
            row = dict(zip(("model", "task", "tokens", "share", "number"), key))
            row |= {"found": run(args, *made, name, number, share, missing), "about": about}
            with open(args.raw, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
