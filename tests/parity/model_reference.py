"""A multimodal checkpoint trained by a plain loop: HF's class, processor and template, sample by sample."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def hf_model(folder: Path) -> Any:
    """The checkpoint's own class, with plain attention."""
    import transformers

    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]
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
        self.config = AutoConfig.from_pretrained(model)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.modality = "audio" if hasattr(self.config, "audio_config") else "image"
        if self.modality == "audio":
            self.processor = AutoFeatureExtractor.from_pretrained(model)
        else:
            self.processor = AutoImageProcessor.from_pretrained(model, backend="pil")
        keys = (f"{self.modality}_token_id", f"{self.modality}_token_index")
        self.token_id = next(getattr(self.config, key) for key in keys if hasattr(self.config, key))
        self.token = self.tokenizer.convert_ids_to_tokens(self.token_id)

    def inputs(self, number: int) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward for one row, ids [1, T] and all."""
        row, tag = self.rows[number], f"<{self.modality}>"
        messages = []
        for message in row["messages"]:
            pieces = re.split(f"({tag})", message["content"])
            parts = [
                {"type": self.modality} if piece == tag else {"type": "text", "text": piece}
                for piece in pieces
                if piece
            ]
            messages.append({"role": message["role"], "content": parts})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        names = [self.folder / name for name in row.get(f"{self.modality}s", ())]
        media = self._media(names) if names else {}
        counts = iter(self._counts(media))
        text = re.sub(re.escape(self.token), lambda _: self.token * next(counts), text)
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = dict(media)
        if "image_grid_thw" in found:
            found["mm_token_type_ids"] = (ids == self.token_id).int()
        return {"input_ids": ids, **found}

    def _media(self, names: list[Path]) -> dict[str, Tensor]:
        import soundfile
        from PIL import Image

        if self.modality == "image":
            pictures = [Image.open(name).convert("RGB") for name in names]
            return dict(self.processor(pictures, return_tensors="pt"))
        sounds = [soundfile.read(name, dtype="float32")[0] for name in names]
        made = self.processor(
            sounds, sampling_rate=16000, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {
            "input_features": made["input_features"],
            "feature_attention_mask": made["attention_mask"],
        }

    def labels(self, ids: Tensor) -> Tensor:
        """Ids of what assistants say, end of turn included, -100 elsewhere."""
        starts, end = self.tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
        labels, inside = torch.full_like(ids, -100), False
        for at, token in enumerate(ids.tolist()):
            if inside:
                labels[at] = token
            inside = token == starts or (inside and token != end)
        return labels

    def _counts(self, media: dict[str, Tensor]) -> list[int]:
        if not media:
            return []
        if self.modality == "audio":
            return [((n - 1) // 2 + 1 - 2) // 2 + 1 for n in media["feature_attention_mask"].sum(-1).tolist()]
        if "image_grid_thw" in media:
            merge = self.processor.merge_size**2
            return [int(grid.prod()) // merge for grid in media["image_grid_thw"]]
        vision = self.config.vision_config
        whole = (vision.image_size // vision.patch_size) ** 2
        kept = self.config.vision_feature_select_strategy == "full" and vision.model_type.startswith("clip")
        return [whole + kept] * len(media["pixel_values"])


def part_of(name: str) -> str:
    """The part of our configuration that a parameter of an HF class belongs to."""
    if "projector" in name or "merger" in name:
        return "projector"
    return "tower" if any(f".{x}." in name for x in ("visual", "vision_tower", "audio_tower")) else "llm"


def train_hf_model(
    config: Any, dataset: Any, sampler: Any, model: Path, rows: Path, steps: int
) -> dict[str, Any]:
    """Losses, norms, weights after ``steps`` by HF name, and the gradients of the first step."""
    torch.set_num_threads(1)
    hf = hf_model(model)
    hf.train()
    samples, omni, base = HFSamples(model, rows), config.omni, config.optimizer.params["lr"]
    (tower,) = omni.encoders.values()
    rates = {"llm": omni.llm.lr, "tower": tower.lr, "projector": tower.projector.lr}
    frozen = {"llm": omni.llm.freeze, "tower": tower.freeze, "projector": tower.projector.freeze}
    groups = []
    for name, parameter in hf.named_parameters():
        part = part_of(name)
        fixed = frozen[part] or "audio_tower.embed_positions" in name  # sinusoids, frozen in HF's class
        parameter.requires_grad_(not fixed)
        if not fixed:
            lr = base if rates[part] is None else rates[part]
            decay = config.optimizer.params["weight_decay"] if parameter.dim() >= 2 else 0.0
            groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, lr=base, eps=config.optimizer.params["eps"])
    trained = [p for group in groups for p in group["params"]]
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        loss, targets = torch.zeros(()), 0
        for row in sampler.rows(step):
            sample, inputs = dataset.encode(row), samples.inputs(row)
            assert inputs["input_ids"][0].tolist() == sample.input_ids.tolist(), f"row {row}: other tokens"
            labels = torch.as_tensor(sample.labels)
            logits = hf(**inputs, use_cache=False).logits[0]
            loss = loss + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            targets += int((labels >= 0).sum())
        optimizer.zero_grad()
        (loss / targets).backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, config.gradient_clipping)))
        optimizer.step()
        losses.append(float(loss.detach() / targets))
    final = {name: p.detach() for name, p in hf.named_parameters()}
    return {"losses": losses, "norms": norms, "final": final, "gradients": gradients}
