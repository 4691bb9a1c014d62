"""The figures of the method pages: what a drafter's slots may look at, and the timeline of a round."""

import numpy as np
from style import BLUE, GREEN, GREY, LIGHT, ORANGE, SKY, YELLOW, arrow, box, canvas, plt, save


def mask(axes, allowed, rows, columns, colors, title):
    """One square per pair: row looks at column. `allowed` holds indices of `colors`, -1 for no."""
    for i, row in enumerate(allowed):
        for j, kind in enumerate(row):
            color = LIGHT if kind < 0 else colors[kind]
            axes.add_patch(plt.Rectangle((j, -i - 1), 0.94, 0.94, facecolor=color, edgecolor="white"))
    for j, name in enumerate(columns):
        axes.text(j + 0.47, 0.15, name, ha="center", va="bottom", fontsize=8, rotation=60)
    for i, name in enumerate(rows):
        axes.text(-0.15, -i - 0.53, name, ha="right", va="center", fontsize=8)
    axes.set_title(title, fontsize=10, pad=40)
    axes.set(xlim=(-2.4, len(columns)), ylim=(-len(rows) - 0.2, 0.4))
    axes.set_aspect("equal")
    axes.axis("off")


def legend(figure, entries):
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=color) for color, _ in entries]
    figure.legend(
        handles, [text for _, text in entries], loc="lower center", ncols=len(entries), frameon=False, fontsize=9
    )


def block_mask(name, slots, title):
    context = [f"f{i}" for i in range(5)]
    allowed = np.concatenate([np.zeros((len(slots), 5), int), np.ones((len(slots), len(slots)), int)], 1)
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    figure.subplots_adjust(0.02, 0.1, 0.98, 0.74)
    mask(axes, allowed, slots, context + slots, [SKY, ORANGE], title)
    legend(figure, [(SKY, "target's states before the anchor (f0 to f4)"), (ORANGE, "own block")])
    save(figure, name)


def chain_mask():
    """EAGLE-3: the drafter's slots in one stage, causal; behind the last state it reads its own outputs."""
    slots = [f"slot {i}" for i in range(7)]
    allowed = [[(0 if j < 4 else 1) if j <= i else -1 for j in range(7)] for i in range(7)]
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    figure.subplots_adjust(0.02, 0.1, 0.98, 0.78)
    mask(axes, allowed, slots, slots, [SKY, ORANGE], "EAGLE-3: slot i pairs a state with the next token's embedding")
    legend(figure, [(SKY, "slots of target states"), (ORANGE, "slots of own outputs"), (LIGHT, "not visible")])
    save(figure, "eagle3")


def correction(name, boxes, title, note):
    """One parallel pass, then a walk from left to right."""
    figure, axes = canvas(7.6, 3.4, (0, 15.2), (0, 6.8))
    axes.text(0.2, 6.35, title, fontsize=10)
    box(axes, 0.2, 4.3, 14.6, 1.1, "backbone: one pass over anchor and masks, reading the target's states", SKY)
    for k, (slot, head, draft) in enumerate(boxes):
        x = 0.4 + 3.6 * k
        axes.text(x + 1.4, 5.65, slot, ha="center", fontsize=9)
        arrow(axes, (x + 1.4, 4.3), (x + 1.4, 3.55))
        if head:
            box(axes, x, 2.5, 2.8, 1.0, head, YELLOW if head.startswith("+") else LIGHT, size=8)
            arrow(axes, (x + 1.4, 2.5), (x + 1.4, 1.75))
        else:
            arrow(axes, (x + 1.4, 3.55), (x + 1.4, 1.75))
        box(axes, x, 0.9, 2.8, 0.8, draft, GREEN, "white")
        if head and k + 1 < len(boxes) and boxes[k + 1][1].startswith("+"):
            arrow(axes, (x + 2.8, 1.5), (x + 3.6, 2.7), ORANGE)
    axes.text(0.2, 0.2, note, fontsize=9)
    save(figure, name)


def mtp():
    figure, axes = canvas(7.6, 3.4, (0, 15.2), (0, 6.8))
    axes.text(0.2, 6.35, "One head, fed its own output. With several heads, head k makes draft k.", fontsize=10)
    for k in range(3):
        x = 0.4 + 5 * k
        state, token = ("target's last state", "anchor") if k == 0 else (f"output {k}", f"draft {k}")
        box(axes, x, 4.6, 2.2, 0.9, state, SKY if k == 0 else ORANGE, size=8)
        box(axes, x + 2.3, 4.6, 1.6, 0.9, token, LIGHT, size=8)
        arrow(axes, (x + 1.1, 4.6), (x + 1.6, 3.75))
        arrow(axes, (x + 3.1, 4.6), (x + 2.4, 3.75))
        box(axes, x + 0.4, 2.8, 3.2, 0.9, "head: projection + block", YELLOW, size=8)
        arrow(axes, (x + 2.0, 2.8), (x + 2.0, 1.95))
        box(axes, x + 0.6, 1.1, 2.8, 0.8, f"draft {k + 1}", GREEN, "white")
        if k < 2:
            arrow(axes, (x + 3.6, 3.3), (x + 5.6, 4.6), ORANGE)
    axes.text(0.2, 0.3, "The embedding and the output layer are the target's.", fontsize=9)
    save(figure, "mtp")


def timeline():
    figure, axes = canvas(7.6, 3.2, (0, 15.2), (0, 6.4))
    plain = [("plain", 0.2 + 2.6 * i) for i in range(5)]
    axes.text(0.2, 6.0, "Plain decoding: one forward of the target per token", fontsize=10)
    for i, (_, x) in enumerate(plain):
        box(axes, x, 4.6, 2.5, 0.9, f"target: token {i + 1}", SKY, size=8)
    title = "A round with three drafts, of which two are accepted: three tokens for one forward of the target"
    axes.text(0.2, 3.7, title, fontsize=10)
    box(axes, 0.2, 2.3, 1.0, 0.9, "draft", ORANGE)
    box(axes, 1.3, 2.3, 2.9, 0.9, "target: anchor + 3 drafts", SKY, size=8)
    for k, (text, color) in enumerate(
        [("draft 1", GREEN), ("draft 2", GREEN), ("draft 3", GREY), ("next token", BLUE)]
    ):
        box(axes, 4.6 + 2.6 * k, 2.3, 2.4, 0.9, text, color, "white", 8)
        word = ("accepted", "accepted", "rejected", "from the target")[k]
        axes.text(5.8 + 2.6 * k, 1.9, word, ha="center", fontsize=8)
    axes.annotate("", xy=(4.2, 0.9), xytext=(0.2, 0.9), arrowprops=dict(arrowstyle="<->", color="#555555"))
    axes.text(2.2, 0.3, "time of the round", ha="center", fontsize=9)
    save(figure, "round")


def dloop():
    figure, axes = canvas(6.4, 3.6, (0, 12.6), (0, 7.2))
    axes.text(0.2, 6.8, "Three stages before one verification", fontsize=10)
    sees = [
        "target's states",
        "target's states\n+ own states of stage 1",
        "target's states\n+ own states of stages 1, 2",
    ]
    for s in range(3):
        x = 0.3 + 4.3 * s
        box(axes, x, 5.0, 3.4, 1.2, sees[s], SKY if s == 0 else YELLOW, size=8)
        arrow(axes, (x + 1.7, 5.0), (x + 1.7, 4.4))
        box(axes, x, 3.5, 3.4, 0.9, f"stage {s + 1}: {3} drafts", ORANGE, size=9)
        if s < 2:
            arrow(axes, (x + 3.4, 3.95), (x + 4.3, 3.95))
            axes.text(x + 3.85, 4.15, "gate", ha="center", fontsize=8)
        arrow(axes, (x + 1.7, 3.5), (x + 1.7, 2.7))
    box(axes, 0.3, 1.7, 12.0, 1.0, "target: one forward over the anchor and all nine drafts", SKY)
    axes.text(0.3, 0.9, "Gate: the sum of the latest stage's log-probabilities is at least loop_gate.", fontsize=9)
    axes.text(
        0.3,
        0.3,
        "After the verification the drafter's own states are dropped and replaced by the target's.",
        fontsize=9,
    )
    save(figure, "dloop")


def copies():
    figure, axes = canvas(7.6, 2.6, (0, 15.2), (0, 5.2))
    text = ["def", "area", "(", "self", ")", "...", "def", "area", "("]
    for i, word in enumerate(text):
        color = YELLOW if i in (0, 1, 2, 6, 7, 8) else GREEN if i in (3, 4) else LIGHT
        box(axes, 0.2 + 1.3 * i, 2.6, 1.2, 0.8, word, color, "white" if color == GREEN else "#222222")
    for i, word in enumerate(["self", ")"]):
        box(axes, 0.2 + 1.3 * (9 + i), 2.6, 1.2, 0.8, word, "white", "#222222", dashed=True)
        style = dict(arrowstyle="-|>", color="#555555", connectionstyle="arc3,rad=0.18")
        axes.annotate("", xy=(12.5 + 1.3 * i, 2.55), xytext=(4.7 + 1.3 * i, 2.55), arrowprops=style)
    axes.text(0.2, 4.2, "The last tokens occurred before. What followed them there is the draft.", fontsize=10)
    for x, text in ((2.1, "earlier match"), (9.9, "end of the text"), (13.2, "drafts")):
        axes.text(x, 3.6, text, fontsize=9, ha="center")
    save(figure, "copies")


def trees():
    parents = [-1, 0, 0, 1, 1, 2]
    names = ["anchor", "the", "a", "cat", "dog", "cat "]
    places = [(0.9, 3.2), (2.9, 4.4), (2.9, 2.0), (5.0, 5.0), (5.0, 3.6), (5.0, 2.0)]
    figure, (axes, right) = plt.subplots(1, 2, figsize=(7.6, 3.6))
    figure.subplots_adjust(0.01, 0.1, 0.99, 0.76)
    axes.set(xlim=(0, 6), ylim=(1, 6))
    axes.axis("off")
    for i, (x, y) in enumerate(places):
        if parents[i] >= 0:
            a, b = places[parents[i]]
            arrow(axes, (a + 0.6, b), (x - 0.6, y))
        box(
            axes,
            x - 0.6,
            y - 0.3,
            1.2,
            0.6,
            names[i].strip(),
            LIGHT if i == 0 else GREEN,
            "#222222" if i == 0 else "white",
        )
    axes.set_title("A tree of five drafts", fontsize=10, pad=40)
    seen = np.full((6, 6), -1)
    for i in range(6):
        j = i
        while j >= 0:
            seen[i, j] = 0 if j == i else 1
            j = parents[j]
    labels = ["anchor", "the", "a", "the cat", "the dog", "a cat"]
    mask(right, seen, labels, labels, [GREEN, SKY], "A node sees itself and its ancestors")
    legend(figure, [(GREEN, "itself"), (SKY, "ancestor"), (LIGHT, "not visible")])
    save(figure, "trees")


def scheduling():
    """Expected tokens against cost: the length with the most tokens per second is verified."""
    survival = [0.62, 0.38, 0.23, 0.14, 0.08, 0.05]
    tokens = 1 + np.cumsum([0, *survival])
    costs = np.array([61, 63.5, 64.3, 64.5, 65.4, 66.1, 69.2]) + np.array([0, 7, 7, 7, 7, 7, 7])
    costs = costs + np.array([0, 0, 1, 2, 6, 12, 18])
    speed = 1000 * tokens / costs
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.0), layout="constrained")
    left.bar(range(1, 7), survival, color=SKY)
    left.set(
        xlabel="draft", ylabel="chance that drafts 1..k are accepted", title="Survival, from calibrated confidences"
    )
    best = int(speed.argmax())
    right.bar(range(7), speed, color=[ORANGE if k == best else SKY for k in range(7)])
    right.set(xlabel="drafts verified", ylabel="expected tokens per second", title="Tokens over measured cost")
    right.set_ylim(0, 1.15 * speed.max())
    right.text(best, speed[best] + 0.5, "chosen", ha="center", fontsize=9)
    for axes in (left, right):
        axes.title.set_fontsize(10)
    save(figure, "scheduling")


def main() -> None:
    block_mask("dspark_mask", ["anchor", "mask 1", "mask 2", "mask 3"], "DSpark: four slots, four drafts")
    title = "DFlash: four slots, three drafts (the anchor's slot drafts nothing)"
    block_mask("dflash", ["anchor", "mask 1", "mask 2", "mask 3"], title)
    walk = [("anchor", "+ bias(anchor)", "draft 1"), ("mask 1", "+ bias(draft 1)", "draft 2")]
    walk += [("mask 2", "+ bias(draft 2)", "draft 3"), ("mask 3", "+ bias(draft 3)", "draft 4")]
    title = "DSpark: a correction head adds a bias that depends on the token before"
    correction("dspark", walk, title, "bias: the logits of the Markov head, a table of low rank")
    walk = [("anchor", "base logits", "draft 1"), ("mask 1", "+ GRU(draft 1)", "draft 2")]
    walk += [("mask 2", "+ GRU(drafts 1, 2)", "draft 3"), ("mask 3", "+ GRU(1, 2, 3)", "draft 4")]
    title = "Domino: a GRU over the block's tokens corrects later drafts"
    correction("domino", walk, title, "pure_draft_prefix_len = 1: the first draft has no correction")
    chain_mask()
    mtp()
    timeline()
    dloop()
    copies()
    trees()
    scheduling()


if __name__ == "__main__":
    main()
