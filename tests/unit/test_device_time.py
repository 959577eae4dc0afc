"""Where a step's time goes on a device, of made-up kernels."""

from __future__ import annotations

import pytest

from benchmarks.parts.device_time import Kernel, device_time, kind_of, table


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90", "attention"),
        ("backward", "attention"),
        ("nvjet_sm90_tst_128x304_64x3_2x1_v_badd_coopA_NNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matrix products"),
        ("void at::native::layer_norm_grad_input_kernel_vectorized<c10::BFloat16>", "norms"),
        ("norm_backward", "norms"),
        ("_swiglu_backward_kernel", "gated products, GELU"),
        ("gated_backward", "gated products, GELU"),
        ("gelu_backward", "gated products, GELU"),
        ("_triton_rope", "rotation"),
        ("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", "AdamW"),
        ("multi_tensor_apply_kernel<TensorListMetadata<1>, BinaryOp>", "gradient norm, clipping"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and fills"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy>", "copies and fills"),
        ("void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add>", "other single numbers"),
        ("something", "others"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_all_time_is_told_once() -> None:
    kernels = [
        Kernel("gemm", 2000, 5000),
        Kernel("_triton_rope", 1000, 2000),
        Kernel("Memcpy", 4000, 6000),  # half of it beside the product
        Kernel("Memcpy", 4500, 5000),  # all of it
        Kernel("gemm", 8000, 9000),
    ]
    rows = device_time(kernels)
    assert rows == [
        ("matrix products", 4.0, 2),
        ("rotation", 1.0, 1),
        ("copies and fills", 1.0, 2),
        ("nothing", 2.0, 0),
    ]
    assert device_time([]) == []
    assert "50.0%" in table(rows) and table(rows).endswith("8.0 ms")
