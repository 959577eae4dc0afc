"""Tiny compositions, exported from two simulated ranks, and the reference they are compared with.

The reference is what trains: the encoders of `models.encoders` on packed items, and HF's decoder on their
rows.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from data.preprocess import build_preprocess
from models.encoders.runtime import build_encoder
from omni_ds.checkpoint.export import ExportParts, ShardWriter, finish_export
from omni_ds.config import EncoderConfig, ProcessorConfig, ProjectorConfig

TOKENIZER = Path(__file__).parents[2] / "data" / "digits" / "tokenizer"
IMAGE_TOKEN, AUDIO_TOKEN = "<|image_pad|>", "<|audio_pad|>"
LLM = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
VIT = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
WHISPER = {
    "model_type": "whisper",
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "num_mel_bins": 80,
    "max_source_positions": 50,
}


@dataclass
class Case:
    """A composition. llm: HF config; encoders: name -> (HF config, section of the configuration)."""

    name: str
    llm: dict
    encoders: dict[str, tuple[dict, EncoderConfig]] = field(default_factory=dict)
    max_shard_size: str = "5GB"
    dtype: torch.dtype = torch.float32
    chat_template_kwargs: dict = field(default_factory=dict)


def image(layers=3, model_type="siglip_vision_model", reduction="none", factor=1, processor=None, **section):
    config = VIT | {"model_type": model_type, "num_hidden_layers": layers}
    if model_type.startswith("dinov2"):
        config = {key: value for key, value in config.items() if key != "intermediate_size"} | {
            "mlp_ratio": 2
        }
    if model_type == "siglip2_vision_model":
        config["num_patches"] = (config.pop("image_size") // config["patch_size"]) ** 2
    section = EncoderConfig(
        config=config,
        modality="image",
        processor=processor or ProcessorConfig(),
        projector=ProjectorConfig(reduction=reduction, factor=factor, hidden_size=section.pop("width", None)),
        **section,
    )
    return config, section


def audio(factor=2, pad_to_window=False):
    section = EncoderConfig(
        config=WHISPER,
        modality="audio",
        processor=ProcessorConfig(pad_to_window=pad_to_window, max_seconds=5.0),
        projector=ProjectorConfig(reduction="frame_stack", factor=factor, hidden_size=40),
    )
    return WHISPER, section


class Reference:
    """Random weights by global name and the training side's numbers."""

    def __init__(self, case: Case):
        torch.manual_seed(sum(map(ord, case.name)))
        self.case = case
        self.tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        vocabulary = {"vocab_size": len(self.tokenizer)}
        self.llm_config = AutoConfig.for_model(**case.llm | vocabulary)
        self.llm = AutoModelForCausalLM.from_config(self.llm_config).eval()
        self.encoder_configs = {name: AutoConfig.for_model(**hf) for name, (hf, _) in case.encoders.items()}
        self.encoders = {
            name: build_encoder(name, section, self.encoder_configs[name], self.llm_config.hidden_size).eval()
            for name, (_, section) in case.encoders.items()
        }
        self.media = {
            name: build_preprocess(name, section, self.encoder_configs[name].to_dict())
            for name, (_, section) in case.encoders.items()
        }
        for module in (self.llm, *self.encoders.values()):
            randomise(module)
        self.placeholders = {
            name: self.tokenizer.convert_tokens_to_ids(
                IMAGE_TOKEN if e.meta.modality == "image" else AUDIO_TOKEN
            )
            for name, e in self.encoders.items()
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Global name -> tensor; a tied head has no entry."""
        state = {f"llm.{name}": parameter for name, parameter in self.llm.named_parameters()}
        for encoder in self.encoders.values():
            names = encoder.hf_names()
            state |= {names[name]: parameter for name, parameter in encoder.named_parameters()}
        return state

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor, media: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        """One sequence [S] -> logits [S, V]; media by encoder name, in placeholder order."""
        hidden = self.llm.get_input_embeddings()(input_ids)
        for name, values in media.items():
            positions = (input_ids == self.placeholders[name]).nonzero().squeeze(1)
            hidden = hidden.index_copy(0, positions, self.encoders[name](values))
        return self.llm(inputs_embeds=hidden[None]).logits[0]

    def greedy(self, input_ids: torch.Tensor, media: dict[str, list[torch.Tensor]], steps: int) -> list[int]:
        """Tokens by repeated full passes, without cache."""
        ids = input_ids
        for _ in range(steps):
            ids = torch.cat([ids, self.logits(ids, media)[-1].argmax()[None]])
        return ids[len(input_ids) :].tolist()

    def export(self, out_dir: Path) -> Path:
        """As two ranks do: each writes every other tensor, the first one finishes."""
        writers = [
            ShardWriter(out_dir, f"rank{r}", self.case.max_shard_size, lambda name: self.case.dtype)
            for r in (0, 1)
        ]
        for position, (name, tensor) in enumerate(self.state().items()):
            writers[position % 2].add(name, tensor)
        return finish_export(out_dir, [writer.close() for writer in writers], self.parts())

    def parts(self) -> ExportParts:
        sections = {name: section for name, (_, section) in self.case.encoders.items()}
        data = SimpleNamespace(chat_template=None, chat_template_kwargs=self.case.chat_template_kwargs)
        return ExportParts(
            config=SimpleNamespace(omni=SimpleNamespace(encoders=sections, data=data)),
            llm_config=self.llm_config,
            encoder_configs=self.encoder_configs,
            tokenizer=self.tokenizer,
            processors=self.media,
            chat_template=None,
            placeholders=self.placeholders,
        )


def randomise(module: nn.Module) -> None:
    """Weights large enough that every part shows in the logits and greedy decoding does not repeat itself."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, 0.25)
