"""Fixtures of the tests without an adapter: the verbs provider without a device, and the points between its calls."""

import sys

if sys.platform == "linux":
    from data_path_provider import provider, provider_path  # noqa: F401
    from fake_verbs import fake, fake_verbs_path  # noqa: F401
    from racing import adapter, points  # noqa: F401
