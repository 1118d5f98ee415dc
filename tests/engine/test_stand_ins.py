"""Stand-ins for Model Runner V2's kernels do what these do under Triton's interpreter, to the bit."""

import importlib
import inspect
from contextlib import contextmanager
from importlib.metadata import version
from unittest.mock import patch

import pytest
import torch
from engine import V2
from packaging.version import Version
from triton.runtime import interpreter

if not V2 or Version(version("vllm")) < Version("0.32"):
    pytest.skip("kernels of Model Runner V2, as of vLLM 0.32 and later", allow_module_level=True)

from stand_ins import STAND_INS, digest_of, parameters
from vllm.v1.worker import mamba_utils, utils
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch, structured_outputs
from vllm.v1.worker.gpu.model_states import mamba_hybrid
from vllm.v1.worker.gpu.sample import gumbel, logprob, min_p, prompt_logprob
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash
from vllm.v1.worker.gpu.spec_decode.ngram import speculator as ngram
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as drafter

#: Places for requests in the runner's memory, tokens of a prompt and its answer, sizes of the vocabulary.
PLACES, LENGTH, VOCABULARY = 8, 100, (200, 1500)


class Batch:
    """Random memory of a runner, and a batch of requests in it, some of which are prompts. Tensors are named as kernels
    name them.
    """

    def __init__(self, seed):
        self.random = torch.Generator().manual_seed(seed)
        self.requests = 3 + seed % 3
        self.idx_mapping = torch.randperm(PLACES, generator=self.random, dtype=torch.int32)[: self.requests]
        self.prefill_lens = self.ints(20, 60, PLACES)
        self.num_computed_tokens = self.ints(0, 60, PLACES)
        self.all_token_ids = self.ints(0, 5, PLACES, LENGTH)
        self.total_len = self.ints(60, 80, PLACES)
        self.query_start_loc = self.sums(self.ints(4, 9, self.requests), PLACES + 1)
        self.seq_lens = self.ints(10, 70, PLACES)
        self.last_sampled = self.ints(0, VOCABULARY[0], PLACES)
        self.next_prefill_tokens = self.ints(0, VOCABULARY[0], 2, PLACES)
        self.tokens = int(self.query_start_loc[-1])
        self.input_ids = self.ints(0, VOCABULARY[0], 4 * LENGTH)
        self.positions = self.ints(0, 60, 4 * LENGTH).long()
        # At least one draft where not all requests have none.
        self.drafts = 3
        logits = self.ints(1, self.drafts + 2, self.requests)
        self.cu_num_logits = self.sums(logits, self.requests + 1)
        self.num_logits = int(self.cu_num_logits[-1])
        self.logits_indices = torch.arange(self.num_logits)
        self.num_sampled = torch.minimum(self.ints(0, self.drafts + 2, self.requests), logits)
        self.num_rejected = torch.clamp(logits - self.num_sampled, min=0)
        self.vocabulary = VOCABULARY[seed % 2]
        self.logits = torch.randn(self.num_logits, self.vocabulary, generator=self.random)
        self.logits[:, :3] = self.logits.amax(1, keepdim=True)  # of equal ones the first
        self.logits[0, 7] = -torch.inf
        self.expanded_idx_mapping = torch.repeat_interleave(self.idx_mapping, logits)
        self.expanded_local_pos = torch.cat([torch.arange(int(count), dtype=torch.int32) for count in logits])
        self.temperature = torch.tensor([0, 1, 0.7, 2, 0, 0.3, 1, 5])
        self.seeds = torch.randint(-(2**62), 2**62, (PLACES,), generator=self.random)
        self.sampled = self.ints(0, VOCABULARY[0], self.requests, self.drafts + 1).long()
        self.tables = [self.ints(0, 99, PLACES, LENGTH // 4) for _ in range(2)]
        self.out = torch.full((2, 4 * LENGTH), 77)

    def ints(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.random, dtype=torch.int32)

    @staticmethod
    def sums(counts, size):
        found = torch.zeros(size, dtype=torch.int32)
        found[1 : len(counts) + 1] = counts.cumsum(0)
        found[len(counts) + 1 :] = found[len(counts)]
        return found

    def tensors(self):
        """All memory that a kernel may write."""
        found = [each for each in vars(self).values() if isinstance(each, torch.Tensor)]
        return [*found, *self.tables]


def writes(batch):
    rows, starts, contents = (torch.tensor(each, dtype=torch.int32) for each in ([3, 1, 3], [2, 0, 9], range(12)))
    args = rows, starts, contents, torch.tensor([4, 11, 12], dtype=torch.int32)
    kernel = buffer_utils._apply_write_kernel[(3, 2)]
    kernel(batch.all_token_ids, LENGTH, *args, None, BLOCK_SIZE=4, MULTI_GROUP=False)
    groups = torch.tensor([1, 0, 1], dtype=torch.int32)
    kernel(*pointers(batch.tables), *args, groups, BLOCK_SIZE=4, MULTI_GROUP=True)


def pointers(tables):
    addresses = torch.tensor([each.data_ptr() for each in tables], dtype=torch.uint64)
    return addresses, torch.tensor([each.stride(0) for each in tables])


def gathered(batch):
    addresses, strides = pointers(batch.tables)
    out = [torch.full_like(each, 55) for each in batch.tables]
    numbers = batch.ints(0, 20, 2, PLACES)
    kernel, masks = block_table._gather_block_tables_kernel, {}
    if "MASK_SLIDING_WINDOW" in kernel.arg_names:  # vLLM 0.33
        masks = dict(
            num_computed_tokens_ptr=batch.num_computed_tokens,
            sliding_window_reach_ptr=torch.tensor([0, 8], dtype=torch.int32),
            block_sizes_ptr=torch.tensor([4, 4], dtype=torch.int32),
            MASK_SLIDING_WINDOW=batch.requests % 2 == 0,
        )
    kernel[(2, batch.requests + 1)](
        batch.idx_mapping,
        addresses,
        pointers(out)[0],
        strides,
        numbers,
        numbers.stride(0),
        batch.requests,
        BLOCK_SIZE=16,
        **masks,
    )
    return out


def slots(batch):
    addresses, strides = pointers(batch.tables)
    mapping = batch.idx_mapping.clone()
    mapping[0] = -1
    enabled, sizes = torch.tensor([True, batch.requests % 2 == 0]), torch.tensor([4, 8], dtype=torch.int32)
    starts = batch.query_start_loc[: batch.requests + 1]
    block_table._compute_slot_mappings_kernel[(2, batch.requests + 1)](
        batch.out.shape[1], mapping, starts, batch.positions, addresses, strides, sizes, enabled, enabled, batch.out,
        batch.out.stride(0), 0, CP_SIZE=1, CP_INTERLEAVE=1, PAD_ID=-1, TRITON_BLOCK_SIZE=16,
    )  # fmt: skip


def prefills(batch):
    input_batch.prepare_prefill_inputs(
        batch.input_ids, batch.next_prefill_tokens, batch.idx_mapping, batch.query_start_loc, batch.all_token_ids,
        batch.prefill_lens, batch.num_computed_tokens,
    )  # fmt: skip


def positions(batch):
    input_batch.prepare_pos_seq_lens(
        batch.idx_mapping, batch.query_start_loc, batch.num_computed_tokens, batch.positions, batch.seq_lens
    )


def combined(batch):
    drafts = batch.ints(0, 9, PLACES, batch.drafts)
    return input_batch.combine_sampled_and_draft_tokens(
        batch.input_ids, batch.idx_mapping, batch.last_sampled, batch.query_start_loc, batch.seq_lens, batch.prefill_lens,
        drafts, batch.cu_num_logits, batch.num_logits,
    )  # fmt: skip


def counted(batch):
    return input_batch.get_num_sampled_and_rejected(
        batch.num_sampled, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, batch.prefill_lens
    )


def updated(batch):
    counts = batch.ints(0, 3, PLACES, VOCABULARY[0])
    mapping, drafts = batch.idx_mapping.clone(), {}
    mapping[1] = -1
    if "draft_tokens_ptr" in input_batch._post_update_kernel.arg_names and batch.requests % 2:  # vLLM 0.33
        drafts = dict(draft_tokens=batch.ints(0, 9, batch.requests, 3), draft_tokens_out=batch.ints(0, 9, PLACES, 3))
    input_batch.post_update(
        mapping, batch.num_computed_tokens, batch.last_sampled, counts if batch.requests % 2 else None, batch.sampled,
        batch.num_sampled, batch.num_rejected, batch.query_start_loc if batch.requests > 3 else None, batch.all_token_ids,
        batch.total_len, **drafts,
    )  # fmt: skip
    input_batch.post_update_num_computed_tokens(batch.idx_mapping, batch.num_computed_tokens, batch.query_start_loc)
    return counts, *drafts.values()


def expanded(batch):
    return input_batch.expand_idx_mapping(batch.idx_mapping, batch.num_logits, batch.cu_num_logits, batch.drafts + 1)


def accepted(batch):
    mapping = batch.idx_mapping.clone()
    mapping[0] = -1
    grid = (batch.requests,)
    mamba_hybrid._scatter_num_accepted_kernel[grid](mapping, batch.num_sampled, batch.total_len)
    mamba_hybrid._fill_num_accepted_kernel[grid](mapping, batch.seq_lens, 1)


def states(batch):
    """Convolutions' states and others of two groups, of which one has blocks of another size."""
    conv, other = torch.randn(99, 6, 5, generator=batch.random), torch.randn(99, 40, generator=batch.random)
    layers, groups, widths = (conv, other, other.clone()), torch.tensor([0, 0, 1], dtype=torch.int32), [4, 0, 0]
    layout = [
        torch.tensor([each.data_ptr() for each in layers]),
        torch.tensor([4 * each.stride(0) for each in layers]),
        torch.tensor([4, 4, 4], dtype=torch.int32),
        torch.tensor([5, 40, 20], dtype=torch.int32),
        torch.tensor(widths, dtype=torch.int32),
        groups,
    ]
    tables = pointers([each.random_(1, 99, generator=batch.random) for each in batch.tables])[0].long(), LENGTH // 4
    mapping, block = batch.idx_mapping.clone(), 16
    column, source, bias = batch.ints(-1, 4, PLACES), batch.ints(0, 4, PLACES), batch.ints(0, 3, PLACES)
    computed = batch.num_computed_tokens + 5  # more than were accepted
    accepted, rows, zero = (
        batch.ints(1, 5, PLACES),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int64),
    )
    grid, options = (batch.requests, 3, 1), dict(COPY_BLOCK_SIZE=64, CONV_STATE_DIM_FIRST=False, HAS_IDX_MAPPING=True)
    mamba_utils.preprocess_mamba_align_fused_kernel[(1,)](
        mapping, column, computed, batch.query_start_loc, accepted, source, bias, batch.requests,
        BLOCK_SIZE=16, MAMBA_BLOCK_SIZE=block,
    )  # fmt: skip
    mapping[0] = -1
    mamba_utils.precopy_mamba_align_fused_kernel[grid](
        column, source, bias, *tables, *layout, rows, zero, mapping, batch.requests, **options
    )
    mamba_utils.postprocess_mamba_fused_kernel[grid](
        accepted, column, None, computed, None, *tables, *layout, rows, zero, accepted, mapping,
        batch.requests, block_size=block, PRECOMPUTED_NEW_COMPUTED=True, **options,
    )  # fmt: skip
    utils._zero_kv_blocks_kernel[(2, 3, 2)](
        layout[0], torch.tensor([30, 40, 40]), torch.tensor([30, 40, 20]), torch.tensor([5, 17]), BLOCK_SIZE=32
    )
    return *layers, column, source, bias, accepted


def sampled(batch):
    cache = torch.zeros(PLACES, 2, batch.vocabulary)
    column, first = torch.tensor(1), batch.logits.clone()
    args = batch.expanded_idx_mapping, batch.temperature, batch.seeds, torch.arange(batch.num_logits)
    plain = gumbel.gumbel_sample(first, *args, apply_temperature=True, is_drafting=False)
    gumbel.apply_temperature(batch.logits, batch.expanded_idx_mapping, batch.temperature)
    drafted = gumbel.gumbel_sample(
        batch.logits, *args, apply_temperature=False, is_drafting=True, logits_cache=cache, logits_cache_col=column
    )
    return plain, drafted, cache


def noise(batch):
    """The noise itself: log-probabilities of tokens that differ in nothing else."""
    shape, logits = (1, 1), torch.zeros(1, 1024)
    best, value = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
    at = torch.tensor([batch.requests * 1000])
    for token in range(0, 1024, 64):
        logits.fill_(-1e30)[0, token] = 0
        gumbel._gumbel_sample_kernel[shape](
            best, 1, value, 1, None, 0, 0, None, None, 0, logits, 1024, torch.tensor([1]), batch.seeds, at,
            batch.temperature, 1024, BLOCK_SIZE=1024, IS_DRAFTING=False, APPLY_TEMPERATURE=True, USE_FP64=False,
            PER_TOKEN_COL=False,
        )  # fmt: skip
    return best, value


def ranked(batch):
    tokens = batch.ints(0, batch.vocabulary, batch.num_logits)
    tokens[0] = 7
    found = logprob.compute_topk_scores(batch.logits, 4, tokens.long())
    return found.logprob_token_ids, found.logprobs, found.selected_token_ranks


def of_prompts(batch):
    return prompt_logprob.get_prompt_logprobs_token_ids(
        batch.tokens, batch.query_start_loc, batch.idx_mapping, batch.num_computed_tokens, batch.all_token_ids
    )


def improbable(batch):
    shares = torch.tensor([0, 0.1, 0.5, 0, 1, 0.01, 0.2, 0.9])
    min_p.apply_min_p(batch.logits, batch.expanded_idx_mapping, shares)


def grammars(batch):
    masks = torch.randint(-(2**31), 2**31, (2, -(-batch.vocabulary // 32)), generator=batch.random).int()
    structured_outputs._apply_grammar_bitmask_kernel[(2, 1)](
        batch.logits, batch.logits.stride(0), torch.tensor([0, 4 + 3]), batch.cu_num_logits, masks, masks.stride(0),
        batch.vocabulary, MASK_STRIDE=4, BLOCK_SIZE=8192,
    )  # fmt: skip


def ngrams(batch):
    scratch, drafts = (
        torch.zeros(batch.requests, 7, dtype=torch.int64),
        torch.zeros(batch.requests, 4, dtype=torch.int64),
    )
    last = batch.last_sampled.long()
    ngram._ngram_scan_kernel[(batch.requests, 7)](
        batch.all_token_ids, LENGTH, batch.idx_mapping, batch.total_len, batch.num_sampled, scratch, 7, LENGTH, MIN_N=2,
        MAX_N=4, MAX_N_PO2=4, BLOCK_L=16,
    )  # fmt: skip
    ngram._ngram_finalize_kernel[(batch.requests,)](
        batch.all_token_ids, LENGTH, batch.idx_mapping, batch.total_len, batch.num_sampled, last, scratch, 7, drafts,
        LENGTH, 7, K=4, K_PO2=4, N_BLOCKS_PO2=8,
    )  # fmt: skip
    return scratch, drafts


def drafted(batch):
    count, grid, ids = batch.requests, (batch.requests,), batch.ints(0, 9, 4 * LENGTH)
    at, ends, step = torch.zeros(4 * LENGTH, dtype=torch.int64), torch.full((PLACES,), 9), torch.tensor(3)
    starts, lengths = batch.ints(0, 9, PLACES + 1), batch.ints(0, 9, PLACES)
    drafter._prepare_prefill_inputs_kernel[grid](
        ends, step, ids, at, starts, lengths, batch.input_ids, batch.positions, batch.idx_mapping, batch.last_sampled,
        batch.next_prefill_tokens, batch.num_sampled, batch.num_rejected, batch.query_start_loc, batch.seq_lens, PLACES,
        BLOCK_SIZE=16,
    )  # fmt: skip
    found = [each.clone() for each in (ends, step, ids, at, starts, lengths)]
    tokens, from_, hidden = batch.sampled[:, 1:], batch.positions[:PLACES].clone(), torch.randn(count, 24)
    drafter._prepare_decode_inputs_kernel[(count + 1,)](
        tokens, tokens.stride(0), batch.seq_lens, batch.num_rejected, ids, at, from_, starts, lengths, 40, PLACES,
        BLOCK_SIZE=16, ADVANCE_DRAFT_POSITIONS=count % 2 == 0,
    )  # fmt: skip
    found += [each.clone() for each in (ids, at, from_, starts, lengths)]
    out, then = torch.zeros(count, 3, dtype=torch.int64), torch.zeros(count, 24)
    for step in torch.tensor([1, 2]):
        drafter._update_draft_inputs_kernel[grid](
            out, out.stride(0), then, then.stride(0), ids, at, from_, lengths, batch.sampled[:, 0].contiguous(), step,
            hidden, hidden.stride(0), 24, 40, 3, BLOCK_SIZE=16, ADVANCE_DRAFT_POSITIONS=count % 2 == 0,
        )  # fmt: skip
    return *found, ids, at, from_, lengths, out, then[:0] if count % 2 else (then == hidden).all()


def standalone_drafts(batch):
    ids, at, ends = batch.ints(0, 9, 4 * LENGTH), torch.zeros(4 * LENGTH, dtype=torch.int64), torch.full((PLACES,), 9)
    starts, lengths = batch.ints(0, 9, PLACES + 1), batch.ints(0, 9, PLACES)
    standalone._prepare_prefill_inputs_kernel[(batch.requests,)](
        batch.input_ids, batch.positions, batch.last_sampled, batch.idx_mapping, ids, at, ends, starts, lengths,
        batch.query_start_loc, batch.seq_lens, batch.num_rejected, PLACES, 50, BLOCK_SIZE=16,
    )  # fmt: skip
    return ids, at, ends, starts, lengths


def dflash_drafts(batch):
    ids, at, into = batch.ints(0, 9, 99), torch.zeros(99, dtype=torch.int64), torch.zeros(99, dtype=torch.int64)
    starts, lengths = batch.ints(0, 9, PLACES + 1), batch.ints(0, 9, PLACES)
    context = [torch.zeros(99, dtype=torch.int64) for _ in range(2)]
    samples = [torch.zeros(99, dtype=kind) for kind in (torch.int64, torch.int64, torch.int32)]
    warmth, seeds, anchor = torch.zeros(PLACES), torch.zeros(PLACES, dtype=torch.int64), batch.requests % 2
    kernel = dflash._prepare_dflash_inputs_kernel
    padding = [torch.zeros(99, dtype=torch.bool)] * ("out_is_padding_ptr" in kernel.arg_names)  # vLLM 0.33
    kernel[(batch.requests, 2)](
        ids, at, *padding, starts, lengths, into, *context, *samples, warmth, seeds, batch.positions, batch.query_start_loc,
        batch.idx_mapping, batch.last_sampled, batch.next_prefill_tokens, batch.num_sampled, batch.num_rejected,
        batch.temperature, batch.seeds, batch.tables[0], LENGTH // 4, 123, 4, 4, 4 - (1 - anchor), PLACES, 99, 50, 0,
        SAMPLE_FROM_ANCHOR=bool(anchor), PAD_SLOT_ID=-1, CP_SIZE=1, CP_INTERLEAVE=1, BLOCK_SIZE=8,
    )  # fmt: skip
    return ids, at, *padding, starts, lengths, into, *context, *samples, warmth, seeds


def verified(batch, rates=None):
    drafts, at = rejection_sampler.gather_draft_sampled(
        batch.input_ids, batch.positions, batch.logits_indices, batch.expanded_idx_mapping, batch.expanded_local_pos,
        batch.prefill_lens,
    )  # fmt: skip
    batch.logits *= 10  # so that requests that sample accept some drafts, too
    best = batch.logits.argmax(1).int()
    right = torch.rand(batch.num_logits, generator=batch.random) < 0.7
    proposed = torch.where(right, best.roll(1), drafts)
    tokens, numbers = rejection_sampler_utils.rejection_sample(
        batch.logits, None, proposed, batch.cu_num_logits, at, batch.idx_mapping, batch.expanded_idx_mapping,
        batch.expanded_local_pos, batch.temperature, batch.seeds, batch.drafts, rates,
    )  # fmt: skip
    flat = torch.zeros(batch.num_logits, dtype=torch.int64)
    rejection_sampler._flatten_sampled_kernel[(batch.requests,)](
        flat, tokens, tokens.stride(0), numbers, batch.cu_num_logits
    )
    return drafts, at, numbers, flat


def verified_by_chance(batch):
    return verified(batch, torch.tensor([0.8, 0.5, 0.3]))


CASES = (
    writes, gathered, slots, prefills, positions, combined, counted, updated, expanded, accepted, states,
    sampled, noise, ranked, of_prompts, improbable, grammars, ngrams, drafted, standalone_drafts, dflash_drafts, verified,
    verified_by_chance,
)  # fmt: skip


@contextmanager
def launches(run):
    """Context in which kernels are run so, and what was launched in it."""
    names = set()

    def launch(self, *args, **kwargs):
        names.add((self.fn.__module__, self.fn.__name__))
        run(self, *args, **kwargs)

    with patch.object(interpreter.InterpretedFunction, "run", launch):
        yield names


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_writes_what_the_kernel_writes(case):
    for seed in range(4):
        batches = Batch(seed), Batch(seed)
        torch.manual_seed(seed)
        with launches(interpreter.InterpretedFunction.run.interpreted) as names:
            expected = case(batches[0])
        torch.manual_seed(seed)
        # No kernel is left to the interpreter.
        with patch.object(interpreter, "GridExecutor", None):
            got = case(batches[1])
        assert names
        for kernels, ours in zip(flat(expected) + batches[0].tensors(), flat(got) + batches[1].tensors()):
            assert torch.equal(kernels, ours), seed


def flat(result):
    return [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)


def test_each_of_them_is_compared():
    with launches(interpreter.InterpretedFunction.run) as names:
        for case in CASES:
            case(Batch(0))
    assert names == set(STAND_INS)


@pytest.mark.parametrize("module, name", STAND_INS, ids=lambda part: part.removeprefix("vllm.v1.worker."))
def test_it_is_of_this_kernel(module, name):
    kernel = getattr(importlib.import_module(module), name)
    ours = parameters(STAND_INS[module, name][digest_of(kernel.fn)])
    needed = {name for name, each in ours.items() if each.default is inspect.Parameter.empty}
    assert needed <= {each.removesuffix("_ptr") for each in kernel.arg_names}
