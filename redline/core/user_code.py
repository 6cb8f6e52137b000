"""Imports a user's Python file: finds its functions, and the user's own line at fault when something fails in it.

    functions = load_functions(source)
    with blaming(functions.file, "vit()"):
        model = functions.factory()

Only worker processes import a file: a parent has no torch and runs no user code. Names and rules are in
docs/your-model.md; what can be checked without running the file, `workloads/python_file.py` has checked before.

A file can import its neighbours as under `python file.py`. A file with relative imports is a module of the package
around it, as under `python -m package.file`; the package may or may not have an `__init__.py`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.abc
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from redline.core.errors import ModelError, UserError, explained
from redline.core.generators import seeded
from redline.core.known_fixes import DEVICE_ASSERT, known_fix
from redline.core.traced import SAMPLE
from redline.core.units import counted
from redline.core.workload import Source, check_positive

PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
INIT = "__init__.py"
NO_LINE = "no line of the file was running"
IGNORED = -100  # cross-entropy's ignore_index
GENERATED = ("<frozen ", "<string>", "<eval")  # names of code without a file, such as code typed at a prompt


@dataclass(frozen=True, kw_only=True)
class Functions:
    file: str
    name: str
    """The factory's name."""
    factory: Callable[[], Any]
    make_batch: Callable[[int, int], Any]
    """make_batch(size, seed) -> a tree of tensors whose first dimension is `size`, on the host."""
    loss: Callable[[Any, Any], Any] | None = None
    shape: Callable[[], Any] | None = None
    items_per_sample: int = 1
    unit: str = SAMPLE
    batch_name: str = "make_batch"
    """Its name in the file: vit_batch if there are several models. Likewise the two below."""
    loss_name: str = "loss"
    shape_name: str = "shape"
    live: bool = False
    """True for a module that exists already: its loss, if any, was passed in and is not a function of the file."""

    @property
    def words(self) -> str:
        """The model as a user writes it."""
        return f"{Path(self.file).name}:{self.name}"

    @property
    def loss_label(self) -> str:
        """What messages call the loss."""
        if not self.live:
            return f"{self.loss_name}() for {self.words}"
        return f"the loss {'' if self.loss_name == 'loss' else f'{self.loss_name}() '}of {self.words}"


def load_functions(source: Source) -> Functions:
    """Import a file and return its functions. A file that has changed since it was inspected is refused."""
    file, name, digest = source.file, source.factory, source.digest
    if file is None or name is None or digest is None:
        raise ValueError(f"{source} is no Python file")
    module = load_module(file, digest)

    def named(part: str, plain: str) -> str:
        own = f"{name}_{part}"
        return plain if getattr(module, own, None) is None else own

    def found(part: str, plain: str) -> Any:
        return getattr(module, named(part, plain), None)

    factory: Any = getattr(module, name, None)
    make_batch = found("batch", "make_batch")
    shown = Path(file).name
    for what, function in ((name, factory), (named("batch", "make_batch"), make_batch)):
        if not callable(function):
            raise UserError(
                f"{shown} has no function {what}",
                f"after importing it, {what} is {'not there' if function is None else type(function).__name__}",
                f"write `def {what}(...)` into it: docs/your-model.md",
            )
    items, unit = found("items_per_sample", "items_per_sample"), found("unit", "unit")
    if items is not None:
        check_positive(f"items_per_sample in {shown}", items)
    return Functions(
        file=file,
        name=name,
        factory=factory,
        make_batch=make_batch,
        loss=found("loss", "loss"),
        shape=found("shape", "shape"),
        items_per_sample=1 if items is None else items,
        unit=SAMPLE if unit is None else str(unit),
        batch_name=named("batch", "make_batch"),
        loss_name=named("loss", "loss"),
        shape_name=named("shape", "shape"),
    )


class _Loader(importlib.abc.SourceLoader):
    """Loads a module from bytes that were hashed, so that the code that runs is the code that was checked. No .pyc is
    written."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data = path, data

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        return self._data


class _Finder(importlib.abc.MetaPathFinder):
    """Provides that loader whoever imports the file first, a neighbour included, so that its classes exist once."""

    def __init__(self, name: str, path: Path, data: bytes) -> None:
        self._name, self._path, self._data = name, path, data

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=_Loader(self._path, self._data))


@dataclass(frozen=True, kw_only=True)
class Home:
    """A file's place among Python's modules."""

    name: str | None
    """Dotted name in its package, 'shop.models.vit'; None: it stands alone, as a script does."""
    root: Path
    """The folder in which dotted names begin."""
    folder: Path
    """Imported files below this folder belong to the model: the outermost package's folder, or else the file's own."""


def home_of(path: Path, data: bytes) -> Home:
    levels = relative_levels(data)
    packages: list[str] = []
    root = path.parent
    while (len(packages) < levels or (root / INIT).is_file()) and root != root.parent:
        packages.insert(0, root.name)
        root = root.parent
    folder = root / packages[0] if packages else path.parent
    if not levels:
        return Home(name=None, root=root, folder=folder)
    if len(packages) < levels:
        raise UserError(
            f"{path.name} imports from {counted(levels, 'package')} above it",
            f"there are no more than {len(packages)} folders above it",
            "take a dot away from the import",
        )
    names = packages if path.name == INIT else [*packages, path.stem]
    if wrong := next((name for name in names if "." in name), None):
        raise UserError(
            f"{path.name} imports relatively, and {wrong!r} is no name for a package",
            "a dot in it would end the name",
            f"rename {wrong!r}, or write `import neighbour` instead of `from . import neighbour`",
        )
    return Home(name=".".join(names), root=root, folder=folder)


def relative_levels(data: bytes) -> int:
    """Return how many packages up the file's relative imports go: one dot is the package it is in."""
    try:
        nodes = ast.walk(ast.parse(data))
    except (SyntaxError, ValueError):  # importing the file reports where
        return 0
    return max((node.level for node in nodes if isinstance(node, ast.ImportFrom)), default=0)


@functools.cache  # once per process: a second import would make every class again
def load_module(file: str, digest: str) -> ModuleType:
    path = Path(file)
    data = read(path)
    check_unchanged(path, data, digest)
    home = home_of(path, data)
    if home.name is None:
        name = f"redline_user_{digest[:16]}"
        sys.path.insert(0, str(path.parent))  # as under `python file.py`, so that the file can import its neighbours
        sys.path.append(str(home.root))  # and, if it is in a package, that package's modules by their full names
    else:
        name = home.name
        sys.path.insert(0, str(home.root))
        sys.path.append(str(path.parent))  # last, since a neighbour may have the name of a library
        check_package(home, path)
    finder = _Finder(name, path, data)
    sys.meta_path.insert(0, finder)
    try:
        # Random numbers drawn during the import, such as the samples of its batches, are the same in every process.
        with seeded(0), blaming(file, f"importing {path.name}"):
            return importlib.import_module(name)
    except UserError:
        sys.meta_path.remove(finder)
        raise


def check_package(home: Home, path: Path) -> None:
    """Check that the package's name means this folder to Python, and not one that was imported or installed before."""
    assert home.name is not None
    package = home.name.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or str(home.folder) not in (spec.submodule_search_locations or ()):
        where = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        raise UserError(
            f"{path.name} imports relatively, and the name of its package, {package}, is taken",
            f"Python finds {package} at {where}",
            f"rename the folder {package}, or write `import neighbour` instead of `from . import neighbour`",
        )


def read(path: Path) -> bytes:
    with explained(f"cannot read {path}", "check the path"):
        return path.read_bytes()


def check_unchanged(path: Path, data: bytes, digest: str) -> None:
    if hashlib.sha256(data).hexdigest() != digest:
        raise UserError(
            f"{path.name} has changed",
            "what was measured or trained so far belongs to the file as it was",
            "start a new run, or put the old file back",
        )


def neighbours(file: str) -> dict[str, str]:
    """Return the other files of the user's folder that are imported by now, by relative path, with their SHA-256."""
    folder, found = users_folder(file), {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/")
        if path.suffix == ".py" and folder in path.parents and str(path) != file and is_own(path):
            found[os.path.relpath(path, Path(file).parent)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def check_neighbours(file: str, digests: dict[str, str]) -> None:
    for name, digest in digests.items():
        path = Path(file).parent / name
        check_unchanged(path, read(path), digest)


def users_folder(file: str) -> Path:
    """Return the folder that belongs to the model; if the file cannot be read any more, the one it was in."""
    try:
        return home_of(Path(file), Path(file).read_bytes()).folder
    except (OSError, UserError):
        return Path(file).parent


def check_targets(targets: Any, classes: int, functions: Functions) -> None:
    """Check targets before cross-entropy sees them: its error would name neither the function that made them nor the
    number of classes. Every batch of a file is checked here, while its tensors are on the host."""
    least, most = targets.aminmax() if targets.numel() else (0, 0)  # one pass, which is all that most batches cost
    if least >= 0 and most < classes:
        return
    wrong = (targets >= classes) | ((targets < 0) & (targets != IGNORED))
    if not wrong.any():
        return
    counted, first = targets[targets != IGNORED], targets[wrong][0].item()
    line = definition(functions.make_batch, functions.file)
    least, most = counted.min().item(), counted.max().item()
    raise ModelError(
        f"{functions.batch_name} for {functions.words} gives the target {first}, and the model has {classes} classes",
        f"its logits are for classes 0 to {classes - 1}, and the targets go from {least} to {most}"
        f"{f'; they are made at {line}' if line else ''}",
        f"let {functions.batch_name} give targets of 0 to {classes - 1}"
        + (f", or the head {most + 1} outputs or more" if most >= classes else ""),
    )


# which line is at fault


@contextmanager
def blaming(
    file: str,
    what: str | Callable[[BaseException], str],
    function: Callable[..., Any] | None = None,
    call: str | None = None,
) -> Iterator[None]:
    """Turn whatever the user's code raises into a UserError that names the user's own line. If `function` does not
    accept its arguments, none of its lines ran: the line is then its definition, and `call` says how it was called. It
    may be in another file than the model. `what` may be computed from the exception."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        line = users_line(error, file, anywhere=True)
        whose = what if isinstance(what, str) else what(error)
        raise blamed(error, line, file, whose, function, call) from error


def blamed(
    error: BaseException,
    line: str | None,
    file: str,
    what: str,
    function: Callable[..., Any] | None = None,
    call: str | None = None,
) -> UserError:
    """Return what was raised as problem, why and fix. `line`: the user's line that was running, from `users_line`."""
    fix, whose = known_fix(error), own_file(function) or file
    if line is None and isinstance(error, TypeError) and function is not None:
        line = definition(function, whose)
        fix = f"let it take what it is given: it is called as {call}" if line and call else fix
    if line is None and inspect.isbuiltin(function):
        fix = fix or f"take a function of your own for {function.__name__}"
    if isinstance(error, ImportError):
        fix = import_fix(error, file)
    return UserError(
        f"{what} raised {type(error).__name__}: {first_line(error)}",
        f"it happened at {line}" if line else NO_LINE,
        fix or ("fix that line" if line else f"fix {Path(whose).name}"),
    )


def raised_in(file: str, error: BaseException, what: str) -> UserError | None:
    """Do the same for a run that may be compiled and on a GPU; return None if the file is not at fault."""
    if DEVICE_ASSERT in str(error):
        found = blamed(error, None, file, what)
        return UserError(found.problem, "a GPU reports this error late, so that no line can be named", found.fix)
    line = users_line(error, file)
    return None if line is None or is_ours(error) else blamed(error, line, file, what)


def is_ours(error: BaseException) -> bool:
    """True if the innermost code outside libraries is redline's own, so that the mistake is not the user's."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = next((file for file in reversed(files) if file.startswith(PACKAGE) or is_own(Path(file))), "")
    return last.startswith(PACKAGE) and not getattr(error, "real_stack", ())


def import_fix(error: ImportError, file: str) -> str | None:
    """Return the fix for a failed import; None if its message says it all."""
    path = Path(file)
    if "no known parent package" in str(error):
        return f"import without the dot there; or write `from . import` in {path.name} too, which makes both a package"
    if error.name is None:
        return None
    top = error.name.partition(".")[0]
    beside = next((each for each in (path.parent / f"{top}.py", path.parent / top) if each.exists()), None)
    taken = getattr(sys.modules.get(top), "__file__", None)
    if beside is not None and taken is not None and beside not in (Path(taken), Path(taken).parent):
        return f"rename {beside.name}: Python means another {top} by that name, which was imported before ({taken})"
    if isinstance(error, ModuleNotFoundError) and beside is None:
        return f"install {top} where redline is installed, or put {top}.py beside {path.name}"
    return None


def users_line(error: BaseException, file: str, anywhere: bool = False) -> str | None:
    """Return the innermost line of the user's folder in a traceback, with its text: 'vit.py:41: x = x.view(3)'. With
    `anywhere`, of any folder that is the user's own; use it only for code that is not compiled."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{Path(error.filename).name}:{error.lineno}: {(error.text or '').strip()}"
    folder, frames = users_folder(file), traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename == __file__:
        del frames[0]
    frames.extend(
        getattr(error, "real_stack", ())
    )  # frames of code that torch.compile was tracing, and Python was not running
    running = [(frame, Path(frame.filename)) for frame in reversed(frames[1:])]  # the first is the caller's
    own = [(frame, path) for frame, path in running if is_own(path) and (anywhere or folder in path.parents)]
    for frame, path in own or [(frame, path) for frame, path in running if str(path) == file]:
        return f"{path.name}:{frame.lineno}: {frame.line or ''}".rstrip(": ")
    return None


def own_file(function: Callable[..., Any] | None) -> str | None:
    """Return the file that a user's function is in; None if the function is not the user's, or built in."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    return code.co_filename if code is not None and is_own(Path(code.co_filename)) else None


def ran_in(error: BaseException, thing: object) -> bool:
    """True if the error passed through a method of `thing`."""
    return any(frame.f_locals.get("self") is thing for frame, _ in traceback.walk_tb(error.__traceback__))


def definition(function: Callable[..., Any], file: str) -> str | None:
    """Return the line that declares a function of the user's file: 'vit.py:7: def vit(width):'."""
    target = inspect.unwrap(function.__init__ if inspect.isclass(function) else function)
    code = getattr(target, "__code__", None)
    if code is None or code.co_filename != file:
        return None
    lines = linecache.getlines(file)[code.co_firstlineno - 1 :]
    # A decorated function begins at its decorator.
    starts = ("def ", "async def ") if code.co_name != "<lambda>" else ("",)
    skipped = next((index for index, line in enumerate(lines) if line.lstrip().startswith(starts)), 0)
    text = lines[skipped].strip() if lines else ""
    return f"{Path(file).name}:{code.co_firstlineno + skipped}: {text}"


def assignment(name: str, file: str) -> tuple[str, str] | None:
    """Return a file's last assignment to a name, and the value: ('vit.py:7: net = Net(3)', 'Net(3)')."""
    text = "".join(linecache.getlines(file))
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == name for each in node.targets
        ):
            line = text.splitlines()[node.lineno - 1].strip()
            return f"{Path(file).name}:{node.lineno}: {line}", ast.unparse(node.value)
    return None


def is_own(path: Path) -> bool:
    """True if the path is not of an installed package, Python or redline, all of which a user's folder may contain."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)  # which may be built in its source folder
    others = (PACKAGE, STANDARD_LIBRARY, *((os.path.dirname(torch) + os.sep,) if torch else ()), *GENERATED)
    return not {"site-packages", "dist-packages"} & set(path.parts) and not str(path).startswith(others)


def first_line(error: BaseException, otherwise: str = "no message") -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), otherwise)


def described(value: Any) -> str:
    """Describe a value: 'an int64 tensor of [4, 10]', 'a float32 numpy array of [4, 10]', 'a tuple', 'nothing'."""
    if value is None:
        return "nothing"
    name = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        kind = "numpy array" if is_numpy(value) else "tensor"
        name = f"{str(value.dtype).removeprefix('torch.')} {kind} of {list(value.shape)}"
    return f"{'an' if name[0].lower() in 'aeiou' and not name.startswith('u') else 'a'} {name}"


def is_numpy(value: Any) -> bool:
    """True for a NumPy array or scalar."""
    return type(value).__module__.partition(".")[0] == "numpy"
