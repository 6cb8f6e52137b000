"""What a user can name: the built-in GPTs, Hugging Face configs, shape files. Resolving a name needs no torch."""

from redline.workloads.presets import PRESETS, default_workload
from redline.workloads.resolve import resolve_workload
from redline.workloads.shapes import Resolved, changed_document, resolve_shape

__all__ = ["PRESETS", "Resolved", "changed_document", "default_workload", "resolve_shape", "resolve_workload"]
