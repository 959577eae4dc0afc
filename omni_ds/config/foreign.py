"""Names that people know from other trainers, and where the same thing is set here."""

TRANSLATIONS = {
    "model": "omni.model.path",
    "model_name_or_path": "omni.model.path",
    "cutoff_len": "omni.data.max_length",
    "max_seq_length": "omni.data.max_length",
    "freeze_vision_tower": "omni.encoders.vision.freeze",
    "freeze_vit": "omni.encoders.vision.freeze",
    "freeze_multi_modal_projector": "omni.encoders.vision.projector.freeze",
    "freeze_aligner": "omni.encoders.vision.projector.freeze",
    "freeze_language_model": "omni.llm.freeze",
    "freeze_llm": "omni.llm.freeze",
    "vit_lr": "omni.encoders.vision.lr",
    "aligner_lr": "omni.encoders.vision.projector.lr",
    "image_max_pixels": "omni.encoders.vision.processor.max_pixels",
    "image_min_pixels": "omni.encoders.vision.processor.min_pixels",
    "max_pixels": "omni.encoders.vision.processor.max_pixels",
    "min_pixels": "omni.encoders.vision.processor.min_pixels",
    "interleave_probs": "omni.data.train[].weight",
    "mask_history": 'omni.data.loss_on ("last_assistant")',
    "train_on_prompt": 'omni.data.loss_on ("all")',
    "save_steps": "omni.checkpoint.every",
    "save_total_limit": "omni.checkpoint.keep_last",
    "eval_steps": "omni.eval.every",
    "per_device_train_batch_size": (
        "train_batch_size, which counts the samples of a step over all ranks (samples are packed by tokens: "
        "omni.data.max_tokens_per_micro_batch)"
    ),
    "dataset": "omni.data.train",
    "media_folder": "omni.data.train[].media_dir",
    "template": "omni.data.chat_template",
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "max_grad_norm": "gradient_clipping",
    "lr_scheduler_type": 'scheduler.type (cosine: "WarmupCosineLR", linear: "WarmupDecayLR")',
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "gradient_checkpointing": "pipeline.activation_checkpoint_interval (1)",
    "num_epochs": "omni.train.num_train_epochs",
    "logging_steps": "steps_per_print",
    "dataloader_num_workers": "omni.data.num_workers",
    "seed": "omni.train.seed",
}

# Values people know from HF, for keys that take one of a few names.
VALUES = {
    "cosine": "WarmupCosineLR",
    "linear": "WarmupDecayLR",
    "constant_with_warmup": "WarmupLR",
    "mlp2x_gelu": "mlp",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}

# Features of other trainers that are not there yet, in the form of omni_ds.config.limits.
LATER = {
    key: "LoRA is not supported yet: weights are trained in full; use freeze and lr of each part"
    for key in ("lora", "lora_rank", "lora_alpha", "lora_target", "finetuning_type", "train_type")
}


def translate(key: str) -> str | None:
    """Where another trainer's `key` (any case) is set here, None for a name that is not known."""
    return TRANSLATIONS.get(key.lower())
