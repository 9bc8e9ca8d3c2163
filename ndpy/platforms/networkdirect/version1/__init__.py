"""The differences of NetworkDirect version 1 (contract section I).

Version 1 is frozen: it is tested on softnd, and it changes only to correct faults. See docs/explained/frozen.md.

An adapter is opened by an address and has one overlapped file. A registration has a handle, but no object, no rights
and no token. A queue pair's native endpoint belongs to one connector, and is made when the two come together. Peers
reach memory through windows only. They name it by a descriptor and an offset.
"""
