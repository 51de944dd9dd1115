"""Ownership of one storage: the only place that makes tensors over cache memory, and the only one that revokes them.

Tensors are made with `set_` from the storage, so they have no `_base` chain. Revoking swaps a tensor's implementation
with an empty one (`torch.utils.swap_tensors`) and gives it a class that raises StaleView: changing an implementation
that others share would free memory under them (measured: `set_` with a live DLPack consumer, `resize_(0)`).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvhal import holders
from kvhal.contract import Adopted, Holder
from kvhal.errors import StaleView

# The loop variable and the argument of getrefcount.
_ONLY_OURS = 2

__all__ = ["Region", "RegionRelease", "RevokedTensor"]

_NATIVE = "a native reference that Python cannot see (DLPack consumer, autograd graph or extension)"


class RevokedTensor(torch.Tensor):
    """What a tensor becomes when the lease under it is closed: any use raises StaleView."""

    @classmethod
    def __torch_function__(
        cls, func: object, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        raise StaleView(
            "a tensor over a closed KV cache was used; its lease was closed and its bytes were given back; "
            "hold a CacheView and call .tensor() where it is used, while the lease is open"
        )


@dataclass(frozen=True, slots=True)
class RegionRelease:
    """What releasing one region gave: bytes returned, bytes pinned in quarantine, and the holders met."""

    returned: int
    pinned: int
    holders: tuple[Holder, ...]


class Region:
    """`nbytes` at `offset` of one storage, owned or adopted, seen as `cache`, a uint8 tensor [nbytes]."""

    def __init__(self, storage: torch.UntypedStorage, offset: int, nbytes: int, *, adopted: bool) -> None:
        self._storage: torch.UntypedStorage | None = storage
        self.offset = offset
        self.nbytes = nbytes
        self.is_adopted = adopted
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self.cache: torch.Tensor | None = self.tensor("uint8", 0, (nbytes,), (1,))

    @classmethod
    def own(cls, storage: torch.UntypedStorage, nbytes: int) -> Region:
        """A region that owns `storage`; the caller must drop its own reference."""
        return cls(storage, 0, nbytes, adopted=False)

    @classmethod
    def adopt(cls, memory: Adopted, nbytes: int) -> Region:
        """A region over the first `nbytes` of an engine's range; checked by `Layout.bind` before."""
        return cls(memory.storage, memory.offset, nbytes, adopted=True)

    def tensor(self, dtype: str, offset: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A tensor of torch dtype `dtype` at byte `offset` of the region; byte `strides`. StaleView if released."""
        if self._storage is None:
            raise StaleView(
                "a view of a closed KV cache was asked for a tensor; allocate a new lease and take its views"
            )
        kind: torch.dtype = vars(torch)[dtype]
        made = torch.empty(0, dtype=kind, device=self._storage.device)
        size = made.element_size()
        made.set_(self._storage, (self.offset + offset) // size, tuple(shape), tuple(s // size for s in strides))
        if self.is_adopted:
            # An engine's storage outlives us, so only a list of our own tensors tells which to revoke.
            key = id(made)
            self._made[key] = weakref.ref(made, partial(self._forget, key))
        return made

    def _forget(self, key: int, _: object) -> None:
        self._made.pop(key, None)

    def release(self) -> RegionRelease:
        """Drop the storage, revoke or quarantine whoever still holds it. Safe to call twice."""
        if self._storage is None:
            return RegionRelease(0, 0, ())
        if self.is_adopted:
            return self._release_adopted()
        start, cdata, exported = self._storage.data_ptr(), self._storage._cdata, not self._storage.resizable()
        alive = StorageWeakRef(self._storage)
        self.cache = self._storage = None
        if alive.expired():
            return RegionRelease(self.nbytes, 0, ())
        gc.collect()
        if alive.expired():
            return RegionRelease(self.nbytes, 0, ())
        with holders.thawed():
            return self._evict(alive, start, cdata, exported)

    def _evict(self, alive: StorageWeakRef, start: int, cdata: int, exported: bool) -> RegionRelease:
        """Revoke every tensor over the storage, unless a foreign reader would lose its memory by that.

        A storage stops being resizable when numpy or DLPack took its address. One of the tensors is then the anchor of
        that reader and none can be told from the others, so all stay: quarantined.
        """
        if exported:
            names = holders.array_holders(start, self.nbytes) or [_NATIVE]
            return RegionRelease(0, self.nbytes, tuple(Holder(n, self.nbytes, "quarantined") for n in names))
        met = _revoke_all(holders.tensor_holders(cdata))
        revoked = tuple(h for h in met if h.action == "revoked")
        gc.collect()
        if alive.expired():
            return RegionRelease(self.nbytes, 0, revoked)
        names = holders.array_holders(start, self.nbytes) or [_NATIVE]
        kept = tuple(Holder(n, self.nbytes, "quarantined") for n in names)
        return RegionRelease(0, self.nbytes, revoked + kept)

    def _release_adopted(self) -> RegionRelease:
        own, self.cache, self._storage = self.cache, None, None
        references = list(self._made.values())
        self._made.clear()
        tensors = [t for r in references if (t := r()) is not None and t is not own]
        # swap_tensors refuses a tensor that has weak references.
        references.clear()
        del own
        return RegionRelease(0, 0, _revoke_all(tensors))


def _revoke_all(tensors: list[torch.Tensor]) -> tuple[Holder, ...]:
    """Revoke every tensor that lets itself be revoked, emptying the list; who held them, and what became of each."""
    met = [_revoke_first(tensors) for _ in range(len(tensors))]
    return tuple(holder for holder in met if holder is not None)


def _revoke_first(tensors: list[torch.Tensor]) -> Holder | None:
    held = tensors.pop(0)
    if sys.getrefcount(held) <= _ONLY_OURS:
        # A base that only its view, revoked before it, kept alive.
        return None
    description, nbytes = holders.describe(held, skip=(tensors,)), held.numel() * held.element_size()
    return Holder(description, nbytes, "revoked" if _revoke(held) else "quarantined")


def _revoke(tensor: torch.Tensor) -> bool:
    """Empty `tensor` and make every use of it raise StaleView; False if its implementation is shared."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device).as_subclass(RevokedTensor)
    try:
        torch.utils.swap_tensors(tensor, empty)
    except (RuntimeError, ValueError):
        # Co-owned (DLPack, weak references, autograd): swapping would leave the other owner without memory.
        return False
    return True
