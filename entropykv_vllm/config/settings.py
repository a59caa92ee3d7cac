# SPDX-License-Identifier: Apache-2.0
"""The one validated configuration object, and where it comes from: presets, files, JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

Policy = Literal["entropykv", "norm", "knorm", "keydiff", "sink", "window", "random"]
POLICIES: tuple[str, ...] = get_args(Policy)
DEFAULT_PRESET = "balanced"

#: The key under which the settings travel in vLLM's `additional_config`.
CONFIG_KEY = "entropykv"

_STRICT = ConfigDict(extra="forbid", frozen=True)


class TierConfig(BaseModel):
    """A set of layers with its own window, keep ratio and bits."""

    model_config = _STRICT

    name: str = Field(min_length=1, description="The name of the tier in metrics and logs.")
    layers: tuple[int, ...] | str = Field(
        description="The layers of the tier, as a list or as ranges such as '0-5,24-29'."
    )
    window: int | None = Field(None, ge=0, description="The recency window of these layers.")
    keep: float | None = Field(None, gt=0, le=1, description="The keep ratio of these layers.")
    bits: Literal[16] | None = Field(None, description="The bits of these layers' cold pages.")

    @field_validator("layers")
    @classmethod
    def _layers_parse(cls, value: tuple[int, ...] | str) -> tuple[int, ...] | str:
        if not _parse_layers(value):
            raise ValueError("a tier needs at least one layer")
        return value

    def layer_indices(self) -> tuple[int, ...]:
        """The layers as sorted indices in the whole model."""
        return _parse_layers(self.layers)


def _parse_layers(value: tuple[int, ...] | str) -> tuple[int, ...]:
    if not isinstance(value, str):
        return tuple(sorted(set(value)))
    layers: set[int] = set()
    for part in value.split(","):
        first, _, last = part.strip().partition("-")
        try:
            layers.update(range(int(first), int(last or first) + 1))
        except ValueError:
            raise ValueError(f"'{part.strip()}' is not a layer or a range of layers") from None
    return tuple(sorted(layers))


class EvictionConfig(BaseModel):
    """How the KV cache of a request is kept small. All lengths are in tokens."""

    model_config = _STRICT

    policy: Policy = Field("entropykv", description="The score that decides which tokens stay.")
    keep: float = Field(
        0.5, gt=0, le=1, description="The share of the tokens older than the window that stay."
    )
    bits: Literal[16] = Field(16, description="The bits of a number in a cold page.")
    sinks: int = Field(4, ge=0, description="The first tokens of a request, which always stay.")
    window: int = Field(
        256, ge=0, description="The newest tokens, which always stay, as a mean over the layers."
    )
    segment: int = Field(
        256, gt=0, description="The tokens that compete with each other for the kept places."
    )
    interval: int = Field(
        512, gt=0, description="Pages are freed each time a request has grown by this much."
    )
    cap: int | None = Field(
        None, gt=0, description="The most old tokens a layer keeps, whatever the context length."
    )
    lara_window: float = Field(
        0.0, description="How much longer the window of early and late layers is; 0 is uniform."
    )
    lara_keep: float = Field(
        0.0, description="How much more early and late layers keep; negative is less."
    )
    tiers: tuple[TierConfig, ...] | None = Field(
        None, min_length=1, description="Sets of layers made by hand, in place of LARA's."
    )
    granularity: Literal["token", "block"] | None = Field(
        None, description="Keep single tokens or runs of 16; unset: what suits the policy."
    )
    scope: Literal["head", "layer"] | None = Field(
        None, description="Choose per KV head or once per layer; unset: what suits the policy."
    )

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
        config: settings on top of the default preset, as a mapping or its JSON; or the name of a
            preset; or the path of a YAML file. A preset or file may be extended through the key
            `preset` of a mapping.

    Raises:
        ValueError: one sentence that says what is wrong and what to do.
    """
    values = _read(config)
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


def _read(config: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(config, str):
        config = _parse(config)
    values = dict(config or {})
    preset = values.pop("preset", DEFAULT_PRESET)
    return {**_read_file(preset), **values} if preset else values


def _parse(text: str) -> Mapping[str, Any]:
    if not text.lstrip().startswith("{"):
        return {"preset": text}
    try:
        values: Mapping[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"kv-eviction-config is not valid JSON: {error}") from None
    return values


def _read_file(name: str) -> dict[str, Any]:
    path = _preset_folder() / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"'{name}' is neither a preset ({', '.join(preset_names())}) nor a YAML file"
        )
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings such as 'keep: 0.5'")
    return values


def _sentence(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"]))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            known = ", ".join(EvictionConfig.model_fields)
            parts.append(f"'{name}' is not a setting; there are {known}")
        else:
            parts.append(f"{name} is {item['input']!r}: {message[0].lower()}{message[1:]}")
    return "wrong kv-eviction settings: " + "; ".join(parts)
