"""The handlers in the shapes that models have, and what each takes of a multiprocessor: `python -m engine.capture.specialisations`.

Needs NVRTC, no GPU. The shapes are those of `make gpu`; tests hold every one of them to compiling on every architecture.
"""

from __future__ import annotations

from engine.capture import nvrtc, source
from engine.capture.nvrtc import Usage
from engine.capture.source import OPTIONS, HandlerSource, PageShape, RowGroup, RowShape, StatePart, StateShape

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
CONTEXT = 8192
PAGE_BYTES = 4096


def rows_8b() -> RowShape:
    """KV of an 8B model: 32 layers, 8 KV heads of 128, bfloat16."""
    return attention_rows(layers=32, heads=8, dim=128)


def rows_70b() -> RowShape:
    """KV of a 70B model: 80 layers, 8 KV heads of 128, bfloat16."""
    return attention_rows(layers=80, heads=8, dim=128)


def attention_rows(layers: int, heads: int, dim: int, context: int = CONTEXT) -> RowShape:
    """Rows of one group: K and V of every head is a plane, 2 bytes an element."""
    row, planes = 2 * dim, 2 * layers * heads
    return RowShape((RowGroup(planes, row, planes * context * row, context * row),))


def window_rows() -> RowShape:
    """A model with windows of 512 beside full attention, float32 rows of 256 and of 64."""
    ring = RowGroup(30, 1024, 30 * 512 * 1024, 512 * 1024, ring_rows=512)
    full = RowGroup(6, 256, 6 * CONTEXT * 256, CONTEXT * 256)
    return RowShape((ring, full))


def hybrid_state() -> StateShape:
    """Recurrent state of a hybrid model: a matrix a head and a convolution's tail."""
    return StateShape((StatePart(16 * 128 * 128 * 4, 16 * 128 * 128 * 4), StatePart(3 * 4098 * 2, 3 * 4098 * 2)))


def all_handlers() -> list[HandlerSource]:
    """Every kind of handler in its usual and its awkward shape."""
    usual = PageShape(PAGE_BYTES, 256 << 20)
    awkward = PageShape(1536, (16 << 20) + 5, alignment=4, batch=3)
    marked = PageShape(PAGE_BYTES, 64 << 20, bitmap=True, batch=32)
    large = PageShape(65536, 128 << 20)
    rows = [rows_8b(), rows_70b(), window_rows(), RowShape((RowGroup(3, 6, 180, 60), RowGroup(2, 40, 800, 400)))]
    return [
        *(source.page_scanner(shape) for shape in (usual, awkward, marked, large)),
        *(source.page_applier(shape) for shape in (usual, awkward)),
        source.page_marker(marked),
        *(source.row_gatherer(shape) for shape in rows),
        *(source.row_scatterer(shape) for shape in rows),
        source.snapshotter(hybrid_state()),
        source.snapshot_restorer(hybrid_state()),
        source.executor(),
    ]


def usage_table(library: nvrtc.Nvrtc, architecture: str) -> list[tuple[str, str, Usage]]:
    """(handler, kernel, what it takes) of every kernel of every handler."""
    rows = []
    for handler in all_handlers():
        machine = library.compile(handler.text, handler.name, architecture, OPTIONS)
        rows += [(handler.name, kernel, usage) for kernel, usage in machine.usage().items()]
    return rows


def main() -> None:
    """Print the table for every architecture."""
    library = nvrtc.load()
    print(f"NVRTC {library.version[0]}.{library.version[1]}")
    print(f"{'arch':8} {'handler':18} {'kernel':18} {'registers':>9} {'shared':>7} {'stack':>6} {'spills':>7}")
    for architecture in ARCHITECTURES:
        for handler, kernel, usage in usage_table(library, architecture):
            numbers = f"{usage.registers:>9} {usage.shared_bytes:>7} {usage.stack_bytes:>6} {usage.spill_bytes:>7}"
            print(f"{architecture:8} {handler:18} {kernel:18} {numbers}")


if __name__ == "__main__":
    main()
