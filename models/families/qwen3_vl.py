"""Qwen3-VL: what its processor writes for a video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig


def qwen3_spelled(config: PreTrainedConfig, tokenizer: Any) -> dict[str, Callable[[Any], str]]:
    """Of a video each step of its grid, the time before it and marks around, as Qwen3VLProcessor writes them
    in the place of the placeholder."""
    token = tokenizer.convert_ids_to_tokens(config.video_token_id)
    start = getattr(tokenizer, "vision_start_token", "<|vision_start|>")
    end = getattr(tokenizer, "vision_end_token", "<|vision_end|>")

    def video(planned: Any) -> str:
        return "".join(f"<{time:.1f} seconds>{start}{token}{end}" for time in planned.times)

    return {"video": video}
