"""TCP errors that loopback cannot cause, and the status of Connect for each (H.4.2)."""

from __future__ import annotations

import json

from hostile import WindowsProcess, windows_program

REFUSED, ABORTED, TIMEOUT = 0xC0000236, 0xC0000241, 0xC00000B5
NETWORK, HOST = 0xC000023C, 0xC000023D
BAD_ADDRESS, IN_USE, REMOVED = 0xC0000141, 0xC000020A, 0xC00002B6

# From 10000 on, Winsock's numbers (WSAE...); below, those of winerror.h, with which overlapped operations end.
EXPECTED = {
    10061: REFUSED,  # WSAECONNREFUSED
    1225: REFUSED,  # ERROR_CONNECTION_REFUSED
    10060: TIMEOUT,  # WSAETIMEDOUT
    121: TIMEOUT,  # ERROR_SEM_TIMEOUT, which ConnectEx gives on Windows
    1460: TIMEOUT,  # ERROR_TIMEOUT
    10050: NETWORK,  # WSAENETDOWN
    10051: NETWORK,  # WSAENETUNREACH
    10022: NETWORK,  # WSAEINVAL, Wine's error for a peer beyond loopback and a socket bound to loopback
    1231: NETWORK,  # ERROR_NETWORK_UNREACHABLE
    10064: HOST,  # WSAEHOSTDOWN
    10065: HOST,  # WSAEHOSTUNREACH
    1232: HOST,  # ERROR_HOST_UNREACHABLE
    10049: BAD_ADDRESS,  # WSAEADDRNOTAVAIL
    1214: BAD_ADDRESS,  # ERROR_INVALID_NETNAME, for a name that is not a peer's address
    10048: IN_USE,  # WSAEADDRINUSE
    1227: IN_USE,  # ERROR_ADDRESS_ALREADY_ASSOCIATED
    1617: REMOVED,  # ERROR_DEVICE_REMOVED
    10053: ABORTED,  # WSAECONNABORTED
    10054: ABORTED,  # WSAECONNRESET
    1236: ABORTED,  # ERROR_CONNECTION_ABORTED
    64: ABORTED,  # ERROR_NETNAME_DELETED, a reset during an overlapped operation
}


def test_h_4_2_each_error_of_tcp_has_its_status():
    with WindowsProcess(windows_program("connect_status"), *EXPECTED, limit_s=60) as process:
        statuses = json.loads(process.next_line())
        assert process.finish() == 0
    assert {int(error): hex(status) for error, status in statuses.items()} == {
        error: hex(status) for error, status in EXPECTED.items()
    }
