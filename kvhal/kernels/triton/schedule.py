# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
# Triton's dialect: arguments have no Python types.
"""What a step's arrays ask for, checked on the device, and who computes which part of it.

Built once a step and read by the attend of every layer; nothing here waits for the host. The arrays are laid out in
`workspace.AttendWorkspace`. A sequence's entry: {first row, queries, length (0: nothing to read, -1: unreadable),
virtual tiles a head, faults, 1 if its query_starts make sense, first tile of its staged context or -1, tiles of it that
`attend` walks: none if it is staged}.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "EMPTY",
    "JOINED",
    "UNREADABLE",
    "WRITTEN",
    "item_tiles",
    "schedule_kernel",
    "sequences_kernel",
    "staged_tiles",
    "whole_tiles",
]

LANES = tl.constexpr(32)
# What becomes of a row of the result: attend or prefill has written it, its parts are to be joined, its sequence has
# nothing to read, it belongs to no sequence, its sequence cannot be read.
WRITTEN = tl.constexpr(0)
JOINED = tl.constexpr(1)
EMPTY = tl.constexpr(2)
NOBODY = tl.constexpr(3)
UNREADABLE = tl.constexpr(4)


@triton.jit
def item_tiles(first, queries, length, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """(first tile, end tile) of keys that queries `first` to `first + TOKENS - 1` of a sequence see."""
    position = length - queries + first
    last = position + tl.minimum(TOKENS, queries - first)
    begin = last * 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // KEYS
    return begin, (last + KEYS - 1) // KEYS


@triton.jit
def whole_tiles(position, last, begin, end, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """(first key that any of the queries at `position` to `last` sees, first tile and end of those that all see whole).

    Both are kept between tiles `begin` and `end`.
    """
    first = begin * 0
    inner = begin
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
        inner = tl.maximum(begin, (tl.maximum(last - WINDOW + 1, 0) + KEYS - 1) // KEYS)
    inner = tl.minimum(inner, end)
    return first, inner, tl.maximum(tl.minimum((position + 1) // KEYS, end), inner)


@triton.jit
def staged_tiles(queries, length, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """(first key, its tile, end tile) of what any query of a sequence sees, in tiles of the staging."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - queries - WINDOW + 1, 0)
    return first, first // KEYS, (length + KEYS - 1) // KEYS


@triton.jit(do_not_specialize=["max_blocks", "num_blocks", "num_seqs", "num_tokens", "is_counted"])
def sequences_kernel(
    cache,
    block_table,
    seq_lens,
    query_starts,
    workspace,
    counters_offset: tl.int64,
    table_stride: tl.int64,
    max_blocks: tl.int32,
    num_blocks: tl.int32,
    num_seqs: tl.int32,
    num_tokens: tl.int32,
    is_counted: tl.int32,
    sequences_at: tl.int64,
    rows_at: tl.int64,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PROLOGUE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program b checks sequence b and writes its entry and rows; the last program marks rows of no sequence."""
    b = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    rows = (workspace + rows_at).to(tl.pointer_type(tl.int32))
    if b == num_seqs:
        first = tl.minimum(tl.maximum(tl.load(query_starts + num_seqs), 0), num_tokens).to(tl.int32)
        for start in range(first, num_tokens, CHUNK):
            tl.store(rows + (start + lane) * 4, tl.full([CHUNK], -1, tl.int32), mask=start + lane < num_tokens)
    else:
        first = tl.load(query_starts + b).to(tl.int32)
        end = tl.load(query_starts + b + 1).to(tl.int32)
        sane = (first >= 0) & (end >= first) & (end <= num_tokens) & ((b > 0) | (first == 0))
        first = tl.where(sane, first, 0)
        queries = tl.where(sane, end - first, 0)
        wide = tl.load(seq_lens + b).to(tl.int64)
        wrong = (wide != 0) & ((wide < queries) | (wide > max_blocks.to(tl.int64) * P.block_size))
        length = tl.where(wrong, 0, wide).to(tl.int32)
        begin = 0
        if P.window > 0:
            begin = tl.maximum(length - queries - P.window + 1, 0) // P.block_size
        stop = tl.where(queries > 0, (length + P.block_size - 1) // P.block_size, 0)
        bad = tl.zeros([CHUNK], tl.int32)
        for start in range(begin, stop, CHUNK):
            at = start + lane
            block = tl.load(block_table + b.to(tl.int64) * table_stride + at, mask=at < stop, other=0)
            bad += ((block < 0) | (block >= num_blocks)).to(tl.int32)
        faults = tl.sum(bad, axis=0) + wrong.to(tl.int32)
        length = tl.where(faults > 0, -1, length)
        items = tl.where(length > 0, (queries + TOKENS - 1) // TOKENS, 0)
        tiles = tl.zeros([CHUNK], tl.int32)
        for start in range(0, items, CHUNK):
            item = start + lane
            low, high = item_tiles(item * TOKENS, queries, length, TOKENS, KEYS, P.window)
            tiles += tl.where(item < items, high - low + PROLOGUE, 0)
        entry = (workspace + sequences_at).to(tl.pointer_type(tl.int32)) + b * 8
        tl.store(entry, first)
        tl.store(entry + 1, queries)
        tl.store(entry + 2, length)
        tl.store(entry + 3, tl.sum(tiles, axis=0))
        tl.store(entry + 4, faults)
        tl.store(entry + 5, sane.to(tl.int32))
        for start in range(0, queries, CHUNK):
            at = rows + (first + start + lane) * 4
            tl.store(at, tl.zeros([CHUNK], tl.int32) + b, mask=start + lane < queries)
        if (faults > 0) & (is_counted > 0):
            counters = (cache + counters_offset).to(tl.pointer_type(tl.int64))
            tl.atomic_add(counters + 1, faults.to(tl.int64))


@triton.jit
def _placed(entries, index, there, staged, tiles, least, STAGE_KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """(first staged tile or -1, tiles to walk, tiles asked for so far): sequences are staged while there is room."""
    cost = tl.load(entries + index * 8 + 3, mask=there, other=0)
    at = tl.full(index.shape, -1, tl.int32)
    if STAGE_KEYS > 0:
        queries = tl.load(entries + index * 8 + 1, mask=there, other=0)
        length = tl.load(entries + index * 8 + 2, mask=there, other=0)
        _, low, high = staged_tiles(queries, length, STAGE_KEYS, WINDOW)
        asked = tl.where((cost > 0) & (queries >= least), high - low, 0).to(tl.int64)
        ends = staged + tl.cumsum(asked, 0)
        fits = (asked > 0) & (ends <= tiles)
        at = tl.where(fits, ends - asked, -1).to(tl.int32)
        cost = tl.where(fits, 0, cost)
        staged += tl.sum(asked, axis=0)
    return at, cost, staged


@triton.jit(
    do_not_specialize=[
        "num_seqs", "num_tokens", "tiles_0", "parts_0", "tiles_1", "parts_1", "parts_2", "stage_tiles", "stage_least"
    ]
)  # fmt: skip
def schedule_kernel(
    workspace,
    num_seqs: tl.int32,
    num_tokens: tl.int32,
    tiles_0: tl.int64,
    parts_0: tl.int32,
    tiles_1: tl.int64,
    parts_1: tl.int32,
    parts_2: tl.int32,
    schedule_at: tl.int64,
    sequences_at: tl.int64,
    rows_at: tl.int64,
    stage_tiles: tl.int32,
    stage_least: tl.int32,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PROLOGUE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGE_KEYS: tl.constexpr,
):
    """The first programs: where 32 parts of the line each start. The others: who leaves what of 32 rows each.

    The virtual line holds, for each sequence and item, PROLOGUE empty tiles and then its tiles of keys; it is the same
    for every kv head. Sequences of at least `stage_least` queries that fit into `stage_tiles` tiles of STAGE_KEYS are
    not on it (0: all are). `tiles_0` and `tiles_1` count those of all kv heads.
    """
    lane = tl.arange(0, CHUNK)
    entries = (workspace + sequences_at).to(tl.pointer_type(tl.int32))
    total = tl.zeros([CHUNK], tl.int64)
    staged = (num_seqs * 0).to(tl.int64)
    for start in range(0, num_seqs, CHUNK):
        index = start + lane
        _, cost, staged = _placed(
            entries, index, index < num_seqs, staged, stage_tiles, stage_least, STAGE_KEYS, P.window
        )  # fmt: skip
        total += cost.to(tl.int64)
    line = tl.sum(total, axis=0)
    every = line * P.heads
    parts = tl.where(every <= tiles_0, parts_0, tl.where(every <= tiles_1, parts_1, parts_2)).to(tl.int64)
    parts = tl.minimum(parts, line)
    i = tl.program_id(0)
    ahead = (parts_2 + LANES - 1) // LANES
    if i < ahead:
        _cut(
            (workspace + schedule_at).to(tl.pointer_type(tl.int32)), entries, i, line, parts, parts_2, num_seqs,
            stage_tiles, stage_least, P, TOKENS, KEYS, PROLOGUE, CHUNK, STAGE_KEYS,
        )  # fmt: skip
    else:
        _told(
            (workspace + rows_at).to(tl.pointer_type(tl.int32)), entries, i - ahead, line, parts, num_tokens, num_seqs,
            stage_tiles, stage_least, P, TOKENS, KEYS, PROLOGUE, CHUNK, STAGE_KEYS,
        )  # fmt: skip


@triton.jit
def _cut(
    schedule,
    entries,
    i,
    line,
    parts,
    most,
    num_seqs,
    stage_tiles,
    stage_least,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PROLOGUE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGE_KEYS: tl.constexpr,
):
    """Where parts 32 i to 32 i + 31 of the line start.

    A row: {sequence, item, virtual tile, tiles to do} and the sequence's {first row, queries, length}, so that a
    program needs no second look before it can load its queries and keys.
    """
    lane = tl.arange(0, CHUNK)
    w = i.to(tl.int64) * LANES + tl.arange(0, LANES)
    share = tl.maximum(parts, 1)
    at = tl.minimum(w, parts) * line // share
    end = tl.minimum(w + 1, parts) * line // share
    sequence = tl.zeros([LANES], tl.int32)
    base = tl.zeros([LANES], tl.int64)
    before = line * 0
    staged = before
    for start in range(0, num_seqs, CHUNK):
        index = start + lane
        there = index < num_seqs
        place, walked, staged = _placed(
            entries, index, there, staged, stage_tiles, stage_least, STAGE_KEYS, P.window
        )  # fmt: skip
        cost = walked.to(tl.int64)
        ends = before + tl.cumsum(cost, 0)
        if i == 0:
            tl.store(entries + index * 8 + 6, place, mask=there)
            tl.store(entries + index * 8 + 7, walked, mask=there)
        passed = there[:, None] & (ends[:, None] <= at[None, :])
        sequence += tl.sum(passed.to(tl.int32), axis=0)
        base = tl.maximum(base, tl.max(tl.where(passed, ends[:, None], 0), axis=0))
        before += tl.sum(cost, axis=0)
    busy = end > at
    entry = entries + tl.minimum(sequence, tl.maximum(num_seqs - 1, 0)) * 8
    queries = tl.load(entry + 1)
    length = tl.load(entry + 2)
    rest = tl.where(busy, at - base, 0)
    item = tl.zeros([LANES], tl.int32)
    low, high = item_tiles(item * TOKENS, queries, length, TOKENS, KEYS, P.window)
    more = busy & (rest >= high - low + PROLOGUE)
    while tl.max(more.to(tl.int32), axis=0) > 0:
        rest = tl.where(more, rest - (high - low + PROLOGUE), rest)
        item += more.to(tl.int32)
        low, high = item_tiles(item * TOKENS, queries, length, TOKENS, KEYS, P.window)
        more = busy & (rest >= high - low + PROLOGUE)
    row = schedule + w * 8
    exists = w < most
    tl.store(row, sequence, mask=exists)
    tl.store(row + 1, item, mask=exists)
    tl.store(row + 2, rest.to(tl.int32), mask=exists)
    tl.store(row + 3, (end - at).to(tl.int32), mask=exists)
    tl.store(row + 4, tl.load(entry), mask=exists)
    tl.store(row + 5, queries, mask=exists)
    tl.store(row + 6, length, mask=exists)


@triton.jit
def _told(
    rows,
    entries,
    i,
    line,
    parts,
    num_tokens,
    num_seqs,
    stage_tiles,
    stage_least,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PROLOGUE: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGE_KEYS: tl.constexpr,
):
    """What becomes of rows 32 i to 32 i + 31: {state, first and last part of the line that hold it, query in its item}.

    Each held its sequence so far, as `sequences_kernel` left it.
    """
    lane = tl.arange(0, CHUNK)
    token = i * LANES + tl.arange(0, LANES)
    here = token < num_tokens
    row = rows + token * 4
    b = tl.load(row, mask=here, other=-1)
    known = (b >= 0) & (b < num_seqs)
    entry = entries + tl.where(known, b, 0) * 8
    first = tl.load(entry, mask=known, other=0)
    queries = tl.load(entry + 1, mask=known, other=0)
    length = tl.load(entry + 2, mask=known, other=0)
    # Where query_starts make no sense a row's sequence may be left over from another call.
    known = known & (token >= first) & (token < first + queries)
    at = tl.zeros([LANES], tl.int64)
    is_staged = tl.zeros([LANES], tl.int32)
    before = line * 0
    staged = before
    for start in range(0, num_seqs, CHUNK):
        index = start + lane
        there = index < num_seqs
        place, walked, staged = _placed(
            entries, index, there, staged, stage_tiles, stage_least, STAGE_KEYS, P.window
        )  # fmt: skip
        cost = walked.to(tl.int64)
        begins = before + tl.cumsum(cost, 0) - cost
        own = there[:, None] & (index[:, None] == b[None, :])
        at += tl.sum(tl.where(own, begins[:, None], 0), axis=0)
        is_staged += tl.sum((own & (place >= 0)[:, None]).to(tl.int32), axis=0)
        before += tl.sum(cost, axis=0)
    walked = known & (length > 0) & (is_staged == 0)
    item = tl.where(walked, (token - first) // TOKENS, 0)
    other = tl.arange(0, LANES)
    for start in range(0, tl.max(item, axis=0), LANES):
        low, high = item_tiles(
            ((start + other) * TOKENS)[:, None], queries[None, :], length[None, :], TOKENS, KEYS, P.window
        )  # fmt: skip
        cost = tl.where((start + other)[:, None] < item[None, :], high - low + PROLOGUE, 0)
        at += tl.sum(cost.to(tl.int64), axis=0)
    low, high = item_tiles(item * TOKENS, queries, length, TOKENS, KEYS, P.window)
    tiles = tl.maximum(line, 1)
    w0 = ((at + PROLOGUE + 1) * parts - 1) // tiles
    w1 = ((at + PROLOGUE + high - low) * parts - 1) // tiles
    state = tl.where(walked & (w1 > w0), JOINED, WRITTEN)
    state = tl.where(length == 0, EMPTY, tl.where(length < 0, UNREADABLE, state))
    state = tl.where(known, state, NOBODY)
    tl.store(row, state, mask=here)
    tl.store(row + 1, w0.to(tl.int32), mask=here)
    tl.store(row + 2, w1.to(tl.int32), mask=here)
    tl.store(row + 3, token - first - item * TOKENS, mask=here)
