"""Code of the Triton kernels for sm_80, sm_90 and sm_100, beside the sizes that a file has. No GPU is needed."""

import json
import sys

import pytest

pytest.importorskip("triton")

from triton_batch import WHERE_KERNELS_RUN

pytestmark = WHERE_KERNELS_RUN


#: Compute capability -> shapes that are compiled here, by their number in triton_compile.py: Llama 3, latents, fp8, gpt-oss.
CHOSEN = {80: (0, 11), 90: (0, 5, 8, 11), 100: (0, 8)}


@pytest.fixture(scope="module", params=CHOSEN)
def launches(request, tmp_path_factory):
    """Compute capability, and what each launch took there."""
    if sys.platform != "linux":
        pytest.skip("Triton has its ptxas on Linux only")
    from triton_compile import compiled

    return request.param, compiled(
        request.param, CHOSEN[request.param], TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))
    )


def test_kernels_take_no_more_than_their_file_says(launches):
    """`compiled.json` has them by kernel and shape, of all shapes; `python tests/harness/triton_compile.py --publish`
    writes it anew.
    """
    from triton_compile import PUBLISHED, limits

    capability, found = launches
    known, taken = json.loads(PUBLISHED.read_text())[str(capability)], limits(found, capability)
    assert taken.keys() <= known.keys()
    for name, its in taken.items():
        most = known[name]
        assert its["programs"] >= most["programs"], (name, its)
        assert all(its[key] <= most[key] for key in ("registers", "shared", "spilled", "loop")), (name, its, most)
        assert its["copies"] == most["copies"], (name, its["copies"])
    assert not any(kernel["atom."] for kernel in found)


def test_readers_load_by_16_bytes_convert_in_pairs_and_share_an_sm(launches):
    """Copies of 4 bytes are of table entries, weights and logarithms. Loops convert no element alone, and read no byte."""
    from triton_compile import READERS, limits

    capability, found = launches
    assert {kernel["kernel"] for kernel in found} >= set(READERS)
    for kernel in found:
        if kernel["kernel"] in READERS:
            assert 16 in kernel["copies"] or (not kernel["copies"] and kernel["ld.global.v4"]), kernel
            assert kernel["loop"] > 100 and not kernel["conversions"] and not kernel["bytes"], kernel
            assert kernel["spills"] <= 2, kernel
    for name, its in limits(found, capability).items():
        if name.startswith(READERS):
            assert set(its["copies"]) <= {4, 16}, (name, its)
            # Keys in float32 are there for tests alone. On sm_100 eight warps measure mass.
            alone = "float32" in name or (capability == 100 and name.startswith("_mass_from_lse"))
            assert its["programs"] >= (1 if alone else 2) and its["programs"] * its["threads"] >= 256, (name, its)


def test_compiles_for_hopper(launches):
    capability, found = launches
    if capability != 90:
        pytest.skip("the form of the code is looked at once")
    assert {kernel["kernel"] for kernel in found} == {
        "_attend", "_attend_classes", "_choose", "_combine", "_combine_classes", "_compact", "_copy", "_fold",
        "_mass_from_lse", "_moved", "_name", "_put", "_query_lse", "_resident_view", "_shares", "_store_codes",
        "_store_signs", "_sums", "_take", "_take_places", "bit_logits", "box_logits", "sign_logits",
    }  # fmt: skip
    views = [kernel["binary"] for kernel in found if kernel["kernel"] == "_resident_view"]
    assert len(set(views)) == 2 < len(views), "once for each number of groups, whatever is wanted of them"
    direct, out, back = [kernel for kernel in found if kernel["kernel"] == "_compact"][:3]
    # Within the caches a barrier lies between reads and writes, which the interpreter does not need.
    assert direct["bar.sync"] == 1 and not out["bar.sync"] and not back["bar.sync"]
    assert direct["ld.global.v4"] and out["ld.global.v4"] and back["ld.global.v4"]
    reads_fp8 = {kernel["kernel"] for kernel in found if kernel["e4m3x2"]}
    assert reads_fp8 == {"_attend", "_attend_classes", "_mass_from_lse", "_query_lse"}
    # Programs that start together read the same requests' tables, for other KV heads of them.
    grids = {
        kernel["shape"]: kernel["grid"] for kernel in found if kernel["kernel"] == "_attend" and "/" in kernel["shape"]
    }
    assert grids and all(grid[0] == int(shape.split("/")[1].split()[0]) for shape, grid in grids.items())
