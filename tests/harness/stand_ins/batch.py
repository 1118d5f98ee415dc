"""Stand-ins for kernels that prepare a step's batch and keep requests' states."""

import numpy as np

from .registry import ints_at, memory, stands_for


@stands_for("gpu.buffer_utils", "_apply_write_kernel", "7ead8dc875ac", "9f91d0a653ba")
def apply_write(
    grid, output, output_stride, write_indices, write_starts, write_contents, write_cu_lens, write_group_ids,
    MULTI_GROUP,
):  # fmt: skip
    indices, starts, ends = (memory(each)[: grid[0]].tolist() for each in (write_indices, write_starts, write_cu_lens))
    contents = memory(write_contents)
    if MULTI_GROUP:
        addresses, strides = output.tolist(), output_stride.tolist()
        groups = memory(write_group_ids)
    else:
        out, stride = memory(output), output_stride
    begin = 0
    for write, (row, start, end) in enumerate(zip(indices, starts, ends)):
        if MULTI_GROUP:
            stride = strides[groups[write]]
            out = ints_at(addresses[groups[write]], (row + 1) * stride)
        first = row * stride + start
        out[first : first + end - begin] = contents[begin:end]
        begin = end


@stands_for("gpu.block_table", "_gather_block_tables_kernel", "fdab24bafcf3", "a579c223c2c3")
def gather_block_tables(
    grid, batch_idx_to_req_idx, src_block_table_ptrs, dst_block_table_ptrs, block_table_strides, num_blocks_ptr,
    num_blocks_stride, num_reqs, num_computed_tokens=None, sliding_window_reach=None, block_sizes=None,
    MASK_SLIDING_WINDOW=False,
):  # fmt: skip
    groups, padded = grid
    requests, num_blocks = memory(batch_idx_to_req_idx)[:num_reqs].tolist(), memory(num_blocks_ptr)
    sources, targets = src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist()
    for group, stride in enumerate(block_table_strides.tolist()[:groups]):
        source = ints_at(sources[group], (max(requests, default=0) + 1) * stride).reshape(-1, stride)
        target = ints_at(targets[group], padded * stride).reshape(-1, stride)
        for row, request in enumerate(requests):
            count = num_blocks[group * num_blocks_stride + request]
            target[row, :count] = source[request, :count]
            if MASK_SLIDING_WINDOW and (reach := int(sliding_window_reach[group])):
                below = max(int(num_computed_tokens[request]) - reach, 0) // int(block_sizes[group])
                target[row, : min(below, count)] = 0
        target[num_reqs:] = 0


@stands_for("gpu.block_table", "_compute_slot_mappings_kernel", "71e2f8ce757c")
def compute_slot_mappings(
    grid, max_num_tokens, idx_mapping, query_start_loc, pos, block_table_ptrs, block_table_strides, block_sizes,
    slot_mapping_enabled, slot_mappings_ptr, slot_mappings_stride, CP_SIZE, PAD_ID,
):  # fmt: skip
    if CP_SIZE != 1:
        return NotImplemented
    groups, count = grid[0], grid[1] - 1
    starts = memory(query_start_loc)[: count + 1]
    tokens = slice(int(starts[0]), int(starts[-1]))
    requests = np.repeat(memory(idx_mapping)[:count], np.diff(starts)).astype(np.int64)
    real = requests >= 0
    positions, slots = memory(pos)[tokens], memory(slot_mappings_ptr)
    strides, sizes, enabled = block_table_strides.tolist(), block_sizes.tolist(), slot_mapping_enabled.tolist()
    for group, address in enumerate(block_table_ptrs.tolist()[:groups]):
        stride, size = strides[group], sizes[group]
        row = slots[group * slot_mappings_stride :][:max_num_tokens]
        row[tokens.stop :] = PAD_ID
        if enabled[group] and real.any():
            table = ints_at(address, (int(requests.max()) + 1) * stride)
            blocks = table[np.where(real, requests * stride + positions // size, 0)].astype(np.int64)
            row[tokens] = np.where(real, blocks * size + positions % size, PAD_ID)
        else:
            row[tokens] = PAD_ID


@stands_for("gpu.input_batch", "_prepare_prefill_inputs_kernel", "96d1b0d0dffd")
def prepare_prefill_inputs(
    grid, input_ids, next_prefill_tokens, next_prefill_tokens_stride, num_lookahead, idx_mapping, query_start_loc,
    all_token_ids, all_token_ids_stride, prefill_lens, num_computed_tokens,
):  # fmt: skip
    ids, ahead, known = memory(input_ids), memory(next_prefill_tokens), memory(all_token_ids)
    requests, starts = _requests(grid[0], idx_mapping, query_start_loc)
    prefills, computed = memory(prefill_lens), memory(num_computed_tokens)
    for row, request in enumerate(requests):
        done, prefill = int(computed[request]), int(prefills[request])
        if done >= prefill:
            continue
        start, end = starts[row], starts[row + 1]
        tokens = known[request * all_token_ids_stride :]
        ids[start:end] = tokens[done : done + end - start]
        for lookahead in range(num_lookahead):
            position = done + end - start + lookahead
            place = lookahead * next_prefill_tokens_stride + request
            ahead[place] = tokens[position] if position < prefill else 0


@stands_for("gpu.input_batch", "_prepare_pos_seq_lens_kernel", "33c07567a9fe")
def prepare_pos_seq_lens(grid, pos, seq_lens, idx_mapping, query_start_loc, num_computed_tokens, max_num_reqs):
    count = grid[0] - 1
    positions, lengths, computed = memory(pos), memory(seq_lens), memory(num_computed_tokens)
    requests, starts = _requests(count, idx_mapping, query_start_loc)
    for row, request in enumerate(requests):
        start, end, done = starts[row], starts[row + 1], int(computed[request])
        lengths[row] = done + end - start
        positions[start:end] = np.arange(done, done + end - start)
    lengths[count:max_num_reqs] = 0


@stands_for("gpu.input_batch", "_combine_sampled_and_draft_tokens_kernel", "c02435e0be07")
def combine_sampled_and_draft_tokens(
    grid, input_ids, idx_mapping, last_sampled_tokens, query_start_loc, seq_lens, prefill_len, draft_tokens,
    draft_tokens_stride, cu_num_logits, logits_indices, NUM_NEW_SAMPLED_TOKENS=1,
):  # fmt: skip
    ids, indices, drafts = memory(input_ids), memory(logits_indices), memory(draft_tokens)
    requests, starts = _requests(grid[0], idx_mapping, query_start_loc)
    firsts, lengths = memory(cu_num_logits).tolist(), memory(seq_lens)
    prefills, last = memory(prefill_len), memory(last_sampled_tokens)
    for row, request in enumerate(requests):
        first, end = firsts[row], starts[row + 1]
        logits = firsts[row + 1] - first
        indices[first : first + logits] = np.arange(end - logits, end)
        length, prefill = int(lengths[row]), int(prefills[request])
        if length <= prefill:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and length - logits >= prefill:
            ids[end - logits] = last[request]
        if (count := logits - NUM_NEW_SAMPLED_TOKENS) > 0:
            ids[end - count : end] = drafts[request * draft_tokens_stride :][:count]


@stands_for("gpu.input_batch", "_get_num_sampled_and_rejected_kernel", "17bfac5e1599")
def get_num_sampled_and_rejected(
    grid, num_sampled_ptr, num_rejected_ptr, seq_lens, cu_num_logits, idx_mapping, prefill_len,
):  # fmt: skip
    count = grid[0]
    sampled, rejected = memory(num_sampled_ptr)[:count], memory(num_rejected_ptr)[:count]
    generates = memory(seq_lens)[:count] >= memory(prefill_len)[memory(idx_mapping)[:count]]
    sampled *= generates
    rejected[:] = (np.diff(memory(cu_num_logits)[: count + 1]) - sampled) * generates


@stands_for("gpu.input_batch", "_post_update_kernel", "1f8738a0c9e9", "829dedee2756")
def post_update(
    grid, idx_mapping, num_computed_tokens, last_sampled_tokens, output_bin_counts, output_bin_counts_stride,
    sampled_tokens, sampled_tokens_stride, num_sampled_ptr, num_rejected_ptr, query_start_loc, all_token_ids,
    all_token_ids_stride, total_len_ptr, draft_tokens=None, draft_tokens_out=None,
):  # fmt: skip
    requests = memory(idx_mapping)[: grid[0]].tolist()
    computed, last, total = memory(num_computed_tokens), memory(last_sampled_tokens), memory(total_len_ptr)
    samples, known = memory(sampled_tokens), memory(all_token_ids)
    numbers, rejected = memory(num_sampled_ptr).tolist(), memory(num_rejected_ptr).tolist()
    starts = None if query_start_loc is None else memory(query_start_loc).tolist()
    for row, request in enumerate(requests):
        if request < 0:
            continue
        if draft_tokens is not None:
            draft_tokens_out[request] = draft_tokens[row]
        if (count := numbers[row]) > 0:
            tokens = samples[row * sampled_tokens_stride :][:count]
            first = request * all_token_ids_stride + int(total[request])
            known[first : first + count] = tokens
            last[request] = tokens[-1]
            total[request] += count
            if output_bin_counts is not None:
                np.add.at(memory(output_bin_counts)[request * output_bin_counts_stride :], tokens, 1)
        queries = 0 if starts is None else starts[row + 1] - starts[row]
        computed[request] += queries - rejected[row]


@stands_for("gpu.input_batch", "_post_update_num_computed_tokens_kernel", "b26822442702")
def post_update_num_computed_tokens(grid, idx_mapping, num_computed_tokens, query_start_loc):
    requests, starts = _requests(grid[0], idx_mapping, query_start_loc)
    np.add.at(memory(num_computed_tokens), requests, np.diff(starts[: grid[0] + 1]))


@stands_for("gpu.input_batch", "_expand_idx_mapping_kernel", "7636f8d252d4")
def expand_idx_mapping(grid, idx_mapping, expanded_idx_mapping, expanded_local_pos, cu_num_logits):
    requests, firsts = memory(idx_mapping)[: grid[0]].tolist(), memory(cu_num_logits).tolist()
    expanded, places = memory(expanded_idx_mapping), memory(expanded_local_pos)
    for row, request in enumerate(requests):
        first, end = firsts[row], firsts[row + 1]
        expanded[first:end] = request
        places[first:end] = np.arange(end - first)


@stands_for("gpu.model_states.mamba_hybrid", "_scatter_num_accepted_kernel", "3bfefe75dd17")
def scatter_num_accepted(grid, idx_mapping, num_sampled, num_accepted):
    requests = memory(idx_mapping)[: grid[0]]
    real = requests >= 0
    memory(num_accepted)[requests[real]] = np.maximum(memory(num_sampled)[: grid[0]][real], 1)


@stands_for("gpu.model_states.mamba_hybrid", "_fill_num_accepted_kernel", "1c8ea4a64730")
def fill_num_accepted(grid, idx_mapping, num_accepted, num_sampled):
    requests = memory(idx_mapping)[: grid[0]]
    memory(num_accepted)[requests[requests >= 0]] = num_sampled


def _requests(count, idx_mapping, query_start_loc):
    """Return places of the requests of a batch, and where each one's queries start: [count], [count + 1]."""
    return memory(idx_mapping)[:count].tolist(), memory(query_start_loc)[: count + 1].tolist()
