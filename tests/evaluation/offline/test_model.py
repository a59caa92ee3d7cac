# SPDX-License-Identifier: Apache-2.0
"""Models that make logits in a way of their own, or hide which layers have full attention."""

import pytest
import torch

from entropykv_vllm.evaluation.offline import model as offline
from tests.evaluation.offline.conftest import load, tiny


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.0625}),
        ("gemma2", {"final_logit_softcapping": 2.0, "sliding_window": 2048}),
    ],
)
def test_logits_are_the_models_own(tmp_path_factory, kind, more):
    model = load(tiny(tmp_path_factory, kind, **more))
    ids = torch.arange(2, 60)[None]

    with torch.inference_mode(), offline.attending(offline._plain):
        expected = model.net(input_ids=ids, use_cache=False).logits
    found = model.logits(model.hidden(ids, 0, offline._plain))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_logits_that_are_changed_otherwise_are_refused(tmp_path_factory, monkeypatch):
    folder = tiny(tmp_path_factory, "llama")
    own = offline.Model.logits
    monkeypatch.setattr(offline.Model, "logits", lambda self, hidden: 2 * own(self, hidden))
    with pytest.raises(ValueError, match="a way of its own"):
        load(folder)


def test_a_model_of_windows_alone_has_nothing_to_evict(tmp_path_factory):
    folder = tiny(tmp_path_factory, "mistral", sliding_window=64)
    with pytest.raises(ValueError, match="sliding windows"):
        load(folder)


def test_windows_are_found_where_no_list_of_kinds_names_them(tmp_path_factory):
    model = load(tiny(tmp_path_factory, "mistral", sliding_window=None))
    assert model.full == [0, 1, 2, 3]
