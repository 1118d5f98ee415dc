"""`vllm-evict check`: what it says of a server is what the server says, and what vLLM decides for a device it lacks."""

import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from types import SimpleNamespace

import pytest
from releases import BORROWED
from test_refusals import engine_config, refusal
from test_sliding_models import GEMMA4, SIZES, WINDOWS
from transformers import AutoConfig

from vllm_evict.integration.start.versions import layers_size_blocks
from vllm_evict.tools.check import cli as check
from vllm_evict.tools.check.stand_in import DEVICES

#: Asks about many servers in one process, whose imports take most of the time: flags on standard input, answers out.
ASK = """
import json, sys
from vllm_evict.tools.check import cli as check

check.become(sys.argv[1])
for flags in json.load(sys.stdin):
    try:
        answer = 0, check.accepted(flags)
    except check.CheckError as error:
        answer = 2, [str(error)]
    except check.KVPolicyError as error:
        answer = 1, check.refusals_of(error)
    print(json.dumps(answer))
"""
H2O = {"name": "h2o", "budget": 512, "recent": 64}
CONTEXT = {**H2O, "context": 512}
ADAKV = {"name": "adakv", "budget": 512}
#: Arguments of all servers here that are compared with an engine, and the flags for them.
ARGUMENTS = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True}
FLAGS = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
#: What engines of tests have otherwise than servers.
DEFAULTS = {"block_size": None, "max_num_batched_tokens": None, "enable_prefix_caching": None}
#: Model, policy, and further arguments of engines that a CPU starts, and refuses.
STARTED = {
    "llama": ("llama", H2O, {}),
    "llama in small blocks": ("llama", {"name": "sink-window", "budget": 512}, {"block_size": 32}),
    "llama under pressure": ("llama", "h2o-pressure", {}),
    "hybrid": ("hybrid", H2O, {}),
    "MLA": ("mla", H2O, {"dtype": "bfloat16"}),  # vLLM's backend on a CPU with AMX has no float32
    "Gemma 4": ("gemma4", H2O, {}),
}
REFUSED = {
    "llama": ("llama", {**H2O, "allow": ["kvzip"]}, {"enable_prefix_caching": False}),
    "llama with a pattern of another shape": (
        "llama",
        {"name": "duo", "pattern": ["10"], "sink": 64, "recent": 96},
        {},
    ),
    "hybrid": ("hybrid", CONTEXT, {}),
    "MLA": ("mla", ADAKV, {}),
    "Gemma 4": ("gemma4", CONTEXT, {}),
}
#: Name -> type in transformers, architecture, and what is the model's own.
MODELS = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "hybrid": (
        "falcon_h1",
        "FalconH1ForCausalLM",
        dict(mamba_d_ssm=64, mamba_n_heads=2, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1, mamba_d_conv=4),
    ),
    "mla": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        dict(
            kv_lora_rank=512,
            q_lora_rank=64,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=4,
            num_key_value_heads=4,
        ),
    ),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM", dict(layer_types=WINDOWS, global_head_dim=64, **GEMMA4)),
    "gemma4-512": ("gemma4_text", "Gemma4ForCausalLM", dict(layer_types=WINDOWS, global_head_dim=512, **GEMMA4)),
}
#: Model and flags about which nothing can be said, and a part of the line that says so.
HOSTILE = {
    "no such model": (["no/such-model"], "MODEL got 'no/such-model'; expected a folder with a config.json"),
    "no name": (["../\x00/" * 40], "MODEL got "),
    "no JSON": (["broken"], "config.json is no JSON"),
    "deep JSON": (["deep"], "config.json is no JSON"),
    "no object": (["list"], "config.json got list; expected a JSON object"),
    "empty policy": (["llama", "--kv-policy", ""], "--kv-policy got '', a server without a policy; expected one"),
    "unknown flag": (["llama", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    "a misspelt flag": (
        ["llama", "--max-modle-len", "64", "--gpu_memory_utilisation=0.5"],
        "did you mean --max-model-len, --gpu-memory-utilization?",
    ),
    "unknown policy": (["llama", "--kv-policy", "h3o"], "unknown KV policy 'h3o'"),
    "no such drafter": (
        ["llama", "--speculative-config", '{"method": "eagle3", "model": "no/such-drafter"}'],
        "\"model\" in --speculative-config got 'no/such-drafter'; expected a folder with a config.json",
    ),
    "drafts of no kind": (["llama", "--speculative-config", "3"], "vLLM can't tell here: "),
    "no such file of flags": (["llama", "--config", "/no/such.yaml"], "/no/such.yaml"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> folder of a model's configuration."""
    root = tmp_path_factory.mktemp("configs")
    folders = {name: root / name for name in (*MODELS, "broken", "deep", "list")}
    for name, (kind, architecture, own) in MODELS.items():
        sizes = {**SIZES, "head_dim": 64}
        if "layer_types" not in own:
            del sizes["sliding_window"]
        if name == "mla":
            del sizes["head_dim"]
        config = AutoConfig.for_model(kind, **{**sizes, **own})
        config.architectures = [architecture]
        config.save_pretrained(folders[name])
    for name, text in (("broken", "{"), ("deep", "[" * 100_000), ("list", "[]")):
        folders[name].mkdir()
        (folders[name] / "config.json").write_text(text)
    return folders


def flags_of(model, policy, arguments):
    flags = [model, *FLAGS, "--kv-policy", policy if isinstance(policy, str) else json.dumps(policy)]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        flags += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    return flags


@pytest.fixture(scope="module")
def ask(folders, tmp_path_factory):
    """`ask(device, [model, *flags], ...)`: exit status and lines for each server, of one process."""
    hub, cache = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("cache")  # of no model that vLLM knows yet

    def ask(device, *servers):
        given = json.dumps([[str(folders.get(model, model)), *flags] for model, *flags in servers])
        env = os.environ | {"HF_HUB_CACHE": str(hub), "VLLM_CACHE_ROOT": str(cache)}
        env.pop("VLLM_LOGGING_LEVEL", None)
        done = subprocess.run(
            [sys.executable, "-c", ASK, device], input=given, capture_output=True, text=True, env=env, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    ask.hub = hub
    return ask


@pytest.fixture(scope="module")
def on_cpu(ask, folders):
    """(Kind of case, name of case) -> what is said on a CPU."""
    cached = ask.hub / "models--some--llama"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0")
    (cached / "snapshots").mkdir()
    (cached / "snapshots/0").symlink_to(folders["llama"])
    cases = {("started", name): flags_of(*case) for name, case in STARTED.items()}
    cases |= {("refused", name): flags_of(*case) for name, case in REFUSED.items()}
    cases |= {("hostile", name): flags for name, (flags, _) in HOSTILE.items()}
    cases["hub", "cached"] = ["some/llama", *FLAGS]
    snapshot = ask.hub / "models--some--mistral/snapshots/0"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0")
    sizes = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=128, vocab_size=256)
    sizes |= dict(norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=2048)
    (snapshot / "params.json").write_text(json.dumps(sizes))
    cases["hub", "params"] = ["some/mistral", *FLAGS, "--config-format", "mistral", "--tokenizer-mode", "mistral"]
    return dict(zip(cases, ask("cpu", *cases.values())))


@pytest.mark.parametrize("name", STARTED)
def test_a_server_that_starts_says_the_same(on_cpu, engine, folders, monkeypatch, name):
    model, policy, arguments = STARTED[name]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # the command's process has no interpreter of Triton's
    lines = []
    monkeypatch.setattr(logging.getLogger("vllm.evict"), "info", lines.append)
    engine(
        policy, folders[model], load_format="dummy", skip_tokenizer_init=True, **{**DEFAULTS, **ARGUMENTS, **arguments}
    )
    (line,) = [line for line in lines if "model runner" in line]
    status, (said, unknown) = on_cpu["started", name]
    if "blocks that a request holds" in unknown:
        line = re.sub(r" and hold [^;]*", "", line)
    assert status == 0 and line.startswith(said)
    by_layers = model in ("hybrid", "gemma4") or (layers_size_blocks("cpu") and "block_size" not in arguments)
    assert ("blocks that a request holds" in unknown) == by_layers


@pytest.mark.parametrize("name", REFUSED)
def test_a_server_that_is_refused_says_the_same(on_cpu, folders, name):
    model, policy, arguments = REFUSED[name]
    message = refusal(engine_config, folders[model], policy, **ARGUMENTS, **arguments)
    status, refusals = on_cpu["refused", name]
    assert status == 1 and refusals[0] == message


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_one_line(on_cpu, name):
    status, (line,) = on_cpu["hostile", name]
    assert status == 2 and HOSTILE[name][1] in line and "\n" not in line


@pytest.mark.parametrize("name", ["cached", "params"])
def test_a_name_may_be_in_the_local_hub_cache(on_cpu, name):
    status, (said, _) = on_cpu["hub", name]
    assert status == 0 and said.startswith("KV policy h2o ")


NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'
ON = {  # device, model, further flags -> what the first line has
    ("h200", "llama", ()): "model runner V2, async scheduling; attention backend FLASH_ATTN",
    ("h200", "mla", ()): "attention backend FLASH_ATTN_MLA",
    ("h200", "mla", ("--kv-transfer-config", NIXL.replace("consumer", "producer"))): (
        "this server prefills for others (kv_producer): it evicts nothing and runs as stock vLLM"
    ),
    ("h200", "hybrid", ()): "model runner V2, async scheduling; attention backend FLASH_ATTN",
    ("h200", "gemma4", ()): "attention backend FLASH_ATTN",
    ("h200", "gemma4-512", ()): "attention backend FLASH_ATTN",
    ("h200", "llama", ("--block-size", "32", "--kv-policy", "h2o")): (
        "and hold 68 blocks of 32 tokens, under full all their blocks; model runner V2"
    ),
    ("h200", "llama", ("--pipeline-parallel-size", "2")): "model runner V2",
    ("h200", "llama", ("--enable-auto-tool-choice",)): "vLLM: Error: --enable-auto-tool-choice requires --tool-call",
    ("h200", "llama", ("--attention-backend", "FLASHMLA")): "the attention backend FLASHMLA: set --attention-backend",
    ("h200", "llama", ("--tensor-parallel-size", "4", "--distributed-executor-backend", "ray")): "model runner V2",
    ("h200", "llama", ("--enable-sleep-mode",)): "model runner V2, async scheduling; attention backend FLASH_ATTN",
    ("h200", "llama", ("--speculative-config", '{"model": "ngram", "num_speculative_tokens": 3}')): "model runner V2",
    ("h200", "llama", ("--speculative-config", '{"model": 5}')): "vLLM: Input should be a valid string",
    ("h200", "llama", ("--tensor-parallel-size", "16")): "vLLM: World size (16) is larger than the number",
    ("b200", "llama", ()): "model runner V2, async scheduling; attention backend FLASHINFER",
    ("b200", "llama", ("--tensor-parallel-size", "4", "--quantization", "fp8")): "attention backend FLASHINFER",
    ("b200", "llama", ("--kv-transfer-config", NIXL, "--kv-policy", "h2o")): "attention backend FLASHINFER",
    ("b200", "llama", ("--kv-policy", json.dumps(ADAKV))): "attention backend FLASHINFER",
    ("h200", "llama", ("--kv-policy", json.dumps(ADAKV), "--attention-backend", "FLASHINFER")): "plans for all heads",
    ("b200", "llama", ("--kv-policy", json.dumps(ADAKV), "--attention-backend", "FLASH_ATTN")): "KV policy adakv",
    ("b200", "mla", ()): "attention backend FLASHINFER_MLA",
    ("b200", "mla", ("--attention-backend", "CUTLASS_MLA")): "CUTLASS_MLA: set --attention-backend",
    ("b200", "mla", ("--attention-backend", "TRITON_MLA")): "attention backend TRITON_MLA",
    ("b200", "hybrid", ()): "attention backend FLASH",  # vLLM 0.31 and older: FLASH_ATTN
    ("b200", "hybrid", ("--attention-backend", "TRITON_ATTN")): "attention backend TRITON_ATTN",
    ("b200", "gemma4", ()): "attention backend FLASHINFER",
    ("l4", "llama", ()): "attention backend FLASH_ATTN",
    ("l4", "mla", ()): "attention backend TRITON_MLA",
    ("rtx5090", "llama", ()): "attention backend FLASH",
    ("mi300", "llama", ()): "vLLM's rocm engine in this release",
}
REFUSING = ("plans for all heads", "heads of", "set --attention-backend", "vLLM: ", "rocm")


@pytest.mark.parametrize("device", ["h200", "b200", "l4", "rtx5090", "mi300"])
def test_what_vllm_decides_for_a_device(ask, device):
    if device == "mi300" and distribution("vllm").read_text(BORROWED):
        pytest.skip("vLLM imports its compiled parts for ROCm, and those of a CPU end the process")
    cases = {case: says for case, says in ON.items() if case[0] == device}
    answers = ask(device, *([model, *flags] for _, model, flags in cases))
    for says, (status, lines) in zip(cases.values(), answers):
        assert says in lines[0], lines
        assert status == any(word in says for word in REFUSING)
    assert len(answers) == len(cases)


def test_what_prepares_images_may_be_missing_here(ask, tmp_path):
    """vLLM's modules of these models import torchvision. A model of text needs none of it; with images it is the
    host's.
    """
    text = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 64, "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 4096}
    towers = {"text_config": {"model_type": "gemma3_text"}, "vision_config": {"model_type": "siglip_vision_model"}}
    models = {
        "Qwen3_5ForCausalLM": {"model_type": "qwen3_5_text", **text},
        "Gemma3ForConditionalGeneration": {"model_type": "gemma3", **towers},
    }
    for name, config in models.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [name], **config}))
    (alone, (of_text, _)), (images, (with_images, *_)) = ask("h200", *([str(tmp_path / name)] for name in models))
    assert alone == images == 0
    assert of_text.endswith("attention backend FLASH_ATTN") and with_images.endswith("attention backend TRITON_ATTN")


@pytest.mark.parametrize("limits, alone, attend", [({}, False, True), ({}, True, False), ({"image": 0}, False, False)])
def test_images_attend_to_themselves_though_they_cannot_be_prepared_here(limits, alone, attend):
    class Model:
        is_multimodal_model, model_arch_config = True, False
        multimodal_config = SimpleNamespace(
            language_model_only=alone, limit_per_prompt=limits, get_limit_per_prompt=limits.get
        )

        def _supports_multimodal_for_mm_prefix(self):
            return False

        def get_model_arch_config(self):
            return self._supports_multimodal_for_mm_prefix()

    assert check._with_images(Model()).model_arch_config is attend


def test_every_model_is_asked_whether_it_has_images(folders, monkeypatch):
    asked = []
    monkeypatch.setattr(check, "_with_images", lambda model: asked.append(model) or model)
    made = check._configured(check._parse([str(folders["llama"]), *FLAGS]))
    assert asked == [made.model_config]


def test_a_model_of_text_and_sounds_needs_no_files_but_its_configuration(ask, tmp_path):
    """The tokenizer, which vLLM misses here, changes nothing about attention."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "num_hidden_layers": 2}
    known = {"architectures": ["UltravoxModel"], "model_type": "ultravox", "audio_config": {"model_type": "whisper"}}
    (tmp_path / "config.json").write_text(json.dumps({**known, "text_config": text}))
    ((status, (said, _)),) = ask("h200", [str(tmp_path)])
    assert status == 0 and "attention backend FLASH_ATTN" in said


@pytest.mark.parametrize(
    "before",
    [["vllm", "serve"], ["VLLM_MINE=a=b", "vllm", "serve"], ["python3", "-m", "vllm.entrypoints.openai.api_server"]],
)
def test_a_command_may_be_pasted_whole(monkeypatch, before):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(check.CheckError, match="got no MODEL"):
        check._own(["--device", "cpu", *before])
    assert check._own(["--device", "cpu", *before, "MODEL", "--port", "1"]) == ("cpu", ["MODEL", "--port", "1"])
    assert os.environ.get("VLLM_MINE") == ("a=b" if "VLLM_MINE=a=b" in before else None)


def test_files_and_memory_of_the_server_are_elsewhere(ask):
    """Settings that vLLM reads from the tokenizer or a template, and blocks on the host, need another machine's files
    and memory.
    """
    front = ["--reasoning-parser", "qwen3", "--chat-template", "no/such.jinja"]
    host = ["--kv-policy", json.dumps({"name": "full", "evict": "host", "host": "64TiB", "budget": 4096})]
    audit = ["--kv-policy", '{"name": "h2o", "audit": 0.01}']
    (front_end, first), (small, second), (audits, third), (here, (refused,)), (runs, fourth) = (
        *ask("h200", ["llama", *front], ["llama", *host], ["llama", *audit]),
        *ask("cpu", ["llama", *host], ["llama", *audit]),
    )
    assert front_end == small == audits == runs == 0 and here == 1
    assert third[2:] == ["No GPU has run audits yet"] and len(first) == 3 and len(fourth) == 2
    assert first[2] == "Not tried here: --chat-template, --reasoning-parser"
    assert second[2] == f"Not tried here: memory for host ({64 << 40} bytes of each engine)"
    assert f"host: {64 << 40} bytes on a machine of" in refused


def test_every_refusal_is_printed(folders):
    """The command itself, before a pasted one, on a device of each kind of which no more than facts are known."""
    flags = ["--kv-sharing-fast-prefill", "--scheduler-cls", "a.B"]
    command = [sys.executable, "-c", "from vllm_evict.cli import main; main()", "check", "--device", "gb200"]
    command += ["vllm", "serve", folders["llama"], *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    scheduler, fast = done.stdout.splitlines()
    assert (
        done.returncode == 1 and "fast prefill over shared caches" in fast and "leave --scheduler-cls out" in scheduler
    )


def test_the_command_without_a_device_or_vllm(folders, monkeypatch):
    def run(*words, before="pass"):
        script = f"import sys; {before}; from vllm_evict.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", script, "check", *words], capture_output=True, text=True)
        assert done.returncode == 2 and not done.stdout
        (line,) = done.stderr.splitlines()
        return line

    listed = ", ".join(DEVICES)
    for words in (["--device", "tpu", "x"], ["x"], ["--device=", "x"]):
        assert run(*words).endswith(f"expected one of {listed}")
    assert "expected one argument" in run("--device")
    assert "no MODEL" in run("--device", "cpu")
    without = run("--device", "cpu", folders["llama"], before="sys.modules['vllm'] = None")
    assert without.startswith("vllm-evict: check needs vLLM")
