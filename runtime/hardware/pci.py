"""The PCI address of a GPU, as sysfs names it."""

from typing import Any


def pci_address(index: int) -> str | None:
    """Return the address of GPU number ``index``, like ``0000:3b:00.0``, or None if torch does not know it."""
    import torch

    return address_of(torch.cuda.get_device_properties(index))


def address_of(properties: Any) -> str | None:
    """Return the same, of ``torch.cuda.get_device_properties``' answer."""
    try:
        domain, bus = int(properties.pci_domain_id), int(properties.pci_bus_id)
        return f"{domain:04x}:{bus:02x}:{int(properties.pci_device_id):02x}.0"
    except (AttributeError, TypeError):
        return None
