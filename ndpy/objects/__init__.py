"""The classes that users hold, and their parts. Import them from ndpy.

They own every state machine, lock and list, and call a platform for native steps.
"""
