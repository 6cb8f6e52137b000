"""What a user can point at. Today the built-in GPTs; resolving a name needs no torch."""

from redline.workloads.presets import PRESETS, resolve_workload

__all__ = ["PRESETS", "resolve_workload"]
