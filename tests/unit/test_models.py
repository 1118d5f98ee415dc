"""`make models`: trained models by pip, whole or not at all, on wheels made here."""

import shutil
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import gguf_to_hf
import models
from models import FetchError, Package, Source, digest, make

TEXTS = {"fable/texts/b.txt": "the fox", "fable/texts/a.txt": "the grapes", "fable/__init__.py": ""}


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A package index of one wheel, and a source of it."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "fable_texts-1.0-py3-none-any.whl"
    about = "fable_texts-1.0.dist-info"
    files = TEXTS | {
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: fable-texts\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as content:
        for name, text in files.items():
            content.writestr(name, text)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    joined = tmp_path / "joined"
    joined.write_text("the grapesthe fox")
    package = Package("fable-texts", "1.0", digest(wheel))
    source = Source("fables", (package,), "*/texts/*.txt", digest(joined), 1, "CC0", "Aesop")
    monkeypatch.setattr(models, "SOURCES", {"fables": source})
    return folder


def change(monkeypatch, **fields):
    source = models.SOURCES["fables"]
    monkeypatch.setitem(models.SOURCES, "fables", Source(**(vars(source) | fields)))


def test_a_folder_is_made_once(wheels, tmp_path, monkeypatch):
    to = tmp_path / "models"
    assert make("fables", to)
    assert [path.name for path in to.iterdir()] == ["fables"]
    assert (to / "fables/a.txt").read_text() == "the grapes"
    assert {path.name for path in (to / "fables").iterdir()} == {"a.txt", "b.txt", "source.json"}
    monkeypatch.setattr(models, "download", lambda *args: pytest.fail("fetched again"))
    assert not make("fables", to)


def no_index(monkeypatch, wheels):
    (wheels / "fable_texts-1.0-py3-none-any.whl").unlink()


def other_wheel(monkeypatch, wheels):
    change(monkeypatch, packages=(Package("fable-texts", "1.0", "0" * 64),))


def without_pip(monkeypatch, wheels):
    (wheel,) = wheels.glob("*.whl")
    monkeypatch.setattr(models, "download", lambda package, folder: wheel)


def other_files(monkeypatch, wheels):
    without_pip(monkeypatch, wheels)
    change(monkeypatch, sha256="0" * 64)


def small_disk(monkeypatch, wheels):
    usage = types.SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def full_disk(monkeypatch, wheels):
    without_pip(monkeypatch, wheels)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (no_index, "pip cannot fetch fable-texts==1.0 .*Is there a network"),
        (other_wheel, "fable_texts-1.0-py3-none-any.whl got SHA-256 .*; expected 0000"),
        (other_files, "texts/.*.txt in fable_texts-1.0-py3-none-any.whl got SHA-256 .*; expected 0000"),
        (small_disk, "0 MB are free; expected 1 MB for fables; make room"),
        (full_disk, "No space left on device; expected 1 MB for fables; make room"),
    ],
)
def test_what_goes_wrong_is_one_message_and_leaves_nothing(wheels, tmp_path, monkeypatch, wrong, message):
    wrong(monkeypatch, wheels)
    to = tmp_path / "models"
    with pytest.raises(FetchError, match=message) as refused:
        make("fables", to)
    assert "\n" not in str(refused.value)
    assert list(to.iterdir()) == []


def test_a_name_that_is_not_there_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["models.py", "gpt5"])
    with pytest.raises(SystemExit):
        models.main()
    assert "got gpt5; expected some of: smollm2, gemma, essays" in capsys.readouterr().err


def test_a_file_of_another_architecture_is_refused(tmp_path, monkeypatch):
    field = types.SimpleNamespace(contents=lambda: "mamba")
    reader = types.SimpleNamespace(fields={"general.architecture": field})
    gguf = types.SimpleNamespace(GGUFReader=lambda file: reader, dequantize=None)
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    with pytest.raises(gguf_to_hf.ConversionError, match="got architecture 'mamba'; expected llama or gemma3"):
        gguf_to_hf.convert(tmp_path / "mamba.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_get_their_names_and_places():
    name_of, as_stored = gguf_to_hf.name_of, gguf_to_hf.as_stored
    assert name_of("blk.3.ffn_norm.weight", "llama") == "model.layers.3.post_attention_layernorm.weight"
    assert name_of("blk.3.ffn_norm.weight", "gemma3") == "model.layers.3.pre_feedforward_layernorm.weight"
    with pytest.raises(gguf_to_hf.ConversionError, match="'blk.0.ssm_in.weight' is none of llama"):
        name_of("blk.0.ssm_in.weight", "llama")
    wanted, heads = torch.randn(2 * 8, 5), {"attn_q": 4, "attn_k": 2}
    interleaved = wanted.reshape(2, 2, 4, 5).swapaxes(1, 2).reshape(16, 5)
    assert torch.equal(as_stored(interleaved, "blk.0.attn_k.weight", "llama", heads), wanted)
    norm = torch.randn(5)
    assert torch.equal(as_stored(norm + 1, "output_norm.weight", "gemma3", heads), norm + 1 - 1)
