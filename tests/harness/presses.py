"""Tokens that kvpress' presses and our engine keep of one prompt, and the text that follows it (test_kvpress.py)."""

import torch
from transformers import DynamicCache, LlamaForCausalLM

BLOCK, ANSWER = 32, 40


class Transformers:
    """The model as kvpress has it."""

    def __init__(self, path, attention="sdpa"):
        self.model = LlamaForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=torch.float32).eval()

    @torch.no_grad()
    def forward(self, ids, start, cache):
        """The next token."""
        # Presses want positions that this transformers does not hand to attention layers unless it is told to.
        at = torch.arange(start, start + len(ids))
        options = {"position_ids": at[None], "cache_position": at, "past_key_values": cache}
        return int(self.model(input_ids=torch.tensor(ids)[None], **options).logits[0, -1].argmax())

    def generate(self, prompt, count):
        cache = DynamicCache()
        return self.go_on(self.forward(prompt, 0, cache), len(prompt), cache, count)

    def keys(self, prompt):
        """float32 [L, Hkv, n, D]"""
        cache = DynamicCache()
        self.forward(prompt, 0, cache)
        return torch.cat([layer.keys for layer in cache.layers])

    def go_on(self, token, start, cache, count):
        tokens = [token]
        while len(tokens) < count:
            tokens.append(self.forward(tokens[-1:], start + len(tokens) - 1, cache))
        return tokens

    def answer(self, press, prompt, question):
        """Keys that it keeps of the prompt, [n, D] of each KV head, and the text after prompt and question."""
        cache, kept = DynamicCache(), []
        with press(self.model):
            token = self.forward(prompt, 0, cache)
        for layer, cached in zip(self.model.model.layers, cache.layers):
            there = torch.ones(cached.keys.shape[1:3], dtype=torch.bool)
            if (masked := getattr(layer.self_attn, "masked_key_indices", None)) is not None:
                there[masked[1:]] = False
            kept += [keys[mask] for keys, mask in zip(cached.keys[0], there)]
        if question:
            token = self.forward(question, len(prompt), cache)
        return kept, self.go_on(token, len(prompt) + len(question), cache, ANSWER)


def resident(server):
    """Tokens that the engine's one request has computed, and keys that it holds, [n, D] of each KV head."""
    heads, computed = [], 0
    for group, manager in zip(server.worker.kv_evict.groups, server.managers):
        for req_id, blocks in manager.req_to_blocks.items():
            there = [block.block_id for block in blocks if not block.is_null]
            computed = server.scheduler.requests[req_id].num_computed_tokens
            tokens = computed - BLOCK * (len(blocks) - len(there))
            for keys, _ in group.store.read(torch.tensor(there), False):
                heads += keys.transpose(0, 1).flatten(1, 2)[:, :tokens].clone()
    return computed, heads


def kept_of(kept, keys):
    """Which of `keys` [L, Hkv, n, D] are among `kept`, wherever these lie. bool [L, Hkv, n]"""
    every, kept = keys.flatten(0, 2), torch.cat(kept)
    nearest = torch.cdist(kept, every).argmin(1)
    there = torch.zeros(len(every), dtype=torch.bool)
    there[nearest[(kept - every[nearest]).abs().amax(1) < 1e-3]] = True
    return there.view(keys.shape[:3])


def compared(engine, path, case, prompt, question=()):
    """For each budget what they keep, bool [L, Hkv, n], and say, and what we do."""
    theirs, caching = Transformers(path, case.attention), case.policy["name"] == "kvzip"
    keys, question = theirs.keys(prompt), list(question)
    server = engine(case.policy, model=path, max_num_batched_tokens=case.chunk, enable_prefix_caching=caching)
    if caching:  # repeated once, before it is asked about
        server.generate([prompt], max_tokens=ANSWER)
    for budget in case.budgets:
        empty = -len(prompt) % BLOCK  # slots of the last block
        press = case.press(1 - ((budget or 0) - empty) / len(prompt))
        want, text = theirs.answer(press, prompt, question)
        states, options = [], {"extra_args": {"kv_budget": budget}} if budget else {}
        server.add(prompt + question, max_tokens=ANSWER, **options)
        (output,) = server.run(lambda server: states.append(resident(server))).values()
        got = next(heads for computed, heads in states if computed > len(prompt))
        yield kept_of(want, keys), text, kept_of(got, keys), list(output.outputs[0].token_ids)
