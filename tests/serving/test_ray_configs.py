# SPDX-License-Identifier: Apache-2.0
"""The files for Ray Serve: Ray knows what is in them, and so do we."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray")
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from entropykv_vllm.serving.ray_scaling import PagesAskedFor
from entropykv_vllm.serving.ray_serve import EvictionServer, build_openai_app, with_eviction

FILES = sorted((Path(__file__).parents[2] / "configs" / "ray").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_one_for_ray_serve(path):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == (build_openai_app.__module__, build_openai_app.__name__)
    for model in application.args["llm_configs"]:
        ours = with_eviction(model)
        assert ours["server_cls"] is EvictionServer
        assert "kv_eviction" not in ours["engine_kwargs"]
        _check_engine(ours["engine_kwargs"])
        _check_scaling(model["deployment_config"])


def _check_engine(engine: dict) -> None:
    import dataclasses

    from vllm.engine.arg_utils import AsyncEngineArgs

    assert set(engine) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def _check_scaling(deployment: dict) -> None:
    if "autoscaling_config" in deployment:
        config = AutoscalingConfig.model_validate(deployment["autoscaling_config"])
        policy = config.policy.get_policy()
        assert policy is PagesAskedFor or isinstance(policy, PagesAskedFor)


def test_there_are_files():
    assert len(FILES) >= 2
