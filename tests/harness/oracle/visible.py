"""Masks of what each query of a server's requests sees, for a dense model, and whether blocks come back as they went."""

import numpy as np
import torch
from engine import logprobs_of

#: Tokens of a block.
BLOCK = 32


def visible(server):
    """Return the masks of a server's requests; see `watch_masks`."""
    return watch_masks(server.worker)


def watch_masks(worker):
    """Record what each query of a request sees, as a dense model's mask: request -> bool [T, T], made as steps run."""
    masks, execute = {}, worker.execute_model

    def recorded(output):
        result = execute(output)
        new = [(each.req_id, each.num_computed_tokens) for each in output.scheduled_new_reqs]
        cached = zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_computed_tokens)
        for req_id, computed in (*new, *cached):
            count = output.num_scheduled_tokens[req_id]
            mask = masks.setdefault(req_id.split("-")[0], torch.zeros(2048, 2048, dtype=torch.bool))
            rows = slice(computed, computed + count)
            mask[rows] = torch.ones(2048, 2048, dtype=torch.bool).tril()[rows]
            for block in worker.kv_evict.groups[0].with_holes.get(req_id, ()):
                mask[rows, block * BLOCK : (block + 1) * BLOCK] = False
        return result

    worker.execute_model = recorded
    return masks


def watch_bytes(worker):
    """Checks that what comes back is what went, byte for byte, in each step; returns how many blocks did."""
    caches, went, compared = worker.model_runner.kv_caches, {}, []
    rearrange = worker.kv_evict.rearrange

    def pages(block):
        return [cache[block].contiguous().view(torch.uint8).clone() for cache in caches]

    def watched(all_reduce):
        copies = [copy for copy in worker.kv_evict.plan.orders if copy.kind != "poison"]
        now = {copy.physical: pages(copy.physical) for copy in copies}
        rearrange(all_reduce)
        for copy in copies:
            if copy.kind != "fetch":
                went[copy.number] = now[copy.physical]
            else:
                now[copy.physical] = went[copy.number]
        came = {copy.physical for copy in copies if copy.kind == "fetch"}
        compared.extend(all(map(torch.equal, now[physical], pages(physical))) for physical in came)

    worker.kv_evict.rearrange = watched
    return compared


def assert_like_dense(dense, prompt, output, mask, atol=2e-3):
    """Log-probabilities of an answer are those of a dense model that sees what the mask says.

    Tokens that were computed again have the keys and values of their last time; so does one masked pass.
    """
    ids = [*prompt, *output.outputs[0].token_ids]
    logits, _ = dense.forward(ids, dense.new_cache(), mask[: len(ids), : len(ids)] | torch.eye(len(ids)).bool())
    logprobs = torch.log_softmax(logits.double(), -1)[len(prompt) - 1 : -1]
    tokens = list(output.outputs[0].token_ids)
    np.testing.assert_allclose(logprobs_of(output), logprobs[range(len(tokens)), tokens], atol=atol)
