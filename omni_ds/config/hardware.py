"""The section `omni.hardware`: what "auto" degrees are chosen for."""

from omni_ds.config.base import Auto, PositiveFloat, PositiveInt, Section


class HardwareConfig(Section):
    """What the ranks run on; decides degrees that are `auto` and nothing else."""

    device_memory_gib: Auto | PositiveFloat = "auto"
    """Memory of a device in GiB (2^30 bytes); auto: all of the device's, on a CPU without a limit."""
    peak_tflops: Auto | PositiveFloat = "auto"
    """Dense bf16 speed of a device in TFLOP/s (10^12 a second); auto: of known devices, by name, else 300; of
    a CPU, unless device_memory_gib is given, 0.1."""
    intra_node_gbps: Auto | PositiveFloat = "auto"
    """GB/s (10^9 bytes a second, not bits) that a device can send to the others of its node; auto: of known
    devices, by name, else 64; of a CPU likewise 5."""
    inter_node_gbps: Auto | PositiveFloat = "auto"
    """GB/s (10^9 bytes a second) that a device can send to other nodes; auto: 50."""
    gpus_per_node: Auto | PositiveInt = "auto"
    """Ranks of a node; auto: as many as the launcher started on one, with a single rank 8 (on a CPU
    likewise 1)."""
