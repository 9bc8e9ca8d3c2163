"""soft0 endures: peers and hosts that die, memory that goes away, forks, many connections, and limits.

Most tests run a C program of programs/, because Python's own threads, memory and signals would disturb the counting.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from c_programs import number, run
from kit.helpers import DEADLINE_S, SEED, STRESS, rounds

import ndpy

# ---- many connections ----


@pytest.mark.parametrize("by", ["cm", "hand"])
def test_many_connections_leave_nothing_behind(by):
    """Both ends of each are in one process. Every connection carries messages, writes and reads in both directions."""
    connections = rounds(1000, 100)
    out = run("many_connections", connections, 500, by)
    stages = {line.split(":")[0]: line for line in out.splitlines() if "kib_each" in line}
    assert number("threads", stages["used"]) == number("threads", stages["before"])
    # Two ends, with queues for 4 requests. Their large buffers are given back one to two seconds after the last use.
    assert number("kib_each", stages["idle"]) < 90


def test_idle_connections_cost_no_processor_time():
    """100 connections for two seconds."""
    assert number("processor_ms", run("many_connections", 100, 2000, "cm")) < 5


# ---- many times ----


@pytest.mark.timeout(rounds(620, 120))
def test_what_is_made_and_closed_again_and_again_leaves_nothing_behind():
    """Each kind of object, whole contexts, and connections, by hand and by the connection manager."""
    run("cycles", rounds(10000, 250), timeout_s=rounds(600, 110))


# ---- peers that die ----


@pytest.mark.parametrize("habit", ["polled", "written"])
def test_what_a_peer_has_taken_succeeds_although_its_process_ends(habit):
    run("last_message", habit, rounds(200, 40))


@pytest.mark.parametrize("during", ["writes", "reads", "messages", "idle", "connecting", "accepting"])
def test_a_killed_peer_ends_requests_and_connection(during):
    """At once: its kernel says so. Every request completes, and nothing is left."""
    run("killed_peer", during, rounds(100, 4), SEED)


SENDER = """
import os, signal, sys
import ndpy

with ndpy.open_adapter("soft0") as adapter, adapter.create_completion_queue(16) as queue:
    queue_pair = adapter.create_queue_pair(queue)
    connector = adapter.connect(queue_pair, ("127.0.0.1", int(sys.argv[1])), timeout_s=30)
    region = adapter.register(bytes(int(sys.argv[2])), ndpy.Access.NONE)
    for _ in range(4):
        queue_pair.send(region)
    print("sent", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("size", [1_000, 100_000, 3_000_000])
def test_a_peer_is_missed_that_dies_while_its_message_waits_for_a_receive(keep, size):
    """A message waits for a shared queue without limit. The larger ones fill what TCP has room for, so that the peer's
    system still has some of them, and can say nothing."""
    adapter = keep(ndpy.open_adapter("soft0"))
    queue = keep(adapter.create_completion_queue(16))
    queue_pair = keep(adapter.create_queue_pair(queue, srq=keep(adapter.create_shared_receive_queue(4))))
    listener = keep(adapter.listen(("127.0.0.1", 0)))
    command = [sys.executable, "-c", SENDER, str(listener.address[1]), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdin is not None and sender.stdout is not None
        connector = keep(listener.get_request(DEADLINE_S))
        connector.accept(queue_pair, timeout_s=DEADLINE_S)
        assert sender.stdout.readline() == "sent\n"
        time.sleep(0.2)
        with pytest.raises(ndpy.errors.TimeoutError):
            connector.wait_disconnected(0)
        sender.communicate("die\n", timeout=DEADLINE_S)
        connector.wait_disconnected(DEADLINE_S)


def test_a_stopped_peer_ends_nothing():
    """For three seconds. See silent_host.c for longer."""
    run("killed_peer", "stopped", 1, SEED)


# ---- memory that goes away ----


@pytest.mark.parametrize("handler", ["none", "own"])
def test_memory_that_goes_away_ends_the_connection_and_not_the_process(handler):
    """Unmapped, protected, or a file that is cut; the peer's target or source, or this side's."""
    run("missing_memory", handler)


UNMAPPING = """
import ctypes, faulthandler, mmap, sys
import ndpy

if sys.argv[1] == "before":
    faulthandler.enable()
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size = 1 << 20
with ndpy.open_adapter("soft0") as adapter:
    if sys.argv[1] == "after":
        faulthandler.enable()
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    with (
        adapter.register(bytearray(size), ndpy.Access.NONE) as source,
        adapter.register((address, size), ndpy.Access.REMOTE_WRITE) as region,
        adapter.create_completion_queue(16) as queue,
        adapter.create_queue_pair(queue) as near,
        adapter.create_queue_pair(queue) as far,
        adapter.listen(("127.0.0.1", 0)) as listener,
        adapter.create_connector() as connector,
    ):
        connecting = connector.begin_connect(near, listener.address)
        with listener.get_request(timeout_s=20) as request:
            accepting = request.begin_accept(far)
            connecting.result(timeout_s=20)
            connector.complete_connect(timeout_s=20)
            accepting.result(timeout_s=20)
            near.write(source, region.remote())
            queue.wait(timeout_s=20)[0].raise_for_status()
            near.write(source, region.remote(), context=1)
            libc.munmap(address, size)
            near.write(source, region.remote(), context=2)
            taken = []
            while len(taken) < 2:
                taken += queue.wait(timeout_s=20)
            print([completion.status.name for completion in taken if not completion.ok][0])
            connector.wait_disconnected(timeout_s=20)
print("goes on")
ctypes.string_at(8)
"""


@pytest.mark.parametrize("handler", ["before", "after", "none"])
def test_pythons_fault_handler_sees_the_programs_faults_only(handler):
    """faulthandler is enabled before or after soft0 is opened. A fault of the program's own still ends it."""
    done = subprocess.run(
        [sys.executable, "-c", UNMAPPING, handler], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["ACCESS_VIOLATION", "goes on"], done.stderr
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.count("Fatal Python error: Segmentation fault") == (handler != "none")


# ---- hosts that fall silent ----


@pytest.mark.parametrize("what", ["requests", "connecting", "idle", "stopped"])
def test_only_requests_notice_that_the_peers_host_is_silent(what):
    """They fail within 15 s. A stopped process is not a silent host, however long it is stopped."""
    if not STRESS and what != "requests":
        pytest.skip("takes 15 s: with NDPY_STRESS=1 only")
    run("silent_host", *([] if what == "requests" else [what]))


# ---- threads that wait ----


def test_signals_and_cancellation_end_a_wait_as_on_a_card():
    """A signal ends it with EINTR, or not at all with SA_RESTART. A thread that is canceled keeps no lock."""
    run("waiting")


def test_what_is_closed_has_no_events():
    """rping's threads ask for events until the process ends, also after its main thread closed the channel."""
    run("closed_sources")


def test_a_socket_wakes_the_thread_that_polls_a_channel_and_no_other():
    """Unless that thread does not come. Then the workers do the work, and it is woken for its events alone."""
    run("loops")


def test_a_handler_may_jump_out_of_a_wait():
    """The library goes on handling its sockets, even if the thread never calls it again, and loses no message."""
    run("jumping")


# ---- limits ----


def test_a_process_without_descriptors_gets_errors_and_loses_nothing():
    """Each call says so. A listener waits without spinning, and takes the connection when a descriptor is free."""
    run("few_descriptors")


@pytest.mark.parametrize("in_a_row", [1, 5])
def test_memory_that_is_missing_is_an_error_and_leaves_nothing_behind(in_a_row):
    """Each call for memory, a mapping or a thread fails once, alone or with the four behind it."""
    if in_a_row > 1 and not STRESS:
        pytest.skip("with NDPY_STRESS=1 only")
    run("failing_memory", 1, 1, in_a_row)


# ---- forks ----


def test_forked_children_begin_anew_and_their_parents_live_on():
    """Children leave, use and close what they inherited, become other programs, and open the device themselves."""
    run("forked", rounds(300, 20))


FORKING = """
import os, subprocess, sys, threading
import ndpy

def exchange(adapter):
    target = bytearray(1 << 20)
    with (
        adapter.register(os.urandom(1 << 20), ndpy.Access.NONE) as source,
        adapter.register(target, ndpy.Access.REMOTE_WRITE) as region,
        adapter.create_completion_queue(16) as queue,
        adapter.create_queue_pair(queue) as near,
        adapter.create_queue_pair(queue) as far,
        adapter.listen(("127.0.0.1", 0)) as listener,
        adapter.create_connector() as connector,
    ):
        connecting = connector.begin_connect(near, listener.address)
        with listener.get_request(timeout_s=20) as request:
            accepting = request.begin_accept(far)
            connecting.result(timeout_s=20)
            connector.complete_connect(timeout_s=20)
            accepting.result(timeout_s=20)
            for _ in range(5):
                near.write(source, region.remote())
                for completion in queue.wait(timeout_s=20):
                    completion.raise_for_status()
            assert target == source.buffer
            yield
            near.write(source, region.remote())
            queue.wait(timeout_s=20)[0].raise_for_status()
            connector.disconnect(timeout_s=20)
    yield

def once():
    with ndpy.open_adapter("soft0") as adapter:
        list(exchange(adapter))

stop = threading.Event()

def keep_busy():
    while not stop.is_set():
        once()

with ndpy.open_adapter("soft0") as adapter:
    steps = exchange(adapter)
    next(steps)
    busy = threading.Thread(target=keep_busy)
    busy.start()
    for number in range(int(sys.argv[1])):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                once()
                try:
                    adapter.create_completion_queue(8)
                except ndpy.ClosedError:
                    status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0) == (child, 0), number
        subprocess.run(["true"], check=True)
    stop.set()
    busy.join()
    next(steps)
print("ok")
"""


def test_a_child_of_a_busy_python_program_opens_an_adapter_of_its_own():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, str(rounds(50, 5))],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.timeout(rounds(1300, 120))
@pytest.mark.parametrize("connections", [[60], [7_000], [9_800, 9_800, 400]], ids=["60", "7000", "20000"])
def test_connections_that_lack_memory_or_descriptors_wait_and_do_not_end(connections):
    """All of them send at once, with room for the buffers of a few.

    Each number is a process, because one with 20,000 needs a hard limit of 40,600 descriptors. So many connections that
    wait are more than the kernel's queues hold questions for, if TCP asks at once whether their hosts are there.
    """
    if not STRESS and connections != [60]:
        pytest.skip("with NDPY_STRESS=1 only")
    room = 8192 if connections == [60] else 65536
    with ThreadPoolExecutor(len(connections)) as threads:
        for done in [
            threads.submit(run, "short_of_memory", count, room, timeout_s=rounds(1200, 110)) for count in connections
        ]:
            done.result()
