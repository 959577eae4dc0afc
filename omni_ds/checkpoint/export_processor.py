"""Tokenizer, chat template and media processors of an export, as HF's Auto classes find them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import LlavaProcessor

from omni_ds.checkpoint.export_config import AUTO_MAP, Layout
from omni_ds.checkpoint.export_template import export_template
from omni_ds.checkpoint.hf_code.processing_omni import OmniProcessor
from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import read_geometry
from omni_ds.plan.image_size import image_sizing

if TYPE_CHECKING:
    from omni_ds.checkpoint.export import ExportParts


def save_processor(folder: Path, layout: Layout, parts: ExportParts) -> None:
    """Writes tokenizer files, chat_template.jinja and, with encoders, processor_config.json into `folder`."""
    encoders = parts.config.omni.encoders
    tokens = {
        encoder.modality: parts.tokenizer.convert_ids_to_tokens(parts.placeholders[name])
        for name, encoder in encoders.items()
    }
    source = parts.chat_template or parts.tokenizer.chat_template
    template = source and export_template(source, tokens, parts.config.omni.data.chat_template_kwargs)
    if layout.kind == "text":
        parts.tokenizer.save_pretrained(folder)
        if template:
            (folder / "chat_template.jinja").write_text(template)
        return
    processors = {
        encoder.modality: media_processor(parts.processors, name) for name, encoder in encoders.items()
    }
    if layout.kind == "llava":
        processor = _llava_processor(layout, parts, processors["image"], tokens["image"], template)
    else:
        described = {
            spec["modality"]: _describe(spec, tokens[spec["modality"]], _sizing(parts, name))
            for name, spec in layout.config.encoders.items()
        }
        processor = OmniProcessor(
            processors.get("image"), processors.get("audio"), parts.tokenizer, described, template
        )
        processor.auto_map = {"AutoProcessor": AUTO_MAP["AutoProcessor"]}
    processor.save_pretrained(folder)


def media_processor(processors: Mapping[str, Any], name: str) -> Any:
    """HF image processor or feature extractor of an encoder; of a `Preprocess`, the one it holds.

    UserError when its class is not part of transformers: the export could not name it.
    """
    processor = getattr(processors[name], "processor", processors[name])
    if not type(processor).__module__.startswith("transformers."):
        raise UserError(
            f"omni.encoders.{name}: its processor {type(processor).__name__} comes with the checkpoint's own "
            "code, which an export does not hold; use a checkpoint whose processor is part of transformers"
        )
    return processor


def _sizing(parts: ExportParts, name: str) -> dict[str, Any] | None:
    """How images of an encoder are sized at their own proportions; None: all to one size, or no images."""
    section = parts.config.omni.encoders[name]
    if section.modality != "image":
        return None
    where = f"omni.encoders.{name}"
    geometry = read_geometry(where, section, parts.encoder_configs[name].to_dict())
    sizing = image_sizing(where, section, geometry, media_processor(parts.processors, name))
    return sizing and asdict(sizing)


def _describe(spec: Mapping[str, Any], token: str, sizing: dict[str, Any] | None) -> dict[str, Any]:
    """Entry of `OmniProcessor`'s `encoders`."""
    tower, projector = spec["tower"], spec["projector"]
    if spec["modality"] == "audio":
        return {
            "token": token,
            "window": 2 * tower["max_source_positions"],
            "factor": projector["factor"],
            "pad_to_window": spec["pad_to_window"],
        }
    registers = tower["num_register_tokens"] if tower["model_type"] == "dinov2_with_registers" else 0
    return {
        "token": token,
        "patch_size": tower["patch_size"],
        "reduction": projector["reduction"],
        "factor": projector["factor"],
        "prefix": 1 + registers if spec["keep_prefix"] else 0,
        "sizing": sizing,
    }


def _llava_processor(
    layout: Layout, parts: ExportParts, image_processor: Any, token: str, template: str | None
) -> LlavaProcessor:
    vision = layout.config.vision_config
    return LlavaProcessor(
        image_processor,
        parts.tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=layout.config.vision_feature_select_strategy,
        image_token=token,
        num_additional_image_tokens=1 if vision.model_type == "clip_vision_model" else 0,
        chat_template=template,
    )
