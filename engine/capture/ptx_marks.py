"""The PTX pass: a foreign kernel's text -> the same kernel that marks the pages it writes, and its safe points.

Behind every store that can reach global memory stands a call that looks the address up in a table of registered ranges and sets its
page's bit: such a region needs no scan (the BITMAP mode of kernels/page_scan.cuh). Parameters stay as they are; the table is a
variable of the module that the host fills (`REGIONS`). Entries, barriers and returns of kernels get numbered safe points. Marks are
read behind the kernel, in the order of its stream. Writes of more than one address (bulk copies, `multimem`, matrix fragments) and calls
of functions that are not in the module are listed in `unmarked`: a region that such a kernel can reach must be scanned. Pure.
Source: NVIDIA, PTX ISA 8.8 and 9.x.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.capture.ptx_text import Function, Statement, functions

REGIONS = "concordia_regions"
SAFE_POINTS = "concordia_safe_points"
MARKS_VERSION = 2  # of what is put in: a compiler's cache must not hand out text of another one
RANGE_COUNT = 8
REGIONS_BYTES = 8 + 32 * RANGE_COUNT
SAFE_POINTS_BYTES = 8

_ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\s*(?:0x[0-9a-fA-F]+|\d+)))?\s*\]")
# The destination's space comes first: a bulk copy from global to shared memory is a load.
_WRITES_AT_LARGE = re.compile(
    r"^(?:cp(?:\.reduce)?\.async\.bulk(?:\.tensor\.\dd)?\.global\b"
    r"|multimem\.(?:st|red|cp)\b|wmma\.store\b|(?:st|red)\.async\b|st\.bulk\b|sust\b|sured\b|discard\b"
    r"|tensormap\.(?:replace|cp_fenceproxy)\b)"
)
_CALL = re.compile(r"(?:\([^)]*\)\s*,\s*)?([%$\w]+)")
# Of the device's runtime; they write to its own buffers.
_HARMLESS = {"vprintf", "__assertfail", "malloc", "free"}
_STORES = re.compile(r"^(?:st|red|atom)\b")
_OTHER_SPACES = re.compile(r"\.(?:shared|local|param|const)\b")
_BARRIERS = re.compile(r"^(?:bar(?:rier)?(?:\.cta)?\.(?:sync|red)|barrier\.cluster\.wait)\b")
_ENDS = re.compile(r"^(?:ret|exit)\b")


@dataclass(frozen=True, slots=True)
class SafePoint:
    """Where a kernel can be told to have come: its number, kernel, and entry, barrier or return."""

    number: int
    kernel: str
    kind: str


@dataclass(slots=True)
class Instrumented:
    """The new text, and what was put into it.

    stores    marked stores by function
    unmarked  what can write and is not marked, as "function: instruction"
    """

    text: str
    stores: dict[str, int] = field(default_factory=dict)
    safe_points: list[SafePoint] = field(default_factory=list)
    unmarked: list[str] = field(default_factory=list)


def instrument(text: str) -> Instrumented:
    """Put marks and safe points into a module. Raises ValueError: not PTX of 64-bit addresses, or instrumented already."""
    if REGIONS in text:
        raise ValueError("this PTX is instrumented already")
    header = re.search(r"^\s*\.address_size\s+64\s*$", text, re.MULTILINE)
    if header is None:
        raise ValueError("only PTX with .address_size 64 can be instrumented")
    result = Instrumented(text)
    edits: list[tuple[int, str]] = [(header.end(), "\n" + _support())]
    found = functions(text)
    known = {function.name for function in found} | _HARMLESS
    for function in found:
        edits += _marks(function, result, known)
        if function.is_entry:
            edits += _safe_points(function, result)
    result.text = _with_edits(text, edits)
    return result


def _with_edits(text: str, edits: list[tuple[int, str]]) -> str:
    parts, last = [], 0
    for at, inserted in sorted(edits, key=lambda edit: edit[0]):
        parts += [text[last:at], inserted]
        last = at
    return "".join([*parts, text[last:]])


# ---------------------------------------------------------------- marks


def _marks(function: Function, result: Instrumented, known: set[str]) -> list[tuple[int, str]]:
    edits = []
    for statement in function.statements:
        operation = statement.operation
        if _writes_at_large(operation) or _calls_elsewhere(statement, known):
            result.unmarked.append(f"{function.name}: {statement.code.strip()}")
            continue
        if not _STORES.match(operation) or _OTHER_SPACES.search(operation):
            continue
        address = _ADDRESS.search(statement.operands)
        if address is None:
            result.unmarked.append(f"{function.name}: {statement.code.strip()}")
            continue
        number = sum(result.stores.values())
        result.stores[function.name] = result.stores.get(function.name, 0) + 1
        call = _mark_call(number, statement, address)
        # An atomic can overwrite the register that held its address: then the mark comes first.
        overwritten = statement.operands.startswith(address.group(1) + ",")
        edits.append((statement.start, call + "\n\t") if overwritten else (statement.end, call))
    return edits


def _writes_at_large(operation: str) -> bool:
    match = _WRITES_AT_LARGE.match(operation)
    return match is not None and not (".shared" in operation and match.group().startswith(("st.", "red.", "wmma.")))


def _calls_elsewhere(statement: Statement, known: set[str]) -> bool:
    """Whether code runs that is not in this module, or that a register names."""
    if statement.operation.split(".")[0] != "call":
        return False
    target = _CALL.match(statement.operands)
    return target is None or target.group(1) not in known


def _mark_call(number: int, statement: Statement, address: re.Match[str]) -> str:
    base, offset = address.group(1), (address.group(2) or "0").replace(" ", "")
    # A register is added to; a name (a variable of the module) and a number are moved first.
    source = base
    lines = []
    if not base.startswith("%"):
        lines.append(f"mov.u64 %concordia_a, {base};")
        source = "%concordia_a"
    lines += [
        f"add.s64 %concordia_a, {source}, {offset};",
        ".param .b64 concordia_p;",
        "st.param.b64 [concordia_p], %concordia_a;",
        "call concordia_mark, (concordia_p);",
    ]
    return _guarded(f"m{number}", statement, [".reg .b64 %concordia_a;", *lines])


def _guarded(name: str, statement: Statement | None, lines: list[str]) -> str:
    """Lines in a scope of their own, skipped where the statement's predicate does not hold."""
    label = f"$concordia_{name}"
    skip, landing = "", ""
    if statement is not None and statement.predicate is not None:
        register, negated = statement.predicate
        skip, landing = f" @{'' if negated else '!'}{register} bra {label};", f"\n{label}:"
    return f"\n\t{{{skip}\n\t" + "\n\t".join(lines) + f"{landing}\n\t}}"


# ---------------------------------------------------------------- safe points


def _safe_points(function: Function, result: Instrumented) -> list[tuple[int, str]]:
    edits = []
    edits.append((_behind_declarations(function), _safe_point(function, "entry", None, result)))
    for statement in function.statements:
        if _BARRIERS.match(statement.operation):
            edits.append((statement.end, _safe_point(function, "barrier", statement, result)))
        elif _ENDS.match(statement.operation):
            edits.append((statement.start, _safe_point(function, "return", statement, result) + "\n\t"))
    return edits


def _behind_declarations(function: Function) -> int:
    """Before the first label, so that a loop that begins a kernel does not pass its entry again."""
    at = function.body_start
    for statement in function.statements:
        if not statement.code.startswith("."):
            break
        at = statement.end
    return at


def _safe_point(function: Function, kind: str, statement: Statement | None, result: Instrumented) -> str:
    number = len(result.safe_points)
    result.safe_points.append(SafePoint(number, function.name, kind))
    lines = [
        ".param .b32 concordia_n;",
        f"st.param.b32 [concordia_n], {number};",
        "call concordia_safe_point, (concordia_n);",
    ]
    return _guarded(f"s{number}", statement, [f"// safe point {number}: {kind}", *lines])


# ---------------------------------------------------------------- what the text calls


def _support() -> str:
    """Table and functions. A page's bit that is set already is left alone: a hot page costs a load, not an atomic."""
    return f"""
.visible .global .align 8 .b8 {REGIONS}[{REGIONS_BYTES}];
.visible .global .align 8 .b8 {SAFE_POINTS}[{SAFE_POINTS_BYTES}];

.func concordia_mark(
	.param .b64 concordia_address
)
{{
	.reg .pred %p<4>;
	.reg .b32 %r<6>;
	.reg .b64 %rd<12>;

	ld.param.b64 %rd1, [concordia_address];
	mov.u64 %rd2, {REGIONS};
	ld.global.b64 %rd3, [%rd2];
	add.s64 %rd2, %rd2, 8;
$concordia_next:
	setp.eq.s64 %p1, %rd3, 0;
	@%p1 bra $concordia_done;
	ld.global.b64 %rd4, [%rd2];
	ld.global.b64 %rd5, [%rd2+8];
	sub.s64 %rd6, %rd1, %rd4;
	setp.lt.u64 %p2, %rd6, %rd5;
	@%p2 bra $concordia_found;
	add.s64 %rd2, %rd2, 32;
	add.s64 %rd3, %rd3, -1;
	bra $concordia_next;
$concordia_found:
	ld.global.b64 %rd7, [%rd2+16];
	ld.global.b64 %rd8, [%rd2+24];
	cvt.u32.u64 %r1, %rd7;
	shr.u64 %rd9, %rd6, %r1;
	cvt.u32.u64 %r2, %rd9;
	and.b32 %r3, %r2, 31;
	mov.u32 %r4, 1;
	shl.b32 %r4, %r4, %r3;
	shr.u64 %rd9, %rd9, 5;
	shl.b64 %rd9, %rd9, 2;
	add.s64 %rd10, %rd8, %rd9;
	ld.volatile.global.b32 %r5, [%rd10];
	and.b32 %r5, %r5, %r4;
	setp.ne.s32 %p3, %r5, 0;
	@%p3 bra $concordia_done;
	red.global.or.b32 [%rd10], %r4;
$concordia_done:
	ret;
}}

.func concordia_safe_point(
	.param .b32 concordia_number
)
{{
	.reg .pred %p<3>;
	.reg .b32 %r<6>;
	.reg .b64 %rd<4>;

	mov.u64 %rd1, {SAFE_POINTS};
	ld.global.b64 %rd2, [%rd1];
	setp.eq.s64 %p1, %rd2, 0;
	@%p1 bra $concordia_passed;
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %tid.y;
	mov.u32 %r3, %tid.z;
	or.b32 %r1, %r1, %r2;
	or.b32 %r1, %r1, %r3;
	setp.ne.s32 %p2, %r1, 0;
	@%p2 bra $concordia_passed;
	ld.param.b32 %r4, [concordia_number];
	mul.wide.u32 %rd3, %r4, 4;
	add.s64 %rd3, %rd3, %rd2;
	red.global.add.u32 [%rd3], 1;
$concordia_passed:
	ret;
}}
"""


@dataclass(frozen=True, slots=True)
class MarkedRange:
    """A registered range: its pages are 1 << page_shift bytes, and bit p of the bitmap (u32 words on the device) is page p."""

    address: int
    byte_count: int
    page_shift: int
    bitmap_address: int


def regions_table(ranges: Sequence[MarkedRange]) -> bytes:
    """What belongs into the module's variable `REGIONS`. At most RANGE_COUNT ranges, the busiest first."""
    if len(ranges) > RANGE_COUNT:
        raise ValueError(f"{len(ranges)} ranges; an instrumented module looks through {RANGE_COUNT} at most")
    entries = (struct.pack("<QQQQ", r.address, r.byte_count, r.page_shift, r.bitmap_address) for r in ranges)
    return (struct.pack("<Q", len(ranges)) + b"".join(entries)).ljust(REGIONS_BYTES, b"\0")
