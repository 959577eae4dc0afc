"""What the two DeepSpeed engines see: the LLM's pipeline engine and the encoders' engine.

Both configurations leave to us what must be joint or is planned: clipping (one norm over both engines),
optimizer and schedule (built with one group a part), batch arithmetic (packing decides), printing and
monitors, and every parallel degree but ZeRO's. Recomputation is done by the layers themselves.
"""

from __future__ import annotations

from typing import Any

from omni_ds.config.deepspeed import PassedOn
from omni_ds.config.root import Config

_NEVER = 2**31 - 1


def llm_engine_config(config: Config, micro_batches: int, data_degree: int) -> dict[str, Any]:
    """DeepSpeed's dict for the LLM, with `micro_batches` a step on each of `data_degree` replicas.

    To DeepSpeed a micro-batch is one sample. A frozen LLM has no optimizer, and so no ZeRO. Offloaded
    optimizer state is updated by the optimizer that we build, torch's own too: DeepSpeed's needs a compiler.
    """
    result = {
        "train_batch_size": micro_batches * data_degree,
        **_shared(config, micro_batches, 0 if config.omni.llm.freeze else config.zero_optimization.stage),
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "zero_force_ds_cpu_optimizer": False,
    }
    offload = config.zero_optimization
    for key, section in (
        ("offload_optimizer", offload.offload_optimizer),
        ("offload_param", offload.offload_param),
    ):
        if section is not None and section.device != "none":
            result["zero_optimization"][key] = section.model_dump()
    return result


def encoder_engine_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's dict for the encoders: one pass a step over the world, under their own ZeRO stage."""
    result = _shared(config, 1, config.omni.encoder_parallel.zero_stage)
    if "bf16" in result:  # slices pass DeepSpeed's engine by, which would add only what its own passes leave
        result["bf16"] = result["bf16"] | {"immediate_grad_update": True}
    return result


def monitor_config(config: Config) -> dict[str, Any]:
    """The monitors' sections under DeepSpeed's names, for its `get_monitor_config`."""
    return config.model_dump(mode="json", include={"tensorboard", "csv_monitor", "wandb"}, exclude_none=True)


def _shared(config: Config, gradient_accumulation_steps: int, zero_stage: int) -> dict[str, Any]:
    assert config.bf16.enabled != "auto", "resolve() comes first"
    given = config.to_dict()
    passed_on = {key: given[key] for key in PassedOn.model_fields if key in given}
    zero = {key: _whole(value) for key, value in given["zero_optimization"].items()}
    zero.pop("offload_optimizer", None)
    zero.pop("offload_param", None)
    shared = {
        **passed_on,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": 0.0,
        "steps_per_print": _NEVER,
        "zero_optimization": {**zero, "stage": zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    if config.bf16.enabled:
        # At once: a gradient in bf16 then lives no longer than it takes to add it to its sum.
        at_once = {"immediate_grad_update": config.bf16.immediate_grad_update is not False}
        shared |= {"bf16": given["bf16"] | at_once, "data_types": given["data_types"]}
    return shared


def _whole(value: Any) -> Any:
    """Numbers of elements may be written as 5e8."""
    return int(value) if isinstance(value, float) else value
