"""Draw saved results as one picture a bench: figures beside their baselines, the ratio above each pair.

python -m bench.plots [DIRECTORY], default bench/results/
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.report import RESULTS, say


def draw_all(directory: Path = RESULTS) -> list[Path]:
    """One PNG beside each saved result of a directory; the paths. What is no result, or has no rows, is told and passed over."""
    drawn = []
    for path in sorted(directory.glob("*.json")):
        try:
            drawn.append(draw(json.loads(path.read_text()), path.with_suffix(".png")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            say(f"{path}: not drawn: {error!r}")
    return drawn


def draw(result: dict[str, Any], target: Path) -> Path:
    """Raises ValueError, KeyError or TypeError for what is no result or has no rows."""
    rows, wanted = result["rows"], result.get("wanted") or {}
    if not rows:
        raise ValueError("no rows")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.6 * len(rows)), 4.5), layout="constrained")
    for index, row in enumerate(rows):
        axes.bar(index - 0.2, row["baseline"], 0.4, color="#9aa5b1", label="baseline" if index == 0 else None)
        axes.bar(index + 0.2, row["value"], 0.4, color="#1f6f8b", label="Concordia" if index == 0 else None)
        want = f"\n(want {wanted[row['case']]})" if wanted.get(row["case"]) else ""
        axes.annotate(
            f"{row['ratio']:.3g}x{want}",
            (index, max(row["value"], row["baseline"])),
            textcoords="offset points",
            xytext=(0, 4),
            ha="center",
            fontsize=8,
        )
    spread = [value for row in rows for value in (row["value"], row["baseline"])]
    if max(spread) > 20 * min(spread) > 0:
        axes.set_yscale("log")
    axes.margins(y=0.25)
    axes.set_xticks(range(len(rows)), [row["case"] for row in rows], fontsize=8)
    axes.set_ylabel(", ".join(dict.fromkeys(row["unit"] for row in rows)))
    axes.set_title(f"{result['bench']}  ({result['commit'][:12]})\n{result['machine']}", fontsize=8)
    axes.legend(fontsize=8)
    figure.savefig(target, dpi=140)
    pyplot.close(figure)
    return target


if __name__ == "__main__":
    for picture in draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS):
        print(picture)
