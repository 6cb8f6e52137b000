"""Frozen dataclasses that are their own JSON.

    to_json(workload) -> dict of plain values;  from_json(Workload, that dict) == workload

Handles nested dataclasses, tuples and optional fields: what the types of `core` use, and nothing more.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Convert dataclasses to dicts and tuples to lists; leave everything else as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], data: Any) -> T:
    """The inverse of to_json. Unknown keys raise: a file from another version must not half-load."""
    hints = typing.get_type_hints(kind)
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = set(data) - names
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    return kind(**{name: _convert(hints[name], item) for name, item in data.items()})


def _convert(hint: Any, item: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if item is None:
            return None
        return _convert(_member(args, item), item)
    if origin is tuple:
        if not isinstance(item, (list, tuple)):
            raise ValueError(f"{item!r} is not a list")  # a string would be split into letters
        return tuple(_convert(args[0], element) for element in item)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), item)
    if hint is str and not isinstance(item, str):
        raise ValueError(f"{item!r} is not text")
    return item


def _member(args: tuple[Any, ...], item: Any) -> Any:
    """Return the first member of a union, or for a dict the first dataclass that has every field."""
    members = [arg for arg in args if arg is not type(None)]
    kinds = [arg for arg in members if dataclasses.is_dataclass(arg)] if isinstance(item, dict) else []
    fitting = (kind for kind in kinds if set(item) <= {field.name for field in dataclasses.fields(kind)})
    return next(fitting, members[0])
