"""How long a call waits. Every call that waits reads it with these functions."""

from ndpy._core import seconds as seconds
from ndpy._core import timeout as timeout
