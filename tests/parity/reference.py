"""The plain loop that every layout has to equal: HF modules, one process, one sample at a time."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Projector(nn.Module):
    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        for name in ("linear_1", "linear_2"):
            weight = tensors[f"{name}.weight"]
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.load_state_dict({"weight": weight, "bias": tensors[f"{name}.bias"]})
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x)))


class Reference(nn.Module):
    """The composition out of HF classes.

    Args:
        checkpoints: folder of :func:`tests.tiny.make_checkpoints`.
        initial: whole initial weights of a run, for the projectors that no checkpoint holds.
    """

    def __init__(self, checkpoints: Path, initial: dict[str, Tensor]):
        super().__init__()
        from transformers import AutoModelForCausalLM, SiglipVisionModel, WhisperModel

        self.llm = AutoModelForCausalLM.from_pretrained(checkpoints / "llm", attn_implementation="eager")
        self.vision = SiglipVisionModel.from_pretrained(checkpoints / "vision", attn_implementation="eager")
        self.audio = WhisperModel.from_pretrained(checkpoints / "audio", attn_implementation="eager").encoder
        self.projectors = nn.ModuleDict(
            {
                name: Projector(
                    {
                        key.removeprefix(f"encoders.{name}.projector."): tensor.float()
                        for key, tensor in initial.items()
                        if key.startswith(f"encoders.{name}.projector.")
                    }
                )
                for name in ("vision", "audio")
            }
        )
        # HF's class freezes its sinusoids when it is constructed; from_pretrained forgets that.
        self.audio.embed_positions.requires_grad_(False)
        self.float()

    def image_rows(self, pixels: Tensor) -> Tensor:
        """[3, 32, 32] -> [4, H]: hidden_states[-1] of the tower, 2 x 2 patches joined."""
        hidden = self.vision(pixels[None], output_hidden_states=True).hidden_states[-1][0]
        grid = hidden.view(4, 4, -1)
        blocks = [
            torch.cat([grid[r, c], grid[r, c + 1], grid[r + 1, c], grid[r + 1, c + 1]])
            for r in (0, 2)
            for c in (0, 2)
        ]
        return self.projectors["vision"](torch.stack(blocks))

    def clip_rows(self, mel: Tensor) -> Tensor:
        """[mels, frames] -> [rows, H]: HF's layers on each truncated window, 4 frames joined."""
        tower, outputs = self.audio, []
        for window in mel.split(2 * tower.config.max_source_positions, dim=1):
            x = F.gelu(tower.conv2(F.gelu(tower.conv1(window[None])))).transpose(1, 2)
            x = x + tower.embed_positions.weight[: x.shape[1]]
            for layer in tower.layers:
                x = layer(x, None)
                x = x[0] if isinstance(x, tuple) else x
            outputs.append(tower.layer_norm(x)[0])
        tokens = torch.cat(outputs)
        tokens = F.pad(tokens, (0, 0, 0, -len(tokens) % 4))
        return self.projectors["audio"](tokens.reshape(len(tokens) // 4, -1))

    def losses(self, sample: Any, media: list[tuple[str, Tensor]]) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy of one sample alone, and its router loss, weighted by its tokens."""
        ids, labels = torch.as_tensor(sample.input_ids), torch.as_tensor(sample.labels)
        hidden = self.llm.model.embed_tokens(ids)
        for item, (name, value) in zip(sample.meta.items, media, strict=True):
            rows = self.image_rows(value) if name == "vision" else self.clip_rows(value)
            index = torch.cat([torch.arange(start, start + length) for start, length in item.spans])
            hidden = hidden.index_copy(0, index, rows)
        router = bool(getattr(self.llm.config, "output_router_logits", False))
        more = {"output_router_logits": True} if router else {}
        out = self.llm(inputs_embeds=hidden[None], use_cache=False, **more)
        loss = F.cross_entropy(out.logits[0], labels, ignore_index=-100, reduction="sum")
        return loss, self._router_loss(out.router_logits) * len(ids) if router else torch.zeros(())

    def _router_loss(self, logits: tuple[Tensor, ...]) -> Tensor:
        """HF's load-balancing loss of each layer by itself, averaged, times its coefficient."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        config = self.llm.config
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        layers = [load_balancing_loss_func((one,), experts, config.num_experts_per_tok) for one in logits]
        return config.router_aux_loss_coef * torch.stack(layers).mean()

    def named_parts(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Parameters with global names, by part."""
        parts = {
            "llm": [(f"llm.{n}", p) for n, p in self.llm.named_parameters()],
            "vision": [(f"encoders.vision.tower.{n}", p) for n, p in self.vision.named_parameters()],
            "audio": [(f"encoders.audio.tower.{n}", p) for n, p in self.audio.named_parameters()],
        }
        for name, module in self.projectors.items():
            parts[f"{name}.projector"] = [
                (f"encoders.{name}.projector.{n}", p) for n, p in module.named_parameters()
            ]
        return parts


def train_reference(
    config: Any, dataset: Any, sampler: Any, checkpoints: Path, initial: dict[str, Tensor], steps: int
) -> dict[str, Any]:
    """The same steps as :func:`tests.worker.train_and_collect`, on one process without DeepSpeed."""
    torch.set_num_threads(1)
    model = Reference(checkpoints, initial)
    omni = config.omni
    base = config.optimizer.params["lr"]
    freeze = {"llm": omni.llm.freeze}
    rates = {"llm": omni.llm.lr}
    for name, section in omni.encoders.items():
        freeze |= {name: section.freeze, f"{name}.projector": section.projector.freeze}
        rates |= {name: section.lr, f"{name}.projector": section.projector.lr}
    groups = []
    for part, named in model.named_parts().items():
        lr = base if rates[part] is None else rates[part]
        for decays in (True, False):
            chosen = [p for _, p in named if p.requires_grad and (p.dim() >= 2) == decays]
            if not freeze[part] and chosen:
                decay = config.optimizer.params["weight_decay"] if decays else 0.0
                groups.append({"params": chosen, "lr": lr, "weight_decay": decay})
        for _, parameter in named:
            parameter.requires_grad_(parameter.requires_grad and not freeze[part])
    optimizer = torch.optim.AdamW(groups, lr=base, eps=config.optimizer.params["eps"])
    trained = [p for group in groups for p in group["params"]]
    losses, router_losses, norms = [], [], []
    for step in range(steps):
        samples = [dataset.encode(row) for row in sampler.rows(step)]
        targets = sum(sample.meta.target_tokens for sample in samples)
        loss, router = torch.zeros(()), torch.zeros(())
        for row, sample in zip(sampler.rows(step), samples, strict=True):
            media = [
                (item.encoder, torch.as_tensor(dataset.load_media(row, item.ordinal)))
                for item in sample.meta.items
            ]
            sample_loss, sample_router = model.losses(sample, media)
            loss, router = loss + sample_loss, router + sample_router
        loss, router = loss / targets, router / sum(sample.meta.tokens for sample in samples)
        optimizer.zero_grad()
        if loss.requires_grad:
            (loss + router).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, config.gradient_clipping)))
        optimizer.step()
        losses.append(float(loss.detach()))
        router_losses.append(float(router.detach()))
    final = {name: p.detach() for named in model.named_parts().values() for name, p in named}
    return {"losses": losses, "router_losses": router_losses, "norms": norms, "final": final}
