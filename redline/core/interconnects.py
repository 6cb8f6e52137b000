"""Links between the GPUs of a node and networks between nodes, with the rate that a collective reaches on each.

    links = choose_links("nvlink,ib-400", find_device("H200"))
    links.inside.rate, links.between.rate -> 350e9, 45e9          bytes per second of one GPU, one direction
    choose_links("ib-400", find_device("H200")).inside.name -> "nvlink4": an SXM card brings its own

Rates are for one direction: vendors quote the sum of both for NVLink and PCIe. An InfiniBand or RoCE row is one port
per GPU, as in DGX and HGX machines; a plain Ethernet row is one port that all GPUs of a node share. A card whose link
is not certain (PCIe cards, with or without a bridge) has none until the user names it: docs/parallel.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.core.devices import Device
from redline.core.errors import UserError, unknown_name

# Share of a link that large NCCL collectives reach: NVLink 4 about 350 of 450 GB/s, InfiniBand at 400 Gb/s about 45 of
# 50 (docs/sources.md 7). Other rows of each kind are assumed to reach the same share, for want of figures.
REACHED_INSIDE, REACHED_BETWEEN = 350 / 450, 45 / 50
OWN = "nvlink"  # of whichever generation the device has


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    name: str
    inside: bool
    """True if it joins the GPUs of a node, False if it joins nodes."""
    bandwidth: float
    """Bytes per second in one direction, of one GPU or of one port."""
    shared: bool = False
    """True if all GPUs of a node share one port."""
    source: str

    @property
    def reached(self) -> float:
        return REACHED_INSIDE if self.inside else REACHED_BETWEEN

    @property
    def rate(self) -> float:
        """Bytes per second that a collective reaches."""
        return self.reached * self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links inside a node and between nodes; None if unknown."""

    inside: Interconnect | None = None
    between: Interconnect | None = None


def _nvlink(generation: int, links: int, gigabytes: float, gpu: str) -> Interconnect:
    return Interconnect(
        name=f"nvlink{generation}",
        inside=True,
        bandwidth=links * gigabytes * 1e9,
        source=f"{gpu} data sheet: {links} links of {gigabytes:g} GB/s in each direction",
    )


def _pcie(generation: int, transfers: float) -> Interconnect:
    return Interconnect(
        name=f"pcie{generation}",
        inside=True,
        bandwidth=transfers * 16 / 8 * 128 / 130 * 1e9,
        source=f"PCI Express {generation}.0, x16: {transfers:g} GT/s per lane, 128 of 130 bits are data",
    )


def _network(kind: str, gigabits: int, source: str, *, shared: bool = False) -> Interconnect:
    return Interconnect(
        name=f"{kind}-{gigabits}", inside=False, bandwidth=gigabits / 8 * 1e9, shared=shared, source=source
    )


_PER_NODE = "one port per node, all its GPUs together"
INTERCONNECTS = (
    _nvlink(2, 6, 25, "V100"),
    _nvlink(3, 12, 25, "A100"),
    _nvlink(4, 18, 25, "H100"),
    _nvlink(5, 18, 50, "B200"),
    _pcie(3, 8),
    _pcie(4, 16),
    _pcie(5, 32),
    _network("ib", 100, "InfiniBand EDR, one 4x port per GPU"),
    _network("ib", 200, "InfiniBand HDR, one 4x port per GPU (DGX A100: 8 of them)"),
    _network("ib", 400, "InfiniBand NDR, one 4x port per GPU (DGX H100: 8 of them)"),
    _network("ib", 800, "InfiniBand XDR, one 4x port per GPU"),
    _network("roce", 200, "Ethernet with RDMA, one port per GPU: 1600 Gb/s for a node of 8"),
    _network("roce", 400, "Ethernet with RDMA, one port per GPU: 3200 Gb/s for a node of 8"),
    _network("ethernet", 10, _PER_NODE, shared=True),
    _network("ethernet", 25, _PER_NODE, shared=True),
    _network("ethernet", 100, _PER_NODE, shared=True),
    _network("ethernet", 200, _PER_NODE, shared=True),
)
# Cards that come on a board that connects every card to every other at this rate.
NVLINK_OF = {
    **dict.fromkeys(("V100-16-SXM", "V100-32-SXM"), "nvlink2"),
    **dict.fromkeys(("A100-40-SXM", "A100-80-SXM"), "nvlink3"),
    **dict.fromkeys(("H100-SXM", "H200"), "nvlink4"),
    **dict.fromkeys(("B200", "GB200", "B300"), "nvlink5"),
}


def own_link(device: Device | None) -> Interconnect | None:
    """Return the link that certainly joins such cards inside a node, or None."""
    name = None if device is None else NVLINK_OF.get(device.label)
    return None if name is None else _row(name)


def choose_links(words: str | None, device: Device | None) -> Links:
    """Parse one name, or two separated by a comma, in any order. The link inside a node defaults to the card's own, if
    it has one."""
    inside, between = None, None
    for word in () if words is None else words.split(","):
        row = _find(word.strip(), device)
        if (inside if row.inside else between) is not None:
            place = "inside a node" if row.inside else "between nodes"
            raise UserError(
                f"--interconnect {words} names two links {place}",
                "there is one inside a node and one between nodes",
                "name one of each, such as nvlink,ib-400",
            )
        inside, between = (row, between) if row.inside else (inside, row)
    return Links(inside=own_link(device) if inside is None else inside, between=between)


def _find(word: str, device: Device | None) -> Interconnect:
    if word == OWN:
        found = own_link(device)
        if found is not None:
            return found
        which = "no device is known" if device is None else f"{device.label} has no NVLink to every other card"
        names = ", ".join(row.name for row in INTERCONNECTS if row.inside)
        raise UserError("--interconnect nvlink has no generation here", which, f"name the link itself: {names}")
    known = [row.name for row in INTERCONNECTS]
    if word not in known:
        raise unknown_name("interconnect", word, (OWN, *known))
    return _row(word)


def _row(name: str) -> Interconnect:
    return next(row for row in INTERCONNECTS if row.name == name)
