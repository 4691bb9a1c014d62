"""One look for all figures: Okabe and Ito's colours, which colour-blind readers can tell apart, and text kept as
text."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

FOLDER = Path(__file__).resolve().parent
GREY, LIGHT, BLACK = "#9a9a9a", "#e6e6e6", "#222222"
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#f0e442"

plt.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "hf_dspark",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
        "font.size": 10,
        "figure.facecolor": "white",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def canvas(width: float, height: float, x: tuple, y: tuple):
    """A figure without axes, whose units are those of `x` and `y`."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=x, ylim=y)
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def box(axes, x, y, width, height, text="", color=LIGHT, ink=BLACK, size=9, dashed=False):
    style = dict(facecolor=color, edgecolor="#555555", linewidth=0.8, linestyle="--" if dashed else "-")
    axes.add_patch(plt.Rectangle((x, y), width, height, **style))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=size)


def arrow(axes, start, end, color="#555555", dashed=False):
    style = dict(arrowstyle="-|>", color=color, linewidth=1.2, linestyle="--" if dashed else "-", shrinkA=0, shrinkB=0)
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def save(figure, name: str) -> None:
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
