"""Configurations for tests."""


def minimal(**changes):
    """The smallest configuration that trains, with dotted keys changed (`__` for a dot)."""
    raw = {
        "train_batch_size": 8,
        "optimizer": {"params": {"lr": 1e-3}},
        "omni": {
            "llm": {"path": "some/llm"},
            "encoders": {
                "vision": {"path": "some/vit", "modality": "image"},
                "audio": {"path": "some/whisper", "modality": "audio"},
            },
            "data": {"train": "data/train.jsonl"},
            "train": {"max_steps": 10},
            "output_dir": "runs/x",
        },
    }
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        target = raw
        for key in path:
            target = target.setdefault(key, {})
        target[last] = value
    return raw
