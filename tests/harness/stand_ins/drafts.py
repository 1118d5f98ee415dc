"""Stand-ins for kernels that propose drafts and verify them; of rejections those of drafters that keep no logits."""

import numpy as np

from .registry import memory, rows, stands_for
from .sampling import F32, gumbel, uniform


@stands_for("gpu.spec_decode.ngram.speculator", "_ngram_scan_kernel", "fa93e62f6df3")
def ngram_scan(
    grid, token_ids, token_ids_stride, idx_mapping, total_len, num_sampled, scratch, scratch_stride, L, MIN_N, MAX_N,
    BLOCK_L,
):  # fmt: skip
    count, blocks = grid
    known, lengths, out = memory(token_ids), memory(total_len), rows(scratch, count, scratch_stride, blocks)
    sampled = memory(num_sampled)
    out[:] = 0
    for row, request in enumerate(memory(idx_mapping)[:count].tolist()):
        length = int(lengths[request])
        if sampled[row] <= 0 or length < MIN_N:
            continue
        tokens = known[request * token_ids_stride :][:length]
        best = np.zeros(blocks * BLOCK_L, np.int64)
        for n in range(MIN_N, min(MAX_N, length - 1) + 1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
            places = np.flatnonzero((windows == tokens[length - n :]).all(axis=1))
            best[places] = n * (L + 1) + places + 1
        out[row] = best.reshape(blocks, BLOCK_L).max(axis=1)


@stands_for("gpu.spec_decode.ngram.speculator", "_ngram_finalize_kernel", "198104cbd8f2")
def ngram_finalize(
    grid, token_ids, token_ids_stride, idx_mapping, total_len, num_sampled, last_sampled, scratch, scratch_stride,
    drafts, L, N_BLOCKS, K,
):  # fmt: skip
    count = grid[0]
    known, lengths, last, sampled = (memory(each) for each in (token_ids, total_len, last_sampled, num_sampled))
    scores = rows(scratch, count, scratch_stride, N_BLOCKS).max(axis=1).tolist()
    out = rows(drafts, count, K, K)
    for row, request in enumerate(memory(idx_mapping)[:count].tolist()):
        out[row] = last[request]
        if scores[row] > 0 and sampled[row] > 0:
            n, place = divmod(scores[row] - 1, L + 1)
            start, length = n + place, int(lengths[request])
            found = np.minimum(np.arange(start, min(start + K, length)), L - 1)
            out[row, : len(found)] = known[request * token_ids_stride + found]


@stands_for("gpu.spec_decode.target_dependent_ar.speculator", "_prepare_prefill_inputs_kernel", "b09e3977036c")
def prepare_prefill_inputs(
    grid, last_token_indices, draft_current_step, draft_input_ids, draft_positions, draft_query_start_loc,
    draft_seq_lens, target_input_ids, target_positions, idx_mapping, last_sampled, next_prefill_tokens, num_sampled,
    num_rejected, query_start_loc, seq_lens, max_num_reqs,
):  # fmt: skip
    count = grid[0]
    starts, sampled = memory(query_start_loc)[: count + 1].tolist(), memory(num_sampled)
    rejected, last, ahead = memory(num_rejected), memory(last_sampled), memory(next_prefill_tokens)
    ids, positions, ends = memory(draft_input_ids), memory(draft_positions), memory(last_token_indices)
    for row, request in enumerate(memory(idx_mapping)[:count].tolist()):
        start = starts[row]
        end = starts[row + 1] - int(rejected[row])
        ids[start : end - 1] = memory(target_input_ids)[start + 1 : end]
        ends[row] = end - 1
        ids[end - 1] = last[request] if sampled[row] > 0 else ahead[request]
        positions[start:end] = memory(target_positions)[start:end]
    ends[count:max_num_reqs] = 0
    memory(draft_query_start_loc)[:count] = starts[:count]
    memory(draft_query_start_loc)[count : max_num_reqs + 1] = starts[count]
    memory(draft_seq_lens)[:count] = memory(seq_lens)[:count]
    memory(draft_seq_lens)[count:max_num_reqs] = 0
    memory(draft_current_step)[0] = 0


@stands_for("gpu.spec_decode.target_dependent_ar.speculator", "_prepare_decode_inputs_kernel", "3d1d578a2ad9")
def prepare_decode_inputs(
    grid, draft_tokens, draft_tokens_stride, target_seq_lens, num_rejected, input_ids, positions, sample_src_positions,
    query_start_loc, seq_lens, max_model_len, max_num_reqs, ADVANCE_DRAFT_POSITIONS,
):  # fmt: skip
    count = grid[0] - 1
    memory(query_start_loc)[: max_num_reqs + 1] = np.minimum(np.arange(max_num_reqs + 1), count)
    memory(input_ids)[:count] = memory(draft_tokens)[: count * draft_tokens_stride : draft_tokens_stride]
    memory(sample_src_positions)[:count] += 1
    lengths = memory(target_seq_lens)[:count] - memory(num_rejected)[:count]
    if ADVANCE_DRAFT_POSITIONS:
        _advance(memory(positions)[:count], max_model_len - 1)
        lengths = np.minimum(lengths + 1, max_model_len)
    memory(seq_lens)[:count] = lengths
    memory(seq_lens)[count:max_num_reqs] = 0


@stands_for("gpu.spec_decode.target_dependent_ar.speculator", "_update_draft_inputs_kernel", "85b4cbc9847f")
def update_draft_inputs(
    grid, output_draft_tokens, output_draft_tokens_stride, next_input_hidden_states, next_input_hidden_states_stride,
    input_ids, positions, sample_src_positions, seq_lens, draft_tokens, current_draft_step, hidden_states,
    hidden_states_stride, hidden_size, max_model_len, num_speculative_steps, ADVANCE_DRAFT_POSITIONS,
):  # fmt: skip
    count, step = grid[0], int(current_draft_step)
    tokens = memory(draft_tokens)[:count]
    memory(output_draft_tokens)[step::output_draft_tokens_stride][:count] = tokens
    if step >= num_speculative_steps - 1:
        return
    memory(sample_src_positions)[:count] += 1
    memory(input_ids)[:count] = tokens
    # numpy has no bfloat16.
    copied = hidden_states.as_strided((count, hidden_size), (hidden_states_stride, 1))
    next_input_hidden_states.as_strided((count, hidden_size), (next_input_hidden_states_stride, 1)).copy_(copied)
    if ADVANCE_DRAFT_POSITIONS:
        _advance(memory(positions)[:count], max_model_len - 1)
        _advance(memory(seq_lens)[:count], max_model_len)


def _advance(numbers, largest):
    np.minimum(numbers + 1, largest, out=numbers)


@stands_for("gpu.spec_decode.rejection_sampler", "_flatten_sampled_kernel", "8098c9effe74")
def flatten_sampled(grid, flat_sampled, sampled, sampled_stride, num_sampled, cu_num_logits):
    out, tokens, firsts = memory(flat_sampled), memory(sampled), memory(cu_num_logits).tolist()
    for row, number in enumerate(memory(num_sampled)[: grid[0]].tolist()):
        out[firsts[row] : firsts[row] + number] = tokens[row * sampled_stride :][:number]


@stands_for("gpu.spec_decode.rejection_sampler", "_gather_draft_sampled_kernel", "dd3af44592a1")
def gather_draft_sampled(
    grid, draft_sampled, pos, input_ids, positions, logits_indices, expanded_idx_mapping, expanded_local_pos,
    prefill_len, num_logits,
):  # fmt: skip
    tokens = memory(logits_indices)[:num_logits]
    place, local = memory(positions)[tokens], memory(expanded_local_pos)[:num_logits]
    prefills = memory(prefill_len)[memory(expanded_idx_mapping)[:num_logits]]
    placeholder = (local > 0) & (place - local < prefills)
    memory(draft_sampled)[:num_logits] = np.where(placeholder, -1, memory(input_ids)[tokens])
    memory(pos)[:num_logits] = place


@stands_for(
    "gpu.spec_decode.rejection_sampler_utils", "_compute_local_logits_stats_kernel", "525a10febd67", "2e08627cac57"
)
def compute_local_logits_stats(
    grid, target_local_argmax, target_local_argmax_stride, target_local_max, target_local_max_stride,
    target_local_sumexp, target_local_sumexp_stride, target_logits, target_logits_stride, expanded_idx_mapping,
    expanded_local_pos, temp, vocab_size, BLOCK_SIZE, HAS_DRAFT_LOGITS,
):  # fmt: skip
    if HAS_DRAFT_LOGITS or target_logits.element_size() != 4:
        return NotImplemented
    count, blocks = grid
    # Nothing reads what vLLM 0.32 finds for the last token of a request with fewer drafts than others.
    drafted = np.append(memory(expanded_local_pos)[1:count], 0) > 0
    values = np.full((count, blocks * BLOCK_SIZE), -np.inf, F32)
    values[:, :vocab_size] = rows(target_logits, count, target_logits_stride, vocab_size)
    values = values.reshape(count, blocks, BLOCK_SIZE)
    largest = np.nanmax(values, axis=-1)
    rows(target_local_max, count, target_local_max_stride, blocks)[drafted] = largest[drafted]
    samples = memory(temp)[memory(expanded_idx_mapping)[:count]] != 0
    best = np.nanargmax(values[drafted & ~samples], axis=-1) + np.arange(blocks) * BLOCK_SIZE
    rows(target_local_argmax, count, target_local_argmax_stride, blocks)[drafted & ~samples] = best
    totals = rows(target_local_sumexp, count, target_local_sumexp_stride, blocks)
    for token, block in np.argwhere((drafted & samples)[:, None] & (largest > -np.inf)):
        totals[token, block] = np.sum(np.exp(values[token, block] - largest[token, block]))
    totals[(drafted & samples)[:, None] & (largest == -np.inf)] = 0


@stands_for("gpu.spec_decode.rejection_sampler_utils", "_rejection_kernel", "63b14232c08c", "3c83142a96ad")
def rejection(
    grid, sampled, sampled_stride, rejected_steps, target_rejected_logsumexp, draft_rejected_logsumexp, target_logits,
    target_logits_stride, target_local_argmax, target_local_argmax_stride, target_local_max, target_local_max_stride,
    target_local_sumexp, target_local_sumexp_stride, draft_sampled, cu_num_logits, idx_mapping, temp, seed, pos,
    synthetic_conditional_rates, vocab_num_blocks, PADDED_VOCAB_NUM_BLOCKS, HAS_DRAFT_LOGITS, SYNTHETIC_MODE,
    USE_BLOCK_VERIFICATION, FLY_WINDOW_SIZE=0,
):  # fmt: skip
    if HAS_DRAFT_LOGITS or USE_BLOCK_VERIFICATION or FLY_WINDOW_SIZE or target_logits.element_size() != 4:
        return NotImplemented
    count = grid[0]
    rates = memory(synthetic_conditional_rates) if SYNTHETIC_MODE else None
    firsts, drafts = memory(cu_num_logits)[: count + 1].tolist(), memory(draft_sampled).tolist()
    maxima = rows(target_local_max, firsts[-1], target_local_max_stride, vocab_num_blocks)
    tokens = rows(target_local_argmax, firsts[-1], target_local_argmax_stride, vocab_num_blocks)
    temperatures, seeds, positions = memory(temp), memory(seed), memory(pos)
    out, totals = memory(sampled), memory(target_rejected_logsumexp)
    totals[:count], memory(draft_rejected_logsumexp)[:count] = 0, 0
    for row, request in enumerate(memory(idx_mapping)[:count].tolist()):
        accepted = 0
        for logit in range(firsts[row], firsts[row + 1] - 1):
            draft, place = drafts[logit + 1], logit - firsts[row]
            if SYNTHETIC_MODE or temperatures[request] != 0:
                chance = uniform(int(seeds[request]), int(positions[logit]))
            if temperatures[request] == 0:
                block = np.where(np.isnan(maxima[logit]), -np.inf, maxima[logit]).argmax()
                token = tokens[logit, block]
                if SYNTHETIC_MODE:
                    right = draft >= 0 and chance < rates[place]
                    token = draft if right else token
                else:
                    right = token == draft
            elif draft < 0:
                break
            else:
                token = draft
                totals[row] = _log_sum(
                    maxima[logit], target_local_sumexp, logit * target_local_sumexp_stride, PADDED_VOCAB_NUM_BLOCKS
                )
                share = memory(target_logits)[logit * target_logits_stride + draft] - totals[row]
                right = chance < rates[place] if SYNTHETIC_MODE else share > np.log(chance)
            out[row * sampled_stride + place] = token
            if not right:
                break
            accepted += 1
        memory(rejected_steps)[row] = accepted


def _log_sum(maxima, sums, first, padded):
    """Return the logarithm of the sum of a row's exponentials, of which blocks have sums below their maxima."""
    largest, exponentials = maxima.max(), np.zeros(padded, F32)
    exponentials[: len(maxima)] = memory(sums)[first : first + len(maxima)] * np.exp(maxima - largest)
    return largest + np.log(np.sum(exponentials))


@stands_for("gpu.spec_decode.rejection_sampler_utils", "_resample_kernel", "616c214cb25a", "3d2f2096c977")
def resample(
    grid, resampled_local_argmax, resampled_local_argmax_stride, resampled_local_max, resampled_local_max_stride,
    target_logits, target_logits_stride, rejected_step, cu_num_logits, expanded_idx_mapping, draft_sampled, temp, seed,
    pos, vocab_size, BLOCK_SIZE, HAS_DRAFT_LOGITS, USE_FP64, WATERMARK,
):  # fmt: skip
    if HAS_DRAFT_LOGITS or USE_FP64 or WATERMARK or target_logits.element_size() != 4:
        return NotImplemented
    count, blocks = grid
    firsts, steps = memory(cu_num_logits)[: count + 1].tolist(), memory(rejected_step)
    requests, drafts = memory(expanded_idx_mapping), memory(draft_sampled)
    temperatures, seeds, positions = memory(temp), memory(seed), memory(pos)
    logits = rows(target_logits, firsts[-1], target_logits_stride, vocab_size)
    tokens = rows(resampled_local_argmax, count, resampled_local_argmax_stride, blocks)
    maxima = rows(resampled_local_max, count, resampled_local_max_stride, blocks)
    values = np.full(blocks * BLOCK_SIZE, -np.inf, F32)
    for row in range(count):
        token = firsts[row] + int(steps[row])
        request, bonus = requests[token], token == firsts[row + 1] - 1
        if temperatures[request] == 0 and not bonus:
            continue
        values[:vocab_size] = logits[token]
        if not bonus and drafts[token + 1] >= 0:
            values[drafts[token + 1]] = -np.inf
        if temperatures[request] != 0:
            values[:vocab_size] += gumbel(int(seeds[request]), int(positions[token]), vocab_size)
        each = values.reshape(blocks, BLOCK_SIZE)
        tokens[row] = np.nanargmax(each, axis=-1) + np.arange(blocks) * BLOCK_SIZE
        maxima[row] = np.nanmax(each, axis=-1)


@stands_for("gpu.spec_decode.rejection_sampler_utils", "_insert_resampled_kernel", "d6a290f3be4d")
def insert_resampled(
    grid, sampled, sampled_stride, num_sampled, resampled_local_argmax, resampled_local_argmax_stride,
    resampled_local_max, resampled_local_max_stride, resample_num_blocks, cu_num_logits, expanded_idx_mapping, temp,
):  # fmt: skip
    count = grid[0]
    numbers, firsts = memory(num_sampled), memory(cu_num_logits)[: count + 1].tolist()
    requests, temperatures, out = memory(expanded_idx_mapping), memory(temp), memory(sampled)
    tokens = rows(resampled_local_argmax, count, resampled_local_argmax_stride, resample_num_blocks)
    maxima = rows(resampled_local_max, count, resampled_local_max_stride, resample_num_blocks)
    for row in range(count):
        number = int(numbers[row])
        numbers[row] += 1
        token = firsts[row] + number
        if temperatures[requests[token]] != 0 or token == firsts[row + 1] - 1:
            block = np.where(np.isnan(maxima[row]), -np.inf, maxima[row]).argmax()
            out[row * sampled_stride + number] = tokens[row, block]


@stands_for("gpu.spec_decode.dflash.speculator", "_prepare_dflash_inputs_kernel", "ef53e41b2b4c", "71c3eedab966")
def prepare_dflash_inputs(
    grid, out_input_ids, out_query_positions, out_query_start_loc, out_seq_lens, out_query_slot_mapping,
    out_context_positions, out_context_slot_mapping, out_sample_indices, out_sample_pos, out_sample_idx_mapping,
    out_temperature, out_seeds, target_positions, target_query_start_loc, idx_mapping, last_sampled,
    next_prefill_tokens, num_sampled, num_rejected, temperature, seeds, block_table, block_table_stride,
    parallel_drafting_token_id, block_size, num_query_per_req, num_speculative_steps, max_num_reqs, max_num_tokens,
    max_model_len, SAMPLE_FROM_ANCHOR, PAD_SLOT_ID, CP_SIZE,
    out_is_padding=None,
):  # fmt: skip
    if CP_SIZE != 1:
        return NotImplemented
    count, queries, steps = grid[0], num_query_per_req, num_speculative_steps
    tables = rows(block_table, count, block_table_stride, block_table_stride)

    def slots(row, positions):
        blocks = tables[row, np.minimum(positions // block_size, block_table_stride - 1)].astype(np.int64)
        return np.where(blocks != 0, blocks * block_size + positions % block_size, PAD_SLOT_ID)

    ids, at, into = (memory(each) for each in (out_input_ids, out_query_positions, out_query_slot_mapping))
    starts, lengths = memory(out_query_start_loc), memory(out_seq_lens)
    indices, sampled_at, mapping = (
        memory(each) for each in (out_sample_indices, out_sample_pos, out_sample_idx_mapping)
    )
    positions, ends = memory(target_positions), memory(target_query_start_loc)[: count + 1].tolist()
    context, context_slots = memory(out_context_positions), memory(out_context_slot_mapping)
    anchor = 0 if SAMPLE_FROM_ANCHOR else 1
    for row, request in enumerate(memory(idx_mapping)[:count].tolist()):
        start, end = ends[row], ends[row + 1]
        valid = end - int(memory(num_rejected)[row])
        context[start:valid], context[valid:end] = positions[start:valid], 0
        context_slots[start:valid], context_slots[valid:end] = slots(row, positions[start:valid]), PAD_SLOT_ID
        first, places = row * queries, int(positions[valid - 1]) + 1 + np.arange(queries)
        ids[first : first + queries] = parallel_drafting_token_id
        ids[first] = memory(last_sampled if memory(num_sampled)[row] > 0 else next_prefill_tokens)[request]
        at[first : first + queries] = np.minimum(places, max_model_len - 1)
        into[first : first + queries] = slots(row, places)
        of_samples = slice(row * steps, row * steps + queries - anchor)
        indices[of_samples] = first + np.arange(anchor, queries)
        sampled_at[of_samples] = places[anchor:] + (1 - anchor)
        mapping[of_samples] = request
        starts[row], lengths[row] = first, min(int(places[0]) + queries, max_model_len)
        memory(out_temperature)[request] = memory(temperature)[request]
        memory(out_seeds)[request] = memory(seeds)[request]
    starts[count : max_num_reqs + 1], lengths[count:max_num_reqs] = count * queries, 0
    for out, padding in ((indices, 0), (sampled_at, 0), (mapping, -1)):
        out[count * steps : max_num_reqs * steps] = padding
    into[count * queries : max_num_tokens] = PAD_SLOT_ID
    if out_is_padding is not None:
        memory(out_is_padding)[:max_num_tokens] = np.arange(max_num_tokens) >= count * queries
        ids[count * queries : max_num_tokens], at[count * queries : max_num_tokens] = 0, 0


@stands_for("gpu.spec_decode.standalone_ar.speculator", "_prepare_prefill_inputs_kernel", "6bfd26dcd80e")
def prepare_standalone_inputs(
    grid, target_input_ids, target_positions, last_sampled, idx_mapping, out_input_ids, out_positions,
    last_token_indices, out_query_start_loc, out_seq_lens, query_start_loc, seq_lens, num_rejected, max_num_reqs,
    max_model_len,
):  # fmt: skip
    count = grid[0]
    starts, rejected = memory(query_start_loc)[: count + 1].tolist(), memory(num_rejected)
    ids, positions, ends = memory(out_input_ids), memory(out_positions), memory(last_token_indices)
    for row, request in enumerate(memory(idx_mapping)[:count].tolist()):
        start, first, total = starts[row], starts[row] + row, starts[row + 1] - starts[row] + 1
        valid = total - 1 - int(rejected[row])
        ids[first : first + total] = 0
        ids[first : first + valid] = memory(target_input_ids)[start : start + valid]
        ids[first + valid] = memory(last_sampled)[request]
        begin = int(memory(target_positions)[start])
        positions[first : first + total] = np.minimum(np.arange(begin, begin + total), max_model_len - 1)
        ends[row] = first + valid
    memory(out_query_start_loc)[: count + 1] = np.asarray(starts) + np.arange(count + 1)
    memory(out_query_start_loc)[count + 1 : max_num_reqs + 1] = starts[count] + count
    memory(out_seq_lens)[:count] = np.minimum(memory(seq_lens)[:count] + 1, max_model_len)
    memory(out_seq_lens)[count:max_num_reqs] = 0
    ends[count:max_num_reqs] = 0
