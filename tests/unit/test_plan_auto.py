"""Degrees that are chosen: by hand-made models, memories and links; and what hardware means."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from unit.plan_cases import audio_encoder, image_encoder, llm, random_samples

from omni_ds.errors import UserError
from omni_ds.plan.auto import Choice, Degrees, choose, legal_meshes
from omni_ds.plan.build import PlanOptions, build_plan
from omni_ds.plan.hardware import GIB, Device, hardware_of, known
from omni_ds.plan.llm_meta import LLMMeta
from omni_ds.plan.memory import BF16
from omni_ds.plan.mesh import Mesh
from omni_ds.plan.sample import SampleMeta
from omni_ds.plan.step_time import Batch, step_time

H200 = known(Device("NVIDIA H200", 141 * GIB, 8))
SAMPLES = tuple(SampleMeta(row, 2048, 1024, ()) for row in range(256))
OPTIONS = PlanOptions(max_tokens_per_micro_batch=16384, recompute=True)
ANY = Degrees()


def qwen3(layers: int, hidden: int, intermediate: int, heads: int, **experts) -> LLMMeta:
    return LLMMeta(hidden, layers, heads, 8, 128, intermediate, 151936, False, True, qk_norm=True, **experts)


SMALL, MIDDLE, LARGE = qwen3(28, 1024, 3072, 16), qwen3(36, 4096, 12288, 32), qwen3(64, 5120, 25600, 64)
EXPERTS = qwen3(
    48,
    2048,
    6144,
    32,
    experts=128,
    experts_per_token=8,
    moe_intermediate=768,
    moe_layers=tuple(range(48)),
)


def chosen(model: LLMMeta, world: int, asked: Degrees = ANY, *, hardware=H200, **options) -> Choice:
    return choose(model, (), replace(OPTIONS, **options), world, asked, hardware, BF16, SAMPLES)


def test_a_model_that_fits_is_only_replicated():
    assert chosen(SMALL, 8).mesh == Mesh(1, 8)
    assert chosen(MIDDLE, 8).mesh == Mesh(1, 8)


def test_a_large_model_is_cut_within_a_node():
    choice = chosen(LARGE, 8)
    mesh = choice.mesh
    assert mesh.tensor * mesh.pipe > 1 and mesh.world_size == 8
    limit = 141 * GIB * 9 // 10
    assert all(c.memory.peak <= limit for c in choice.fits)
    assert all(c.memory.peak > limit for c in choice.too_large) and choice.too_large
    assert all(c.mesh.tensor <= 8 for c in (*choice.fits, *chosen(LARGE, 64).fits))


def test_without_recomputation_more_has_to_be_cut():
    budget = {"max_tokens_per_micro_batch": 24576}
    assert chosen(MIDDLE, 8, **budget).mesh == Mesh(1, 8)
    mesh = chosen(MIDDLE, 8, recompute=False, **budget).mesh
    assert mesh.lanes * mesh.pipe > 1


def test_experts_are_dealt_where_they_would_not_fit():
    choice = chosen(EXPERTS, 16, Degrees(pipe=1, tensor=1, sequence=1))
    assert choice.mesh.expert > 1 and not EXPERTS.experts % choice.mesh.expert
    whole = next(c for c in choice.too_large if c.mesh.expert == 1)
    assert whole.memory.peak > choice.fits[0].memory.peak
    assert {c.mesh.expert for c in (*choice.fits, *choice.too_large)} == {1, 2, 4, 8, 16}


def test_slow_links_between_nodes_keep_messages_inside():
    slow = replace(H200, inter_bytes=10**9)
    mesh = chosen(LARGE, 16, hardware=slow).mesh
    assert mesh.pipe > 1  # one message a micro-batch crosses, instead of every gradient


def test_what_is_asked_for_is_kept():
    choice = chosen(LARGE, 16, Degrees(pipe=4, sequence=1))
    assert choice.mesh.pipe == 4 and choice.mesh.sequence == 1
    assert chosen(MIDDLE, 8, Degrees(tensor=4)).mesh.tensor == 4


def test_zero_2_and_3_have_one_stage():
    choice = chosen(LARGE, 16, llm_zero_stage=3)
    assert {c.mesh.pipe for c in (*choice.fits, *choice.too_large)} == {1}


def test_every_replica_has_a_sample_and_groups_of_them_divide():
    few = choose(SMALL, (), OPTIONS, 8, ANY, H200, BF16, SAMPLES[:2])
    assert all(c.mesh.data <= 2 for c in few.fits)
    grouped = chosen(SMALL, 8, group_size=4)
    assert {c.mesh.data for c in grouped.fits} == {4, 8}


def test_nothing_fits():
    with pytest.raises(
        UserError, match=r"no layout of 8 ranks fits 21.6 GiB .* the closest, pipeline.stages"
    ):
        chosen(LARGE, 8, hardware=replace(H200, memory=24 * GIB))


def test_nothing_is_legal():
    with pytest.raises(UserError, match="no layout of 8 processes is possible with pipeline.stages 3"):
        chosen(SMALL, 8, Degrees(pipe=3))


def test_equal_choices_and_a_table_that_says_why():
    choice = chosen(LARGE, 8)
    assert choice == chosen(LARGE, 8)
    text = str(choice)
    assert "NVIDIA H200: 141 GiB" in text and "126.9 GiB of it" in text
    assert text.count("chosen") == 2 and "does not fit" in text and "more" in text.splitlines()[-1]


def test_legal_meshes_divide_everything():
    for mesh in legal_meshes(EXPERTS, OPTIONS, 24, ANY, 8, 1000):
        assert mesh.world_size == 24 and mesh.tensor <= 8 and mesh.pipe <= 48
        assert mesh.data_degree % mesh.expert == 0 == EXPERTS.experts % mesh.expert
    assert {m.expert for m in legal_meshes(SMALL, OPTIONS, 8, ANY, 8, 1000)} == {1}


def test_encoders_fill_the_pipeline_and_lengthen_the_first_stage():
    encoders = (image_encoder(), audio_encoder())
    model, options = llm(), PlanOptions(max_tokens_per_micro_batch=256)
    plan = build_plan(model, encoders, Mesh(4, 1), options)
    samples = random_samples(plan, 64, 1, media=0.9)
    hardware = replace(known(Device()), peak_flops=10**9)
    both = Batch.of(model, encoders, samples, False)
    text = replace(both, encoding=0)
    first = replace(plan, options=replace(options, placement="first_stage"))
    alone = step_time(plan, text, hardware, 4).compute
    assert alone < step_time(plan, both, hardware, 4).compute < step_time(first, both, hardware, 4).compute


def test_more_micro_batches_than_are_simulated_cost_what_the_dearest_stage_does():
    plan = build_plan(SMALL, (), Mesh(4, 1), replace(OPTIONS, micro_batches=64))
    batch = Batch.of(SMALL, (), SAMPLES, False)
    more = replace(plan, options=replace(plan.options, micro_batches=128))
    half, whole = (step_time(p, batch, H200, 2).compute for p in (plan, more))
    assert whole < half * 1.05  # the same work in smaller parts: fewer bubbles, more messages
    assert step_time(plan, batch, H200, 2).micro_batches == 64


def section(**given):
    keys = ("device_memory_gib", "peak_tflops", "intra_node_gbps", "inter_node_gbps", "gpus_per_node")
    return SimpleNamespace(**dict.fromkeys(keys, "auto") | given)


def test_hardware_from_names_and_from_the_configuration():
    assert hardware_of(section()).memory is None
    found = hardware_of(section(), Device("NVIDIA A100-SXM4-80GB", 80 * GIB, 4))
    assert (found.peak_flops, found.intra_bytes, found.per_node) == (312 * 10**12, 300 * 10**9, 4)
    assert hardware_of(section(), Device("NVIDIA H100 PCIe", 80 * GIB)).peak_flops == 756 * 10**12
    assert hardware_of(section(), Device("Something new", 80 * GIB)).peak_flops == 300 * 10**12
    given = section(device_memory_gib=0.5, inter_node_gbps=12.5, peak_tflops=989.0, gpus_per_node=4)
    set_ = hardware_of(given)
    assert (set_.memory, set_.inter_bytes, set_.per_node) == (GIB // 2, 12_500_000_000, 4)
    assert set_.peak_flops == 989 * 10**12 and set_.intra_bytes == 64 * 10**9
    other = hardware_of(section(device_memory_gib=80))
    assert other.name == "device" and other.peak_flops == 300 * 10**12 and other.per_node == 8
    other = hardware_of(section(device_memory_gib=80, peak_tflops=989))  # as docs/layouts.md has it
    assert (other.intra_bytes, other.per_node) == (64 * 10**9, 8)
