"""Which parameters train."""

from __future__ import annotations

from torch import nn


def set_trainable(module: nn.Module, trainable: bool = True, **parts: bool) -> None:
    """Set ``requires_grad`` on every parameter of a module; ``parts`` overrides it for children by name.

    ``set_trainable(encoder, tower=False, projector=True)``; ``set_trainable(layer, not config.llm.freeze)``.
    Parameters the module lists in ``unused`` never train.
    """
    unknown = set(parts) - {name for name, _ in module.named_children()}
    assert not unknown, f"{type(module).__name__} has no part {sorted(unknown)}"
    unused = getattr(module, "unused", ())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parts.get(name.split(".", 1)[0], trainable) and name not in unused)
