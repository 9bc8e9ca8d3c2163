"""The report of a fleet's run, in the forms that people and programs read.

| file | what it has |
| --- | --- |
| `document.py`, `schema.json` | JSON, and its check against its schema |
| `schema.py` | the check of a document against a JSON Schema |
| `terminal.py` | tables for a terminal |
| `html.py` | one HTML file, by the template of `ndpy.tools.page` |
| `junit.py` | JUnit XML, which CI systems read |
| `openmetrics.py` | metrics for the folder of a node exporter |
| `diff.py` | what got worse and better from one report to another |
| `command.py` | the command `ndpy report` |
| `statistics.py` | what all of them show of many measurements |
| `options.py` | the options of commands, and the writing of files |
| `node_sets.py` | many names of nodes as one word |
"""
