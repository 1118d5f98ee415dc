"""`compact`: the kernel against the reference, the reference against packed tokens, and what overlap does."""

import contextlib
import itertools

import packing
import pytest
import torch
from test_mass import BF16, F16, F32, needs_extension

from vllm_evict.compute.kernels import compact as module
from vllm_evict.compute.kernels.compact import compact, compact_reference, is_ordered
from vllm_evict.compute.kernels.mass import pack_keys, pack_values, unpack_keys, unpack_values

F8, U8 = torch.float8_e4m3fn, torch.uint8


def kernels() -> list[str]:
    found = []
    for isa in ("avx512", "portable") if module._C_cpu is not None else ():
        with contextlib.suppress(ValueError):
            compact([torch.zeros(1, 1, 2, 1)], ints([0]), ints([[[0]]]), ints([0]), isa=isa)
            found.append(isa)
    return found


def ints(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Random bytes in the pages of some layers, and requests of some tokens of which each head keeps others."""

    def __init__(
        self, tokens, kept, heads=2, dim=32, block_size=16, dtype=F32, layout="vec", shared=False, seed=0, spare=3
    ):
        layers = 3
        random = torch.Generator().manual_seed(seed)
        self.layout, self.block_size = layout, block_size
        self.blocks = [-(-count // block_size) for count in tokens]
        self.targets = [-(-count // block_size) for count in kept]
        total = sum(self.blocks) + sum(self.targets) + spare
        size = (total, heads + 1, 2 * block_size, dim * dtype.itemsize)
        self.bytes = [torch.randint(0, 256, size, dtype=U8, generator=random) for _ in range(layers)]
        self.caches = [page.view(dtype)[:, 1:] for page in self.bytes]  # heads of another class before them
        ids = torch.randperm(total, generator=random).int()
        self.source, self.target, _ = ids.split([sum(self.blocks), sum(self.targets), spare])

        def draw(length, count):
            return torch.randperm(length, generator=random)[:count].sort().values

        self.keep = torch.cat(
            [
                torch.stack([draw(length, count) for _ in range((1 if shared else layers) * heads)])
                for length, count in zip(tokens, kept)
            ],
            1,
        )
        self.keep = self.keep.int().unflatten(0, (-1, heads))
        lengths = self.blocks, kept, self.targets
        self.starts = ints([[0, *itertools.accumulate(counts)] for counts in lengths])

    def run(self, function=compact, **options) -> list[torch.Tensor]:
        """All bytes afterwards, those around the heads included."""
        whole = [page.clone() for page in self.bytes]
        caches = [base.view(cache.dtype)[:, 1:] for base, cache in zip(whole, self.caches)]
        function(caches, self.source, self.keep, self.target, self.starts, layout=self.layout, **options)
        return whole

    def parts(self):
        """Source and target of each request."""
        return self.source.split(self.blocks), self.target.split(self.targets)

    def tokens(self, whole, blocks) -> torch.Tensor:
        """Bytes of what `blocks` hold, token by token: [L, Hkv, n * bs, 2 * D * itemsize]. Not of fp8 in amx."""
        found = []
        for base, cache in zip(whole, self.caches):
            pages = base.view(cache.dtype)[:, 1:][blocks.long()]
            keys, values = pages.split(self.block_size, 2)
            parts = unpack_keys(keys.contiguous(), self.layout), unpack_values(values.contiguous(), self.layout)
            found.append(torch.cat(parts, -1).transpose(0, 1).flatten(1, 2).contiguous().view(U8))
        return torch.stack(found)


each_isa = pytest.mark.parametrize("isa", kernels())


def same(ours, theirs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


TOKENS, KEPT = [150, 1, 64, 96], [70, 1, 0, 96]
SHAPES = [  # heads, dim, block size, dtype, layout, whether all layers keep the same
    (2, 32, 16, F32, "vec", False),
    (3, 64, 32, BF16, "vec", True),
    (1, 80, 16, F16, "vec16", False),
    (2, 32, 32, F8, "vec", False),
    (2, 33, 24, U8, "vec", True),
    (2, 64, 32, BF16, "amx", False),
    (1, 96, 48, BF16, "amx", True),
    (2, 32, 32, F8, "amx", False),
    (1, 16, 512, F32, "vec", False),  # blocks longer than what is moved at once
    (2, 32, 128, U8, "vec", False),  # rows of two vectors
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def batch_of(shape, **options) -> Batch:
    heads, dim, block_size, dtype, layout, shared = shape
    return Batch(TOKENS, KEPT, heads, dim, block_size, dtype, layout, shared=shared, **options)


@each_isa
@each_shape
def test_matches_the_reference(isa, shape):
    batch = batch_of(shape)
    assert same(batch.run(isa=isa), batch.run(compact_reference))


@each_shape
def test_kept_tokens_lie_in_their_slots_and_nothing_else_changes(shape):
    batch = batch_of(shape)
    if batch.caches[0].element_size() == 1 and batch.layout == "amx":
        pytest.skip("unpack_keys is for bfloat16 there")
    whole = batch.run(compact_reference)
    before = batch.bytes
    for r, count in enumerate(KEPT):
        (source, target), size = (part[r] for part in batch.parts()), batch.block_size
        keep = batch.keep[..., batch.starts[1, r] : batch.starts[1, r + 1]].long()
        held, now = batch.tokens(before, source), batch.tokens(whole, target)
        keep = keep.expand(len(before), -1, -1)[..., None].expand(-1, -1, -1, held.shape[-1])
        assert torch.equal(now[:, :, :count], held.gather(2, keep))
        assert torch.equal(now[:, :, count:], batch.tokens(before, target)[:, :, count:])
        assert len(target) * size >= count
    others = torch.ones(len(before[0]), dtype=torch.bool).index_fill(0, batch.target.long(), False)
    assert all(torch.equal(a[others], b[others]) and torch.equal(a[:, 0], b[:, 0]) for a, b in zip(before, whole))


def overlaps():
    """Targets that are sources: the first blocks, as they lie; later ones; the first in another order."""
    yield "in place", lambda source, m: source[:m], True
    yield "from the second on", lambda source, m: source[1 : m + 1], False
    yield "the last", lambda source, m: source[len(source) - m :], False
    yield "backwards", lambda source, m: source[:m].flip(0), False
    yield "behind a new one", lambda source, m: torch.cat((ints([0]), source[: m - 1])), True
    yield "one of its own", lambda source, m: torch.cat((source[:1], ints([0] * (m > 1)), source[1 : m - 1])), True


@pytest.mark.parametrize("isa", [*kernels(), None])
@pytest.mark.parametrize(("choose", "ordered"), [case[1:] for case in overlaps()], ids=[case[0] for case in overlaps()])
@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_a_target_may_be_a_source(isa, choose, ordered, layout):
    """In whatever order: what arrives is what a request with new blocks gets."""
    for seed, kept in enumerate((33, 64, 79, 95)):
        apart = Batch([192], [kept], dtype=BF16, layout=layout, block_size=16, seed=seed)
        apart.source, apart.target = torch.arange(1, 13, dtype=torch.int32), torch.arange(13, 19, dtype=torch.int32)
        apart.target = apart.target[: apart.targets[0]]
        expected = apart.tokens(apart.run(compact_reference), apart.target)[:, :, :kept]
        apart.target = choose(apart.source, len(apart.target)).contiguous()
        assert is_ordered(apart.source, apart.target) == ordered
        whole = apart.run(compact, isa=isa) if isa else apart.run(compact_reference)
        assert torch.equal(apart.tokens(whole, apart.target)[:, :, :kept], expected)


@each_isa
def test_random_overlaps(isa):
    """Two requests whose targets are some of their sources and some new blocks, in any order."""
    random = torch.Generator().manual_seed(3)
    sizes = (16, F32), (48, F32), (80, BF16), (128, U8)  # rows of up to three vectors
    for seed, (block_size, dtype) in enumerate(10 * sizes):
        kept = [block_size * int(n) // 16 for n in torch.randint(1, 90, (2,), generator=random)]
        batch = Batch([13 * block_size, 6 * block_size], kept, 1, 3, block_size, dtype, seed=seed, spare=20)
        batch.source = torch.arange(19, dtype=torch.int32)
        own = [ints([*range(13), 20, 21, 22]), ints([*range(13, 19), 23, 24])]
        own = [blocks[torch.randperm(len(blocks), generator=random)] for blocks in own]
        batch.target = torch.cat([blocks[:count] for blocks, count in zip(own, batch.targets)])
        assert same(batch.run(isa=isa), batch.run(compact_reference))


@needs_extension
def test_requests_may_share_what_is_only_read():
    batch = Batch([64, 64], [20, 30])
    batch.source[4:6] = batch.source[:2]
    assert same(batch.run(), batch.run(compact_reference))


@needs_extension
def test_one_request_needs_no_starts_and_threads_change_nothing(set_threads):
    batch = Batch([900], [500], heads=4)
    whole = batch.run()
    batch.starts = None
    for count in (1, 2, 5):
        set_threads(count)
        assert same(batch.run(), whole)
    batch.target = batch.source[1 : 1 + len(batch.target)]  # through scratch
    expected = batch.run(compact_reference)
    assert same(batch.run(), expected)


def test_layers_may_lie_in_one_tensor():
    """vLLM's layouts with layers inside a block give each layer a stride of all of them."""
    pages = torch.randn(6, 2, 2, 32, 32)  # blocks, layers, heads
    before = pages.clone()
    keep = ints([3, 17, 30]).expand(1, 2, 3)
    compact([pages[:, layer] for layer in range(2)], ints([4, 1]), keep, ints([4]))
    keys, values = (half.contiguous() for half in before.flatten(1, 2).split(16, 2))
    keys, values = unpack_keys(keys), values
    for slot, token in enumerate((3, 17, 30)):
        block, place = (4, 1)[token // 16], token % 16
        assert torch.equal(unpack_keys(pages.flatten(1, 2)[:, :, :16].contiguous())[4, :, slot], keys[block, :, place])
        assert torch.equal(pages.flatten(1, 2)[4, :, 16 + slot], values[block, :, place])


@pytest.mark.parametrize("layout,dtype", [("vec", F8), ("amx", F8), ("vec", F32), ("amx", BF16)])
def test_packed_as_vllm_does(layout, dtype):
    """Tokens written one by one, as vLLM does, equal what compact makes of them."""
    block_size, heads, dim = 32, 2, 64
    cache = torch.zeros(5, heads, 2 * block_size, dim, dtype=U8 if dtype == F8 else dtype)
    stored, options = cache.chunk(2, 2), {"kv_cache_dtype": "fp8"} if dtype == F8 else {}
    keys, values = torch.randn(2, 2 * block_size, heads, dim).to(BF16 if dtype == F8 else dtype)

    kept = [0, 1, 5, 31, 32, 50, 51, 63]
    packing.write(keys, values, *stored, torch.arange(64), layout, **options)
    slots = 128 + torch.arange(len(kept))
    packing.write(keys[kept].contiguous(), values[kept].contiguous(), *stored, slots, layout, **options)
    for function in (compact, compact_reference):
        function([cache], ints([0, 1]), ints(kept).expand(1, heads, -1), ints([3]), layout=layout)
        assert torch.equal(cache[3], cache[4])
        cache[3] = 0


@needs_extension
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("b.caches = []", ValueError, "at least one layer"),
        ("b.caches = [c.double() for c in b.caches]", TypeError, "of 1, 2 or 4 bytes"),
        ("b.caches[1] = b.caches[1].half()", TypeError, "one dtype"),
        ("b.caches[1] = b.caches[1][1:]", ValueError, "of one shape"),
        ("b.caches = [c.mT for c in b.caches]", ValueError, "contiguous within a block and head"),
        ("b.layout = 'nhd'", ValueError, "layout must be one of"),
        ("b.layout = 'amx'", TypeError, "of bfloat16 or of 1 byte"),
        ("b.layout, b.caches = 'amx', [c.bfloat16()[:, :, :8].clone() for c in b.caches]", ValueError, "bs and D"),
        ("b.source = b.source.long()", TypeError, "source must be int32"),
        ("b.keep = b.keep.long()", TypeError, "keep must be int32"),
        ("b.keep = b.keep[0]", ValueError, "keep must be 3-dimensional"),
        ("b.keep = b.keep[:2]", ValueError, r"keep must be \[L or 1"),
        ("b.keep = b.keep[:, :1]", ValueError, r"keep must be \[L or 1"),
        ("b.keep[1, 1, 3] = b.keep[1, 1, 2]", ValueError, "keep must ascend"),
        ("b.keep[1, 1, 0] = -1", ValueError, "keep must ascend"),
        ("b.keep[2, 0, -1] = 48", ValueError, "keep must ascend"),
        ("b.source[0] = 999", ValueError, "block ids of caches"),
        ("b.target[0] = -1", ValueError, "block ids of caches"),
        ("b.target = b.target[:1]", ValueError, "starts must ascend|hold all kept"),
        ("b.starts = b.starts[:2]", ValueError, r"starts must be \[3"),
        ("b.starts[1, 1] = 99", ValueError, "starts must ascend"),
        ("b.starts[2, 1] = 1", ValueError, "hold all kept tokens"),
        ("b.target[1] = b.target[0]", ValueError, "each block once"),
        ("b.target[0] = b.source[-1]", ValueError, "another request's source"),
    ],
)
def test_invalid_arguments_change_nothing(change, error, message):
    batch = Batch([64, 40], [20, 9])
    before = [page.clone() for page in batch.bytes]
    exec(change, {"torch": torch}, {"b": batch})
    with pytest.raises(error, match=message):
        compact(batch.caches, batch.source, batch.keep, batch.target, batch.starts, layout=batch.layout)
    assert same(batch.bytes, before)


@needs_extension
def test_unknown_isa():
    with pytest.raises(ValueError, match="isa must be"):
        Batch([20], [10]).run(isa="avx2")


def test_packings_of_the_reference_are_those_of_the_score_pass():
    """Its table of places is `pack_keys` and `pack_values` of numbered elements."""
    for layout in ("vec", "amx"):
        numbers = torch.arange(32 * 16).view(1, 1, 32, 16)
        places = module._places(32, 16, layout)
        for pack, half in ((pack_keys, places[:, :16]), (pack_values, places[:, 16:] - 32 * 16)):
            for low in (0, 256):  # bfloat16 counts to 256
                packed = pack((numbers - low).clamp(-1, 255).bfloat16(), layout).flatten()
                part = numbers.flatten()[low : low + 256] - low
                assert torch.equal(packed[half.flatten()[low : low + 256]], part.bfloat16())
