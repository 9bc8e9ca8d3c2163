/* One file, because all of it is the state of one system, which engine/system.h describes. */
#include "world.h"
#include "transport.h"
#include "watch.h"
#include "wire/wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST       16
#define NEVER      UINT64_MAX
#define FIRST_PORT 5000
#define TURNS      100000u

struct connection {
    bool open, listening, connected, canceled, fin, reset;
    uint8_t *input;
    size_t begin, end, capacity;
    struct io *receiving, *sending, *connecting;
    void *receive_data;
    const void *send_data;
    size_t receive_size, send_size;
    unsigned waiting; /* connections to be accepted */
    uint64_t asked_at, silent_since;
    unsigned asked;
    struct watch *watch;
    /* What the engine sent: it has to be well formed. */
    uint8_t *output;
    size_t sent, output_capacity;
};

static struct connection connections[MOST];
static struct io *posted, **last_posted = &posted;
static uint64_t clock_ms;
static size_t chunk, room;
static unsigned locks;
static enum world_connects connects;
static bool receives_stay;
static bool lacks_pages, lacks_copies, lacks_buffers;

void world_require(bool condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "the engine: %s\n", what);
    abort();
}

/* ---- Locks ---- */

void lock_start(struct lock *lock)
{
    lock->exclusive = lock->shared = 0;
}

void lock_acquire(struct lock *lock)
{
    world_require(lock->exclusive == 0 && lock->shared == 0, "would wait for a lock of its own");
    lock->exclusive = 1;
    locks++;
}

void lock_release(struct lock *lock)
{
    world_require(lock->exclusive == 1, "releases a lock that it does not have");
    lock->exclusive = 0;
    locks--;
}

void lock_share(struct lock *lock)
{
    world_require(lock->exclusive == 0, "would wait for a lock of its own");
    lock->shared++;
}

void lock_unshare(struct lock *lock)
{
    world_require(lock->shared-- > 0, "releases a lock that it does not share");
}

void condition_start(struct condition *condition)
{
    condition->wakes = 0;
}

static bool step(void);

void condition_wait_ms(struct condition *condition, struct lock *lock, uint64_t ms)
{
    uint32_t wakes = condition->wakes;

    lock_release(lock);
    while (step())
        ;
    if (condition->wakes == wakes) {
        uint64_t next = timers_run();
        world_require(next != TIMERS_NONE || ms != UINT64_MAX, "waits for ever");
        clock_ms += next < ms ? next : ms;
        world_run();
    }
    lock_acquire(lock);
}

void condition_wait(struct condition *condition, struct lock *lock)
{
    condition_wait_ms(condition, lock, UINT64_MAX);
}

void condition_wake_all(struct condition *condition)
{
    condition->wakes++;
}

/* ---- Threads and time ---- */

uint64_t thread_id(void)
{
    return 1;
}

void thread_yield(void) {}

uint64_t now_ms(void)
{
    return clock_ms;
}

unsigned workers_start(void)
{
    return 1;
}

void workers_stop(void)
{
    world_run();
}

void workers_wake(void) {}

static void post(struct io *io, nd_status error, size_t bytes)
{
    io->next = NULL;
    io->error = error;
    io->bytes = bytes;
    *last_posted = io;
    last_posted = &io->next;
}

void worker_post(struct io *io)
{
    post(io, ND_SUCCESS, 0);
}

/* ---- Sockets ---- */

static struct connection *of(socket_handle handle)
{
    world_require(handle >= 0 && handle < MOST && connections[handle].open, "uses a socket that is closed");
    return &connections[handle];
}

static socket_handle new_socket(void)
{
    for (int i = 0; i < MOST; i++)
        if (!connections[i].open) {
            struct connection *made = &connections[i];
            free(made->input);
            free(made->output);
            memset(made, 0, sizeof *made);
            made->open = true;
            made->asked_at = made->silent_since = NEVER;
            return i;
        }
    return NO_SOCKET;
}

socket_handle socket_bound(const struct sockaddr_storage *address, bool listening, nd_status *status)
{
    socket_handle handle = new_socket();

    (void)address;
    *status = handle == NO_SOCKET ? ND_TOO_MANY_OPENED_FILES : ND_SUCCESS;
    if (handle != NO_SOCKET)
        connections[handle].listening = listening;
    return handle;
}

socket_handle socket_for_connecting(const struct sockaddr_storage *own, nd_status *status)
{
    return socket_bound(own, false, status);
}

void socket_set_up(socket_handle handle)
{
    (void)of(handle);
}

bool socket_set_service_type(socket_handle handle, uint8_t value)
{
    (void)of(handle);
    (void)value;
    return true;
}

bool socket_address(socket_handle handle, struct sockaddr_storage *out)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)(FIRST_PORT + handle)),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

    (void)of(handle);
    memset(out, 0, sizeof *out);
    memcpy(out, &address, sizeof address);
    return true;
}

/* Whatever the peer did, the engine sends a start-up frame, and then FPDUs in the right order. */
static void check_output(const struct connection *connection)
{
    struct wire_receiver receiver = {0};
    struct mpa_frame frame;
    const uint8_t *at = connection->output;
    size_t left = connection->sent, used = 0;

    if (left == 0)
        return;
    int result = mpa_decode(at, left, false, &frame, &used);
    if (result == MPA_FRAME)
        result = mpa_decode(at, left, true, &frame, &used);
    world_require(result == WIRE_OK || result == WIRE_MORE, "sends no start-up frame");
    while (result == WIRE_OK) {
        struct wire_segment segment;
        at += used;
        left -= used;
        result = wire_parse(at, left, frame.crc, &segment, &used);
        if (result == WIRE_OK)
            world_require(wire_receive(&receiver, &segment) == WIRE_OK, "sends a segment out of order");
    }
    world_require(result == WIRE_MORE, "sends something that is not an FPDU");
}

static void close_connection(struct connection *connection)
{
    check_output(connection);
    world_require(connection->receiving == NULL && connection->sending == NULL && connection->connecting == NULL,
                  "closes a socket that is in use");
    connection->open = false;
}

void socket_discard(socket_handle handle)
{
    close_connection(of(handle));
}

bool socket_start(struct socket *socket, socket_handle handle, bool accepted)
{
    world_require(accepted == connections[handle].connected, "starts a socket of another kind");
    socket->handle = handle;
    socket->worker = transport_next_worker();
    return true;
}

socket_handle socket_accept(socket_handle listening, struct sockaddr_storage *peer)
{
    struct connection *from = of(listening);
    socket_handle handle = NO_SOCKET;

    if (from->waiting > 0) {
        from->waiting--;
        handle = new_socket();
    }
    if (handle == NO_SOCKET) {
        errno = EAGAIN;
        return NO_SOCKET;
    }
    connections[handle].connected = true;
    if (peer != NULL)
        socket_address(handle, peer);
    return handle;
}

enum io_result socket_connect(struct socket *socket, struct io *io, const struct sockaddr_storage *peer,
                              nd_status *error)
{
    struct connection *connection = of(socket->handle);

    (void)peer;
    world_require(connection->connecting == NULL && !connection->connected, "connects twice");
    if (connects == REFUSES_AT_ONCE) {
        *error = ND_CONNECTION_REFUSED;
        return IO_FAILED;
    }
    if (connects == CONNECTS_AT_ONCE) {
        connection->connected = true;
        return IO_DONE;
    }
    connection->connecting = io;
    return IO_PENDING;
}

void socket_connected(struct socket *socket, struct sockaddr_storage *local)
{
    socket_address(socket->handle, local);
}

static void keep_output(struct connection *connection, const void *data, size_t size)
{
    if (connection->sent + size > connection->output_capacity) {
        connection->output_capacity = 2 * (connection->sent + size);
        connection->output = realloc(connection->output, connection->output_capacity);
        world_require(connection->output != NULL, "no memory for its output");
    }
    if (size == 0)
        return;
    memcpy(connection->output + connection->sent, data, size);
    connection->sent += size;
}

static size_t take_output(struct connection *connection, const void *data, size_t size)
{
    size_t taken = size < room ? size : room;

    room -= taken;
    keep_output(connection, data, taken);
    return taken;
}

enum io_result socket_send(struct socket *socket, struct io *io, const void *data, size_t size, bool more, size_t *sent,
                           nd_status *error)
{
    struct connection *connection = of(socket->handle);

    (void)more;
    world_require(connection->sending == NULL && size > 0, "sends twice at once, or nothing");
    if (connection->reset || connection->canceled || !connection->connected) {
        *error = ND_CONNECTION_ABORTED;
        return IO_FAILED;
    }
    if (lacks_buffers) {
        *error = ND_INSUFFICIENT_RESOURCES;
        return IO_FAILED;
    }
    *sent = take_output(connection, data, size);
    if (*sent > 0)
        return IO_DONE;
    connection->sending = io;
    connection->send_data = data;
    connection->send_size = size;
    return IO_PENDING;
}

/* True if a receive ends now. */
static bool take_input(struct connection *connection, void *data, size_t size, size_t *bytes, nd_status *error)
{
    size_t there = connection->end - connection->begin;

    *bytes = 0;
    *error = ND_SUCCESS;
    if (there > 0) {
        *bytes = there < size ? there : size;
        *bytes = *bytes < chunk ? *bytes : chunk;
        memcpy(data, connection->input + connection->begin, *bytes);
        connection->begin += *bytes;
        return true;
    }
    if (connection->reset)
        *error = ND_CONNECTION_ABORTED;
    return connection->fin || connection->reset;
}

enum io_result socket_receive(struct socket *socket, struct io *io, void *data, size_t size, size_t *received,
                              nd_status *error)
{
    struct connection *connection = of(socket->handle);

    world_require(connection->receiving == NULL && size > 0, "receives twice at once, or nothing");
    if (connection->canceled) {
        *error = ND_CANCELED;
        return IO_FAILED;
    }
    if (lacks_buffers) {
        *error = ND_INSUFFICIENT_RESOURCES;
        return IO_FAILED;
    }
    if (take_input(connection, data, size, received, error))
        return *error == ND_SUCCESS ? IO_DONE : IO_FAILED;
    connection->receiving = io;
    connection->receive_data = data;
    connection->receive_size = size;
    return IO_PENDING;
}

static void cancel(struct io **io, nd_status error);

enum move socket_receive_elsewhere(struct socket *socket, struct io *io, void *data, size_t size)
{
    struct connection *connection = of(socket->handle);

    if (connection->receiving != io)
        return MOVE_FAILED;
    if (receives_stay) {
        cancel(&connection->receiving, ND_CONNECTION_ABORTED);
        return MOVE_ENDS;
    }
    connection->receive_data = data;
    connection->receive_size = size;
    return MOVE_DONE;
}

void socket_probe(struct socket *socket, bool on)
{
    struct connection *connection = of(socket->handle);

    connection->asked_at = on ? clock_ms : NEVER;
    connection->asked += on;
}

/* Asks once a second, and is answered at once or not at all. */
unsigned socket_unanswered(struct socket *socket, uint32_t *silent_ms)
{
    const struct connection *connection = of(socket->handle);
    bool silent = connection->silent_since != NEVER;

    *silent_ms = silent ? (uint32_t)(clock_ms - connection->silent_since) : 0;
    return silent && connection->asked_at != NEVER ? (unsigned)((clock_ms - connection->asked_at) / 1000) : 0;
}

void world_falls_silent(socket_handle handle)
{
    of(handle)->silent_since = clock_ms;
}

unsigned world_asked(socket_handle handle, bool *now)
{
    *now = of(handle)->asked_at != NEVER;
    return of(handle)->asked;
}

bool socket_peer_ended(struct socket *socket)
{
    return of(socket->handle)->fin;
}

void socket_resets(struct socket *socket)
{
    (void)of(socket->handle);
}

void socket_end_sending(struct socket *socket)
{
    (void)of(socket->handle);
}

static void cancel(struct io **io, nd_status error)
{
    if (*io != NULL)
        post(*io, error, 0);
    *io = NULL;
}

void socket_cancel(struct socket *socket, bool reset)
{
    struct connection *connection = of(socket->handle);

    (void)reset;
    connection->canceled = true;
    cancel(&connection->receiving, ND_CANCELED);
    cancel(&connection->sending, ND_CANCELED);
    cancel(&connection->connecting, ND_CANCELED);
}

void socket_close(struct socket *socket)
{
    close_connection(of(socket->handle));
}

/* ---- Memory, the environment, files ---- */

bool guarded_copy_start(void)
{
    return true;
}

void guarded_copy_stop(void) {}

bool guarded_copy(void *destination, const void *source, size_t size)
{
    if (lacks_copies)
        return false;
    memmove(destination, source, size);
    return true;
}

bool memory_allows(const void *memory, size_t size, bool write)
{
    (void)memory, (void)size, (void)write;
    return true;
}

void *pages_take(size_t size)
{
    return lacks_pages ? NULL : calloc(1, size);
}

void pages_give(void *pages, size_t size)
{
    (void)size;
    free(pages);
}

bool environment_text(const char *name, char *buffer, size_t size)
{
    (void)name, (void)buffer, (void)size;
    return false;
}

struct log_file *log_open(const char *name)
{
    (void)name;
    return NULL;
}

void log_append(struct log_file *file, const char *text, size_t size)
{
    (void)file, (void)text, (void)size;
}

void log_close(struct log_file *file)
{
    (void)file;
}

size_t log_stamp(char *out, size_t size)
{
    (void)out, (void)size;
    return 0;
}

/* ---- Listening sockets ---- */

/* In place of the system's call. */
int __wrap_listen(int handle, int backlog)
{
    (void)backlog;
    world_require(of(handle)->listening, "listens with another socket");
    return 0;
}

bool watch_start(struct watch *watch, int handle, watch_ready *ready)
{
    watch->handle = handle;
    watch->ready = ready;
    of(handle)->watch = watch;
    return true;
}

void watch_stop(struct watch *watch)
{
    of(watch->handle)->watch = NULL;
}

/* ---- The other end ---- */

void world_reset(void)
{
    for (int i = 0; i < MOST; i++) {
        free(connections[i].input);
        free(connections[i].output);
    }
    memset(connections, 0, sizeof connections);
    world_require(posted == NULL, "left work from the last input");
    last_posted = &posted;
    clock_ms = 1000;
    chunk = room = SIZE_MAX / 2;
    connects = CONNECTS_LATER;
    receives_stay = false;
    lacks_pages = lacks_copies = lacks_buffers = false;
    world_require(locks == 0, "keeps a lock");
}

static bool step(void)
{
    struct io *io = posted;

    if (io != NULL) {
        posted = io->next;
        if (posted == NULL)
            last_posted = &posted;
        io->done(io, io->error, io->bytes);
        world_require(locks == 0, "keeps a lock");
        return true;
    }
    for (int i = 0; i < MOST; i++) {
        struct connection *connection = &connections[i];
        nd_status error;
        size_t bytes;

        if (!connection->open)
            continue;
        if (connection->connecting != NULL) {
            connection->connected = connects != REFUSES_LATER;
            cancel(&connection->connecting, connection->connected ? ND_SUCCESS : ND_CONNECTION_REFUSED);
            return true;
        }
        if (connection->sending != NULL && (room > 0 || connection->reset)) {
            io = connection->sending;
            connection->sending = NULL;
            if (connection->reset || lacks_buffers)
                post(io, connection->reset ? ND_CONNECTION_ABORTED : ND_INSUFFICIENT_RESOURCES, 0);
            else
                post(io, ND_SUCCESS, take_output(connection, connection->send_data, connection->send_size));
            return true;
        }
        if (connection->receiving != NULL && !lacks_buffers &&
            take_input(connection, connection->receive_data, connection->receive_size, &bytes, &error)) {
            io = connection->receiving;
            connection->receiving = NULL;
            post(io, error, bytes);
            return true;
        }
        if (connection->receiving != NULL && lacks_buffers) {
            cancel(&connection->receiving, ND_INSUFFICIENT_RESOURCES);
            return true;
        }
    }
    return false;
}

void world_run(void)
{
    unsigned turns = 0;

    do
        while (step())
            world_require(++turns < TURNS, "does not come to rest");
    while (timers_run() == 0);
}

void world_pass(uint64_t ms)
{
    uint64_t until = clock_ms + ms, next;

    for (unsigned turns = 0;; turns++) {
        do {
            world_run();
            next = timers_run();
        } while (posted != NULL);
        world_require(turns < TURNS, "does not come to rest");
        if (next == TIMERS_NONE || clock_ms + next > until)
            break;
        clock_ms += next;
    }
    clock_ms = until;
}

socket_handle world_knock(void)
{
    for (int i = 0; i < MOST; i++)
        if (connections[i].open && connections[i].listening && connections[i].watch != NULL) {
            struct watch *watch = connections[i].watch;
            connections[i].waiting++;
            watch->ready(watch);
            world_run();
            return world_newest();
        }
    return NO_SOCKET;
}

socket_handle world_newest(void)
{
    for (int i = MOST - 1; i >= 0; i--)
        if (connections[i].open && !connections[i].listening)
            return i;
    return NO_SOCKET;
}

void world_feed(socket_handle handle, const void *data, size_t size)
{
    struct connection *connection;

    if (handle == NO_SOCKET || !connections[handle].open)
        return;
    connection = &connections[handle];
    if (size == 0 || connection->fin || connection->reset)
        return;
    if (connection->end + size > connection->capacity) {
        connection->capacity = 2 * (connection->end + size);
        connection->input = realloc(connection->input, connection->capacity);
        world_require(connection->input != NULL, "no memory for its input");
    }
    memcpy(connection->input + connection->end, data, size);
    connection->end += size;
}

void world_end(socket_handle handle, bool reset)
{
    if (handle == NO_SOCKET)
        return;
    connections[handle].fin = true;
    connections[handle].reset |= reset;
}

void world_limit(size_t new_chunk, size_t new_room)
{
    chunk = new_chunk > 0 ? new_chunk : 1;
    room = new_room;
}

const uint8_t *world_output(socket_handle handle, size_t *size)
{
    *size = handle == NO_SOCKET ? 0 : connections[handle].sent;
    return handle == NO_SOCKET ? NULL : connections[handle].output;
}

void world_connects(enum world_connects how)
{
    connects = how;
}

void world_receives_stay(void)
{
    receives_stay = true;
}

void world_lacks_buffers(bool lacks)
{
    lacks_buffers = lacks;
}

void world_lacks(bool pages, bool copies)
{
    lacks_pages = pages;
    lacks_copies = copies;
}

unsigned world_locks(void)
{
    return locks;
}

unsigned world_open_sockets(void)
{
    unsigned count = 0;

    for (int i = 0; i < MOST; i++)
        count += connections[i].open;
    return count;
}
