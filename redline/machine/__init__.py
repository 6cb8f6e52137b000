"""What this machine is, without torch: `this_machine()` asks the driver, `find_measured(names)` reads our records."""

from redline.machine.local import Gpu, Machine, this_machine
from redline.machine.measured import find_measured, save_measured

__all__ = ["Gpu", "Machine", "find_measured", "save_measured", "this_machine"]
