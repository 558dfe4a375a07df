"""Does a printed number come from one pass over a loader? The text of scripts."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from paceline.doctor.rules.printed_values import comes_from

TEXTS = {
    "its own loop": (True, """
        total = 0.0
        for x, y in local:  # loop
            total += loss(model(x), y).item()
        mean = total / len(local)
        print(f"loss {mean:.3f}")
    """),
    "a reduced number, then another loop": (False, """
        import torch
        right = torch.zeros(2)
        for x, y in loader:
            right += count(model(x), y)
        dist.all_reduce(right)
        accuracy = (right[0] / right[1]).item()
        for x, y in local:  # loop
            probe = torch.nn.functional.cross_entropy(model(x), y)
        print("accuracy", accuracy)
    """),
    "both": (True, """
        right = 1.0
        for x, y in local:  # loop
            probe = loss(model(x), y)
        print("accuracy", right, probe.item())
    """),
    "the same name, made anew": (False, """
        for x, y in local:  # loop
            total = loss(model(x), y)
        total = reduced(numbers)
        print("accuracy", total)
    """),
    "a writer that the loop uses too": (False, """
        accuracy = reduced(numbers)
        for x, y in local:  # loop
            writer.add_image("example", model(x))
        writer.add_scalar("accuracy", accuracy)  # print(
    """),
    "a list that is filled": (True, """
        hits = []
        for x, y in local:  # loop
            hits.append(model(x).argmax(1) == y)
        print("accuracy", sum(hits) / len(hits))
    """),
    "a comprehension": (True, """
        hits = [model(x).argmax(1) == y for x, y in local]  # loop
        print("accuracy", sum(hits) / len(hits))
    """),
    "a function": (True, """
        def evaluate(model):
            for x, y in local:  # loop
                right += count(model(x), y)
            return right
        def report():
            return {"accuracy": evaluate(model)}
        numbers = report()
        print(numbers["accuracy"])
    """),
    "a function in the print": (True, """
        def evaluate(model):
            for x, y in local:  # loop
                right += count(model(x), y)
            return right
        print("accuracy", evaluate(model))
    """),
    "an object that is filled by keywords, as of the library evaluate": (True, """
        metric = evaluate.load("accuracy")
        for x, y in local:  # loop
            metric.add_batch(predictions=model(x).argmax(1), references=y)
        numbers = metric.compute()
        print("accuracy", numbers)
    """),
    "an object that a function fills": (True, """
        def evaluate(model, meter):
            for x, y in local:  # loop
                meter.update(count(model(x), y))
        meter = Meter()
        evaluate(model, meter)
        print("accuracy", meter.value)
    """),
    "an attribute": (True, """
        class Trainer:
            def evaluate(self):
                for x, y in self.local:  # loop
                    self.right += count(self.model(x), y)
            def fit(self):
                self.evaluate()
                print("accuracy", self.right)
    """),
    "another attribute": (False, """
        class Trainer:
            def probe(self):
                for x, y in self.local:  # loop
                    self.example = self.model(x)
            def fit(self):
                self.accuracy = reduced(self.numbers)
                self.probe()
                print("accuracy", self.accuracy)
    """),
    "a training loss after a pass of a function": (False, """
        def probe(model):
            for x, y in local:  # loop
                draw(model(x))
        for epoch in range(3):
            total = 0.0
            for x, y in loader:
                total += step(x, y)
            probe(model)
            print(f"epoch {epoch} train loss {total / 8:.3f}")
    """),
    "what the text does not tell": (None, """
        def say(number):
            print("accuracy", number)
        for x, y in local:  # loop
            right += count(model(x), y)
        say(right)
    """),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_printed_number_comes_from(name: str, tmp_path: Path) -> None:
    known, text = TEXTS[name]
    lines = textwrap.dedent(text).lstrip("\n").splitlines()
    file = tmp_path / "train.py"
    file.write_text("\n".join(lines) + "\n")
    loop = next(number for number, line in enumerate(lines, 1) if "# loop" in line)
    said = next(number for number, line in enumerate(lines, 1) if "print(" in line)
    assert comes_from([str(file), said], [str(file), loop]) is known


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    file = str(tmp_path / "nowhere.py")
    assert comes_from([file, 3], [file, 1]) is None
    assert comes_from([], [file, 1]) is None
