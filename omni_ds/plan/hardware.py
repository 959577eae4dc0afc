"""What the ranks run on, in plain numbers: memory, speed and links of a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

GIB = 1 << 30
GIGA = 10**9
TERA = 10**12


@dataclass(frozen=True)
class Hardware:
    """A device and its links.

    memory: bytes, None for no limit; peak_flops: dense bf16 FLOP/s; intra_bytes, inter_bytes: bytes/s that a
    device sends to others of its node, and of other nodes; per_node: devices of a node.
    """

    name: str
    memory: int | None
    peak_flops: int
    intra_bytes: int
    inter_bytes: int
    per_node: int

    def __str__(self) -> str:
        memory = "no memory limit" if self.memory is None else f"{self.memory / GIB:.3g} GiB"
        return (
            f"{self.name}: {memory}, {self.peak_flops / TERA:g} TFLOP/s, {self.intra_bytes / GIGA:g} GB/s in "
            f"a node of {self.per_node}, {self.inter_bytes / GIGA:g} GB/s between nodes"
        )


@dataclass(frozen=True)
class Device:
    """What a process finds out about its device. memory: bytes, None on a CPU; on_node: of how many ranks."""

    name: str = "cpu"
    memory: int | None = None
    on_node: int = 1


# Part of a device's name -> (dense bf16 TFLOP/s, GB/s to a neighbour in the node), from the vendors' data
# sheets; links are one direction. The first that matches counts, so that variants come before their family.
_KNOWN = (
    ("GB300", 2500, 900),
    ("GB200", 2500, 900),
    ("B300", 2250, 900),
    ("B200", 2250, 900),
    ("H200", 989, 450),
    ("GH200", 989, 450),
    ("H100 NVL", 835, 300),
    ("H100 PCIe", 756, 64),
    ("H100", 989, 450),
    ("H800", 989, 200),
    ("H20", 148, 450),
    ("A800", 312, 200),
    ("A100-PCIE", 312, 32),
    ("A100", 312, 300),
    ("A40", 150, 32),
    ("A6000", 155, 32),
    ("A10", 125, 32),
    ("L40S", 362, 32),
    ("L40", 181, 32),
    ("L4", 121, 32),
    ("RTX 4090", 165, 32),
    ("RTX 3090", 71, 32),
    ("MI325X", 1307, 448),
    ("MI300X", 1307, 448),
    ("MI250X", 191, 200),
)
_UNKNOWN = (300, 64)  # an accelerator that is not listed
_CPU = (0.1, 5)
_INTER = 50  # GB/s: one 400 Gbit/s adapter for each device
_PER_NODE = 8


class HardwareSection(Protocol):
    """:class:`omni_ds.config.HardwareConfig`: "auto", or a number in the unit of its name."""

    device_memory_gib: object
    peak_tflops: object
    intra_node_gbps: object
    inter_node_gbps: object
    gpus_per_node: object


def known(device: Device) -> Hardware:
    """From the table of devices; a CPU has no memory limit and slow links."""
    if device.memory is None:
        tflops, link, name = *_CPU, device.name
        per_node = max(1, device.on_node)
    else:
        found = next((row for row in _KNOWN if row[0].lower() in device.name.lower()), None)
        tflops, link = found[1:] if found else _UNKNOWN
        name, per_node = device.name, device.on_node if device.on_node > 1 else _PER_NODE
    return Hardware(name, device.memory, int(tflops * TERA), link * GIGA, _INTER * GIGA, per_node)


def hardware_of(section: HardwareSection, device: Device = Device()) -> Hardware:
    """What the configuration says, and for "auto" what is known of the device."""
    found = known(device)
    values: dict[str, int] = {}
    for key, field, unit in (
        ("device_memory_gib", "memory", GIB),
        ("peak_tflops", "peak_flops", TERA),
        ("intra_node_gbps", "intra_bytes", GIGA),
        ("inter_node_gbps", "inter_bytes", GIGA),
        ("gpus_per_node", "per_node", 1),
    ):
        given = getattr(section, key)
        if given != "auto":
            values[field] = int(given * unit)
    if "memory" in values and device.memory is None:
        # memory is given for a device that is not here: a plan for an accelerator, not for this CPU
        tflops, link = _UNKNOWN
        found = replace(
            found, name="device", peak_flops=tflops * TERA, intra_bytes=link * GIGA, per_node=_PER_NODE
        )
    return replace(found, **values)
