"""The bar chart of the README, from gain.json: speed over plain decoding, as [mean, low, high]."""

import json

from style import BLACK, BLUE, FOLDER, ORANGE, plt, save


def main() -> None:
    data = json.loads((FOLDER / "gain.json").read_text(encoding="utf-8"))
    bars = data["bars"]
    figure, axes = plt.subplots(figsize=(7.6, 3.0), layout="constrained")
    for shift, key, label, color in (
        (-0.2, "greedy", "greedy (T = 0)", BLUE),
        (0.2, "sampled", "sampled (T = 1)", ORANGE),
    ):
        places = [i + shift for i in range(len(bars))]
        means = [bar[key][0] for bar in bars]
        spread = [[bar[key][0] - bar[key][1] for bar in bars], [bar[key][2] - bar[key][0] for bar in bars]]
        axes.bar(places, means, 0.38, color=color, label=label, yerr=spread, ecolor=BLACK, capsize=3)
        for place, bar in zip(places, bars):
            axes.text(place, bar[key][2] + 0.04, f"{bar[key][0]:.2f}", ha="center", fontsize=9)
    axes.axhline(1, color="#777777", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(bars)), [bar["name"] for bar in bars])
    axes.set_ylabel("times as fast as plain")
    axes.set_ylim(0, 1.35 * max(bar[key][2] for bar in bars for key in ("greedy", "sampled")))
    axes.set_title(data["caption"], fontsize=10, loc="left")
    axes.legend(frameon=False, ncols=2, loc="upper left", fontsize=9)
    save(figure, "gain")


if __name__ == "__main__":
    main()
