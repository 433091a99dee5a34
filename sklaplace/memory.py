"""Memory: how much there is, said in units that people read."""

import os

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device now; an estimate for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    if "SC_AVPHYS_PAGES" in names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 8 * 2**30  # a system that does not say: half of a common laptop


def readable(n_bytes: float) -> str:
    """Bytes with a binary unit, such as '931 TiB'."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n_bytes >= 1024 and len(units) > 1:
        n_bytes, units = n_bytes / 1024, units[1:]
    return (
        f"{n_bytes:,.0f} {units[0]}" if n_bytes >= 10 else f"{n_bytes:.1f} {units[0]}"
    )
