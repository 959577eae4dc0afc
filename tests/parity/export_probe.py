"""Runs in a process of its own that cannot import this repository: loads exported folders, answers, saves.

argv: a folder with one sub-folder per case, each with `model/` (the export) and `inputs.pt`; writes
    `outputs.pt`.
"""

import importlib.util
import sys
from pathlib import Path

import torch
import transformers

NEW_TOKENS = 5


def answer(model, prompts):
    """Logits of each prompt, greedy tokens of each alone and of all as one left-padded batch."""
    with torch.no_grad():
        logits = [model(input_ids=p["ids"][None], **stacked(p["media"])).logits[0] for p in prompts]
    settings = {
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    alone = []
    for p in prompts:
        out = model.generate(
            input_ids=p["ids"][None],
            attention_mask=torch.ones_like(p["ids"])[None],
            **stacked(p["media"]),
            **settings,
        )
        alone.append(out[0, len(p["ids"]) :].tolist())
    longest = max(len(p["ids"]) for p in prompts)
    ids = torch.stack([torch.nn.functional.pad(p["ids"], (longest - len(p["ids"]), 0)) for p in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - len(p["ids"]) for p in prompts]).long()
    media = {
        name: [value for p in prompts for value in p["media"].get(name, [])] for name in ("image", "audio")
    }
    batch = {"input_ids": ids, "attention_mask": mask, **stacked(media)}
    together = model.generate(**batch, **settings)[:, longest:].tolist()
    beams = model.generate(**batch, **settings, num_beams=2, num_return_sequences=2)[:, longest:].tolist()
    single_beams = []
    for p in prompts:
        single_beams += model.generate(
            input_ids=p["ids"][None],
            attention_mask=torch.ones_like(p["ids"])[None],
            **stacked(p["media"]),
            **settings,
            num_beams=2,
            num_return_sequences=2,
        )[:, len(p["ids"]) :].tolist()
    return {
        "logits": logits,
        "alone": alone,
        "together": together,
        "beams": beams,
        "single_beams": single_beams,
    }


def stacked(media):
    """Model inputs: media of unlike sizes are padded, their sizes passed along."""
    inputs = {}
    for name, keys in (
        ("image", ("pixel_values", "image_sizes")),
        ("audio", ("input_features", "feature_lengths")),
    ):
        values = media.get(name)
        if not values:
            continue
        longest = [max(value.shape[d] for value in values) for d in range(3 - (name == "audio"))]
        padded = []
        for value in values:
            pad = []
            for d in reversed(range(value.ndim)):
                pad += [0, longest[d] - value.shape[d]]
            padded.append(torch.nn.functional.pad(value, pad, value=9.0))
        inputs[keys[0]] = torch.stack(padded)
        if len({value.shape for value in values}) > 1:
            sizes = [value.shape[1:] if name == "image" else value.shape[1] for value in values]
            inputs[keys[1]] = torch.tensor(sizes)
    return inputs


def main(root):
    torch.set_num_threads(1)
    assert importlib.util.find_spec("omni_ds") is None
    transformers.utils.logging.disable_progress_bar()
    for folder in sorted(Path(root).iterdir()):
        inputs = torch.load(folder / "inputs.pt")
        loader = getattr(transformers, inputs["auto_class"])
        model, info = loader.from_pretrained(
            folder / "model", trust_remote_code=True, output_loading_info=True, **inputs["kwargs"]
        )
        model.eval()
        outputs = {
            "class": type(model).__name__,
            "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
            "trouble": {key: sorted(map(str, value)) for key, value in info.items() if value},
            "state": dict(model.state_dict()) if inputs["want_state"] else {},
            **answer(model, inputs["prompts"]),
        }
        torch.save(outputs, folder / "outputs.pt")


main(sys.argv[1])
