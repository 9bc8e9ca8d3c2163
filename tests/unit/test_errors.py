"""The exceptions: their families, what they store, and how they read."""

from __future__ import annotations

import builtins
import errno
import os
import pickle

import pytest

import ndpy
from ndpy import errors

# What an errno of a native call means to the program, from the manual pages.
MEANINGS = {
    errno.ENOMEM: ndpy.InsufficientResourcesError,
    errno.EBUSY: ndpy.DeviceBusyError,
    errno.EACCES: ndpy.PermissionError,
    errno.EPERM: ndpy.PermissionError,
    errno.EFAULT: ndpy.AccessViolationError,
    errno.ENODEV: ndpy.DeviceRemovedError,
    errno.EOPNOTSUPP: ndpy.UnsupportedError,
    errno.EADDRINUSE: ndpy.AddressInUseError,
    errno.EADDRNOTAVAIL: ndpy.AddressUnreachableError,
    errno.ENETUNREACH: ndpy.AddressUnreachableError,
    errno.EHOSTUNREACH: ndpy.AddressUnreachableError,
    errno.ECONNREFUSED: ndpy.ConnectionRefusedError,
    errno.ECONNABORTED: ndpy.ConnectionAbortedError,
    errno.ETIMEDOUT: ndpy.TimeoutError,
    errno.ENOTCONN: ndpy.NotConnectedError,
    errno.ECANCELED: ndpy.CanceledError,
}

FAMILIES = {
    ndpy.ProviderError: OSError,
    ndpy.ProviderNotFoundError: OSError,
    ndpy.ClosedError: ValueError,
    ndpy.ForeignObjectError: ValueError,
    ndpy.InvalidBufferError: ValueError,
    ndpy.LimitExceededError: ValueError,
    ndpy.InvalidFlagsError: ValueError,
    ndpy.ElementRangeError: IndexError,
    ndpy.AdapterNotFoundError: LookupError,
    ndpy.NotConnectedError: ConnectionError,
    ndpy.ConnectionRefusedError: builtins.ConnectionRefusedError,
    ndpy.ConnectionAbortedError: builtins.ConnectionAbortedError,
    ndpy.TimeoutError: builtins.TimeoutError,
    ndpy.PermissionError: builtins.PermissionError,
    ndpy.AccessViolationError: builtins.PermissionError,
}


def all_errors() -> list[type[BaseException]]:
    return [thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, BaseException)]


@pytest.mark.parametrize("error", [e for e in all_errors() if e.__module__ == "ndpy.errors"], ids=lambda e: e.__name__)
def test_every_error_has_the_one_root_a_docstring_and_a_public_name(error):
    assert issubclass(error, ndpy.NdpyError)
    assert error.__doc__
    assert getattr(ndpy, error.__name__) is error
    assert (error.__name__ in ndpy.__all__) != hasattr(builtins, error.__name__)


def test_a_star_import_hides_no_builtin():
    assert not set(ndpy.__all__) & set(dir(builtins))


@pytest.mark.parametrize(("error", "family"), FAMILIES.items(), ids=lambda e: e.__name__)
def test_errors_are_of_pythons_families(error, family):
    assert issubclass(error, family)


@pytest.mark.parametrize(("number", "error"), MEANINGS.items(), ids=lambda value: str(value))
def test_an_errno_chooses_the_class_and_is_kept(number, error):
    made = errors.from_errno("ibv_reg_mr", number)
    assert type(made) is error
    assert (made.operation, made.native, made.native_name) == ("ibv_reg_mr", number, errno.errorcode[number])
    assert made.errno == number
    assert "ibv_reg_mr" in str(made)
    assert errno.errorcode[number] in str(made)


@pytest.mark.parametrize("number", [errno.EDOM, 9999, -9999])
def test_unknown_numbers_pass_through(number):
    made = errors.from_errno("ibv_poll_cq", number)
    assert type(made) is ndpy.ProviderError
    assert made.native == abs(number)
    assert str(abs(number)) in str(made)


def test_what_failed_is_followed_by_the_reason():
    assert errors.from_errno("x", errno.EBUSY, "no window").message == f"no window: {os.strerror(errno.EBUSY)}"
    assert errors.from_errno("x", errno.ENOMEM, "no window").message.startswith(
        "no window: the adapter or the system has"
    )
    assert errors.from_errno("x", errno.EBUSY).message == os.strerror(errno.EBUSY)


def test_a_shortage_says_what_to_do():
    assert "close what is not needed" in str(errors.from_errno("create queue pair", errno.ENOMEM))
    for number in (errno.EMFILE, errno.ENFILE):
        assert "limit" in str(errors.from_errno("create queue pair", number, "in whatever words"))


def test_negative_numbers_are_the_kernels_way_to_say_the_same():
    assert type(errors.from_errno("x", -errno.ENOMEM)) is ndpy.InsufficientResourcesError


def test_provider_errors_can_be_pickled():
    """An error crosses from a worker process to its parent."""
    error = ndpy.QueueFullError("all 4 slots are taken", operation="send", native=12)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ndpy.QueueFullError
    assert (again.message, again.operation, again.native) == (error.message, "send", 12)
    assert str(again) == str(error)


def test_a_refusal_before_the_native_call_has_no_number():
    error = ndpy.NotConnectedError("connect first", operation="send")
    assert (error.native, error.native_name) == (0, "")
    assert str(error) == "send: connect first (ndpy explain not-connected)"
