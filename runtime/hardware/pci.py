"""PCI addresses of GPUs, in the notation of Linux's sysfs."""

from typing import Any


def pci_address(index: int) -> str | None:
    """Return the PCI address of the GPU with this index, like ``0000:3b:00.0``. None if torch does not report it."""
    import torch

    return address_of(torch.cuda.get_device_properties(index))


def address_of(properties: Any) -> str | None:
    """Return the PCI address of a GPU from its ``torch.cuda.get_device_properties``. None if these lack the address."""
    try:
        domain, bus = int(properties.pci_domain_id), int(properties.pci_bus_id)
        return f"{domain:04x}:{bus:02x}:{int(properties.pci_device_id):02x}.0"
    except (AttributeError, TypeError):
        return None
