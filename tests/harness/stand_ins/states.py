"""Stand-ins for kernels that copy states of linear attention between blocks, and that clear blocks."""

import ctypes

import numpy as np

from .registry import ints_at, memory, stands_for


@stands_for("utils", "_zero_kv_blocks_kernel", "c62acf83e325")
def zero_kv_blocks(grid, seg_addrs, seg_block_strides, seg_page_sizes, block_ids, BLOCK_SIZE):
    blocks, strides, sizes = block_ids.tolist(), seg_block_strides.tolist(), seg_page_sizes.tolist()
    for segment, address in enumerate(seg_addrs.tolist()[: grid[1]]):
        for block in blocks[: grid[0]]:
            ctypes.memset(address + 4 * block * strides[segment], 0, 4 * min(sizes[segment], grid[2] * BLOCK_SIZE))


@stands_for("mamba_utils", "preprocess_mamba_align_fused_kernel", "1b1f5808e38b")
def preprocess_mamba_align(
    grid, idx_mapping, state_idx_ptr, num_computed_tokens, query_start_loc, num_accepted_tokens, src_col, src_off,
    num_reqs, MAMBA_BLOCK_SIZE,
):  # fmt: skip
    requests = memory(idx_mapping)[:num_reqs]
    states, accepted = memory(state_idx_ptr), memory(num_accepted_tokens)
    before = states[requests]
    memory(src_col)[requests] = before
    memory(src_off)[requests] = np.maximum(accepted[requests] - 1, 0)
    computed = memory(num_computed_tokens)[requests] + np.diff(memory(query_start_loc)[: num_reqs + 1])
    states[requests] = (computed + MAMBA_BLOCK_SIZE - 1) // MAMBA_BLOCK_SIZE - 1
    accepted[requests[(before >= 0) & (before != states[requests])]] = 1


@stands_for("mamba_utils", "precopy_mamba_align_fused_kernel", "de7b8a02ed08")
def precopy_mamba_align(
    grid, mamba_state_idx, src_col, token_bias, block_table_ptrs, block_table_stride_req, state_base_addrs,
    state_block_strides, state_elem_sizes, state_inner_sizes, state_conv_widths, state_group_indices, idx_mapping,
    num_reqs, CONV_STATE_DIM_FIRST, HAS_IDX_MAPPING=True,
):  # fmt: skip
    if CONV_STATE_DIM_FIRST:
        return NotImplemented
    sources, targets, biases = memory(src_col), memory(mamba_state_idx), memory(token_bias)
    for request in _requests(idx_mapping if HAS_IDX_MAPPING else None, num_reqs):
        source, target = int(sources[request]), int(targets[request])
        if source >= 0 and source != target:
            _copy(
                grid[1], request, source, target, int(biases[request]), block_table_ptrs, block_table_stride_req,
                state_base_addrs, state_block_strides, state_elem_sizes, state_inner_sizes, state_conv_widths,
                state_group_indices,
            )  # fmt: skip


@stands_for("mamba_utils", "postprocess_mamba_fused_kernel", "9f0ff4417c78")
def postprocess_mamba(
    grid, num_accepted_tokens, mamba_state_idx, num_computed_tokens, block_table_ptrs, block_table_stride_req,
    state_base_addrs, state_block_strides, state_elem_sizes, state_inner_sizes, state_conv_widths, state_group_indices,
    num_accepted_tokens_out, idx_mapping, num_reqs, block_size, CONV_STATE_DIM_FIRST, HAS_IDX_MAPPING=False,
    PRECOMPUTED_NEW_COMPUTED=False,
):  # fmt: skip
    # The other form, of Model Runner V1, reads what this form does not have.
    if CONV_STATE_DIM_FIRST or not PRECOMPUTED_NEW_COMPUTED:
        return NotImplemented
    accepted, states, computed = memory(num_accepted_tokens), memory(mamba_state_idx), memory(num_computed_tokens)
    for request in _requests(idx_mapping if HAS_IDX_MAPPING else None, num_reqs):
        running = int(computed[request]) - int(accepted[request]) + 1
        aligned = int(computed[request]) // block_size * block_size
        if aligned < running:
            continue
        source, target, bias = int(states[request]), aligned // block_size - 1, aligned - running
        if source != target or bias:
            _copy(
                grid[1], request, source, target, bias, block_table_ptrs, block_table_stride_req, state_base_addrs,
                state_block_strides, state_elem_sizes, state_inner_sizes, state_conv_widths, state_group_indices,
            )  # fmt: skip
        if source == target:
            memory(num_accepted_tokens_out)[request] = 1


def _requests(idx_mapping, count):
    """Return places of the requests of a batch."""
    return range(count) if idx_mapping is None else [each for each in memory(idx_mapping)[:count].tolist() if each >= 0]


def _copy(
    states, request, source, target, bias, tables, table_stride, addresses, strides, elements, inner, widths, groups
):  # fmt: skip
    """Copy a request's states from one column of its block tables to another, past `bias` tokens: convolutions' states
    within a block, others from the column so many further."""
    bases, firsts = tables.tolist(), addresses.tolist()
    for state in range(states):
        width, group = int(widths[state]), int(groups[state])
        columns = max(source + bias * (not width), target) + 1
        row = ints_at(bases[group] + 4 * request * int(table_stride), columns)
        size, stride = int(inner[state]) * int(elements[state]), int(strides[state])
        to = firsts[state] + int(row[target]) * stride
        if width:
            ctypes.memmove(to, firsts[state] + int(row[source]) * stride + bias * size, (width - bias) * size)
        else:
            ctypes.memmove(to, firsts[state] + int(row[source + bias]) * stride, size)
