# SPDX-License-Identifier: Apache-2.0
"""Which backend the GPU worker's layers get: vLLM's answers about a card, made up."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from entropykv_vllm.attention.backends import gpu_backend
from entropykv_vllm.attention.gpu import FlashTierBackend, TritonTierImpl


@pytest.fixture
def card(monkeypatch):
    """Pretend to have one, and that FlashAttention has pages of multiples of some tokens."""

    def card(major: int, page: int) -> None:
        patch = monkeypatch.setattr
        patch(fa_utils, "is_flash_attn_varlen_func_available", lambda: True)
        patch(
            type(current_platform), "get_device_capability", lambda *_: DeviceCapability(major, 0)
        )
        patch(FlashAttentionBackend, "get_supported_kernel_block_sizes", lambda: [page])

    return card


def config(page: int, head: int = 128, dtype=torch.bfloat16, named: str | None = None):
    return SimpleNamespace(
        attention_config=SimpleNamespace(backend=named and SimpleNamespace(name=named)),
        model_config=SimpleNamespace(dtype=dtype, get_head_size=lambda: head),
        cache_config=SimpleNamespace(block_size=page),
    )


@pytest.mark.parametrize(
    ("major", "multiple", "given", "found"),
    [
        (9, 16, config(32), "Flash"),
        (7, 16, config(32), "Triton"),
        (9, 16, config(32, dtype=torch.float32), "Triton"),
        (9, 16, config(32, head=100), "Triton"),
        (10, 128, config(128, head=256), "Flash"),
        (10, 128, config(32, head=256), "Triton"),
        (9, 16, config(32, named="TRITON_ATTN"), "Triton"),
    ],
)
def test_flash_attention_runs_where_card_heads_and_pages_allow_it(
    card, major, multiple, given, found
):
    card(major, multiple)
    assert gpu_backend(given) == f"{found}TierBackend"


HINT = "name TRITON_ATTN with --attention-backend"


@pytest.mark.parametrize(
    ("sinks", "dtype", "found"),
    [
        (False, torch.bfloat16, []),
        (True, torch.bfloat16, ["sink not supported on compute capability < 9.0", HINT]),
        (False, torch.float32, ["dtype not supported", HINT]),
        (False, torch.float64, ["dtype not supported"]),
    ],
)
def test_what_flash_attention_cannot_do_names_what_can(card, monkeypatch, sinks, dtype, found):
    """Whether a layer has sinks (gpt-oss) is known once it is made; Ampere has none."""
    card(8, 16)
    monkeypatch.setattr(FlashAttentionBackend, "supports_sink", lambda: True)
    reasons = FlashTierBackend.validate_configuration(
        *(64, dtype, "auto", 32, False, sinks, False, False, False),
        *(DeviceCapability(8, 0), "decoder"),
    )
    assert reasons == found


def test_no_output_is_quantized_that_our_kernels_would_leave_as_it_is():
    """vLLM's compiler would hand the layer a tensor of 8 bits and a scale that we do not read."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    impl = TritonTierImpl.__new__(TritonTierImpl)
    assert not impl.fused_output_quant_supported(kFp8StaticTensorSym)
