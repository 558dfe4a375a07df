"""The drawings of the first page and of the strategies' pages: who holds what, and what travels.

    python docs/drawings.py            # writes docs/img/strategies/*.svg; tests/docs/test_drawings.py compares them

A bar stands for one kind of bytes, as many segments as there are parts of it; the filled ones are those that a process
holds. Each drawing has its own light ground, so that it reads the same on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).parent / "img" / "strategies"
WIDTH = 760
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
INK, SOFT, GROUND, PANEL = "#1d2a33", "#4d5d68", "#f7f9fa", "#ffffff"
COLOURS = {  # what a bar stands for -> its colour
    "weights": "#3b78c3",
    "gradients": "#d9822b",
    "optimizer": "#3f9467",
    "batch": "#7d6bb0",
    "shared": "#b0507d",
}
ROW, BAR, PAD = 23, 56, 10


@dataclass(frozen=True)
class Bar:
    """A row of a device's box: a label, and a bar of `of` segments of which those in `held` are filled."""

    colour: str
    label: str
    held: Sequence[int] = (0,)
    of: int = 1


class Drawing:
    """SVG from boxes, arrows and lines of text. texts: about (left, top, right, bottom) of each line, and the line."""

    def __init__(self, title: str, height: int) -> None:
        self.title, self.height = title, height
        self.texts: list[tuple[float, float, float, float, str]] = []
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, size: int = 13, bold: bool = False, at: str = "start", ink: str = INK
    ) -> None:
        """Lines of text. y: the base line of the first. at: start, middle or end, which x is."""
        for number, line in enumerate(words.split("\n")):
            base, wide = y + number * (size + 4), len(line) * size * (0.56 if bold else 0.53)
            left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[at]
            self.texts.append((left, base - size * 0.8, left + wide, base + size * 0.2, line))
            weight = ' font-weight="bold"' if bold else ""
            self._parts.append(
                f'<text x="{x:g}" y="{base:g}" font-size="{size}" text-anchor="{at}" fill="{ink}"{weight}>'
                f"{escape(line)}</text>"
            )

    def note(self, y: float, words: str, size: int = 12) -> None:
        """Softer lines across the whole drawing."""
        self.text(WIDTH / 2, y, words, size=size, at="middle", ink=SOFT)

    def rectangle(self, x: float, y: float, w: float, h: float, fill: str, stroke: str = INK, radius: int = 6) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius}" fill="{fill}" stroke="{stroke}"/>'
        )

    def device(self, x: float, y: float, w: float, name: str, rows: Sequence[Bar], least: float = 0) -> float:
        """A box with a name and bars, at least so high. Returns its lower edge."""
        high = max(PAD + 18 + ROW * len(rows) + 4, least)
        self.rectangle(x, y, w, high, PANEL)
        self.text(x + PAD, y + PAD + 11, name, bold=True)
        for number, row in enumerate(rows):
            top = y + PAD + 20 + ROW * number
            self.text(x + PAD, top + 14, row.label, size=12)
            colour, part = COLOURS[row.colour], BAR / row.of
            for segment in range(row.of):
                fill = colour if segment in row.held else "#ffffff"
                self.rectangle(x + w - PAD - BAR + segment * part, top + 4, part, 12, fill, colour, 0)
        return y + high

    def arrow(self, *points: tuple[float, float], both: bool = False, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        style = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.6"{style}{start} '
            'marker-end="url(#head)"/>'
        )

    def dot(self, x: float, y: float, name: str, fill: str) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="17" fill="{fill}" stroke="{INK}"/>')
        self.text(x, y + 4, name, size=12, at="middle", ink="#ffffff", bold=True)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" font-family="{FONT}">\n<title>{escape(self.title)}</title>\n'
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{INK}"/></marker></defs>\n'
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8" fill="{GROUND}" '
            'stroke="#c3cdd4"/>'
        )
        return "\n".join([head, *self._parts, "</svg>"]) + "\n"


# --- what several drawings share

P, G, OPT = "weights, P", "gradients, G", "Adam's state, 2 P"
COLUMNS = (20, 275, 530)  # three boxes side by side
WIDE = 210


REPLICA = (Bar("weights", P), Bar("gradients", G), Bar("optimizer", OPT))


def part(number: int, of: int) -> Bar:
    return Bar("batch", "batch: its part", (number,), of)


def ring_below(d: Drawing, bottom: float, words: str) -> None:
    """Arrows from each of three boxes to the next, and back to the first below them."""
    for left, right in pairwise(COLUMNS):
        d.arrow((left + WIDE + 3, bottom - 60), (right - 3, bottom - 60))
    low = bottom + 22
    d.arrow(
        (COLUMNS[2] + WIDE / 2, bottom),
        (COLUMNS[2] + WIDE / 2, low),
        (COLUMNS[0] + WIDE / 2, low),
        (COLUMNS[0] + WIDE / 2, bottom + 3),
    )
    d.text(WIDTH / 2, low + 22, words, at="middle")


# --- the drawings


def overview() -> Drawing:
    d = Drawing("The same script on one process and on four: the same global batch, the same mean, the same model", 262)
    d.text(20, 28, "train.py, a global batch of 64, a seed", size=14, bold=True)
    d.text(20, 66, "1 process", bold=True)
    d.rectangle(110, 48, 256, 28, COLOURS["batch"])
    d.text(238, 67, "64 examples", at="middle", ink="#ffffff")
    d.arrow((370, 62), (420, 62))
    d.rectangle(424, 44, 150, 36, PANEL)
    d.text(499, 67, "gradient: mean of 64", size=12, at="middle")
    d.arrow((578, 62), (618, 62))
    d.rectangle(622, 44, 118, 36, COLOURS["weights"])
    d.text(681, 67, "model", at="middle", ink="#ffffff", bold=True)
    d.text(20, 161, "4 processes", bold=True)
    for number in range(4):
        y = 100 + 32 * number
        d.rectangle(110 + 64 * number, y, 64, 26, COLOURS["batch"])
        d.text(142 + 64 * number, y + 18, "16", at="middle", ink="#ffffff")
        d.arrow((178 + 64 * number, y + 13), (420, y + 13))
        d.arrow((578, y + 13), (618, y + 13))
        d.rectangle(622, y, 118, 26, COLOURS["weights"])
        d.text(681, y + 18, "model", at="middle", ink="#ffffff", bold=True)
    d.rectangle(424, 98, 150, 126, PANEL)
    d.text(499, 150, "sum over all,\ndivided by 64:\ngradient: mean of 64", size=12, at="middle")
    d.note(
        248, "All five models are the same, up to rounding. With a batch size per process they would not be.", size=13
    )
    return d


def data_parallel() -> Drawing:
    d = Drawing("data_parallel: the first device holds the optimizer's state, sends weights and adds gradients up", 268)
    rows = [Bar("weights", P), Bar("gradients", G)]
    d.device(20, 40, WIDE, "device 0: your model", [*rows, Bar("optimizer", OPT), part(0, 3)], least=180)
    for number, y in ((1, 20), (2, 136)):
        d.device(530, y, WIDE, f"device {number}: a copy", [*rows, part(number, 3)])
        d.arrow((233, y + 40), (527, y + 40))
        d.text(380, y + 33, "weights, P", at="middle")
        d.arrow((527, y + 72), (233, y + 72))
        d.text(380, y + 65, "gradients, G", at="middle")
    d.note(256, "In a step the first device sends (n - 1) P and receives (n - 1) G. Each loss stays on its device.")
    return d


def mirrored() -> Drawing:
    d = Drawing("mirrored: every device holds everything, and gradients go around a ring", 218)
    for number, x in enumerate(COLUMNS):
        bottom = d.device(
            x,
            20,
            WIDE,
            f"device {number}" + (": your model" if not number else ": its mirror"),
            [*REPLICA, part(number, 3)],
        )
    ring_below(
        d,
        bottom,
        "reduction=ring: each device sends 2 (n - 1) / n G. Weights never travel: all make the same update.",
    )
    return d


def central_storage() -> Drawing:
    d = Drawing("central_storage: the CPU holds the optimizer's state and updates; devices compute", 184)
    rows = [Bar("weights", P), Bar("gradients", G)]
    d.device(20, 20, 190, "CPU: masters", [*rows, Bar("optimizer", OPT)], least=104)
    d.device(300, 20, 180, "device 0: your model", [*rows, part(0, 2)], least=104)
    d.device(570, 20, 170, "device 1: a copy", [*rows, part(1, 2)], least=104)
    for left, right in ((210, 300), (480, 570)):
        d.arrow((right - 3, 62), (left + 3, 62))
        d.text((left + right) / 2, 55, "G", at="middle")
        d.arrow((left + 3, 96), (right - 3, 96))
        d.text((left + right) / 2, 89, "P", at="middle")
    told = "Gradients come together on device 0, and go to the CPU once in a step; new weights come back.\n"
    told += "No device holds Adam's 2 P. With one device the right box is not there."
    d.note(150, told)
    return d


def ddp() -> Drawing:
    d = Drawing("ddp: every process holds everything, and gradients go around a ring while the backward runs", 218)
    for number, x in enumerate(COLUMNS):
        bottom = d.device(x, 20, WIDE, f"process {number}", [*REPLICA, part(number, 3)])
    ring_below(d, bottom, "gradients, bucket by bucket, while the backward runs: each process sends 2 (n - 1) / n G")
    return d


def ring_and_server() -> Drawing:
    d = Drawing("Ring against server: what the busiest of n = 4 processes sends in a step", 262)
    d.text(190, 30, "ring", size=14, bold=True, at="middle")
    places = [(110, 70), (270, 70), (270, 180), (110, 180)]
    for number, (x, y) in enumerate(places):
        d.dot(x, y, str(number), COLOURS["weights"])
        to = places[(number + 1) % 4]
        dx, dy = (to[0] > x) - (to[0] < x), (to[1] > y) - (to[1] < y)
        d.arrow((x + 22 * dx, y + 22 * dy), (to[0] - 22 * dx, to[1] - 22 * dy))
    d.text(190, 130, "each 2 (n - 1) / n G", at="middle")
    d.text(190, 228, "each process sends 1.5 G for n = 4,\nand never more than 2 G", size=12, at="middle", ink=SOFT)
    d.text(560, 30, "server", size=14, bold=True, at="middle")
    d.dot(560, 180, "S", COLOURS["optimizer"])
    for number, x in enumerate((410, 510, 610, 710)):
        d.dot(x, 70, str(number), COLOURS["weights"])
        shift = (x - 560) / 150
        d.arrow((x - 14 * shift, 92), (560 + 24 * shift, 160 if abs(shift) < 0.5 else 170), both=True)
    d.text(400, 134, "G up,\nP down", at="end")
    d.text(
        560,
        228,
        "the server sends and receives n times as much:\nat least 4 G and 4 P for n = 4, and it grows with n",
        size=12,
        at="middle",
        ink=SOFT,
    )
    return d


def shared() -> Drawing:
    d = Drawing("shared: the processes of a machine have one copy of the weights, and each updates its slices", 262)
    memory = [Bar("weights", "weights, P: one copy for all"), Bar("gradients", "gradients, G: for each process")]
    bottom = d.device(20, 20, 720, "memory that all processes share", memory)
    for number, x in enumerate(COLUMNS):
        rows = [Bar("optimizer", "Adam, 2 P / n", (number,), 3), part(number, 3)]
        d.device(x, 150, WIDE, f"process {number}", rows)
        for to, words, at in ((60, "reads P,\nwrites G", "end"), (150, "writes its\nP / n", "start")):
            d.arrow((x + to, 150), (x + to, bottom + 4), both=to == 60)
            d.text(x + to + (-8 if at == "end" else 8), 118, words, size=12, at=at)
    d.note(246, "Each process adds up an n-th of all gradients, and updates its rows of the weights. Nothing is sent.")
    return d


def fsdp() -> Drawing:
    d = Drawing("fsdp: what process 1 of 4 holds in a step in the stages 1, 2 and 3", 236)
    one = (1,)
    for stage, x in enumerate(COLUMNS, 1):
        d.device(
            x,
            20,
            WIDE,
            f"process 1 of 4, stage {stage}",
            [
                Bar("weights", P if stage < 3 else "weights, P / n", range(4) if stage < 3 else one, 4),
                Bar("gradients", G if stage < 2 else "gradients, G / n", range(4) if stage < 2 else one, 4),
                Bar("optimizer", "Adam, 2 P / n", one, 4),
                Bar("batch", "batch: its part", one, 4),
            ],
        )
    words = (
        "P once, after the update;\nG twice, in the backward",
        "P once, before the forward;\nG once, in the backward",
        "P twice, before forward and\nbackward, layer by layer; G once",
    )
    for x, told in zip(COLUMNS, words, strict=True):
        d.text(x, 170, told, size=12)
    d.note(
        226,
        "Below each: what it sends in a step, times (n - 1) / n. A filled segment is a slice that the process holds.",
    )
    return d


def deepspeed() -> Drawing:
    d = Drawing("deepspeed: what process 1 of 4 holds in a step in the stages 1, 2 and 3", 226)
    one = (1,)
    for stages, x, cut in (("stages 1 and 2", 70, False), ("stage 3", 440, True)):
        d.device(
            x,
            20,
            250,
            f"process 1 of 4, {stages}",
            [
                Bar("weights", "weights, P / n" if cut else P, one if cut else range(4), 4),
                Bar("weights", "copy to update, P / n", one, 4),
                Bar("gradients", "gradients, G / n", one, 4),
                Bar("optimizer", "Adam, 2 P / n", one, 4),
                Bar("batch", "batch: its part", one, 4),
            ],
        )
    d.text(70, 190, "in a micro-batch (n - 1) / n G, once or twice;\nin a step (n - 1) / n P", size=12)
    d.text(440, 190, "in a micro-batch (n - 1) / n of 2 P and G;\none layer is gathered at a time", size=12)
    return d


def tensor() -> Drawing:
    d = Drawing("tensor: each process holds half of every cut layer; activations are added in each block", 274)
    for number, y in ((0, 20), (1, 138)):
        d.rectangle(20, y, 110, 101, PANEL)
        d.text(75, y + 34, f"process {number}", bold=True, at="middle")
        d.text(75, y + 58, "the whole\nbatch, x", size=12, at="middle")
        d.arrow((133, y + 50), (177, y + 50))
        for x, layer, half in ((180, "1st Linear", "its columns"), (400, "2nd Linear", "its rows")):
            rows = [("weights", half), ("gradients", "gradients"), ("optimizer", "Adam's state")]
            d.device(x, y, 180, layer, [Bar(kind, label, (number,), 2) for kind, label in rows])
        d.arrow((363, y + 50), (397, y + 50))
        d.arrow((583, y + 50), (617, 124 if number == 0 else 135))
    d.rectangle(620, 102, 122, 56, PANEL)
    d.text(681, 125, "sum: the block's\noutput, on both", size=12, at="middle")
    told = "In each block, in forward and backward, each process sends 2 (n - 1) / n of the activations' bytes."
    d.note(262, told)
    return d


def ulysses() -> Drawing:
    d = Drawing(
        "ulysses: each process holds half of the tokens; attention computes half of the heads for all tokens", 262
    )
    steps = (
        ("layers", "its tokens", "batch", 2),
        ("attention", "its heads", "shared", 2),
        ("layers", "its tokens", "batch", 2),
    )
    for number, y in ((0, 20), (1, 132)):
        for x, (layer, held, colour, of) in zip(COLUMNS, steps, strict=True):
            d.device(x, y, WIDE, f"process {number}: {layer}", [Bar(colour, held, (number,), of), Bar("weights", P)])
    for left, right in pairwise(COLUMNS):
        for y, other in ((56, 168), (168, 56)):
            d.arrow((left + WIDE + 3, y), (right - 3, y))
            d.arrow((left + WIDE + 3, y), (right - 3, other), dashed=True)
    d.note(230, "Each all-to-all sends (n - 1) / n of the process's part of q, k, v or the output.")
    d.note(250, "Gradients are summed over all processes after the backward.")
    return d


def pipeline() -> Drawing:
    d = Drawing("pipeline: each process holds a stage; activations go right, their gradients left", 288)
    for number, x in enumerate(COLUMNS):
        rows = [
            Bar("weights", "weights", (number,), 3),
            Bar("gradients", "gradients", (number,), 3),
            Bar("optimizer", "Adam's state", (number,), 3),
        ]
        d.device(x, 20, 180, f"stage {number}", rows)
    for left, right in pairwise(COLUMNS):
        d.arrow((left + 183, 58), (right - 3, 58))
        d.arrow((right - 3, 92), (left + 183, 92))
    d.text(
        20,
        146,
        "To the right activations at the cut, to the left their gradients; no gradients of weights.",
        size=12,
        ink=SOFT,
    )
    d.text(20, 176, "gpipe, 4 micro-batches in time:", size=12, bold=True)
    for stage in range(3):
        y = 186 + 22 * stage
        d.text(20, y + 15, f"stage {stage}", size=12)
        for micro in range(4):
            for kind, start in (("weights", stage + micro), ("gradients", 8 - stage + micro)):
                x = 80 + 44 * start
                d.rectangle(x, y, 42, 19, COLOURS[kind], radius=2)
                d.text(
                    x + 21, y + 14, f"{'F' if kind == 'weights' else 'B'}{micro}", size=12, at="middle", ink="#ffffff"
                )
    d.text(
        20,
        274,
        "Gaps: a stage waits (s - 1) / (m + s - 1) of the time: with s = 3 stages and m = 4 micro-batches a third.",
        size=12,
        ink=SOFT,
    )
    return d


def alone_then_together(d: Drawing, bars: Sequence[Bar], together: str) -> float:
    """Three processes that train alone, and a line below them in which they meet. Returns that line's lower edge."""
    for number, x in enumerate(COLUMNS):
        bottom = d.device(x, 20, WIDE, f"process {number}", [*bars, part(number, 3)])
        d.arrow((x + WIDE / 2, bottom + 2), (x + WIDE / 2, bottom + 42))
    d.text(WIDTH / 2 + 12, bottom + 27, "`every` steps alone: nothing travels", size=12)
    d.rectangle(20, bottom + 46, 720, 34, PANEL)
    d.text(WIDTH / 2, bottom + 68, together, at="middle")
    return bottom + 80


def local_sgd() -> Drawing:
    d = Drawing("local_sgd: every process trains alone for some steps, then weights are averaged", 262)
    mean = "mean of the weights: each process sends 2 (n - 1) / n P, once in `every` steps"
    bottom = alone_then_together(d, REPLICA, mean)
    d.note(bottom + 24, "Gradients and Adam's state stay where they are. All go on from the mean.")
    return d


def diloco() -> Drawing:
    d = Drawing("diloco: every process trains alone; an outer optimizer moves the shared weights", 304)
    mean = "mean of (shared - own weights): each process sends 2 (n - 1) / n P, once in `every` steps"
    shared = [Bar("shared", "shared weights, P"), Bar("shared", "outer momentum, P")]
    bottom = alone_then_together(d, [*REPLICA, *shared], mean)
    d.note(bottom + 24, "The outer SGD moves the shared weights by it, the same on all; all go on from them.")
    return d


def parameter_server() -> Drawing:
    d = Drawing("parameter_server: workers hold replicas, servers hold weights and optimizer state", 318)
    for number, x in ((0, 20), (1, 480)):
        d.device(x, 20, 260, f"worker {number}", [Bar("weights", P), Bar("gradients", G), part(number, 2)])
        d.device(
            x,
            196,
            260,
            f"server {number}",
            [
                Bar("weights", "its half of the weights", (number,), 2),
                Bar("optimizer", "and of Adam's state", (number,), 2),
            ],
        )
        centre, other = x + 130, 610 if number == 0 else 150
        d.arrow((centre, 124), (centre, 192), both=True)
        d.arrow((centre + (40 if number == 0 else -40), 124), (other + (-40 if number == 0 else 40), 192), both=True)
    d.text(380, 58, "up: G (1 + 1 / W) in sync,\nG in async", size=12, at="middle")
    d.text(380, 228, "down: G + P in sync,\nP in async", size=12, at="middle")
    d.note(306, "W workers, k servers: a server carries 1 / k of what all workers send and receive.")
    return d


DRAWINGS = {
    "overview": overview,
    "ring_and_server": ring_and_server,
    "data_parallel": data_parallel,
    "mirrored": mirrored,
    "central_storage": central_storage,
    "ddp": ddp,
    "shared": shared,
    "fsdp": fsdp,
    "deepspeed": deepspeed,
    "tensor": tensor,
    "ulysses": ulysses,
    "pipeline": pipeline,
    "local_sgd": local_sgd,
    "diloco": diloco,
    "parameter_server": parameter_server,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
