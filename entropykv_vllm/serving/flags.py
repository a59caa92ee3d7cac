# SPDX-License-Identifier: Apache-2.0
"""`--kv-eviction` and the flags beside it in vLLM's command line.

The one place where vLLM is patched: its engine arguments are a dataclass without an extension
point. The flags set four of them: `additional_config`, `worker_cls`, `scheduler_cls`, `block_size`.
They also let the live page in, which vLLM would only do if VLLM_PLUGINS named it.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from vllm import envs, plugins
from vllm.engine.arg_utils import EngineArgs

from entropykv_vllm.config.settings import (
    CONFIG_KEY,
    DEFAULT_PRESET,
    OTHERS_DEFAULT,
    POLICIES,
    EvictionConfig,
    load,
    preset_names,
)
from entropykv_vllm.serving.positions import TEXT_KEY
from entropykv_vllm.serving.settings import engine_settings

#: Of this package, in each group of vLLM's plugins.
ENTRY_POINT = "entropykv"

_MARK = "_entropykv_flags"


def install() -> None:
    """Wrap `EngineArgs.add_cli_args` and `EngineArgs.from_cli_args`, once."""
    if getattr(EngineArgs, _MARK, False):
        return
    setattr(EngineArgs, _MARK, True)
    EngineArgs.add_cli_args = staticmethod(_adding_flags(EngineArgs.add_cli_args))
    EngineArgs.from_cli_args = classmethod(_applying_flags(EngineArgs.from_cli_args.__func__))
    plugins.load_endpoint_plugins = _letting_the_page_in(plugins.load_endpoint_plugins)


def _adding_flags(add_cli_args: Callable) -> Callable:
    @functools.wraps(add_cli_args)
    def wrapper(parser):
        parser = add_cli_args(parser)
        group = parser.add_argument_group(
            title="EntropyKV", description="Evict pages of the KV cache (plugin entropykv-vllm)."
        )
        group.add_argument(
            "--kv-eviction",
            choices=["none", *POLICIES],
            default="none",
            help="The policy that decides which tokens stay in the KV cache.",
        )
        group.add_argument("--kv-eviction-config", default=None, help=_config_help())
        group.add_argument(
            "--kv-eviction-ui",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="With eviction: the live page /entropykv on the same server.",
        )
        group.add_argument(
            "--kv-eviction-ui-text",
            action="store_true",
            help="Let the live page show the text of prompts and answers, to all who can open it.",
        )
        return parser

    return wrapper


def _config_help() -> str:
    fields = "\n".join(
        f"- {name}: {field.description}{_default(field.default)}"
        for name, field in EvictionConfig.model_fields.items()
    )
    return (
        f"A preset ({', '.join(preset_names())}), a YAML file, or settings on top of a preset, as "
        "JSON or as --kv-eviction-config.NAME VALUE, where NAME 'preset' names the preset. Without "
        f"one it is {DEFAULT_PRESET} for entropykv, and for the other policies, which are there to "
        f"be compared with, {OTHERS_DEFAULT['preset']} with bits "
        f"{OTHERS_DEFAULT['bits']}. Settings and their values where a preset leaves them "
        f"out:\n{fields}"
    )


def _default(value: object) -> str:
    return "" if value is None else f" ({value})"


def _applying_flags(from_cli_args: Callable) -> Callable:
    @functools.wraps(from_cli_args)
    def wrapper(cls, args: argparse.Namespace):
        policy = getattr(args, "kv_eviction", "none")
        if policy == "none":
            for flag in ("config", "ui_text"):
                if getattr(args, f"kv_eviction_{flag}", None):
                    name = f"--kv-eviction-{flag.replace('_', '-')}"
                    _stop(f"{name} needs --kv-eviction POLICY beside it")
            return from_cli_args(cls, args)
        for name, value in _settings(policy, args).items():
            setattr(args, name, value)
        engine_args = from_cli_args(cls, args)
        if engine_args.distributed_executor_backend == "ray" and engine_args.data_parallel_size < 2:
            engine_args.distributed_executor_backend = _asking_nodes()
        engine_args.create_engine_config = _checked(engine_args.create_engine_config)
        return engine_args

    return wrapper


def _asking_nodes() -> type | str:
    """vLLM's executor on Ray, which first asks the nodes whether they evict.

    Not with data parallelism, where vLLM asks for the executor by its name before one is made.
    """
    if find_spec("ray") is None:
        return "ray"  # vLLM says what is missing
    from entropykv_vllm.serving.ray_executor import ray_executor

    return ray_executor()


def _settings(policy: str, args: argparse.Namespace) -> dict[str, Any]:
    try:
        config = load(policy, args.kv_eviction_config)
    except ValueError as error:
        _stop(str(error))
    settings = engine_settings(config)
    for name in ("worker_cls", "scheduler_cls"):
        if getattr(args, name, None) not in (None, "auto", settings[name]):
            _stop(f"--kv-eviction sets --{name.replace('_', '-')} itself: leave that out")
    settings["additional_config"] = {
        **(getattr(args, "additional_config", None) or {}),
        CONFIG_KEY: settings["additional_config"][CONFIG_KEY],
    }
    if getattr(args, "kv_eviction_ui_text", False):
        if not args.kv_eviction_ui:
            _stop("--kv-eviction-ui-text shows text on the page that --no-kv-eviction-ui turns off")
        settings["additional_config"][TEXT_KEY] = True
    if getattr(args, "enable_prefix_caching", None) is not None:
        settings.pop("enable_prefix_caching", None)  # `checks` says what is wrong with it
    if getattr(args, "block_size", None) is not None:
        del settings["block_size"]
    return settings


def _checked(create_engine_config: Callable) -> Callable:
    """Refuse at start-up, before any process is started, what cannot be served."""

    @functools.wraps(create_engine_config)
    def wrapper(*args, **kwargs):
        import vllm

        from entropykv_vllm.serving import checks

        try:
            checks.check_version(vllm.__version__)
            config = create_engine_config(*args, **kwargs)
            checks.check_engine(config)
            checks.check_plan(config)
        except checks.UnsupportedError as error:
            _stop(str(error))
        return config

    return wrapper


def _letting_the_page_in(load_endpoint_plugins: Callable) -> Callable:
    """vLLM's, which opens no route of a plugin that VLLM_PLUGINS does not name.

    Whoever starts a server with --kv-eviction has asked for ours, so where the variable is not set
    it names ours while the plugins are looked up: others stay shut. The page itself looks whether
    it is turned off.
    """

    @functools.wraps(load_endpoint_plugins)
    def wrapper(*args, **kwargs):
        if envs.VLLM_PLUGINS is not None:
            return load_endpoint_plugins(*args, **kwargs)
        os.environ["VLLM_PLUGINS"] = ENTRY_POINT
        try:
            return load_endpoint_plugins(*args, **kwargs)
        finally:
            del os.environ["VLLM_PLUGINS"]

    return wrapper


def _stop(sentence: str) -> None:
    print(f"entropykv: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)
