"""enum ndpy_operation for cffi, which reads no macros: made of the table in operations.h."""

import re
from pathlib import Path


def declaration() -> str:
    rows = re.findall(r"^ {4}ROW\((\w+), (\d+),", Path(__file__).with_suffix(".h").read_text(), re.MULTILINE)
    return f"enum ndpy_operation {{ {', '.join(f'NDPY_{name} = {number}' for name, number in rows)} }};"
