# SPDX-License-Identifier: Apache-2.0
"""The one validated configuration object, and where it comes from: presets, files, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from entropykv_vllm.config.policies import CURVES, MODULES

POLICIES = tuple(MODULES)
Bits = Literal[16, 8, 4]

#: Where settings start from if they name no preset: those of entropykv, and those of the other
#: policies, whose scores are compared without quantization.
DEFAULT_PRESET = "balanced"
OTHERS_DEFAULT = {"preset": "long-context", "bits": 16}

#: The key under which the settings travel in vLLM's `additional_config`.
CONFIG_KEY = "entropykv"

#: No model has as many; a slip of the finger must not fill the memory.
MOST_LAYERS = 10_000

_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TierConfig(BaseModel):
    """A set of layers with its own window, keep ratio and bits."""

    model_config = _STRICT

    name: str = Field(min_length=1, description="The name of the tier in metrics and logs.")
    layers: tuple[int, ...] = Field(
        description="The layers of the tier, as a list or as ranges such as '0-5,24-29'."
    )
    window: int | None = Field(None, ge=0, description="The recency window of these layers.")
    keep: float | None = Field(None, gt=0, le=1, description="The keep ratio of these layers.")
    bits: Bits | None = Field(None, description="The bits of these layers' cold pages.")

    @field_validator("layers", mode="before")
    @classmethod
    def _parse(cls, value: object) -> tuple[int, ...]:
        layers = _parse_layers(value)
        if not layers:
            raise ValueError("a tier needs at least one layer")
        return layers


class ProfileConfig(BaseModel):
    """Which model settings were calibrated for, and what was found out about it."""

    model_config = _STRICT

    model: str = Field(description="The hash of the model's configuration.")
    name: str = Field("", description="The model's name.")
    sensitivity: dict[int, float] = Field(
        default_factory=dict, description="What cutting a layer cost, in nats, by layer."
    )


def _parse_layers(value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple):
        parts = [str(layer) for layer in value]
    elif isinstance(value, str):
        parts = value.split(",")
    else:
        raise ValueError("layers are a list such as [0, 1] or ranges such as '0-5,24-29'")
    return tuple(sorted({layer for part in parts for layer in _parse_range(part.strip())}))


def _parse_range(part: str) -> range:
    first, _, last = part.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MOST_LAYERS):
        raise ValueError(f"'{part}' is not a layer or a range of layers")
    return range(int(first), int(last) + 1)


class EvictionConfig(BaseModel):
    """How the KV cache of a request is kept small. All lengths are in tokens."""

    model_config = _STRICT

    policy: str = Field("entropykv", description="The score that decides which tokens stay.")
    keep: float = Field(
        0.5, gt=0, le=1, description="The share of the tokens older than the window that stay."
    )
    bits: Bits = Field(
        16,
        description="The bits of a number in an old page, 16, 8 or 4: fewer hold more tokens.",
    )
    sinks: int = Field(4, ge=0, description="The first tokens of a request, which always stay.")
    window: int = Field(
        256, ge=0, description="The newest tokens, which always stay, as a mean over the layers."
    )
    segment: int | None = Field(
        None,
        gt=0,
        description="The tokens that compete with each other for the kept places; unset: the "
        "length near 256 that suits the pages.",
    )
    interval: int = Field(
        512,
        gt=0,
        description="Pages are freed each time a request has grown by this much (whole pages).",
    )
    cap: int | None = Field(
        None, gt=0, description="The most old tokens a layer keeps, whatever the context length."
    )
    lara_window: float = Field(
        0.0,
        ge=-10,
        le=10,
        description="How much longer the window of early and late layers is; 0 is uniform.",
    )
    lara_keep: float = Field(
        0.0,
        ge=-10,
        le=10,
        description="How much more early and late layers keep; negative is less.",
    )
    curve: str = Field(
        "lara",
        description="What these two strengths follow: lara, which gives more to early and late "
        "layers, or pyramid, which gives more to early ones.",
    )
    tiers: tuple[TierConfig, ...] | None = Field(
        None, description="Sets of layers made by hand, in place of LARA's."
    )
    profile: ProfileConfig | None = Field(
        None, description="The model that the settings were calibrated for; others are refused."
    )
    granularity: Literal["token", "block"] | None = Field(
        None, description="Keep single tokens or runs of 16; unset: what suits the policy."
    )
    scope: Literal["head", "layer"] | None = Field(
        None, description="Choose per KV head or once per layer; unset: what suits the policy."
    )
    debug: bool = Field(
        False,
        description="Check at each step who owns pages, and on CPUs what full ones hold: slow.",
    )

    @field_validator("policy", "curve")
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        known = POLICIES if info.field_name == "policy" else CURVES
        if name not in known:
            raise ValueError(f"choose one of {', '.join(known)}")
        return name

    @field_validator("tiers")
    @classmethod
    def _names_differ(cls, tiers: tuple[TierConfig, ...] | None) -> tuple[TierConfig, ...] | None:
        names = [tier.name for tier in tiers or ()]
        if tiers is not None and not names:
            raise ValueError("name at least one tier, or leave tiers out")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tiers are named '{name}'")
        return tiers

    @property
    def bits_used(self) -> set[int]:
        """The bits of all tiers."""
        return {tier.bits or self.bits for tier in self.tiers or ()} or {self.bits}

    @property
    def selection(self) -> tuple[str, str]:
        """The granularity and the scope in force."""
        granularity, scope = _SELECTION.get(self.policy, ("token", "head"))
        return self.granularity or granularity, self.scope or scope


#: Norms rank single tokens badly and runs of tokens well; distinctness needs no help.
_SELECTION = {"norm": ("block", "head"), "knorm": ("block", "head")}


def load(policy: str, config: str | Mapping[str, Any] | None = None) -> EvictionConfig:
    """Read and validate settings.

    Args:
        policy: one of `POLICIES`.
        config: settings, as a mapping or its JSON; or the name of a preset; or the path of a YAML
            file. The key `preset` of a mapping names the preset or file that it is on top of:
            without it, `balanced` for entropykv, and for the other policies, which are there to be
            compared with, `long-context` with 16 bits.

    Raises:
        ValueError: one sentence that says what is wrong and what to do.
    """
    values = _read(policy, config)
    if policy not in POLICIES:
        raise ValueError(f"'{policy}' is not a policy: choose one of {', '.join(POLICIES)}")
    if values.setdefault("policy", policy) != policy:
        raise ValueError(
            f"these settings are made for --kv-eviction {values['policy']}, not {policy}: "
            f"use that policy or other settings"
        )
    try:
        return EvictionConfig.model_validate(values)
    except ValidationError as error:
        raise ValueError(_sentence(error)) from None


def preset_names() -> list[str]:
    """The names of the presets in `configs/`."""
    return sorted(path.stem for path in _preset_folder().glob("*.yaml"))


def _preset_folder() -> Path:
    installed = Path(str(resources.files("entropykv_vllm"))) / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def _read(policy: str, config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    values = dict(parse(config))
    if "preset" not in values and policy != "entropykv":
        values = {**OTHERS_DEFAULT, **values}
    preset = values.pop("preset", DEFAULT_PRESET)
    if not isinstance(preset, str):
        raise ValueError(f"preset is {preset!r}: name one of {', '.join(preset_names())}")
    return {**_read_file(preset), **values}


def parse(config: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Settings as a mapping, of which the key `preset` may name what they are on top of."""
    if not isinstance(config, str):
        return config or {}
    if not config.lstrip().startswith("{"):
        return {"preset": config}
    try:
        values: Mapping[str, Any] = json.loads(config)
    except json.JSONDecodeError as error:
        raise ValueError(f"kv-eviction-config is not valid JSON: {error}") from None
    return values


def _read_file(name: str) -> dict[str, Any]:
    path = _find(name)
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"'{_short(name)}' is neither a preset ({', '.join(preset_names())}) nor JSON nor a "
            f"YAML file that can be read ({error.__class__.__name__})"
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings such as 'keep: 0.5'")
    return values


def _find(name: str) -> Path:
    """A preset, a file that comes with the package (profiles of models), or any file."""
    if name in preset_names():
        return _preset_folder() / f"{name}.yaml"
    profiles = {path.name: path for path in _preset_folder().glob("*.json")}
    return profiles.get(name, Path(name))


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."


def _sentence(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"]))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            known = ", ".join(EvictionConfig.model_fields)
            parts.append(f"'{name}' is not a setting; there are {known}")
        else:
            parts.append(
                f"{name} is {_short(repr(item['input']))}: {message[0].lower()}{message[1:]}"
            )
    return "wrong kv-eviction settings: " + "; ".join(parts)
