"""`vllm-evict eval` and `tune` know a model as vLLM does: its own types, code of a model's own, Mistral's format."""

import base64
import json
import sys

import pytest
from evaluation import sample_of
from oracle.tiny import make_tiny_llama

from vllm_evict.tools.eval import EvalError
from vllm_evict.tools.eval.backends import engine_config
from vllm_evict.tools.eval.prompts import Prompts

SIZES = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny Llama. A call that reads from the terminal fails."""
    monkeypatch.setattr(sys, "stdin", None)
    return make_tiny_llama(tmp_path / "model")


def change(folder, without=(), **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in without} | fields))


def test_a_type_that_vllm_alone_knows(folder):
    """Falcon's first one."""
    heads = ("head_dim", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    change(folder, heads, model_type="RefinedWebModel", architectures=["FalconForCausalLM"], n_layer=2, n_head=4)
    change(folder, multi_query=True, parallel_attn=True, alibi=False, bias=False, layer_norm_epsilon=1e-5)
    config = engine_config(str(folder), SIZES)
    assert config.model_config.max_model_len == 1024 and Prompts(config).sent("t1 t2")


def test_code_of_a_models_own_runs_if_it_is_trusted(folder):
    change(folder, model_type="its_own", auto_map={"AutoConfig": "configuration_own.Own"})
    code = "from transformers import LlamaConfig\n\n\nclass Own(LlamaConfig):\n    model_type = 'its_own'\n"
    (folder / "configuration_own.py").write_text(code)
    with pytest.raises(EvalError, match=r"if you trust it: --engine-args '\{\"trust_remote_code\": true\}'"):
        engine_config(str(folder), SIZES)
    config = engine_config(str(folder), SIZES | {"trust_remote_code": True})
    assert Prompts(config).sent("t1 t2") == Prompts(config).tokenizer.encode("t1 t2")


def test_mistrals_format_has_no_text_of_a_chat(tmp_path):
    """Its template makes token ids: what is around a message stands before and after the ids of a text."""
    sizes = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=128, vocab_size=356)
    sizes |= dict(norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=2048)
    (tmp_path / "params.json").write_text(json.dumps(sizes))
    known = dict(num_vocab_tokens=256, default_vocab_size=356, default_num_special_tokens=100, version="v3")
    vocabulary = [dict(rank=n, token_bytes=base64.b64encode(bytes([n])).decode(), token_str=None) for n in range(256)]
    tokenizer = {"config": {"pattern": "[a-z]+|[^a-z]", **known}, "vocab": vocabulary}
    (tmp_path / "tekken.json").write_text(json.dumps(tokenizer))
    own = {"config_format": "mistral", "tokenizer_mode": "mistral", "load_format": "dummy"}
    prompts = Prompts(engine_config(str(tmp_path), SIZES | own))
    asked, sample = [{"role": "user", "content": "a text"}], sample_of("niah", 100, count=prompts_of_words)
    ids = prompts.sent("a text")
    assert ids == prompts.sent(asked) == prompts.tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    assert ids == [*prompts.before, *prompts.tokenizer.encode("a text", add_special_tokens=False), *prompts.after]
    assert prompts.ids(sample) == prompts.sent(sample.text)
    assert prompts.count(sample.context) == len(prompts.before) + len(sample.context.encode())
    with pytest.raises(EvalError, match="turns got a model whose chat template makes token ids"):
        _ = prompts.between


def prompts_of_words(text):
    return len(text.split())
