"""Who still holds a storage: a scan of the garbage collector's objects, and names for what it finds.

Only used when a storage is still alive after its lease dropped it; a scan takes about 30 ms for 170k objects.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

__all__ = ["array_holders", "describe", "tensor_holders", "thawed"]

_CONTAINER_ITEMS_SEARCHED = 10_000
_NAMELESS = "held by an object that Python cannot name"
_CONTAINERS = (list, tuple, set, frozenset, dict, CellType)


@contextmanager
def thawed() -> Iterator[None]:
    """Scan inside this: engines call gc.freeze(), which hides objects from the collector's lists."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if frozen:
            gc.freeze()


def tensor_holders(cdata: int) -> list[torch.Tensor]:
    """Every live tensor over the storage whose C++ address is `cdata`, derived views before their bases."""
    # By type(o): isinstance() over all objects would run lazy module attributes and proxies.
    found = [o for o in gc.get_objects() if _has_memory(type(o)) and _storage_of(o) == cdata]
    # Asking for t._base would bring a base back to life that only its view holds.
    return sorted(found, key=lambda t: not t._is_view())


def array_holders(start: int, nbytes: int) -> list[str]:
    """Descriptions of numpy arrays and of tensors over other storages (DLPack consumers) that read this range.

    numpy arrays are invisible to the garbage collector, so they are looked for inside the containers that it tracks.
    """
    named: dict[int, str] = {}
    for frame in _live_frames():
        for name, item in _locals(frame).items():
            if _is_inside(item, start, nbytes):
                named[id(item)] = f"{_shape(item)}: {_local(name, frame)}"
    objects = gc.get_objects()
    found = {id(i): i for owner in objects for i in _members(owner) if _is_inside(i, start, nbytes)}
    objects.clear()
    items = [item for key, item in found.items() if key not in named]
    found.clear()
    others = [describe(item, skip=(items,)) for item in items]
    # What nobody visible holds is the anchor of an array or capsule that is named itself.
    return [*named.values(), *(o for o in others if not o.endswith(_NAMELESS))] or others


def _is_inside(item: object, start: int, nbytes: int) -> bool:
    address = _address_of(item)
    return address is not None and start <= address < start + nbytes


def describe(held: object, skip: Iterable[object] = ()) -> str:
    """What `held` is and where it is kept, e.g. "uint8 tensor (4, 16): attribute 'k_scale' of Attention"."""
    ignored = {id(o) for o in skip} | {id(sys._getframe())}
    return f"{_shape(held)}: {_frame_place(held) or _referrer_place(held, ignored) or _NAMELESS}"


def _has_memory(kind: type) -> bool:
    """Whether objects of this type are tensors with memory. The compiler's fake ones warn when asked for theirs."""
    return issubclass(kind, torch.Tensor) and not kind.__module__.startswith("torch._subclasses.")


def _storage_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return int(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):
            # Sparse, fake and functional tensors have no storage.
            return 0


def _address_of(item: object) -> int | None:
    kind = type(item)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return int(item.__array_interface__["data"][0])  # type: ignore[attr-defined]  # checked by name: numpy is optional
    if _has_memory(kind):
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return int(item.data_ptr())  # type: ignore[attr-defined]  # issubclass above
            except (RuntimeError, NotImplementedError):
                return None
    return None


def _members(owner: object) -> Iterable[object]:
    """What `owner` refers to directly: container items, cell contents, attributes (their dict may not exist yet)."""
    kind = type(owner)
    if issubclass(kind, torch.Tensor):
        return (owner,)
    if kind.__module__ == "builtins" and kind not in _CONTAINERS:
        return ()
    return gc.get_referents(owner)[:_CONTAINER_ITEMS_SEARCHED]


def _shape(held: object) -> str:
    kind = type(held)
    if issubclass(kind, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            dtype = str(held.dtype).removeprefix("torch.")  # type: ignore[attr-defined]  # issubclass above
            return f"{dtype} {kind.__name__.lower()} {tuple(held.shape)!r}"  # type: ignore[attr-defined]  # as above
    if kind.__name__ == "ndarray":
        return f"numpy array {held.shape!r}"  # type: ignore[attr-defined]  # an ndarray
    return kind.__qualname__


def _live_frames() -> Iterator[FrameType]:
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith("kvhal."):
                yield frame
            frame = frame.f_back


def _locals(frame: FrameType) -> dict[str, object]:
    """The locals of a frame, without leaving a copy of them in it."""
    found = dict(frame.f_locals)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        # Before Python 3.13 f_locals is a copy that the frame keeps, so it would keep every local alive.
        frame.f_locals.clear()
    return found


def _local(name: str, frame: FrameType) -> str:
    code = frame.f_code
    return f"local {name!r} of {code.co_qualname} ({code.co_filename}:{frame.f_lineno})"


def _frame_place(held: object) -> str:
    for frame in _live_frames():
        for name, value in _locals(frame).items():
            if value is held:
                return _local(name, frame)
    return ""


def _referrer_place(held: object, ignored: set[int], depth: int = 3) -> str:
    """Where the first nameable referrer keeps `held`."""
    referrers = gc.get_referrers(held)
    ignored = ignored | {id(referrers), id(held)}
    for keeper in referrers:
        if id(keeper) in ignored or (isinstance(keeper, FrameType) and _is_ours(keeper)):
            continue
        place = _place_in(keeper, held, ignored, depth)
        if place:
            return place
    return ""


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("kvhal.")


def _place_in(keeper: object, held: object, ignored: set[int], depth: int) -> str:
    kind = type(keeper)
    if kind is FrameType:
        names = [n for n, v in _locals(keeper).items() if v is held]  # type: ignore[arg-type]  # a frame
        return _local(names[0], keeper) if names else ""  # type: ignore[arg-type]  # a frame
    if kind is dict:
        return _place_in_dict(keeper, held, ignored)  # type: ignore[arg-type]  # a dict
    if kind is CellType:
        return _closure_of(keeper)
    if kind in (list, tuple, set):
        inside = _referrer_place(keeper, ignored, depth - 1) if depth else ""
        return f"item of a {kind.__name__}" + (f" ({inside})" if inside else "")
    if issubclass(kind, torch.Tensor):
        return f"base of {_shape(keeper)}"
    for name, value in _attributes(keeper):
        if value is held:
            return f"attribute {name!r} of {kind.__qualname__}"
    return f"an object of type {kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else ""


def _place_in_dict(keeper: dict[Any, Any], held: object, ignored: set[int]) -> str:
    key = next((k for k, v in list(keeper.items()) if v is held), None)
    if key is None:
        return ""
    if "__name__" in keeper and "__spec__" in keeper:
        return f"global {key!r} of module {keeper['__name__']}"
    for owner in gc.get_referrers(keeper):
        if id(owner) in ignored or isinstance(owner, (dict, list, FrameType)):
            continue
        if isinstance(owner, ModuleType) or any(v is keeper for _, v in _attributes(owner)) or _dict_is(owner, keeper):
            return f"attribute {key!r} of {type(owner).__qualname__}"
    return f"entry {key!r} of a dict"


def _dict_is(owner: object, keeper: dict[Any, Any]) -> bool:
    try:
        return vars(owner) is keeper
    except TypeError:
        return False


def _attributes(owner: object) -> Iterable[tuple[str, object]]:
    try:
        return list(vars(owner).items())
    except TypeError:
        return ()


def _closure_of(cell: object) -> str:
    for closure in gc.get_referrers(cell):
        if type(closure) is tuple:
            for function in gc.get_referrers(closure):
                if isinstance(function, FunctionType) and function.__closure__ is closure:
                    return f"closure of {function.__qualname__}"
    return "a closure"
