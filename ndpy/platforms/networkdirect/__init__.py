"""The public classes over NetworkDirect providers.

Importing the package loads nothing, so parts of it work on any system.
"""
