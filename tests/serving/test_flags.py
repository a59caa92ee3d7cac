# SPDX-License-Identifier: Apache-2.0
"""The flags in vLLM's command line, and what is refused before a server starts."""

import json
import os
import tomllib
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import plugins
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.utils.argparse_utils import FlexibleArgumentParser

from entropykv_vllm import engine_args
from entropykv_vllm.config.settings import EvictionConfig, load
from entropykv_vllm.kernels.scores import OBSERVED
from entropykv_vllm.serving import checks, flags, positions

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
MLA = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 2,
    "first_k_dense_replace": 4,
}
ENCODER_DECODER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 51865,
    "torch_dtype": "float32",
}
IMAGES = LLAMA | {"is_mm_prefix_lm": True}
POOLING = LLAMA | {"architectures": ["LlamaModel"]}
BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "torch_dtype": "float32",
}


@pytest.fixture
def make(tmp_path):
    """Parse a command line for a model of the given Hugging Face configuration."""
    flags.install()

    def parse(*words: str, model: dict = LLAMA):
        (tmp_path / "config.json").write_text(json.dumps(model))
        (tmp_path / "preprocessor_config.json").write_text('{"feature_size": 80}')
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        common = ["--model", str(tmp_path), "--skip-tokenizer-init", "--load-format", "dummy"]
        return AsyncEngineArgs.from_cli_args(parser.parse_args([*common, *words]))

    return parse


def refusal(capsys, run) -> str:
    """The one sentence that ends the start, with a non-zero exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code != 0
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_without_the_flag_nothing_is_changed(make):
    args = make()
    assert (args.worker_cls, args.scheduler_cls, args.block_size) == ("auto", None, None)
    assert args.additional_config == {}


def test_the_flag_sets_worker_scheduler_pages_and_settings(make):
    args = make("--kv-eviction", "norm", "--kv-eviction-config", '{"keep": 0.25}')
    assert args.worker_cls.endswith("EvictionWorker")
    assert args.scheduler_cls == "entropykv_vllm.serving.scheduler.scheduler"
    assert args.block_size == 32
    expected = {"policy": "norm", "keep": 0.25, "bits": 16, "window": 224, "interval": 224}
    sent = args.additional_config["entropykv"]
    assert sent == EvictionConfig(**expected).model_dump(mode="json", exclude_none=True)
    assert "segment" not in sent


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ([], 32),
        (["--kv-eviction-config", "quality"], 64),
        (["--kv-eviction-config", "quality", "--block-size", "128"], 128),
        (['--kv-eviction-config={"tiers": [{"name": "a", "layers": "0-3", "bits": 8}]}'], 64),
        (['--kv-eviction-config={"bits": 8, "tiers": [{"name":"a","layers":"0","bits":4}]}'], 32),
    ],
)
def test_pages_are_larger_where_eight_bits_need_it(make, words, page):
    assert make("--kv-eviction", "entropykv", *words).block_size == page


def test_engine_args_start_from_the_same_presets():
    for policy in ("entropykv", "norm"):
        settings = engine_args(policy)["additional_config"]["entropykv"]
        assert EvictionConfig(**settings) == load(policy)
    assert engine_args("entropykv")["block_size"] == 32
    assert engine_args("norm", preset="quality")["block_size"] == 64


def test_dotted_keys_and_presets_and_other_additional_config(make):
    args = make(
        *("--kv-eviction", "entropykv", "--kv-eviction-config.keep", "0.3"),
        *("--kv-eviction-config.preset", "quality", "--additional-config", '{"a": 1}'),
        *("--block-size", "64"),
    )
    assert args.additional_config["a"] == 1
    assert args.additional_config["entropykv"]["keep"] == 0.3
    assert args.additional_config["entropykv"]["window"] == 256
    assert args.block_size == 64


def test_a_preset_by_name_brings_its_policy(make):
    args = make("--kv-eviction", "sink", "--kv-eviction-config", "streaming")
    assert args.additional_config["entropykv"]["policy"] == "sink"


def test_a_supported_model_starts(make):
    config = make("--kv-eviction", "entropykv").create_engine_config()
    assert config.additional_config["entropykv"]["policy"] == "entropykv"
    assert config.cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kv-eviction-config.keep", "0"], "keep is 0: input should be greater than 0"),
        (["--kv-eviction-config.keep", "2"], "keep is 2: input should be less than or equal to 1"),
        (["--kv-eviction-config", "nowhere"], "neither a preset"),
        (["--worker-cls", "my.Worker"], "sets --worker-cls itself"),
    ],
)
def test_wrong_settings_stop_in_words(make, capsys, words, sentence):
    said = refusal(capsys, lambda: make("--kv-eviction", "entropykv", *words))
    assert said.startswith("entropykv: error: ")
    assert sentence in said


def test_an_unknown_policy_stops_in_words(make, capsys):
    assert "invalid choice: 'lru'" in refusal(capsys, lambda: make("--kv-eviction", "lru"))


def test_settings_without_the_flag_stop_in_words(make, capsys):
    said = refusal(capsys, lambda: make("--kv-eviction-config", '{"keep": 0.5}'))
    assert "needs --kv-eviction" in said


@pytest.mark.parametrize(
    ("model", "words", "sentence"),
    [
        (MLA, [], "does not support models with multi-head latent attention"),
        (ENCODER_DECODER, [], "does not support encoder-decoder models"),
        (IMAGES, [], "does not support images that attend to what follows in them"),
        (POOLING, ["--runner", "pooling"], "does not support pooling models"),
        (BERT, [], "does not support pooling models"),
        (
            LLAMA,
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'],
            "does not support speculative decoding",
        ),
        (LLAMA, ["--kv-cache-dtype", "fp8"], "does not support --kv-cache-dtype fp8"),
        (LLAMA, ["--kv-sharing-fast-prefill"], "does not support --kv-sharing-fast-prefill"),
        (LLAMA, ["--disable-hybrid-kv-cache-manager"], "hybrid KV cache manager"),
    ],
)
def test_what_is_not_supported_stops_in_words(make, capsys, model, words, sentence):
    args = make("--kv-eviction", "entropykv", *words, model=model)
    said = refusal(capsys, args.create_engine_config)
    assert said.startswith("entropykv: error: EntropyKV ")
    assert sentence in said
    assert "--kv-eviction none" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--attention-backend", "FLASHINFER"], "attends with FLASH_ATTN or TRITON_ATTN"),
        (["--attention-backend", "TRITON_ATTN"], None),
        (
            ["--attention-config.backend_per_kind.full_attention", "FLASH_ATTN"],
            "brings the backend for layers with full attention",
        ),
        (["--kv-eviction", "h2o"], "has the policy h2o, which reads attention, on CPUs only"),
        (["--kv-eviction-ui-text"], "follows the tokens of a text on CPUs only"),
    ],
)
def test_what_gpus_do_not_support_is_refused_there(make, words, sentence):
    config = make("--kv-eviction", "entropykv", *words).create_engine_config()
    found = [said for refused, said in checks._gpu_refusals(config) if refused]
    assert len(found) == bool(sentence)
    assert all(sentence in said for said in found)


def test_diffusion_is_refused_where_vllm_would_run_it(make):
    config = make("--kv-eviction", "entropykv").create_engine_config()
    vars(config.model_config)["is_diffusion"] = True  # on CPUs vLLM refuses it first
    with pytest.raises(checks.UnsupportedError, match="does not support diffusion models"):
        checks.check_engine(config)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kv-eviction-config.segment", "100"], "segment must be whole pages, of 32 tokens"),
        (["--kv-eviction-config.sinks", "33"], "sinks must fit one page of 32 tokens"),
        (["--kv-eviction-config.cap", "90"], "cap must have room for one old page of 96 tokens"),
        (
            ["--kv-eviction-config.bits", "8", "--block-size", "16", "--dtype", "bfloat16"],
            "set a larger --block-size, such as 32",
        ),
        (
            ["--kv-eviction-config", '{"tiers": [{"name": "a", "layers": "0-9"}]}'],
            "tier 'a' names layer 4, which is not a full-attention layer of this model",
        ),
        (
            ["--kv-eviction-config", '{"tiers": [{"name": "a", "layers": "0-2"}]}'],
            "no tier has the layers 3",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_stop_in_words(make, capsys, words, sentence):
    args = make("--kv-eviction", "entropykv", *words)
    said = refusal(capsys, args.create_engine_config)
    assert said.startswith("entropykv: error: these settings do not fit: ")
    assert sentence in said


def test_settings_calibrated_for_another_model_stop_in_words(make, capsys):
    words = ["--kv-eviction-config", "SmolLM2-135M-Instruct.json"]
    said = refusal(capsys, make("--kv-eviction", "entropykv", *words).create_engine_config)
    assert "calibrated for another model (SmolLM2-135M-Instruct)" in said
    assert "entropykv calibrate" in said


@pytest.mark.parametrize("policy", OBSERVED)
def test_scores_that_read_attention_turn_the_prefix_cache_off(make, policy):
    config = make("--kv-eviction", policy).create_engine_config()
    assert config.cache_config.enable_prefix_caching is False
    assert engine_args(policy)["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in engine_args("entropykv")


def test_scores_that_read_attention_refuse_the_prefix_cache(make, capsys):
    args = make("--kv-eviction", "h2o", "--enable-prefix-caching")
    said = refusal(capsys, args.create_engine_config)
    assert "needs --no-enable-prefix-caching for scores that read attention" in said


def test_an_unsupported_vllm_stops_in_words(make, capsys, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    said = refusal(capsys, make("--kv-eviction", "entropykv").create_engine_config)
    assert "supports vLLM 0.32 and 0.33, and this is 0.31.0" in said


def test_the_help_names_every_setting():
    flags.install()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    helps = {word: a.help for a in parser._actions for word in a.option_strings}
    for name, field in EvictionConfig.model_fields.items():
        assert f"- {name}: {field.description}" in helps["--kv-eviction-config"]


def test_an_older_ray_executor_that_talks_through_gpus_is_refused_on_cpus(make, monkeypatch):
    pytest.importorskip("ray")
    words = ["--kv-eviction", "entropykv", "--distributed-executor-backend", "ray"]
    config = make(*words).create_engine_config()
    assert config.parallel_config.use_ray
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(checks.UnsupportedError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"):
        checks.check_engine(config)
    monkeypatch.setenv("VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE", "shm")
    checks.check_engine(config)


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["--distributed-executor-backend", "ray"], True),
        (["--distributed-executor-backend", "ray", "--data-parallel-size", "2"], False),
        (["--distributed-executor-backend", "mp"], False),
    ],
)
def test_an_executor_of_ours_asks_the_nodes(make, words, ours):
    pytest.importorskip("ray")
    backend = make("--kv-eviction", "entropykv", *words).distributed_executor_backend
    from entropykv_vllm.serving.ray_executor import EvictionRayExecutor

    assert (backend is EvictionRayExecutor) == ours
    assert ours or backend in words


def test_without_eviction_ray_stays_as_it_is(make):
    assert make("--distributed-executor-backend", "ray").distributed_executor_backend == "ray"


def test_workers_keep_positions_only_if_the_page_shows_text(make):
    assert positions.TEXT_KEY not in make("--kv-eviction", "entropykv").additional_config
    args = make("--kv-eviction", "entropykv", "--kv-eviction-ui-text")
    assert positions.wanted(args)
    assert args.additional_config["entropykv"]["policy"] == "entropykv"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kv-eviction-ui-text"], "--kv-eviction-ui-text needs --kv-eviction"),
        (
            ["--kv-eviction", "norm", "--kv-eviction-ui-text", "--no-kv-eviction-ui"],
            "shows text on the page that --no-kv-eviction-ui turns off",
        ),
    ],
)
def test_text_without_a_page_stops_in_words(make, capsys, words, sentence):
    assert sentence in refusal(capsys, lambda: make(*words))


def test_text_with_a_score_that_reads_attention_stops_in_words(make, capsys):
    args = make("--kv-eviction", "h2o", "--kv-eviction-ui-text")
    assert "shows no text with scores that read attention" in refusal(
        capsys, args.create_engine_config
    )


class Found:
    """What an endpoint plugin of another package would be found as."""

    value = "other"

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self):
        return lambda: SimpleNamespace(name=self.name, required_tasks=None)


@pytest.mark.parametrize(
    ("named", "loaded"),
    [(None, ["entropykv"]), ("other", ["other"]), ("other,entropykv", ["other", "entropykv"])],
)
def test_the_pages_gate_opens_for_the_page_alone(monkeypatch, named, loaded):
    """vLLM opens no routes of plugins that VLLM_PLUGINS does not name."""
    flags.install()
    found = [Found("other"), Found("entropykv")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: found)
    if named is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    assert [plugin.name for plugin in plugins.load_endpoint_plugins(("generate",))] == loaded
    assert os.environ.get("VLLM_PLUGINS") == named


def test_the_package_names_the_page_as_its_endpoint_plugin():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    entry = project["entry-points"]["vllm.endpoint_plugins"][flags.ENTRY_POINT]
    module, _, name = entry.partition(":")
    assert isinstance(getattr(import_module(module), name)(), EndpointPlugin)
