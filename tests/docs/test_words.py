"""Plain words: no private vocabulary in what users read, and few of the sentences that read like a translation.

The limits are the highest figures of the docs of Lightning Fabric, Accelerate and torchtitan, and of the docstrings of
optax, equinox, torchtitan and torchft, counted in November 2026 with the same expressions. Per 1,000 words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md"))]
)

# Words of our own for what the field has a term for (docs/glossary.md).
PRIVATE = re.compile(
    r"\b(doors?|keepers?|strangers?|story|stories|trains? apart|hand(?:s|ed)? on|in question|at hand"
    r"|comes? to (?:its|an|their) end|told|nobody|whoever)\b",
    re.IGNORECASE,
)
STIFF = {  # (expression, limit in Markdown, limit in docstrings)
    "of which, whose": (
        r"\b(?:of|in|by|to|from|for|with|at|on|under|over|after) which\b|\bwhose\b",
        0.27,
        1.35,
    ),
    "what is ...": (
        r"(?:^|[.:;,(]\s+)[Ww]hat (?:is|are|has|have|was|it|a|the|one|they|does|can|cannot|could)\b",
        0.15,
        0.0,
    ),
    "so many, as long": (r"\b(?:so|as) (?:many|much|often|long)\b", 0.19, 0.02),
    "that it has": (r"\bthat (?:it|they|he|one) (?:has|have|is|are|was|were|had|does|do)\b", 0.07, 0.05),
    "is told": (r"\b(?:is|are|was|were) told\b|\btells? (?:it|them|of|that|which|what|how|whether)\b", 0.0, 0.0),
    "the one": (r"\b(?:that|which|this|the) one\b|\bno one\b|\bnobody\b", 0.11, 0.25),
}


def markdown(path: Path) -> str:
    """The sentences of a page: without code, tables and tags."""
    text = re.sub(r"```.*?```", " ", path.read_text(), flags=re.DOTALL)
    text = re.sub(r"^\|.*$", " ", text, flags=re.MULTILINE)
    return re.sub(r"<[^>]+>", " ", re.sub(r"`[^`]*`", "X", text))


def docstring_nodes(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            expression = node.body[0]
            assert isinstance(expression, ast.Expr)
            assert isinstance(expression.value, ast.Constant)
            yield expression.value


def docstrings(path: Path) -> str:
    nodes = docstring_nodes(ast.parse(path.read_text()))
    return "\n".join(str(node.value) for node in nodes)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of the strings of a module that are sentences: what users may be shown."""
    tree = ast.parse(path.read_text())
    described = {id(node) for node in docstring_nodes(tree)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in described:
            continue
        if node.value.count(" ") >= 2:
            yield node.lineno, node.value


def rates(texts: list[str], column: int) -> dict[str, tuple[float, float]]:
    """Expression -> (found per 1,000 words, limit), where it is over its limit."""
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts)
    found = {
        name: (1000 * sum(len(re.findall(row[0], text, flags=re.MULTILINE)) for text in texts) / words, row[column])
        for name, row in STIFF.items()
    }
    return {name: (round(rate, 2), float(limit)) for name, (rate, limit) in found.items() if rate > float(limit)}


def test_pages_read_as_those_of_the_field() -> None:
    assert not rates([markdown(path) for path in PAGES], 1)


def test_docstrings_read_as_those_of_the_field() -> None:
    assert not rates([docstrings(path) for path in sorted(SOURCE.rglob("*.py"))], 2)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_have_no_private_words(path: Path) -> None:
    assert not [match[0] for match in PRIVATE.finditer(markdown(path))]


def test_no_message_has_a_private_word() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {match[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in messages(path)
        for match in PRIVATE.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_the_counts_see_what_they_are_for() -> None:
    """Else nothing above could fail."""
    text = "A rank whose script raises is told once. What it has is as many as before. That one has nobody."
    assert set(rates([text], 1)) == set(STIFF) - {"that it has"}
    assert [match[0] for match in PRIVATE.finditer("the keeper is told by nobody, in question")] == [
        "keeper",
        "told",
        "nobody",
        "in question",
    ]
