"""What is right and wrong with RDMA on this machine: the public names of ndpy.tools.doctor."""

from ndpy.tools.doctor import Finding, LinkDescription, describe_link, diagnose, record

__all__ = ["Finding", "LinkDescription", "describe_link", "diagnose", "record"]
