"""Stand-ins for kernels that change logits, sample tokens, and rank them."""

import numpy as np

from .registry import memory, rows, stands_for

F32 = np.float32


@stands_for("gpu.sample.gumbel", "_temperature_kernel", "47f8e146ba43")
def temperature(grid, logits, logits_stride, expanded_idx_mapping, temperature_ptr, vocab_size):
    if not _is_float32(logits):
        return NotImplemented
    lines = rows(logits, grid[0], logits_stride, vocab_size)
    for line, value in zip(lines, memory(temperature_ptr)[memory(expanded_idx_mapping)[: grid[0]]]):
        if value not in (0, 1):
            line /= value


@stands_for("gpu.sample.gumbel", "_gumbel_sample_kernel", "8bcb52dfb49b", column_in_seed=False)
@stands_for("gpu.sample.gumbel", "_gumbel_sample_kernel", "41f8e23069f2", column_in_seed=True)
def gumbel_sample(
    grid, local_argmax, local_argmax_stride, local_max, local_max_stride, logits_cache, logits_cache_stride_0,
    logits_cache_stride_1, logits_cache_col, logits_cache_source, logits_cache_source_stride, logits, logits_stride,
    expanded_idx_mapping, seeds, pos, temp, vocab_size, BLOCK_SIZE, IS_DRAFTING, APPLY_TEMPERATURE, USE_FP64,
    PER_TOKEN_COL, column_in_seed,
):  # fmt: skip
    if USE_FP64 or not _is_float32(logits, logits_cache):
        return NotImplemented
    tokens, blocks = grid
    requests = memory(expanded_idx_mapping)[:tokens].tolist()
    lines = rows(logits, tokens, logits_stride, vocab_size)
    if logits_cache is not None:
        cache, sources = memory(logits_cache), rows(logits_cache_source, tokens, logits_cache_source_stride, vocab_size)
        columns = memory(logits_cache_col)
    temperatures, streams, position = memory(temp), memory(seeds), memory(pos)
    values = np.full((tokens, blocks * BLOCK_SIZE), -np.inf, F32)
    for token, request in enumerate(requests):
        seed = int(streams[request])
        if logits_cache is not None and request >= 0:
            column = int(columns[token if PER_TOKEN_COL else 0])
            seed ^= column << 32 if column_in_seed else 0
            first = request * logits_cache_stride_0 + column * logits_cache_stride_1
            cache[first : first + vocab_size] = sources[token]
        line = values[token, :vocab_size]
        line[:] = lines[token]
        if request >= 0 and temperatures[request] != 0:
            if APPLY_TEMPERATURE:
                line /= temperatures[request]
            line += gumbel(seed, int(position[token]) + (IS_DRAFTING and 1 << 30), vocab_size)
    values = values.reshape(tokens, blocks, BLOCK_SIZE)
    rows(local_argmax, tokens, local_argmax_stride, blocks)[:] = (
        np.nanargmax(values, axis=-1) + np.arange(blocks) * BLOCK_SIZE
    )
    rows(local_max, tokens, local_max_stride, blocks)[:] = np.nanmax(values, axis=-1)


def gumbel(seed: int, position: int, count: int) -> np.ndarray:
    """Return the Gumbel noise of the first tokens of a vocabulary, of a request's stream at a position: [count], float32."""
    noise = _hashes(seed, position, np.arange(count, dtype=np.uint32))
    high, low = (noise >> np.uint32(16)).astype(F32), (noise & np.uint32(0xFFFF)).astype(F32)
    uniform = high * F32(1.52587890625e-05) + (low + F32(0.5)) * F32(2.3283064365386963e-10)
    polynomial = F32(1 / 8)
    for term in range(7, 0, -1):
        polynomial = F32(1 / term) + uniform * polynomial
    direct = np.log(np.maximum(F32(1) - uniform, F32(5.960464477539063e-08)))
    return -np.log(-np.where(uniform < F32(0.25), -uniform * polynomial, direct))


def uniform(seed: int, position: int) -> np.float32:
    """Return Triton's `rand` of a seed at an offset: ten rounds of Philox, as a number above 0 and below 1."""
    word, smallest = (1 << 32) - 1, F32(4.6566127342e-10)
    c0, c1, c2, c3, k0, k1 = position & word, position >> 32 & word, 0, 0, seed & word, seed >> 32 & word
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & word, left >> 32 ^ c3 ^ k1, left & word
        k0, k1 = k0 + 0x9E3779B9 & word, k1 + 0xBB67AE85 & word
    return max(F32(c0 if c0 < 1 << 31 else word - c0) * smallest, smallest)


def _hashes(seed, position, offsets):
    """Return MurmurHash3 of (seed, position, offset) for each offset: [offsets], uint32."""
    mixed, word = np.uint32(0), (1 << 32) - 1
    with np.errstate(over="ignore"):
        for key in (seed & word, seed >> 32 & word, position & word, offsets):
            key = _rotated(np.asarray(key, np.uint32) * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            mixed = _rotated(mixed ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        mixed = mixed ^ np.uint32(16)
        mixed = (mixed ^ mixed >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return mixed ^ mixed >> np.uint32(16)


def _rotated(value, shift):
    return value << np.uint32(shift) | value >> np.uint32(32 - shift)


@stands_for("gpu.sample.logprob", "_topk_log_softmax_kernel", "535eb7c043db")
def topk_log_softmax(grid, output, logits, logits_stride, topk_ids, topk_ids_stride, topk, vocab_size, BLOCK_SIZE):
    if not _is_float32(logits):
        return NotImplemented
    count = grid[0]
    lines = rows(logits, count, logits_stride, vocab_size)
    largest = np.nanmax(lines, axis=1)
    total = np.zeros(count, F32)
    # Blocks have zeros after the vocabulary's end: the order of a sum in floating point depends on its length.
    exponentials = np.zeros((count, -(-vocab_size // BLOCK_SIZE) * BLOCK_SIZE), F32)
    np.exp(lines - largest[:, None], out=exponentials[:, :vocab_size])
    for start in range(0, vocab_size, BLOCK_SIZE):
        for row in range(count):
            total[row] += np.sum(exponentials[row, start : start + BLOCK_SIZE])
    chosen = np.take_along_axis(lines, rows(topk_ids, count, topk_ids_stride, topk), axis=1)
    rows(output, count, topk, topk)[:] = chosen - largest[:, None] - np.log(total)[:, None]


@stands_for("gpu.sample.logprob", "_ranks_kernel", "9bb31889efc6")
def ranks(grid, output, logits, logits_stride, token_ids, vocab_size, BLOCK_SIZE):
    if not _is_float32(logits):
        return NotImplemented
    lines = rows(logits, grid[0], logits_stride, vocab_size)
    value = lines[np.arange(grid[0]), memory(token_ids)[: grid[0]]]
    padding = (-vocab_size % BLOCK_SIZE) * (value == -np.inf)
    memory(output)[: grid[0]] = (lines >= value[:, None]).sum(axis=1) + padding


@stands_for("gpu.sample.prompt_logprob", "_prompt_logprobs_token_ids_kernel", "2706dbdcfea5")
def prompt_logprobs_token_ids(
    grid, prompt_logprobs_token_ids_ptr, query_start_loc, idx_mapping, num_computed_tokens, all_token_ids,
    all_token_ids_stride,
):  # fmt: skip
    out, known, computed = memory(prompt_logprobs_token_ids_ptr), memory(all_token_ids), memory(num_computed_tokens)
    starts = memory(query_start_loc).tolist()
    for row, request in enumerate(memory(idx_mapping)[: grid[0]].tolist()):
        start, end, first = starts[row], starts[row + 1], request * all_token_ids_stride + int(computed[request]) + 1
        out[start:end] = known[first : first + end - start]


@stands_for("gpu.sample.min_p", "_min_p_kernel", "bd9d4defbc34")
def min_p(grid, logits, logits_stride, expanded_idx_mapping, min_p_ptr, vocab_size):
    if not _is_float32(logits):
        return NotImplemented
    lines = rows(logits, grid[0], logits_stride, vocab_size)
    for line, share in zip(lines, memory(min_p_ptr)[memory(expanded_idx_mapping)[: grid[0]]]):
        if share != 0:
            line[line < np.nanmax(line) + np.log(share)] = -np.inf


@stands_for("gpu.structured_outputs", "_apply_grammar_bitmask_kernel", "1d93a33523d5")
def apply_grammar_bitmask(
    grid, logits, logits_stride, logits_indices, cu_num_logits, bitmask, bitmask_stride, vocab_size, MASK_STRIDE,
):  # fmt: skip
    if not _is_float32(logits):
        return NotImplemented
    firsts, values = memory(cu_num_logits).tolist(), memory(logits)
    packed = rows(bitmask, grid[0], bitmask_stride, bitmask_stride)
    for mask, place in enumerate(memory(logits_indices)[: grid[0]].tolist()):
        request, position = divmod(place, MASK_STRIDE)
        if position < firsts[request + 1] - firsts[request]:
            line = values[(firsts[request] + position) * logits_stride :][:vocab_size]
            bits = np.unpackbits(packed[mask].view(np.uint8), bitorder="little")[:vocab_size]
            line[: len(bits)][bits == 0] = -np.inf


def _is_float32(*tensors):
    return all(tensor is None or tensor.element_size() == 4 for tensor in tensors)
