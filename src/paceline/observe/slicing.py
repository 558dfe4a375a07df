"""Program slicing: trace a line of a script back to a source that affects it, such as a rank or a clock. Pure.

A line such as `torch.optim.SGD(..., lr=lr)` uses names. If the line itself uses no source, the last assignments to its
names are searched, then the assignments to the names in those assignments, and so on. The search ends at a line that
does something with a source (`lr = 0.1 * size`). An assignment that only names a source (`size = run.world.size`) is
skipped, because many correct lines use such a name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

from paceline.observe.script_stack import Place
from paceline.observe.source import FUNCTIONS, LOOPS, Statement, statement_at, statements

RANK = re.compile(
    r"\bworld\.(rank|size|local_rank|local_size|node|nodes)\b|\.(main|is_main|rank|world_size|local_rank|process_index"
    r"|num_processes|is_main_process)\b|get_rank\(|get_world_size\(|['\"](LOCAL_|GROUP_)?(RANK|WORLD_SIZE)['\"]"
)
CLOCK = re.compile(
    r"\btime\(|time_ns\(|perf_counter|monotonic|getpid\(|urandom|SystemRandom|uuid|\.seed\(\)|default_rng\(\)|\bhash\("
    r"|\.now\(|\bid\(|secrets\.|RandomState\(\)|\.Random\(\)|\bset\("
)
_WRITING = re.compile(
    r"^(print|logging\.|logger\.|log\(|run\.log|run\.print|writer\.|tqdm|wandb\.|torch\.save|run\.save)"
)


class Slice:
    """Searches the script's code for a source.

    Args:
        source: a pattern for sources, such as RANK or CLOCK.
        asked: lines that queried the rank during the run.
    """

    def __init__(self, source: re.Pattern[str], asked: Collection[Place] = ()) -> None:
        self._source, self._asked = source, set(asked)

    def origin(self, place: Place) -> tuple[Place, Place | None] | None:
        """Return (the line that uses a source, the innermost branch or loop around `place` that uses a source).

        If no branch uses a source, the second item is None. If only the branch uses a source, the first item is
        `place`. Returns None if there is no source.
        """
        acting = statement_at(*place)
        if acting is None:
            return None
        branch = next((b for b in reversed(acting.inside) if self._head_has(acting, b)), None)
        where = (acting.file, branch.lineno) if branch is not None else None
        found = self._follow(acting, set())
        if found is not None:
            return self._exact(found), where
        return (place, where) if where is not None else None

    def _exact(self, statement: Statement) -> Place:
        """The line of the source within a statement of several lines."""
        for one in statement.expressions():
            for node in sorted(ast.walk(one), key=lambda n: getattr(n, "lineno", 0), reverse=True):
                if isinstance(node, (ast.Name, ast.Attribute, ast.Call)) and self._has(statement, [node]):
                    return statement.file, node.lineno
        return statement.place

    def _head_has(self, acting: Statement, head: ast.stmt) -> bool:
        """Whether the head of a branch or loop uses a source."""
        as_one = Statement(acting.file, head.lineno, head, acting.scope)
        return isinstance(head, (ast.If, *LOOPS)) and self._has(as_one, list(as_one.expressions()))

    def _has(self, at: Statement, expressions: list[ast.expr]) -> bool:
        """Whether these expressions use a source, or a name for a source."""
        if any(self._source.search(ast.unparse(one)) for one in expressions):
            return True
        return any(self._is_source(one) for name in _names(expressions) for one in self._definitions(at, name))

    def _is_source(self, definition: Statement) -> bool:
        """Whether the statement only names a source."""
        expressions = list(definition.expressions())
        if isinstance(definition.node, FUNCTIONS):
            expressions = [n.value for n in ast.walk(definition.node) if isinstance(n, ast.Return) and n.value]
        if not expressions or any(
            isinstance(n, (ast.BinOp, ast.IfExp, ast.Lambda)) for one in expressions for n in ast.walk(one)
        ):
            return False
        whole = " ".join(ast.unparse(one) for one in expressions)
        if isinstance(definition.node, FUNCTIONS) or len(whole) < 80:
            return bool(self._source.search(whole)) or (definition.place in self._asked and "(" not in whole)
        return False

    def _follow(self, at: Statement, been: set[Place]) -> Statement | None:
        """Find the statement that uses a source: this statement, or a definition of its names, recursively."""
        if at.place in been:
            return None
        been.add(at.place)
        expressions = list(at.expressions())
        if self._has(at, expressions):
            return at
        for name in _names(expressions):
            for definition in self._definitions(at, name):
                if not isinstance(definition.node, (*FUNCTIONS, ast.ClassDef)):
                    if (found := self._follow(definition, been)) is not None:
                        return found
                elif (inner := self._inside(definition)) is not None:
                    return inner
        return at if at.place in self._asked and not self._is_source(at) else None

    def _inside(self, function: Statement) -> Statement | None:
        """The first statement in a function or class that does something with a source."""
        last = function.node.end_lineno or function.line
        own = [s for s in statements(function.file) if function.line < s.line <= last]
        return next((s for s in own if not self._is_source(s) and self._has(s, list(s.expressions()))), None)

    def _definitions(self, at: Statement, name: str) -> list[Statement]:
        """The statements that define a name, as seen from this line.

        For a variable: the last assignment before this line. For an attribute: the first assignments in the file. For a
        parameter: the calls of the function.
        """
        every = statements(at.file)
        if "." in name:
            return [s for s in every if name in _targets(s.node)][:3]
        if own := [s for s in _before(at) if name in _targets(s.node)]:
            return own[-1:]
        if isinstance(at.scope, FUNCTIONS):
            arguments = [a.arg for a in (*at.scope.args.posonlyargs, *at.scope.args.args, *at.scope.args.kwonlyargs)]
            if name in arguments:
                return _calling(at.file, at.scope.name)[:3]
        outside = [s for s in every if name in _targets(s.node) and s.scope is not at.scope]
        return outside[-1:] or [s for s in every if getattr(s.node, "name", None) == name][:1]


def _calling(file: str, function: str) -> list[Statement]:
    """The statements of a file that call a function."""
    wanted = re.compile(rf"\b{re.escape(function)}\(")
    return [s for s in statements(file) if any(wanted.search(ast.unparse(e)) for e in s.expressions())]


def _before(at: Statement) -> list[Statement]:
    """The earlier statements in the same function."""
    return [s for s in statements(at.file) if s.scope is at.scope and s.line < at.line]


def acting_lines(file: str, source: re.Pattern[str], asked: Collection[Place] = ()) -> list[Place]:
    """The lines of a file that do something with a source, other than naming, printing or saving it."""
    slice_ = Slice(source, asked)
    found = []
    for statement in statements(file):
        expressions = list(statement.expressions())
        if not expressions or not slice_._has(statement, expressions) or slice_._is_source(statement):
            continue
        if isinstance(statement.node, ast.If):
            body = [s for s in statement.node.body if not (isinstance(s, ast.Expr) and _WRITING.search(ast.unparse(s)))]
            if not body:
                continue
            found.append((file, body[0].lineno))
        elif not _WRITING.search(ast.unparse(statement.node)):
            found.append(statement.place)
    return found


def carried_state(files: Collection[str], ends: Collection[Place]) -> list[tuple[Place, Place | None]]:
    """Statements that update state which the script keeps from step to step, such as `count += 1`.

    Each result is a pair: the line of the statement, and a line that calls its method, or None. Statements that affect
    the lines `ends`, which pass losses to backward, come first. State that is only printed is left out.
    """
    found: list[tuple[int, tuple[Place, Place | None]]] = []
    for file in files:
        every = statements(file)
        near = _known_as(
            _above([statement for end in ends if (statement := statement_at(*end)) is not None and end[0] == file])
        )
        for statement in every:
            names = {name.partition("[")[0] for name in _targets(statement.node)} - {"self"}
            if not _updates(statement, names) or not _repeated(statement):
                continue
            users = [
                s
                for s in every
                if s.place != statement.place
                and _known_as(names) & _known_as(_names(list(s.expressions())))
                and not _WRITING.search(ast.unparse(s.node))
                and not (isinstance(s.node, ast.If) and all(_WRITING.search(ast.unparse(b)) for b in s.node.body))
                and not isinstance(s.node, ast.Return)
            ]
            if users:
                called = calling_line(statement.place)
                rank = 0 if _known_as(names) & near else 1
                found.append((rank, (statement.place, called)))
    return [place for _, place in sorted(found, key=lambda one: one[0])]


def _known_as(names: Collection[str]) -> set[str]:
    """Drop the object from attributes: `self.value` in a method may be `control.value` outside of it."""
    return {name[name.index(".") :] if "." in name else name for name in names}


def _updates(statement: Statement, names: set[str]) -> bool:
    """Whether a statement computes its target from the target, or from a name that was computed from the target."""
    if isinstance(statement.node, ast.AugAssign):
        return bool(names)
    if not isinstance(statement.node, ast.Assign) or not names:
        return False
    used = set(_names(list(statement.expressions())))
    made = {
        name
        for s in _before(statement)
        if _targets(s.node) & used and isinstance(s.node, ast.Assign)
        for name in _names(list(s.expressions()))
    }
    attributes = {name for name in names if "." in name}
    return bool(names & used) or bool(attributes & made)


def _repeated(statement: Statement) -> bool:
    """Whether a statement runs repeatedly on the same variable: in a loop, or on an attribute in a method."""
    loops = any(isinstance(one, (ast.For, ast.While)) for one in statement.inside)
    attribute = any("." in name for name in _targets(statement.node))
    made = isinstance(statement.scope, FUNCTIONS) and statement.scope.name == "__init__"
    return not made and (loops or (isinstance(statement.scope, FUNCTIONS) and attribute))


def calling_line(place: Place) -> Place | None:
    """The first line that calls the function or method around this line."""
    statement = statement_at(*place)
    if statement is None or not isinstance(statement.scope, FUNCTIONS):
        return None
    calls = _calling(statement.file, statement.scope.name)
    return next((s.place for s in calls if s.scope is not statement.scope), None)


def defining_line(place: Place) -> Place | None:
    """The last assignment before this line, in the same function, to a name that the line uses."""
    statement = statement_at(*place)
    if statement is None:
        return None
    names, own = set(_names(list(statement.expressions()))), reversed(_before(statement))
    return next((s.place for s in own if isinstance(s.node, ast.Assign) and names & _targets(s.node)), None)


def _above(starts: list[Statement]) -> set[str]:
    """The names and attributes that these statements depend on, through assignments in the same file."""
    names: set[str] = set()
    waiting = list(starts)
    been: set[Place] = set()
    while waiting:
        statement = waiting.pop()
        if statement.place in been:
            continue
        been.add(statement.place)
        fresh = set(_names(list(statement.expressions()))) - names
        names |= fresh
        for other in statements(statement.file):
            if fresh & _targets(other.node) or getattr(other.node, "name", None) in fresh:
                waiting.append(other)
            elif any(name.rpartition(".")[2] == getattr(other.node, "name", None) for name in fresh if "." in name):
                waiting += [s for s in statements(other.file) if s.scope is other.node]
    return names


def matching_line(files: Collection[str], words: re.Pattern[str]) -> Place | None:
    """The first statement that contains these words."""
    every = (s for file in files for s in statements(file))
    return next((s.place for s in every if any(words.search(ast.unparse(e)) for e in s.expressions())), None)


def _names(expressions: list[ast.expr]) -> list[str]:
    """The names and attributes that these expressions use."""
    nodes = [node for one in expressions for node in ast.walk(one)]
    used = (n for n in nodes if isinstance(n, ast.Name) or isinstance(getattr(n, "value", None), ast.Name))
    return list(dict.fromkeys(ast.unparse(n) for n in used if isinstance(n, (ast.Name, ast.Attribute))))


def _targets(node: ast.stmt) -> set[str]:
    """The names and attributes that a statement assigns to."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    return {ast.unparse(n) for target in targets for n in ast.walk(target) if isinstance(n, (ast.Name, ast.Attribute))}
