"""Finds token arithmetic that belongs in ``regista.tokens``.

Two things are looked for. In files that use torch, an index that takes tokens by number:
``x[:, 1:]``, ``x[:, 0]``, ``attention[:, :, 0, 1:]``, ``x.narrow(1, 1, n)``, and slices bounded by a
count of prefix tokens or registers. In any file, a grid side from a square root: ``int(n ** 0.5)``.
Pictures and boxes are left alone: channels are the last axis, ``picture[:, :, 0]`` or ``[..., :3]``,
and numpy arrays hold no tokens (a name annotated as one, or assigned from ``np.`` or ``.numpy()``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

COUNTS = re.compile(r"(num_(prefix|reg|cls|special)|prefix_tokens|n_?reg|num_registers)", re.IGNORECASE)
TOKEN_DIMENSIONS = (1, 2, -2)


def token_slices(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, code) of every index that takes tokens by number or by a prefix count."""
    if _uses_torch(tree):
        yield from _token_slices(tree, frozenset({"np", "numpy"}))


def _token_slices(node: ast.AST, arrays: frozenset[str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arrays = _array_names(node, arrays)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        if _takes_tokens(node.slice.elts) and not _is_array(node.value, arrays):
            yield node.lineno, ast.unparse(node)
    elif isinstance(node, ast.Call) and _narrows_tokens(node):
        yield node.lineno, ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from _token_slices(child, arrays)


def _array_names(function: ast.FunctionDef | ast.AsyncFunctionDef, known: frozenset[str]) -> frozenset[str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = known - {argument.arg for argument in arguments}
    names |= {argument.arg for argument in arguments if _says_array(argument.annotation)}
    for _ in range(2):  # a name may stand above the one it comes from, in a loop
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and _says_array(node.annotation):
                names |= {ast.unparse(node.target)}
            elif isinstance(node, ast.Assign) and _is_array(node.value, names):
                names |= {ast.unparse(target) for target in node.targets}
    return names


def _says_array(annotation: ast.expr | None) -> bool:
    return annotation is not None and "ndarray" in ast.unparse(annotation).lower()


def _is_array(node: ast.expr, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "numpy" or _is_array(node.func.value, names)
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return ast.unparse(node) in names or _is_array(node.value, names)
    if isinstance(node, ast.BinOp):
        return _is_array(node.left, names) or _is_array(node.right, names)
    return isinstance(node, ast.Name) and node.id in names


def square_grids(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, code) of every integer made from a square root."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        whole = name in ("int", "round", "floor", "ceil") and any(_is_root(inner) for inner in ast.walk(node))
        if name == "isqrt" or whole:
            yield node.lineno, ast.unparse(node)


def _uses_torch(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "torch" for name in names):
            return True
    return False


def _takes_tokens(elements: list[ast.expr]) -> bool:
    first, *rest = elements
    if _is_whole(first):  # x[:, ...]: the second axis holds the tokens, or heads and then tokens
        # the last of three axes may be a picture's channels
        channels = len(rest) == 2 and _is_whole(rest[0]) and not _from_a_number_on(rest[1])
        return not channels and any(_is_number(part) or _is_count(part) for part in rest)
    if isinstance(first, ast.Constant) and first.value is Ellipsis:  # x[..., 1:, :] or attention[..., 1:]
        before_last = rest[:-1]
        return any(_is_number(part) or _is_count(part) for part in before_last) or (
            bool(rest) and (_from_a_number_on(rest[-1]) or _is_count(rest[-1]))
        )
    return False


def _narrows_tokens(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("narrow", "select"):
        return False
    given = [_value(argument) for argument in node.args]
    # narrow(dim, start, length); an empty piece and a start from a layout's slice are fine
    empty = len(given) == 3 and given[2] == 0
    return len(given) >= 2 and given[0] in TOKEN_DIMENSIONS and isinstance(given[1], int) and not empty


def _is_whole(node: ast.expr) -> bool:
    return isinstance(node, ast.Slice) and node.lower is None and node.upper is None and node.step is None


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Slice):
        return isinstance(_value(node.lower), int) or isinstance(_value(node.upper), int)
    return isinstance(_value(node), int)


def _is_count(node: ast.expr) -> bool:
    bounds = [node.lower, node.upper] if isinstance(node, ast.Slice) else [node]
    return any(bound is not None and COUNTS.search(ast.unparse(bound)) is not None for bound in bounds)


def _from_a_number_on(node: ast.expr) -> bool:
    return isinstance(node, ast.Slice) and isinstance(_value(node.lower), int)


def _value(node: ast.expr | None) -> object:
    if node is None:
        return None
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return None if isinstance(value, bool) else value


def _is_root(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _called(node) in ("sqrt", "isqrt")
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and _value(node.right) == 0.5


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""
