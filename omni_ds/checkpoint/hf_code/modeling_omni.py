"""A causal language model whose placeholder tokens are filled with the rows of image and audio encoders."""

from typing import ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import GenerationMixin

from .configuration_omni import OmniComposedConfig
from .encoders_omni import OmniEncoder

MEDIA_INPUTS = {"image": ("pixel_values", "image_sizes"), "audio": ("input_features", "feature_lengths")}


class OmniForConditionalGeneration(PreTrainedModel, GenerationMixin):
    config_class = OmniComposedConfig
    config: OmniComposedConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities = ("image", "audio", "text")
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement: ClassVar = ["past_key_values"]

    def __init__(self, config):
        super().__init__(config)
        self.llm = AutoModelForCausalLM.from_config(config.text_config)
        attention, width = config._attn_implementation, config.text_config.hidden_size
        self.encoders = nn.ModuleDict(
            {name: OmniEncoder(spec, width, attention) for name, spec in config.encoders.items()}
        )
        self.post_init()

    def get_input_embeddings(self):
        return self.llm.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.llm.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.llm.get_output_embeddings()

    def set_output_embeddings(self, value):
        self.llm.set_output_embeddings(value)

    def get_decoder(self):
        return self.llm.get_decoder()

    def media_of(self, modality, tensors):
        """The media of one modality as a list without padding: images [3, H, W], clips [mels, frames]."""
        values, sizes = (tensors.get(key) for key in MEDIA_INPUTS[modality])
        if values is None:
            return []
        if sizes is None:
            return list(values)
        sizes = sizes.tolist()
        if modality == "image":
            return [value[:, :height, :width] for value, (height, width) in zip(values, sizes, strict=True)]
        return [value[:, :frames] for value, frames in zip(values, sizes, strict=True)]

    def get_media_features(self, modality, **tensors):
        """Rows [rows, hidden] of every medium of one modality, in order, as the language model gets them."""
        values = self.media_of(modality, tensors)
        for name, spec in self.config.encoders.items():
            if spec["modality"] == modality and values:
                return self.encoders[name](values)
        if values:
            raise ValueError(
                f"this model has no {modality} encoder, but {MEDIA_INPUTS[modality][0]} was passed"
            )
        return []

    def fill_placeholders(self, input_ids, inputs_embeds, media):
        """inputs_embeds [B, S, hidden] with the rows of all media in place of their placeholder tokens."""
        for spec in self.config.encoders.values():
            rows = self.get_media_features(spec["modality"], **media)
            if not rows:
                continue
            if input_ids is None:
                token = torch.tensor(spec["token_id"], device=inputs_embeds.device)
                mask = (inputs_embeds == self.get_input_embeddings()(token)).all(-1)
            else:
                mask = input_ids == spec["token_id"]
            features = torch.cat(rows).to(inputs_embeds.device, inputs_embeds.dtype)
            if int(mask.sum()) != len(features):
                raise ValueError(
                    f"{spec['modality']}: {int(mask.sum())} placeholder tokens (id {spec['token_id']}) but "
                    f"{len(features)} feature rows from {len(rows)} media; use the processor of this model"
                )
            inputs_embeds = inputs_embeds.masked_scatter(mask.unsqueeze(-1), features)
        return inputs_embeds

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        pixel_values=None,
        image_sizes=None,
        input_features=None,
        feature_lengths=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """
        Args:
            pixel_values: [images, 3, height, width], in the order of their placeholders over the batch;
                smaller images are padded below and to the right.
            image_sizes: [images, 2] int64, height and width without padding; None: no padding.
            input_features: [clips, mels, frames], padded at the end.
            feature_lengths: [clips] int64, frames without padding; None: no padding.
            labels: [B, S] int64, not shifted, -100 where there is no target.
        """
        media = {
            "pixel_values": pixel_values,
            "image_sizes": image_sizes,
            "input_features": input_features,
            "feature_lengths": feature_lengths,
        }
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        inputs_embeds = self.fill_placeholders(input_ids, inputs_embeds, media)
        return self.llm(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def prepare_inputs_for_generation(self, input_ids, is_first_iteration=False, **kwargs):
        """Media go in with the prompt; their rows are in the cache afterwards."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and kwargs.get("use_cache", True):
            for keys in MEDIA_INPUTS.values():
                for key in keys:
                    inputs.pop(key, None)
        return inputs

    def _expand_inputs_for_generation(
        self, expand_size=1, is_encoder_decoder=False, input_ids=None, **kwargs
    ):
        """Several sequences per prompt: media are repeated prompt by prompt, not one by one."""
        if expand_size == 1 or input_ids is None:
            return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **kwargs)
        expanded = {}
        for spec in self.config.encoders.values():
            keys = MEDIA_INPUTS[spec["modality"]]
            tensors = {key: value for key in keys if (value := kwargs.pop(key, None)) is not None}
            if tensors:
                order = self._media_order(spec, tensors, input_ids, expand_size)
                expanded |= {key: value[order.to(value.device)] for key, value in tensors.items()}
        input_ids, kwargs = super()._expand_inputs_for_generation(
            expand_size, is_encoder_decoder, input_ids, **kwargs
        )
        return input_ids, kwargs | expanded

    def _media_order(self, spec, tensors, input_ids, expand_size):
        """Indices of media such that every prompt's media stand `expand_size` times one behind the other."""
        rows = [len(part) for part in self.get_media_features(spec["modality"], **tensors)]
        order, start = [], 0
        for tokens in (input_ids == spec["token_id"]).sum(-1).tolist():
            stop = start
            while tokens > 0:
                tokens -= rows[stop]
                stop += 1
            order += list(range(start, stop)) * expand_size
            start = stop
        return torch.tensor(order, dtype=torch.long)
