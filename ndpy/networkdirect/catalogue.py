from typing import Any


def entries() -> list[Any]:
    return []


def bitness(path: str) -> str:
    return ""
