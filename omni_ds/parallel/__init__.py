"""The users of ``torch.distributed``: process groups, point-to-point channels, feature reshard, agreement."""
