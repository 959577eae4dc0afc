"""A multimodal checkpoint trained by a plain loop: HF's class, processor and template, sample by sample."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from parity.hf_tiles import PROCESSORS, tiled_inputs
from parity.hf_videos import hf_timed_video, hf_video
from torch import Tensor

# Classes around the one that is trained.
_INSIDE = {
    f"{stem}ForConditionalGeneration": f"{stem}ThinkerForConditionalGeneration"
    for stem in ("Qwen2_5Omni", "Qwen3OmniMoe")
}


def hf_model(folder: Path) -> Any:
    """The checkpoint's own class, with plain attention."""
    import transformers

    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    name = _INSIDE.get(name, name)
    cls = getattr(transformers, name)
    return cls.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


class HFSamples:
    """Rows of a JSON lines file as HF's processor makes them, without ours.

    model: the folder. The template writes one placeholder for each medium, which becomes as many as HF's
    processor has features for.
    """

    def __init__(self, model: Path, rows: Path):
        from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

        self.rows = [json.loads(line) for line in rows.read_text().splitlines()]
        self.folder = rows.parent
        config = AutoConfig.from_pretrained(model)
        self.config = getattr(config, "thinker_config", config)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.processors: dict[str, Any] = {}
        if hasattr(self.config, "vision_config"):
            self.processors["image"] = AutoImageProcessor.from_pretrained(model, backend="pil")
        if hasattr(self.config, "audio_config"):
            self.processors["audio"] = AutoFeatureExtractor.from_pretrained(model)
        self.tokens = {}  # medium -> its placeholder
        for modality in ("image", "video", "audio"):
            keys = (f"{modality}_token_id", f"{modality}_token_index")
            found = [getattr(self.config, key) for key in keys if hasattr(self.config, key)]
            if found:
                self.tokens[modality] = self.tokenizer.convert_ids_to_tokens(found[0])

    @property
    def processor(self) -> Any:
        """The one there is, or that of images."""
        return next(iter(self.processors.values()))

    def inputs(self, number: int) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward for one row, ids [1, T] and all."""
        row, tags = self.rows[number], "<image>|<video>|<audio>"
        messages = []
        for message in row["messages"]:
            pieces = re.split(f"({tags})", message["content"])
            parts = [
                {"type": piece[1:-1]} if re.fullmatch(tags, piece) else {"type": "text", "text": piece}
                for piece in pieces
                if piece
            ]
            messages.append({"role": message["role"], "content": parts})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        if self.config.model_type == "gemma3":
            return self._processed(text, [self.folder / name for name in row.get("images", ())])
        if self.config.model_type in PROCESSORS:
            return tiled_inputs(self, text, row)
        text, media = self.expand(text, row)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, **media, **self.more(ids, media)}

    def expand(self, text: str, row: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
        """The text with as many placeholders as there are features, and the processed media."""
        media: dict[str, Tensor] = {}
        for modality, token in self.tokens.items():
            if given := row.get(f"{modality}s"):
                made = getattr(self, f"_{modality}")(given)
                stand_ins = made.pop("texts", None)
                if stand_ins is None:
                    stand_ins = [token * count for count in self._counts(modality, made)]
                pieces = text.split(token)
                text = "".join(a + b for a, b in zip(pieces, [*stand_ins, ""], strict=True))
                media |= made
        return text, media

    def more(self, ids: Tensor, media: dict[str, Tensor]) -> dict[str, Any]:
        """What else the model's forward wants."""
        if "image_grid_thw" not in media and "video_grid_thw" not in media:
            return {}
        types = torch.zeros_like(ids, dtype=torch.int)
        for number, modality in enumerate(("image", "video"), 1):
            token = self.tokenizer.convert_tokens_to_ids(self.tokens[modality])
            types = types.masked_fill(ids == token, number)
        return {"mm_token_type_ids": types}

    def _image(self, names: list[str]) -> dict[str, Tensor]:
        from PIL import Image

        pictures = [Image.open(self.folder / name).convert("RGB") for name in names]
        return dict(self.processors["image"](pictures, return_tensors="pt"))

    def _video(self, given: list[Any]) -> dict[str, Any]:
        if self.config.model_type.startswith("qwen3_vl"):
            made = [hf_timed_video(value, self.folder, self.processors["image"]) for value in given]
            return {
                "pixel_values_videos": torch.cat([patches for patches, _, _ in made]),
                "video_grid_thw": torch.tensor([grid for _, grid, _ in made]),
                "texts": [text for _, _, text in made],
            }
        made = [hf_video(value, self.folder, self.processors["image"]) for value in given]
        found = {
            "pixel_values_videos": torch.cat([patches for patches, _, _ in made]),
            "video_grid_thw": torch.tensor([grid for _, grid, _ in made]),
        }
        if self.config.model_type == "qwen2_5_vl":
            found["second_per_grid_ts"] = torch.tensor([seconds for _, _, seconds in made])
        return found

    def _audio(self, names: list[str]) -> dict[str, Tensor]:
        import soundfile

        sounds = [soundfile.read(self.folder / name, dtype="float32")[0] for name in names]
        if self.config.model_type == "voxtral":
            return self._windows(sounds)
        made = self.processor(
            sounds, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {
            "input_features": made["input_features"],
            "feature_attention_mask": made["attention_mask"],
        }

    def _processed(self, text: str, names: list[Path]) -> dict[str, Tensor]:
        """What Gemma3's processor makes of a rendered text and its images, token types included."""
        from PIL import Image
        from transformers import Gemma3Processor

        processor = Gemma3Processor(
            self.processor, self.tokenizer, image_seq_length=self.config.mm_tokens_per_image
        )
        pictures = [Image.open(name).convert("RGB") for name in names] or None
        made = processor(images=pictures, text=text, add_special_tokens=False, return_tensors="pt")
        assert bool(made["token_type_ids"].any()) == bool(names)
        return dict(made)

    def _windows(self, sounds: list[Any]) -> dict[str, Tensor]:
        """Each clip filled up to whole windows, cut into them: what VoxtralProcessor does with clips."""
        from transformers import VoxtralProcessor

        sizes = {
            "pad_to_multiple_of": self.processor.n_samples,
            "max_source_positions": self.processor.nb_max_frames,
        }
        processor = SimpleNamespace(feature_extractor=self.processor)
        each = [
            VoxtralProcessor._retrieve_input_features(
                processor, [sound], **VoxtralProcessor.audio_kwargs | sizes
            )
            for sound in sounds
        ]
        self.windows = [len(clip) for clip in each]
        return {"input_features": torch.cat(each)}

    def labels(self, ids: Tensor) -> Tensor:
        """Ids of what assistants say, end of turn included, -100 elsewhere."""
        starts, end = self.tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
        labels, inside = torch.full_like(ids, -100), False
        for at, token in enumerate(ids.tolist()):
            if inside:
                labels[at] = token
            inside = token == starts or (inside and token != end)
        return labels

    def _counts(self, modality: str, media: dict[str, Tensor]) -> list[int]:
        if self.config.model_type == "voxtral":
            audio = self.config.audio_config
            rows = audio.max_source_positions * audio.hidden_size // audio.intermediate_size
            return [rows * windows for windows in self.windows]
        if modality == "audio":
            return [((n - 1) // 2 + 1 - 2) // 2 + 1 for n in media["feature_attention_mask"].sum(-1).tolist()]
        if f"{modality}_grid_thw" in media:
            merge = self.processors["image"].merge_size ** 2
            return [int(grid.prod()) // merge for grid in media[f"{modality}_grid_thw"]]
        vision = self.config.vision_config
        whole = (vision.image_size // vision.patch_size) ** 2
        kept = self.config.vision_feature_select_strategy == "full" and vision.model_type.startswith("clip")
        return [whole + kept] * len(media["pixel_values"])


def hf_samples(model: Path, rows: Path) -> HFSamples:
    """Of the kind that the model's processor makes."""
    from parity.hf_omni import OmniSamples
    from transformers import AutoConfig

    omni = "omni" in AutoConfig.from_pretrained(model).model_type
    return (OmniSamples if omni else HFSamples)(model, rows)


def section_of(name: str, omni: Any) -> Any:
    """The section of our configuration that a parameter of an HF class belongs to."""
    projects = any(part in name for part in ("projector", "merger", "image_newline", ".audio_tower.proj"))
    inside = any(f".{module}." in name for module in ("visual", "vision_tower", "audio_tower"))
    if not projects and not inside:
        return omni.llm
    own = "audio" if "audio" in name else "vision"
    tower = omni.encoders[own] if own in omni.encoders else next(iter(omni.encoders.values()))
    return tower.projector if projects else tower


def router_penalty(hf: Any, router_logits: Any) -> Tensor:
    """Our definition of the router loss of one document, by HF's function: summed over its tokens."""
    config, module = hf.config.get_text_config(), sys.modules[type(hf).__module__]
    total, experts = torch.zeros(()), getattr(config, "num_local_experts", None) or config.num_experts
    for logits in router_logits:
        aux = module.load_balancing_loss_func((logits,), experts, config.num_experts_per_tok)
        total = total + len(logits) * config.router_aux_loss_coef * aux
    return total / len(router_logits)


def train_hf_model(
    config: Any, dataset: Any, sampler: Any, model: Path, rows: Path, steps: int
) -> dict[str, Any]:
    """Losses, norms, weights after ``steps`` by HF name, and the gradients of the first step."""
    torch.set_num_threads(1)
    hf = hf_model(model)
    hf.train()
    samples, omni, base = hf_samples(model, rows), config.omni, config.optimizer.params["lr"]
    groups = []
    for name, parameter in hf.named_parameters():
        section = section_of(name, omni)
        fixed = section.freeze or "audio_tower.embed_positions" in name  # sinusoids, frozen in HF's class
        parameter.requires_grad_(not fixed)
        if not fixed:
            lr = base if section.lr is None else section.lr
            decay = config.optimizer.params["weight_decay"] if parameter.dim() >= 2 else 0.0
            groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, lr=base, eps=config.optimizer.params["eps"])
    trained = [p for group in groups for p in group["params"]]
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        loss, penalty, targets, tokens = torch.zeros(()), torch.zeros(()), 0, 0
        for row in sampler.rows(step):
            sample, inputs = dataset.encode(row), samples.inputs(row)
            assert inputs["input_ids"][0].tolist() == sample.input_ids.tolist(), f"row {row}: other tokens"
            labels = torch.as_tensor(sample.labels)
            out = hf(**inputs, use_cache=False)
            loss = loss + F.cross_entropy(out.logits[0], labels, ignore_index=-100, reduction="sum")
            if getattr(hf.config.get_text_config(), "output_router_logits", False):
                penalty = penalty + router_penalty(hf, out.router_logits)
            targets, tokens = targets + int((labels >= 0).sum()), tokens + len(labels)
        optimizer.zero_grad()
        (loss / targets + penalty / tokens).backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, config.gradient_clipping)))
        optimizer.step()
        losses.append(float(loss.detach() / targets))
    final = {name: p.detach() for name, p in hf.named_parameters()}
    return {"losses": losses, "norms": norms, "final": final, "gradients": gradients}
