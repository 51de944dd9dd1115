"""Blocks outside a cache: export, import and conversion. A block is payload, row words and opaque stores together.

The header is the full layout and encoding of the group, so blocks only ever enter a cache that reads them the same way.
Bytes form: b"KVHALBLK" | uint32 header length, little endian | header JSON | payload [layers][blocks][page_bytes].
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvhal.choice import Choice
from kvhal.errors import AddressError, SpecMismatch
from kvhal.kernels.geometry import PageGeometry
from kvhal.layout import GroupLayout
from kvhal.modes import ENCODINGS, Encoding, Scaling
from kvhal.modes import mode as mode_of

if TYPE_CHECKING:
    from kvhal.lease import CacheLease

__all__ = ["Blocks", "Fp8Family", "convert", "export_blocks", "import_blocks"]

_MAGIC = b"KVHALBLK"
_VERSION = 1
_LOG = logging.getLogger("kvhal")


class Fp8Family(Choice):
    """The two families of 8-bit floating point: OCP (e4m3fn, e5m2) and FNUZ (gfx942's e4m3fnuz, e5m2fnuz)."""

    OCP = "ocp"
    FNUZ = "fnuz"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Exported blocks. header: JSON values. payload: uint8 [layers, blocks, page_bytes] in host memory."""

    header: dict[str, Any]
    payload: torch.Tensor

    @property
    def count(self) -> int:
        return int(self.payload.shape[1])

    def to_bytes(self) -> bytes:
        """The self-contained bytes form."""
        head = json.dumps(self.header, sort_keys=True).encode()
        return b"".join((_MAGIC, struct.pack("<I", len(head)), head, self.payload.contiguous().numpy().tobytes()))

    @classmethod
    def from_bytes(cls, blob: bytes) -> Blocks:
        """Parse the bytes form. Raises SpecMismatch if it is not one, is cut short, or does not match its checksum."""
        start = len(_MAGIC) + 4
        if blob[: len(_MAGIC)] != _MAGIC or len(blob) < start:
            raise SpecMismatch(f"{len(blob)} bytes do not start with {_MAGIC!r}; these are not exported kvhal blocks")
        (size,) = struct.unpack("<I", blob[len(_MAGIC) : start])
        try:
            header = json.loads(blob[start : start + size])
            shape = (header["layers"], header["blocks"], header["cache"]["group"]["page_bytes"])
            version, crc = header["kvhal_blocks"], header["crc32"]
        except (ValueError, KeyError, TypeError) as exc:
            raise SpecMismatch(
                f"the header of the exported blocks cannot be read ({exc!r}); export them again"
            ) from exc
        if version != _VERSION:
            raise SpecMismatch(
                f"exported blocks have version {version!r}; this kvhal reads {_VERSION}; export them again"
            )
        payload = bytearray(blob[start + size :])
        promised = shape[0] * shape[1] * shape[2]
        if len(payload) != promised or zlib.crc32(payload) != crc:
            raise SpecMismatch(
                f"exported blocks hold {len(payload)} payload bytes where the header promises {promised}, or bytes "
                "with another checksum; they were cut or changed on the way: export them again"
            )
        if not promised:
            return cls(header, torch.empty(shape, dtype=torch.uint8))
        return cls(header, torch.frombuffer(payload, dtype=torch.uint8).reshape(shape))


def export_blocks(lease: CacheLease, placed: GroupLayout, blocks: Sequence[int]) -> Blocks:
    """Copy `blocks` of a group to host memory. Raises AddressError for a block outside it or named twice."""
    wanted = _block_ids(placed, blocks)
    pages = [_pages(lease, page)[wanted.to(lease.torch_device)] for page in _page_geometry(lease, placed)]
    payload = torch.stack(pages).cpu()
    header = {
        "kvhal_blocks": _VERSION,
        "layers": payload.shape[0],
        "blocks": payload.shape[1],
        "cache": _describe(lease, placed),
        "crc32": _crc(payload),
    }
    return Blocks(header, payload)


def import_blocks(lease: CacheLease, placed: GroupLayout, moved: Blocks | bytes, blocks: Sequence[int]) -> None:
    """Write exported blocks into `blocks` of a group. Everything is checked before the first byte is written."""
    incoming = moved if isinstance(moved, Blocks) else Blocks.from_bytes(moved)
    here = _describe(lease, placed)
    differences = list(_differences("", incoming.header["cache"], here))
    if differences:
        raise SpecMismatch(
            "the exported blocks are not of this cache's kind: " + "; ".join(differences) + "; "
            "import into a cache planned alike, or convert() between OCP and FNUZ"
        )
    wanted = _block_ids(placed, blocks)
    if incoming.count != len(blocks):
        raise SpecMismatch(f"{incoming.count} blocks were exported and {len(blocks)} targets named; name one a block")
    if _crc(incoming.payload) != incoming.header["crc32"]:
        raise SpecMismatch("the payload of the exported blocks does not match its checksum; export them again")
    for layer, page in enumerate(_page_geometry(lease, placed)):
        _pages(lease, page)[wanted.to(lease.torch_device)] = incoming.payload[layer].to(lease.torch_device)


def convert(blocks: Blocks, to: str) -> Blocks:
    """The same values in the other fp8 family ("ocp" or "fnuz"): codes are the same bits, scales exactly 2x or 0.5x.

    Exact for everything kvhal stores: finite codes stop at 448 (OCP) and 224 (FNUZ). -0 becomes 0, for FNUZ has none.
    FNUZ codes above those clamps (240; 32768 and up for e5m2fnuz) and the infinities of e5m2, which only foreign bytes
    can hold, have no code on the other side: they become NaN, counted in one log record.
    Stores that are not fp8, and those already of the family, stay as they are.
    """
    family = Fp8Family(to)
    header: dict[str, Any] = json.loads(json.dumps(blocks.header))
    payload = blocks.payload.clone()
    group = header["cache"]["group"]
    fields = {f["name"]: f for f in group["fields"]}
    factor = 2.0 if family is Fp8Family.FNUZ else 0.5
    for column, store in enumerate(s for s in group["stores"] if "encoding" in s):
        source = ENCODINGS[store["encoding"]]
        if source.counterpart is None or source.is_fnuz == (family is Fp8Family.FNUZ):
            continue
        target = ENCODINGS[source.counterpart]
        codes = _field_view(payload, fields[store["name"]], torch.uint8, 1)
        _recode(codes, source, target)
        if mode_of(store["mode"]).scaling is Scaling.ROW:
            _field_view(payload, fields[f"{store['name']}_word"], torch.float32, 4).mul_(factor)
        else:
            for row in header["cache"]["static_scales"]:
                row[column] *= factor
        store["encoding"] = target.name
    header["crc32"] = _crc(payload)
    return Blocks(header, payload)


def _recode(codes: torch.Tensor, source: Encoding, target: Encoding) -> None:
    """Map codes in place so that target value * (2 or 0.5) = source value."""
    table, lost = _code_table(source, target)
    index = codes.to(torch.int64)
    unrepresentable = int(lost[index].sum())
    if unrepresentable:
        _LOG.warning(
            "convert: %d codes of %s have no code in %s and became NaN",
            unrepresentable, source.name, target.name,
            extra={"event": "convert.unrepresentable", "count": unrepresentable},
        )  # fmt: skip
    codes.copy_(table[index])


def _code_table(source: Encoding, target: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    every = torch.arange(256, dtype=torch.uint8)
    factor = 0.5 if target.is_fnuz else 2.0
    wanted = every.view(vars(torch)[source.dtype]).to(torch.float32) * factor
    there = every.view(vars(torch)[target.dtype]).to(torch.float32)
    same = wanted[:, None] == there[None, :]
    table = torch.where(same.any(1), same.int().argmax(1), target.nan_code or 0).to(torch.uint8)
    # Equal values are +0 and -0: argmax takes the lower code, +0.
    if not target.is_fnuz:
        return table, ~same.any(1) & ~wanted.isnan()
    return table, ~same.any(1) & wanted.isfinite()


def _field_view(payload: torch.Tensor, field: dict[str, Any], dtype: torch.dtype, size: int) -> torch.Tensor:
    layers, count, page = payload.shape
    typed = payload.view(-1).view(dtype)
    strides = (count * page // size, page // size, *(s // size for s in field["strides"]))
    return typed.as_strided((layers, count, *field["shape"]), strides, field["offset"] // size)


def _page_geometry(lease: CacheLease, placed: GroupLayout) -> tuple[PageGeometry, ...]:
    return PageGeometry.all_of(lease.layout, placed.group.name)


def _pages(lease: CacheLease, page: PageGeometry) -> torch.Tensor:
    return lease.bytes_at("uint8", page.base, (page.num_blocks, page.nbytes), (page.block_stride, 1))


def _describe(lease: CacheLease, placed: GroupLayout) -> dict[str, Any]:
    """Layout, encoding and static scales of one group: what must agree for its blocks to mean the same."""
    whole = lease.layout.describe()
    group = next(g for g in whole["groups"] if g["name"] == placed.group.name)
    spec = lease.layout.spec
    static = any(s["mode"] for s in group["stores"] if "mode" in s and mode_of(s["mode"]).scaling is Scaling.STATIC)
    scales = [list(spec.stored_scales(layer)) for layer in placed.group.layers] if static else None
    return {
        "layout_version": whole["layout_version"],
        "layout": whole["layout"],
        "group": group,
        "static_scales": scales,
    }


def _differences(path: str, theirs: object, ours: object) -> Iterable[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted(theirs.keys() | ours.keys()):
            yield from _differences(f"{path}.{key}" if path else key, theirs.get(key), ours.get(key))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            name = a["name"] if isinstance(a, dict) and "name" in a else i
            yield from _differences(f"{path}[{name}]", a, b)
    elif theirs != ours:
        yield f"{path} is {theirs!r} there and {ours!r} here"


def _block_ids(placed: GroupLayout, blocks: Sequence[int]) -> torch.Tensor:
    wrong = [b for b in blocks if not 0 <= b < placed.num_blocks]
    if wrong or len(set(blocks)) != len(blocks):
        what = f"blocks {wrong[:8]!r} are outside" if wrong else f"blocks {list(blocks)[:8]!r} repeat in"
        raise AddressError(
            f"{what} group {placed.group.name!r}, whose blocks are 0 to {placed.num_blocks - 1}; name each block once"
        )
    return torch.tensor(list(blocks), dtype=torch.int64)


def _crc(payload: torch.Tensor) -> int:
    return zlib.crc32(payload.contiguous().numpy().data)
