"""`decode_mass` of heads that are slices of a layer, and `decode_classes`: heads in classes, each with pages of its own."""

import pytest
import torch
from test_decode import LENGTHS, Batch
from test_mass import BF16, F32, each_isa, needs_extension

from vllm_evict.compute.kernels.decode import decode_classes, decode_classes_reference
from vllm_evict.compute.kernels.mass import block_mass


class Classes:
    """A layer whose heads fall into classes: one query, and for each class pages, block tables and lengths.

    `outputs` is how many outputs a call is given.
    """

    outputs = 2

    def __init__(self, kv_heads=(2, 3), group=2, dim=64, block_sizes=(32, 32), dtype=F32, queries=None, layout="vec"):
        random = torch.Generator().manual_seed(1)
        lens = LENGTHS, [min(length, 5 + 70 * (length > 300)) for length in LENGTHS]
        self.classes = [
            Batch(lengths, (group * heads, heads), dim, block_size, dtype, layout, queries=queries)
            for lengths, heads, block_size in zip(lens, kv_heads, block_sizes)
        ]
        first = self.classes[0]
        total = group * sum(kv_heads)
        self.query = torch.randn(len(first.query), total + 1, dim, generator=random).to(dtype)[:, :total]
        self.heads = [group * heads for heads in kv_heads]
        self.weights = torch.rand(len(first.query)) * (torch.rand(len(first.query)) < 0.7)
        for each, query in zip(self.classes, self.query.split(self.heads, 1)):
            each.query, each.weights = query, self.weights
            each.starts, each.rows = first.starts, first.rows

    def new_out(self, dtype=F32, rows=None, per_token=False):
        widths = [int(each.seq_lens.max()) if per_token else each.table.shape[1] for each in self.classes]
        return [
            torch.zeros(len(LENGTHS), rows or each.heads[1], width, dtype=dtype)
            for each, width in zip(self.classes, widths)
        ]

    def run(self, function=decode_classes, out=None, isa=None, sinks=None, **options):
        output = torch.full(self.query.shape, 7.0, dtype=self.query.dtype)
        own = [None] * len(self.classes) if sinks is None else sinks.split(self.heads)
        classes = [
            each.attention(mass, query, sinks=its, **options)
            for each, mass, query, its in zip(
                self.classes, out or [None] * len(self.classes), self.query.split(self.heads, 1), own
            )
        ]
        how = {} if function is decode_classes_reference else {"isa": isa}
        function(classes, self.classes[0].rows, output.split(self.heads, 1)[: self.outputs], **how)
        return output


@each_isa
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_heads_may_be_slices_of_what_others_use(isa, dtype):
    """Pages, query and output of some of a layer's heads: as dense copies, to the bit, and the rest is not touched."""
    batch = Batch(LENGTHS, (6, 3), dtype=dtype)
    dense, sliced = Batch(LENGTHS, (6, 3), dtype=dtype), Batch(LENGTHS, (6, 3), dtype=dtype)
    for kv_heads in (slice(0, 1), slice(1, 3), slice(2, 3)):
        heads = slice(2 * kv_heads.start, 2 * kv_heads.stop)
        pages = torch.cat((batch.keys, batch.values), 2)
        dense.keys, dense.values = pages[:, kv_heads].clone().split(32, 2)
        dense.query = batch.query[:, heads].clone()
        dense.heads = sliced.heads = dense.query.shape[1], dense.keys.shape[1]
        others = torch.full_like(pages, torch.nan)
        others[:, kv_heads] = pages[:, kv_heads]
        sliced.keys, sliced.values = (half[:, kv_heads] for half in others.split(32, 2))
        query = torch.full_like(batch.query, torch.nan)
        query[:, heads] = batch.query[:, heads]
        sliced.query = query[:, heads]
        whole = torch.full_like(query, 7.0)
        output, mass = dense.run(isa=isa)
        _, its_mass = sliced.run(isa=isa, output=whole[:, heads])
        assert torch.equal(whole[:, heads], output) and torch.equal(its_mass, mass)
        whole[:, heads] = 7.0
        assert (whole == 7).all()
        masses = []
        for each in (dense, sliced):
            masses.append(torch.zeros_like(mass))
            block_mass(each.attention(masses[-1]), isa=isa)
        assert torch.equal(*masses) and masses[0].isfinite().all()


@each_isa
@pytest.mark.parametrize("shape", [((2, 3), 2, 64, (32, 32), F32), ((1, 4), 7, 128, (64, 16), BF16)], ids=str)
@pytest.mark.parametrize("layout", ["vec", "amx"])
def test_classes_are_decoded_as_each_alone(isa, shape, layout):
    layer = Classes(*shape[:4], BF16 if layout == "amx" else shape[4], layout=layout)
    out = layer.new_out()
    output = layer.run(isa=isa, out=out)
    for each, part, mass in zip(layer.classes, output.split(layer.heads, 1), out):
        alone = each.run(isa=isa)
        assert torch.equal(part, alone[0]) and torch.equal(mass, alone[1])


@needs_extension
@pytest.mark.parametrize("queries", [None, [1, 2, 5, 1, 5, 2, 60, 3, 70]], ids=["decodes", "prompts"])
def test_classes_match_the_reference_on_any_number_of_threads(set_threads, queries):
    layer = Classes(queries=queries)
    out, expected_out = layer.new_out(rows=1), layer.new_out(torch.float64, rows=1)
    output, expected = layer.run(out=out), layer.run(decode_classes_reference, out=expected_out)
    torch.testing.assert_close(output, expected, rtol=3e-6, atol=3e-6)
    for mass, wanted in zip(out, expected_out):
        torch.testing.assert_close(mass.double(), wanted, rtol=3e-6, atol=1e-7 if queries else 3e-8)
    for count in (1, 3):
        set_threads(count)
        only_first = [layer.new_out(rows=1)[0], None]
        assert torch.equal(layer.run(out=only_first), output) and torch.equal(only_first[0], out[0])
        assert torch.equal(layer.run(), output)


@needs_extension
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: layer.classes[1].table.__setitem__((0, 0), 999), "block ids"),
        (lambda layer: setattr(layer, "outputs", 1), "one entry for each class"),
    ],
)
def test_bad_classes_are_refused(change, message):
    layer = Classes((2, 3), group=1)
    change(layer)
    with pytest.raises(ValueError, match=message):
        layer.run()


@pytest.mark.parametrize("function", [decode_classes, decode_classes_reference])
def test_each_tokens_mass_of_classes_is_that_of_each_alone(function):
    layer = Classes()
    out = layer.new_out(per_token=True)
    layer.run(function, out=out, per_token=True)
    for each, mass in zip(layer.classes, out):
        torch.testing.assert_close(mass, each.run(per_token=True)[1], rtol=3e-6, atol=3e-8)


@needs_extension
def test_each_tokens_mass_has_the_same_bits_for_any_number_of_threads(set_threads):
    batch, layer = Batch(LENGTHS), Classes()
    results = []
    for count in (1, 3):
        set_threads(count)
        out = layer.new_out(per_token=True)
        results.append([*batch.run(per_token=True), layer.run(out=out, per_token=True), *out])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
