"""config.json of an export: which class a composition is, and its config.

Three cases. Without encoders the language model's own class. One CLIP or SigLIP encoder of fixed image size
with a plain mlp projector is LLaVA, which every HF tool knows. Anything else is
`OmniForConditionalGeneration`, whose code lies in `hf_code/` and is copied into the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from omni_ds.checkpoint.hf_code.configuration_omni import OmniComposedConfig
from omni_ds.checkpoint.hf_code.modeling_omni import OmniForConditionalGeneration
from omni_ds.config import Config
from omni_ds.errors import UserError
from omni_ds.plan.encoder_geometry import tower_config
from omni_ds.plan.encoder_meta import EncoderMeta
from omni_ds.plan.image_size import NAFLEX

AUTO_MAP = {
    "AutoConfig": "configuration_omni.OmniComposedConfig",
    "AutoModel": "modeling_omni.OmniForConditionalGeneration",
    "AutoModelForCausalLM": "modeling_omni.OmniForConditionalGeneration",
    "AutoModelForImageTextToText": "modeling_omni.OmniForConditionalGeneration",
    "AutoModelForMultimodalLM": "modeling_omni.OmniForConditionalGeneration",
    "AutoProcessor": "processing_omni.OmniProcessor",
}

# Keys of a tower's config that describe the file it came from, or count layers that are not built.
_DROPPED = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "id2label",
    "label2id",
)
_DROPPED_DINO = ("out_features", "out_indices", "stage_names")


@dataclass(frozen=True)
class Layout:
    """What the exported folder holds.

    kind: "text", "llava" or "composed". config: of the exported class. rename: global parameter name -> name
    in the exported files. shapes: shape of every parameter of that class by its name in the files, tied ones
    once.
    """

    kind: str
    config: PretrainedConfig
    rename: Callable[[str], str]
    shapes: dict[str, tuple[int, ...]]


def plan_layout(
    config: Config,
    llm_config: PretrainedConfig,
    encoder_configs: Mapping[str, PretrainedConfig],
    placeholders: Mapping[str, int],
    processors: Mapping[str, Any],
) -> Layout:
    """Chooses the class of a composition. Builds it on the meta device to learn its names; allocates nothing.

    Args:
        encoder_configs: HF config by encoder name, of the tower or of the checkpoint it is part of.
        placeholders: token id that stands for a feature row, by encoder name.
        processors: HF image processor or feature extractor, by encoder name.
    """
    encoders = config.omni.encoders
    if not encoders:
        return _layout(
            "text", _clean_copy(llm_config), AutoModelForCausalLM.from_config, _by_prefix({"llm.": ""})
        )
    specs = {
        name: encoder_spec(name, section, encoder_configs[name], llm_config.hidden_size, placeholders[name])
        for name, section in encoders.items()
    }
    modalities = [spec["modality"] for spec in specs.values()]
    if len(set(modalities)) != len(modalities):
        raise UserError(
            f"omni.encoders {', '.join(specs)}: an export holds one encoder of each modality, not "
            f"{modalities}; leave one out"
        )
    name, spec = next(iter(specs.items()))
    if len(specs) == 1 and _is_llava(encoders[name], spec, processors[name]):
        return _layout(
            "llava", _llava_config(spec, llm_config), LlavaForConditionalGeneration, _llava_names(name)
        )
    hf_config = OmniComposedConfig(
        text_config=_clean_copy(llm_config), encoders=specs, auto_map=dict(AUTO_MAP)
    )
    return _layout("composed", hf_config, OmniForConditionalGeneration, lambda name: name)


def encoder_spec(
    name: str, section: Any, hf_config: PretrainedConfig, llm_hidden: int, token_id: int
) -> dict[str, Any]:
    """Entry of `OmniComposedConfig.encoders` for one encoder; what it means is documented there."""
    whole = hf_config.to_dict()
    meta = EncoderMeta.from_config(name, section, whole, llm_hidden)
    model_type, tower = tower_config(whole)
    tower = {key: value for key, value in tower.items() if key not in _DROPPED} | {"model_type": model_type}
    if meta.family == "vit":
        tower |= {"num_hidden_layers": meta.layers, "patch_size": meta.patch}
        if model_type != NAFLEX:
            tower["image_size"] = meta.image
        if model_type in ("siglip_vision_model", NAFLEX):
            tower["vision_use_head"] = False
        for key in _DROPPED_DINO if model_type.startswith("dinov2") else ():
            tower.pop(key, None)
    return {
        "modality": meta.modality,
        "tower": tower,
        "projector": {
            "reduction": meta.reduction,
            "factor": meta.factor,
            "hidden_size": meta.projector_hidden,
        },
        "keep_prefix": meta.keep_prefix,
        "pad_to_window": meta.pad_to_window,
        "token_id": token_id,
    }


def _layout(kind: str, config: PretrainedConfig, build: Callable, class_name: Callable[[str], str]) -> Layout:
    """Names and shapes, by building the class where tensors have no data.

    class_name: global parameter name -> name in the class. Files hold the names `save_pretrained` would give:
    transformers renames on the way, so that files of one release load in another.
    """
    with torch.device("meta"):
        model = build(type(config).from_dict(config.to_dict()))
    config.architectures = [type(model).__name__]
    tied = set(model.all_tied_weights_keys)
    parameters = model.named_parameters(remove_duplicate=False)
    state = {name: parameter for name, parameter in parameters if name not in tied}
    names = {id(parameter): name for name, parameter in state.items()}
    saved = revert_weight_conversion(model, dict(state))
    file_names = {names.get(id(parameter)): file_name for file_name, parameter in saved.items()}
    assert file_names.keys() == state.keys(), f"{type(model).__name__} saves more than renamed parameters"

    def rename(name: str) -> str:
        return file_names.get(class_name(name), class_name(name))

    return Layout(kind, config, rename, {file_names[name]: tuple(state[name].shape) for name in state})


def _clean_copy(config: PretrainedConfig) -> PretrainedConfig:
    """The same config without traces of the folder it was loaded from."""
    values = {key: value for key, value in config.to_dict().items() if key not in _DROPPED}
    return type(config).from_dict(values)


def _by_prefix(prefixes: Mapping[str, str]) -> Callable[[str], str]:
    """Renames by the first prefix that fits; other names stay."""

    def rename(name: str) -> str:
        for old, new in prefixes.items():
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    return rename


def _is_llava(section: Any, spec: Mapping[str, Any], processor: Any) -> bool:
    """Images of the tower's own size, no reduction, a projector as wide as the language model."""
    side = spec["tower"].get("image_size")
    return (
        spec["tower"]["model_type"] in ("clip_vision_model", "siglip_vision_model")
        and spec["projector"]["reduction"] == "none"
        and section.projector.hidden_size is None
        and section.processor.min_pixels is None
        and section.processor.max_pixels is None
        and processed_size(processor) == (side, side)
    )


def processed_size(processor: Any) -> tuple[int | None, int | None]:
    """(height, width) in pixels of an HF image processor's output; None where it depends on the image."""
    size = getattr(processor, "crop_size" if getattr(processor, "do_center_crop", None) else "size", None)
    if isinstance(size, int):
        return size, size
    size = dict(size or {})
    return size.get("height"), size.get("width")


def _llava_config(spec: Mapping[str, Any], llm_config: PretrainedConfig) -> LlavaConfig:
    """The tower ends with the feature layer, so that is -1: the hidden states before the closing norm."""
    tower, text = spec["tower"], _clean_copy(llm_config)
    drop_class_token = tower["model_type"] == "clip_vision_model" and not spec["keep_prefix"]
    patches = (tower["image_size"] // tower["patch_size"]) ** 2
    prefix = int(tower["model_type"] == "clip_vision_model" and spec["keep_prefix"])
    return LlavaConfig(
        vision_config=dict(tower),
        text_config=text.to_dict(),
        image_token_index=spec["token_id"],
        image_seq_length=patches + prefix,
        projector_hidden_act="gelu",
        vision_feature_select_strategy="default" if drop_class_token else "full",
        vision_feature_layer=-1,
        tie_word_embeddings=bool(text.tie_word_embeddings),
    )


def _llava_names(encoder: str) -> Callable[[str], str]:
    """Global names -> those of `LlavaForConditionalGeneration`."""
    return _by_prefix(
        {
            "llm.model.": "model.language_model.",
            "llm.lm_head.": "lm_head.",
            f"encoders.{encoder}.tower.": "model.vision_tower.",
            f"encoders.{encoder}.projector.": "model.multi_modal_projector.",
        }
    )
