"""0 is a number and not the absence of one: `x or default` and `x if x else default` replace it in silence."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from tests.tools.sources import modules

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
NUMBERS = {"int", "float"}
NO_ZERO = {"os.cpu_count()"}
"""Numbers that may be missing and are never 0."""


def is_number(annotation: ast.expr | None) -> bool:
    """Says whether an annotation means a number that may be missing: `int`, `float | None`, `Annotated[int, ...]`."""
    match annotation:
        case ast.Constant(value=str() as text):
            return is_number(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            members = [each for each in (left, right) if not (isinstance(each, ast.Constant) and each.value is None)]
            return bool(members) and all(map(is_number, members))
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return is_number(first)
        case ast.Name(id=name):
            return name in NUMBERS
    return False


def annotated(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Returns the names of attributes, and of functions, that are numbers wherever one of that name is defined."""
    attributes: dict[str, set[bool]] = defaultdict(set)
    results: dict[str, set[bool]] = defaultdict(set)
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    attributes[each.target.id].add(is_number(each.annotation))
                elif isinstance(each, Function) and "property" in map(ast.unparse, each.decorator_list):
                    attributes[each.name].add(is_number(each.returns))
        if isinstance(node, Function):
            results[node.name].add(is_number(node.returns))
    return tuple({name for name, found in each.items() if found == {True}} for each in (attributes, results))  # type: ignore[return-value]


def replaced_zeros(nodes: list[ast.AST], attributes: set[str], results: set[str]) -> Iterator[tuple[int, str]]:
    """Yields line and text of each expression that puts another number in the place of a number that may be 0."""
    names: set[str] = set()

    def is_numeric(value: ast.expr) -> bool:
        match value:
            case ast.Constant(value=number):
                return isinstance(number, int | float) and not isinstance(number, bool)
            case ast.Name(id=name):
                return name in names
            case ast.Attribute(attr=name):
                return name in attributes
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=given):
                # value_of(config, name, int, default) returns what it is told
                return name in results or any(isinstance(each, ast.Name) and each.id in NUMBERS for each in given)
        return False

    def is_replaced(value: ast.expr, other: ast.expr) -> bool:
        # 0 and None in the place of 0 change nothing, or say that 0 is none
        is_same = isinstance(other, ast.Constant) and other.value in (0, None) and other.value is not False
        return not is_same and ast.unparse(value) not in NO_ZERO and (is_numeric(value) or is_numeric(other))

    conditions = {id(each) for node in nodes for each in conditions_of(node)}
    for scope in (node for node in nodes if isinstance(node, Function)):
        given = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
        names = {each.arg for each in given if is_number(each.annotation)}
        inner = list(ast.walk(scope))
        for node in inner:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and is_numeric(node.value):
                names.add(node.targets[0].id)
        for expression in (each for each in inner if isinstance(each, ast.expr)):
            match expression:
                case ast.BoolOp(op=ast.Or(), values=[*firsts, last]) if id(expression) not in conditions:
                    wrong = any(is_replaced(each, last) for each in firsts)
                case ast.IfExp(test=test, body=body, orelse=last):
                    wrong = ast.unparse(test) == ast.unparse(body) and is_replaced(test, last)
                case _:
                    wrong = False
            if wrong:
                yield expression.lineno, ast.unparse(expression)


def conditions_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions of a node of which only the truth counts."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
            yield from truths(test)
        case ast.comprehension(ifs=tests):
            for each in tests:
                yield from truths(each)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from truths(operand)
        case ast.Call(func=ast.Name(id="bool" | "any" | "all"), args=given):
            for each in given:
                yield from truths(each.elt if isinstance(each, ast.GeneratorExp) else each)


def truths(test: ast.expr) -> Iterator[ast.expr]:
    """Yields a condition and those that it joins."""
    yield test
    for each in test.values if isinstance(test, ast.BoolOp) else []:
        yield from truths(each)


def test_no_number_takes_the_place_of_zero() -> None:
    attributes, results = annotated(node for module in modules() for node in module.nodes)
    wrong = {
        f"{module.name}:{line}: {text}"
        for module in modules()
        for line, text in replaced_zeros(module.nodes, attributes, results)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_a_replaced_zero_is_recognised() -> None:
    source = """
class Section:
    size: int | None = None
    name: str | None = None
    @property
    def width(self) -> "float | None": ...

def found(config) -> int | None: ...

def good(section, config, number: int | None, rows: list[int]):
    a = number or 0
    b = section.name or section.size and "x"
    c = rows or [1]
    d = 1 if number is None else number
    e = section.size or None
    if number or section.size or found(config): return number is None or b
    f = os.cpu_count() or 1
    return any(each or number for each in rows)

def bad(section, config, number: int | None, text, default: float):
    a = number or 1
    b = section.size or text
    c = text or default
    d = found(config) or text
    e = needed_value(config, "x", int) or text
    f = number if number else 2
    g = section.width or text
    h = value_of(config, "y", float, None)
    i = h or default
    j = text or number or 3
"""
    nodes = list(ast.walk(ast.parse(source)))
    found = dict(replaced_zeros(nodes, *annotated(nodes)))
    first = source.splitlines().index("def bad(section, config, number: int | None, text, default: float):") + 2
    assert [*found] == [*range(first, first + 7), first + 8, first + 9], found
