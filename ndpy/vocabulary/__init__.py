"""What everything else speaks of: flags, descriptions, addresses, quirks of drivers, and what this system tells.

No module here imports one outside but ndpy.errors.
"""
