"""Configuration of a language model composed with image and audio encoders."""

from typing import ClassVar

from transformers import AutoConfig, PretrainedConfig


class OmniComposedConfig(PretrainedConfig):
    """
    Args:
        text_config: config of the language model (a config object or its dict with `model_type`).
        encoders: for each encoder, by name, a dict with
            - `modality`: `"image"` or `"audio"`;
            - `tower`: config of the tower as a dict with `model_type`; it has the layers up to the one whose
              output is used, and no more;
            - `projector`: `{"reduction": "none" | "pixel_shuffle" | "frame_stack", "factor": int,
              "hidden_size": int}`;
            - `keep_prefix`: image: class and register tokens become features too;
            - `pad_to_window`: audio: encode whole windows instead of the clip's own duration;
            - `token_id`: the token that stands for one feature row.
    """

    model_type = "omni_composed"
    sub_configs: ClassVar = {"text_config": AutoConfig}

    def __init__(self, text_config=None, encoders=None, **kwargs):
        if text_config is None:
            text_config = {"model_type": "llama"}
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config
        self.encoders = encoders if encoders is not None else {}
        kwargs.setdefault("tie_word_embeddings", bool(getattr(text_config, "tie_word_embeddings", False)))
        super().__init__(**kwargs)

    def token_ids(self):
        """Placeholder token of each encoder, by name."""
        return {name: encoder["token_id"] for name, encoder in self.encoders.items()}
