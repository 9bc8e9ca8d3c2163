"""What a coroutine of ndpy.aio awaits at its end is in a Finally. The garbage collector may close the coroutine, in any
thread, and what a `finally` block awaits then runs there.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def awaits(statements: list[ast.stmt]) -> bool:
    kinds = (ast.Await, ast.AsyncWith, ast.AsyncFor)
    return any(isinstance(node, kinds) for statement in statements for node in ast.walk(statement))


def catches(handler: ast.ExceptHandler, name: str) -> bool:
    return handler.type is None or name in ast.unparse(handler.type)


def awaits_when_closed(block: ast.Try) -> bool:
    """Whether a coroutine that is closed while it awaits something in the block awaits something else."""
    if not awaits(block.body):
        return False
    for handler in block.handlers:
        if catches(handler, "GeneratorExit") or catches(handler, "BaseException"):
            return awaits(handler.body) or awaits(block.finalbody)
    return awaits(block.finalbody)


def test_no_coroutine_awaits_anything_while_it_is_closed():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "ndpy/aio").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Try) and awaits_when_closed(node)
    ]
    assert not found, "await this in a Finally of ndpy/aio/life.py"
