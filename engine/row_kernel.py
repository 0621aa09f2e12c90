"""The code of the kernel in `engine/row_attention.py`, in LLVM's intermediate form: `text` writes it, `pack` what it is told.

Of each KV head, keys and values go by in blocks of 64. *scores* multiplies three rows of the query with four keys at a time, in twelve sums
of eight floats; *weights* carries the softmax on from block to block; *mix* adds the values, so weighted, for three rows and 32 columns
at a time. Each is a function of its own, so that its sums stay in registers, and fetches what the next one reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from llvmlite import ir

ROWS = 3  # of the query, at a time: there must be a multiple of it
LANES = 8  # floats of a vector: the width of keys must be a multiple of it
COLUMNS = 32  # of the values, at a time: their width must be a multiple of it
_BLOCK = 64
_KEYS = 4
_LINE = 16  # floats of a cache line
_HIDDEN = -1e30  # a score that weighs nothing
_SEEN = -1e29  # any other is larger

_FLOAT, _INT, _SMALL = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR, _SMALLS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_SMALL, LANES)
_FLOATS, _BOUNDS = ir.PointerType(_FLOAT), ir.PointerType(_SMALL)
# 2^x for x in [-1/2, 1/2], within two units of a float's last place: the Taylor series, highest power first.
_SERIES = (
    1.5403530393381606e-4, 1.333355814642869e-3, 9.618129107628477e-3, 5.550410866482158e-2,
    2.402265069591007e-1, 6.931471805599453e-1, 1.0,
)  # fmt: skip
_LEAST_POWER = -126.0


# What `attend` is told, in this order, and then the scale: by what scores are multiplied, which are powers of two. Strides are in floats.
_ADDRESSES = ("query", "keys", "values", "out", "scratch", "lows", "highs")
_NUMBERS = (
    "all_from", "all_to", "heads", "rows", "context", "key_dim", "value_dim",
    "key_head", "key_row", "value_head", "value_row",
)  # fmt: skip
pack = Struct(f"{len(_ADDRESSES) + len(_NUMBERS)}qf").pack


def scratch_floats(rows: int) -> int:
    """Room that the kernel needs: for each row the scores of a block, the largest score, the sum, and by what the sums so far shrink."""
    return rows * (_BLOCK + 3)


def text() -> str:
    """A module with the function `attend`, which takes the address of what was packed."""
    module = ir.Module("row_attention")
    own = _Own(module)
    _attend(
        module, own, _scores(module, own), [_weights(module, own, hides) for hides in (False, True)], _mix(module, own)
    )
    return str(module)


class _Own:
    """LLVM's own functions."""

    def __init__(self, module: ir.Module) -> None:
        def declared(name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
            return ir.Function(module, ir.FunctionType(result, arguments), name)

        self.fma = declared("llvm.fma.v8f32", _VECTOR, _VECTOR, _VECTOR, _VECTOR)
        self.larger = declared("llvm.maxnum.v8f32", _VECTOR, _VECTOR, _VECTOR)
        self.floor = declared("llvm.floor.v8f32", _VECTOR, _VECTOR)
        self.largest = declared("llvm.vector.reduce.fmax.v8f32", _FLOAT, _VECTOR)
        self.sum = declared("llvm.vector.reduce.fadd.v8f32", _FLOAT, _FLOAT, _VECTOR)
        self.fetch = declared("llvm.prefetch.p0", ir.VoidType(), _FLOATS, _SMALL, _SMALL, _SMALL)
        self.smaller = declared("llvm.smin.i64", _INT, _INT, _INT)


@dataclass(slots=True)
class _Loop:
    """One that is being written. now: what the round before left; next: what this one leaves; left: what the last one of all left."""

    count: Any
    now: list[Any]
    next: list[Any]
    left: list[Any] = field(default_factory=list)


class _Code(ir.IRBuilder):  # type: ignore[misc]
    """Writes one function, which is given `arguments`."""

    def __init__(self, module: ir.Module, own: _Own, name: str, kinds: list[ir.Type], *, inner: bool = True) -> None:
        self.written = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
        if inner:
            self.written.linkage = "internal"
            self.written.attributes.add("noinline")
        self.own = own
        self.given = list(self.written.args)
        super().__init__(self.written.append_basic_block())

    def end(self) -> ir.Function:
        self.ret_void()
        return self.written

    @contextmanager
    def loop(self, end: Any, step: int, start: list[Any] | None = None) -> Iterator[_Loop]:
        """From 0, as long as the count is less than `end`."""
        before, start = self.block, start or []
        inside, after = self.written.append_basic_block(), self.written.append_basic_block()
        self.cbranch(self.icmp_signed("<", _number(0), end), inside, after)
        self.position_at_end(inside)
        count, now = self.phi(_INT), [self.phi(value.type) for value in start]
        written = _Loop(count, now, now)
        yield written
        following, last = self.add(count, _number(step)), self.block
        self.cbranch(self.icmp_signed("<", following, end), inside, after)
        for phi, first, then in zip([count, *now], [_number(0), *start], [following, *written.next], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(then, last)
        self.position_at_end(after)
        for first, then in zip(start, written.next, strict=True):
            written.left.append(left := self.phi(then.type))
            left.add_incoming(first, before)
            left.add_incoming(then, last)

    def at(self, pointer: Any, *steps: Any) -> Any:
        """The address so many floats further."""
        for step in steps:
            pointer = self.gep(pointer, [step])
        return pointer

    def load_vector(self, pointer: Any, *steps: Any) -> Any:
        loaded = self.load(self.bitcast(self.at(pointer, *steps), ir.PointerType(_VECTOR)))
        loaded.align = 4
        return loaded

    def store_vector(self, vector: Any, pointer: Any, *steps: Any) -> None:
        self.store(vector, self.bitcast(self.at(pointer, *steps), ir.PointerType(vector.type))).align = 4

    def pick(self, one: Any, other: Any, lanes: list[int]) -> Any:
        return self.shuffle_vector(one, other, ir.Constant(ir.VectorType(_SMALL, len(lanes)), lanes))

    def fill(self, scalar: Any, lanes: int = LANES) -> Any:
        """A vector of nothing else."""
        nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        return self.pick(self.insert_element(nothing, scalar, _small(0)), nothing, [0] * lanes)

    def fma(self, one: Any, other: Any, added: Any) -> Any:
        return self.call(self.own.fma, [one, other, added])

    def fetch(self, pointer: Any, width: Any) -> None:
        """Bring a row near."""
        with self.loop(width, _LINE) as line:
            self.call(self.own.fetch, [self.at(pointer, line.count), _small(0), _small(3), _small(1)])

    def sums_of_four(self, vectors: list[Any]) -> Any:
        """Four vectors -> a vector (4,) of their sums."""
        halves: list[Any] = []
        for one, other in (vectors[:2], vectors[2:]):
            even, odd = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
            halves.append(self.fadd(self.pick(one, other, even), self.pick(one, other, odd)))
        left, right = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
        both = self.fadd(self.pick(halves[0], halves[1], left), self.pick(halves[0], halves[1], right))
        return self.fadd(self.pick(both, both, [0, 1, 2, 3]), self.pick(both, both, [4, 5, 6, 7]))

    def power_of_two(self, vector: Any) -> Any:
        """2^x, of x <= 0; no less than 2^-126."""
        vector = self.call(self.own.larger, [vector, _same(_LEAST_POWER)])
        whole = self.call(self.own.floor, [self.fadd(vector, _same(0.5))])
        rest, power = self.fsub(vector, whole), _same(_SERIES[0])
        for factor in _SERIES[1:]:
            power = self.fma(power, rest, _same(factor))
        exponent = self.add(self.fptosi(whole, _SMALLS), ir.Constant(_SMALLS, [127] * LANES))
        return self.fmul(power, self.bitcast(self.shl(exponent, ir.Constant(_SMALLS, [23] * LANES)), _VECTOR))


def _number(value: int) -> ir.Constant:
    return ir.Constant(_INT, value)


def _small(value: int) -> ir.Constant:
    return ir.Constant(_SMALL, value)


def _same(value: float) -> ir.Constant:
    return ir.Constant(_VECTOR, [value] * LANES)


def _scores(module: ir.Module, own: _Own) -> ir.Function:
    """Products of the query's rows with a block of keys, scaled: (rows, _BLOCK)."""
    kinds = [_FLOATS, _FLOATS, _FLOATS, _FLOAT, _INT, _INT, _INT, _INT, _FLOATS, _INT, _INT]
    code = _Code(module, own, "scores", kinds)
    query, keys, scores, scale, rows, size, width, step, ahead, ahead_width, ahead_step = code.given
    last, scales = code.sub(size, _number(1)), code.fill(scale, _KEYS)
    with code.loop(size, _KEYS) as key:
        places = [code.add(key.count, _number(each)) for each in range(_KEYS)]
        # Beyond the last key stands the last one: nobody sees those columns.
        key_rows = [code.at(keys, code.mul(code.call(own.smaller, [place, last]), step)) for place in places]
        for place in places:
            code.fetch(code.at(ahead, code.mul(place, ahead_step)), ahead_width)
        with code.loop(rows, ROWS) as row:
            row_places = [code.add(row.count, _number(each)) for each in range(ROWS)]
            query_rows = [code.at(query, code.mul(place, width)) for place in row_places]
            with code.loop(width, LANES, [_same(0.0)] * (ROWS * _KEYS)) as part:
                of_query, sums = [code.load_vector(each, part.count) for each in query_rows], list(part.now)
                for index, key_row in enumerate(key_rows):
                    of_key = code.load_vector(key_row, part.count)
                    for each in range(ROWS):
                        at = each * _KEYS + index
                        sums[at] = code.fma(of_query[each], of_key, sums[at])
                part.next = sums
            for each, place in enumerate(row_places):
                products = code.sums_of_four(part.left[each * _KEYS : (each + 1) * _KEYS])
                code.store_vector(code.fmul(products, scales), scores, code.mul(place, _number(_BLOCK)), key.count)
    return code.end()


def _weights(module: ir.Module, own: _Own, hides: bool) -> ir.Function:
    """Scores -> weights, by the largest score so far; each row's sum goes on, and by what all that was summed before shrinks.

    hides  columns, counted from that of the block's first key, that a row doesn't see weigh nothing
    """
    kinds = [_FLOATS, _FLOATS, _FLOATS, _FLOATS, _INT, _INT, _BOUNDS, _BOUNDS]
    code = _Code(module, own, "hiding_weights" if hides else "weights", kinds)
    scores, largest, sums, shrinks, rows, first, lows, highs = code.given
    columns = code.add(code.fill(code.trunc(first, _SMALL)), ir.Constant(_SMALLS, list(range(LANES))))
    with code.loop(rows, 1) as row:
        row_scores = code.at(scores, code.mul(row.count, _number(_BLOCK)))
        vectors = [code.load_vector(row_scores, _number(at)) for at in range(0, _BLOCK, LANES)]
        if hides:
            low, high = (code.fill(code.load(code.at(bound, row.count))) for bound in (lows, highs))
            for index, vector in enumerate(vectors):
                column = code.add(columns, ir.Constant(_SMALLS, [index * LANES] * LANES))
                seen = code.and_(code.icmp_signed(">=", column, low), code.icmp_signed("<", column, high))
                vectors[index] = code.select(seen, vector, _same(_HIDDEN))
        top = vectors[0]
        for vector in vectors[1:]:
            top = code.call(own.larger, [top, vector])
        before, now = code.load(code.at(largest, row.count)), code.call(own.largest, [top], fastmath=("fast",))
        now = code.select(code.fcmp_ordered(">", now, before), now, before)
        summed, tops = _same(0.0), code.fill(now)
        for at, vector in zip(range(0, _BLOCK, LANES), vectors, strict=True):
            weight = code.power_of_two(code.fsub(vector, tops))
            weight = code.fma(vector, _same(0.0), weight)  # what is no number stays none
            if hides:
                weight = code.select(code.fcmp_ordered("<", vector, _same(_SEEN)), _same(0.0), weight)
            code.store_vector(weight, row_scores, _number(at))
            summed = code.fadd(summed, weight)
        shrink = code.extract_element(code.power_of_two(code.fill(code.fsub(before, now))), _small(0))
        added = code.call(own.sum, [ir.Constant(_FLOAT, 0.0), summed], fastmath=("fast",))
        total = code.at(sums, row.count)
        code.store(code.fadd(code.fmul(code.load(total), shrink), added), total)
        code.store(now, code.at(largest, row.count))
        code.store(shrink, code.at(shrinks, row.count))
    return code.end()


def _mix(module: ir.Module, own: _Own) -> ir.Function:
    """Adds a block's values, by their weights, to what there is of each row, which shrinks first: (rows, width)."""
    kinds = [_FLOATS, _FLOATS, _FLOATS, _FLOATS, _INT, _INT, _INT, _INT, _FLOATS, _INT, _INT]
    code = _Code(module, own, "mix", kinds)
    weights, shrinks, values, out, rows, size, width, step, ahead, ahead_width, ahead_step = code.given
    with code.loop(size, 1) as value:
        code.fetch(code.at(ahead, code.mul(value.count, ahead_step)), ahead_width)
    across = range(0, COLUMNS, LANES)
    with code.loop(rows, ROWS) as row, code.loop(width, COLUMNS) as column:
        places = [code.add(row.count, _number(each)) for each in range(ROWS)]
        outs = [code.at(out, code.mul(place, width), column.count) for place in places]
        start = [
            code.fmul(code.fill(code.load(code.at(shrinks, place))), code.load_vector(there, _number(at)))
            for place, there in zip(places, outs, strict=True)
            for at in across
        ]
        row_weights = [code.at(weights, code.mul(place, _number(_BLOCK))) for place in places]
        with code.loop(size, 1, start) as value:
            value_row, sums = code.at(values, code.mul(value.count, step), column.count), list(value.now)
            by = [code.fill(code.load(code.at(each, value.count))) for each in row_weights]
            for index, at in enumerate(across):
                vector = code.load_vector(value_row, _number(at))
                for each in range(ROWS):
                    place = each * len(across) + index
                    sums[place] = code.fma(by[each], vector, sums[place])
            value.next = sums
        for each, there in enumerate(outs):
            for index, at in enumerate(across):
                code.store_vector(value.left[each * len(across) + index], there, _number(at))
    return code.end()


def _attend(
    module: ir.Module, own: _Own, scores: ir.Function, weights: list[ir.Function], mix: ir.Function
) -> ir.Function:
    """All heads, all blocks; at the end what was mixed is divided by the sum of its weights."""
    code = _Code(module, own, "attend", [ir.PointerType(_INT)], inner=False)
    given: dict[str, Any] = {}
    for index, name in enumerate((*_ADDRESSES, *_NUMBERS, "scale")):
        word = code.gep(code.given[0], [_number(index)])
        if name == "scale":
            given[name] = code.load(code.bitcast(word, _FLOATS))
        elif name in _ADDRESSES:
            given[name] = code.inttoptr(code.load(word), _BOUNDS if name in ("lows", "highs") else _FLOATS)
        else:
            given[name] = code.load(word)
    rows, context, key_dim, value_dim = (given[name] for name in ("rows", "context", "key_dim", "value_dim"))
    scratch, key_row, value_row = given["scratch"], given["key_row"], given["value_row"]
    largest = code.at(scratch, code.mul(rows, _number(_BLOCK)))
    sums = code.at(largest, rows)
    shrinks = code.at(sums, rows)
    with code.loop(given["heads"], 1) as head:
        query = code.at(given["query"], code.mul(code.mul(head.count, rows), key_dim))
        out = code.at(given["out"], code.mul(code.mul(head.count, rows), value_dim))
        head_keys = code.at(given["keys"], code.mul(head.count, given["key_head"]))
        head_values = code.at(given["values"], code.mul(head.count, given["value_head"]))
        with code.loop(rows, 1) as row:
            code.store(ir.Constant(_FLOAT, _HIDDEN), code.at(largest, row.count))
            code.store(ir.Constant(_FLOAT, 0.0), code.at(sums, row.count))
        with code.loop(code.mul(rows, value_dim), LANES) as part:
            code.store_vector(_same(0.0), out, part.count)
        with code.loop(context, _BLOCK) as block:
            end = code.add(block.count, _number(_BLOCK))
            size = code.call(own.smaller, [_number(_BLOCK), code.sub(context, block.count)])
            keys = code.at(head_keys, code.mul(block.count, key_row))
            values = code.at(head_values, code.mul(block.count, value_row))
            code.call(
                scores,
                [query, keys, scratch, given["scale"], rows, size, key_dim, key_row, values, value_dim, value_row],
            )
            bounds = [scratch, largest, sums, shrinks, rows, block.count, given["lows"], given["highs"]]
            seen = code.and_(
                code.icmp_signed("<=", given["all_from"], block.count), code.icmp_signed("<=", end, given["all_to"])
            )
            with code.if_else(seen) as (everything, some):
                with everything:
                    code.call(weights[False], bounds)
                with some:
                    code.call(weights[True], bounds)
            ahead = code.at(head_keys, code.mul(end, key_row))
            code.call(mix, [scratch, shrinks, values, out, rows, size, value_dim, value_row, ahead, key_dim, key_row])
        with code.loop(rows, 1) as row:
            share = code.fill(code.fdiv(ir.Constant(_FLOAT, 1.0), code.load(code.at(sums, row.count))))
            row_out = code.at(out, code.mul(row.count, value_dim))
            with code.loop(value_dim, LANES) as part:
                code.store_vector(code.fmul(share, code.load_vector(row_out, part.count)), row_out, part.count)
    return code.end()
